"""Gated DeltaNet on a trie equals the recurrence on each path: values, gradients, whole hybrid models.

python -m pytest tests/test_delta.py
"""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_attention import (
    DATA,
    TINY,
    assert_row_equals_separate,
    backward,
    make_sample,
    random_samples,
    row_logp,
    separate_logp,
    tensor,
    tiny_model,
    tries,
)
from test_train import ROOT, gradients

import attention
from attention import delta, delta_kernels, reference
from flops import row_cost_from_config
from packing import pack
from sync import sent_parameters

REFERENCE = json.loads((DATA / "reference" / "gated_delta.json").read_text())
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
HYBRIDS = {
    "Qwen3Next": LINEAR | EXPERTS,
    "Qwen3_5Text": LINEAR,
    "Qwen3_5MoeText": LINEAR | EXPERTS,
    "OlmoHybrid": LINEAR | dict(linear_num_key_heads=4),
}


def hybrid(family, dtype=torch.float64, implementation="tree", **changes):
    model = tiny_model(family, dtype, implementation, **HYBRIDS[family] | changes)
    if implementation == "tree":
        delta.hook(model)
    return model


def plan_of(parent):
    """Plan of a row given each token's predecessor (-1 = none), in depth-first order."""
    depth, end = [], list(range(1, len(parent) + 1))
    for above in parent:
        depth.append(depth[above] + 1 if above >= 0 else 0)
    for token in reversed(range(len(parent))):
        if parent[token] >= 0:
            end[parent[token]] = max(end[parent[token]], end[token])
    return reference.plan(torch.tensor(end, dtype=torch.int32), torch.tensor(depth), plain=True)


def plan_of_row(samples):
    """The row's plan, and its tokens' predecessors read off the paths of the samples."""
    row = pack([make_sample(ids) for ids in samples]).to("cpu")
    path, parent = [], []
    for token, depth in enumerate(row.position_ids.tolist()):
        del path[depth:]
        parent.append(path[-1] if path else -1)
        path.append(token)
    return reference.plan(row.subtree_end, row.position_ids, plain=True), parent


def rule_by_token(q, k, v, g, beta, parent, scale=1.0):
    """The definition: one token at a time, each from the state of its predecessor. Outputs and states."""
    states, outputs = [], []
    for t, above in enumerate(parent):
        fresh = q.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        state = states[above] * g[t].exp()[:, None, None] if above >= 0 else fresh  # [H, K, V]
        rest = v[t] - (state.mT @ k[t][..., None])[..., 0]  # [H, V]
        states.append(state + k[t][..., None] * (beta[t][:, None] * rest)[:, None])
        outputs.append((states[-1].mT @ (q[t] * scale)[..., None])[..., 0])
    return torch.stack(outputs), states


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


# ---- the recurrence and the convolution


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_reference_values_and_gradients_hold_in_float64(chunk, monkeypatch):
    monkeypatch.setattr(delta, "CHUNK", chunk)
    inputs = [tensor(REFERENCE[name]) for name in ("q", "k", "v", "g", "beta")]
    output = delta.recur(*inputs, True, plan_of(REFERENCE["parent"]))
    output.backward(tensor(REFERENCE["dout"]))
    found = [output, *(x.grad for x in inputs)]
    for a, name in zip(found, ("out", "dq", "dk", "dv", "dg", "dbeta"), strict=True):
        torch.testing.assert_close(a, tensor(REFERENCE[name]), rtol=1e-9, atol=1e-12)


def test_convolution_has_the_reference_values_and_gradients():
    values = REFERENCE["conv"]
    x, weight = tensor(values["x"]), tensor(values["weight"])
    y = delta.convolve(x, weight, None, "silu", plan_of(REFERENCE["parent"]))
    y.backward(tensor(values["dy"]))
    for found, name in ((y, "y"), (x.grad, "dx"), (weight.grad, "dweight")):
        torch.testing.assert_close(found, tensor(values[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_branches_start_from_their_parents_state(dtype):
    """Case A16. Its queries are not scaled, ours are: so they are given larger."""
    given_, expect = map(case("A16_delta_rule_from_parent_state").get, ("given", "expect"))
    q, k = (torch.tensor(given_[name], dtype=dtype)[:, None] for name in "qk")  # [5, 1, 2]
    v = torch.tensor(given_["v"], dtype=dtype)[:, None, None].requires_grad_()
    g, beta = (torch.tensor(given_[name], dtype=dtype)[:, None] for name in ("log_decay", "beta"))
    output = delta.recur(q * 2**0.5, k, v, g, beta, False, plan_of([-1, 0, 1, 1, 3]))
    output.sum().backward()
    tolerance = expect["half_precision_tolerance" if dtype == torch.bfloat16 else "tolerance"]
    for found, name in ((output, "outputs"), (v.grad, "grad_v")):
        wanted = torch.tensor(expect[name], dtype=torch.float64)
        torch.testing.assert_close(found.flatten().double(), wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=12, deadline=None)
@given(tries, st.sampled_from([1, 2, 4, 64]), st.sampled_from([(2, 2), (1, 3)]))
def test_chunks_equal_the_recurrence_token_by_token(samples, chunk, heads):
    plan, parent = plan_of_row(samples)
    torch.manual_seed(0)
    n, (groups, values) = len(parent), heads
    q, k, v, g, beta = (
        draw(n, groups, 4),
        draw(n, groups, 4),
        draw(n, values, 3),
        draw(n, values),
        draw(n, values),
    )
    leaves = (q, k, v, g, beta)
    wide = [x.repeat_interleave(values // groups, 1) / x.norm(dim=-1).max() for x in (q, k)]
    decay, share = F.logsigmoid(g), beta.sigmoid()
    wanted, _ = rule_by_token(*wide, v, decay, share, parent, scale=0.5)
    narrow = [x / x.norm(dim=-1).max() for x in (q, k)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK", chunk)
        found = delta.recur(*narrow, v, decay, share, False, plan)
    gradient = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    grads = [torch.autograd.grad(out, leaves, gradient, retain_graph=True) for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@settings(max_examples=12, deadline=None)
@given(tries, st.integers(2, 6), st.booleans(), st.sampled_from(["silu", None]))
def test_convolution_follows_the_path_through_segments_of_any_length(samples, width, biased, activation):
    plan, parent = plan_of_row(samples)
    torch.manual_seed(0)
    x, weight, bias = draw(len(parent), 3), draw(3, width), draw(3) if biased else None
    rows = []
    for token in range(len(parent)):
        total = 0 if bias is None else bias
        for back in range(width):
            total = total + x[token] * weight[:, width - 1 - back] if token >= 0 else total
            token = parent[token] if token >= 0 else -1
        rows.append(total)
    wanted = torch.stack(rows)
    wanted = F.silu(wanted) if activation else wanted
    found = delta.convolve(x, weight, bias, activation, plan)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    gradient = torch.randn_like(wanted)
    grads = [torch.autograd.grad(out, leaves, gradient, retain_graph=True) for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(tries)
def test_levels_list_every_segment_once(samples):
    """What lets kernels made for sequences walk a trie: levels of neighbours, gaps that hold no token."""
    plan, _ = plan_of_row(samples)
    segments = plan(delta._segments)
    layout = plan(delta_kernels.layout_of, segments)
    seen, above = [], None
    for number, level in enumerate(layout.levels):
        bounds = level.bounds.tolist()
        real = [a < b for a, b in zip(bounds, bounds[1:], strict=False)]
        listed = [segments.start.tolist().index(a) if r else None for a, r in zip(bounds, real, strict=False)]
        seen += [s for s in listed if s is not None]
        for slot, segment in enumerate(listed):
            if segment is None:
                continue
            assert bounds[slot + 1] == segments.start[segment + 1]
            first = layout.chunks[level.chunk[slot]].tolist()
            assert first == [segment, 0]
            if number:
                assert above[level.parent[slot]] == segments.parent[segment]
        if number:  # children of one parent are neighbours, in the order of their parents
            parents = level.parent.tolist()
            assert parents == sorted(parents)
            assert torch.bincount(level.parent, minlength=len(above)).tolist() == level.children.tolist()
        above = listed
    assert sorted(seen) == list(range(len(segments.parent)))


# ---- the kernels: the convolution's also under the interpreter, in a process of its own

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
interpreter = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="see the test of the interpreter"
)
kernels = pytest.mark.skipif(
    not torch.cuda.is_available() or delta_kernels._fla() is None,
    reason="needs a CUDA device and flash-linear-attention",
)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_convolution_passes_under_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "convolution_in_one_pass", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@interpreter
@pytest.mark.parametrize("seed", range(4))
def test_convolution_in_one_pass_equals_plain_pytorch(seed, monkeypatch):
    """Rows of short segments, many children of one parent, tiles smaller and larger than segments."""
    from attention import delta_convolution

    monkeypatch.setattr(delta_convolution, "TILE", 8)
    monkeypatch.setattr(delta_convolution, "BLOCK", 16)
    torch.manual_seed(seed)
    samples = random_samples(seed, longest=12) + [[1, 2, token] for token in range(3, 25)]
    plan, parent = plan_of_row(samples)
    width, silu, biased = [(4, True, False), (4, False, True), (2, True, True), (5, True, False)][seed]
    shapes = (len(parent), 20), (20, width), *([(20,)] if biased else [])
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0])
    bias = leaves[2] if biased else None
    wanted = delta.convolve(*leaves[:2], bias, "silu" if silu else None, plan)
    rest = (plan(delta._ancestors, width), plan(delta._forks, width))
    x, weight, *bias = (leaf.detach().float().to(DEVICE).requires_grad_() for leaf in leaves)
    rest = rest[0].to(DEVICE), [part.to(DEVICE) for part in rest[1]]
    found = delta_convolution.Convolve.apply(x, weight, bias[0] if bias else None, silu, *rest)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(found, (x, weight, *bias), gradient.to(DEVICE))
    for a, b in zip(grads, torch.autograd.grad(wanted, leaves, gradient.double()), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-5, atol=1e-4)


def on_row_and_on_paths(run, samples, tensors, gradient):
    """Relative errors of output and gradients against float64: of a row in one call, of its samples alone."""
    row = pack([make_sample(ids) for ids in samples]).to("cuda")
    tokens, path = [], []  # of every sample, in the row
    for ids in samples:
        path = [0] * len(ids)
        start = 0
        for depth, token in enumerate(ids):
            inside = (row.position_ids == depth) & (row.input_ids == token)
            inside &= torch.arange(len(row.input_ids), device="cuda") >= start
            path[depth] = start = int(inside.nonzero()[0])
        tokens.append(torch.tensor(path, device="cuda"))

    def results(plan, dtype, at=slice(None), part=1.0):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
        rows = [x[at] if len(x) == len(gradient) else x for x in leaves]
        output = run(*rows, plan)
        grads = torch.autograd.grad(output, leaves, (gradient[at] * part).to(output.dtype))
        return [output.detach().double(), *(x.double() for x in grads)]

    share = torch.bincount(torch.cat(tokens), minlength=len(gradient)).reciprocal()  # [N]
    exact, found = (
        results(reference.plan(row.subtree_end, row.position_ids, plain=plain), dtype)
        for plain, dtype in ((True, torch.float64), (False, None))
    )
    apart = [torch.zeros_like(x) for x in exact]
    for at in tokens:
        end = torch.full((len(at),), len(at), dtype=torch.int32, device="cuda")
        plan = reference.plan(end, torch.arange(len(at), device="cuda"))
        part = share[at].view(-1, *[1] * (gradient.dim() - 1))
        output, *grads = results(plan, None, at, part)
        apart[0][at] = output
        for total, grad in zip(apart[1:], grads, strict=True):
            total += grad
    return [[float((a - b).norm() / b.norm()) for a, b in zip(x, exact, strict=True)] for x in (found, apart)]


LONG = [
    [1] * 70 + [2] * 90,
    [1] * 70 + [2] * 30 + [3],
    [1] * 70 + [4] * 2,
    [1] * 9,
    [5] * 130,
    [5] * 64 + [6] * 64,
]


@kernels
@pytest.mark.parametrize("heads", [(16, 32, 128), (4, 4, 128), (2, 4, 256), (2, 4, 64)])
def test_kernels_are_as_close_to_float64_as_the_package_on_each_path(heads, monkeypatch):
    monkeypatch.setattr(delta_kernels, "SHORTEST", 0)
    torch.manual_seed(0)
    groups, values, size = heads
    length = len(pack([make_sample(ids) for ids in LONG]).input_ids)
    draw_ = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    tensors = [draw_(length, groups, size), draw_(length, groups, size), draw_(length, values, size)]
    tensors += [-torch.rand(length, values, device="cuda"), torch.rand(length, values, device="cuda")]
    run = lambda q, k, v, g, beta, plan: delta.recur(q, k, v, g, beta, True, plan)  # noqa: E731
    row, alone = on_row_and_on_paths(run, LONG, tensors, draw_(length, values, size))
    assert all(a <= 1.2 * b for a, b in zip(row, alone, strict=True)), (row, alone)


@kernels
def test_convolution_kernels_are_as_close_to_float64_as_on_each_path():
    torch.manual_seed(0)
    samples = random_samples(5, longest=90)
    length = len(pack([make_sample(ids) for ids in samples]).input_ids)
    x, weight, gradient = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((length, 96), (96, 4), (length, 96))
    )
    run = lambda x, weight, plan: delta.convolve(x, weight, None, "silu", plan)  # noqa: E731
    row, alone = on_row_and_on_paths(run, samples, [x, weight], gradient)
    assert all(a <= 1.2 * b for a, b in zip(row, alone, strict=True)), (row, alone)


# ---- models


@pytest.fixture
def in_float64(monkeypatch):
    """Modelling code computes parts in float32 whatever the model's dtype; here those are float64 too."""
    to, softmax = torch.Tensor.to, F.softmax
    doubled = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kw: to(self, *(doubled(x) for x in args), **kw)
    )
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(F, "softmax", lambda x, dim=None, dtype=None, **kw: softmax(x, dim=dim))


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"])
def test_hybrid_gives_a_row_the_logp_and_every_gradient_of_its_samples(family, in_float64):
    model = hybrid(family)
    attention.check(model)
    for seed, longest in ((1, 16), (2, 5)):
        assert_row_equals_separate(model, random_samples(seed, longest=longest), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_gives_a_row_what_the_library_gives_each_sample(family, in_float64):
    alone = tiny_model(family, implementation="eager", **HYBRIDS[family])
    model = hybrid(family)
    model.load_state_dict(alone.state_dict())
    assert_row_equals_separate(model, random_samples(3, longest=16), rtol=1e-6, atol=1e-6, alone=alone)


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3Next"])
def test_gradient_checkpointing_replays_the_tree(family):
    samples, model = random_samples(2), hybrid(family)

    def forward(ids, positions, **tree):
        return model(input_ids=ids, position_ids=positions, use_cache=False, **tree).logits

    plain = backward(row_logp(forward, samples), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(backward(row_logp(forward, samples), model), plain, rtol=1e-12, atol=1e-12)


def test_a_bf16_row_is_as_close_to_float64_as_its_samples_alone():
    exact, rough = hybrid("Qwen3_5Text"), hybrid("Qwen3_5Text", torch.bfloat16)
    exact.load_state_dict(rough.state_dict())
    samples = random_samples(4, longest=20)

    def results(model, logp):
        def forward(ids, positions, **tree):
            return model(input_ids=ids, position_ids=positions, use_cache=False, **tree).logits.double()

        found = logp(forward, samples)
        return torch.cat([x.double().flatten() for x in (*found, *backward(found, model).values())]).detach()

    wanted, row, alone = (
        results(exact, separate_logp),
        results(rough, row_logp),
        results(rough, separate_logp),
    )
    assert (row - wanted).norm() <= 1.2 * (alone - wanted).norm()


def test_gradients_keep_the_layout_of_what_they_are_of():
    """Token by token. Products with one that lay channel by channel took more than twice as long."""
    model = hybrid("Qwen3_5Text")
    layer, seen = model.model.layers[0].linear_attn, []
    row = pack([make_sample(ids) for ids in random_samples(1, longest=20)]).to("cpu")

    def watch(_module, _inputs, output):
        output.register_hook(seen.append)

    layer.in_proj_qkv.register_forward_hook(watch)
    x = torch.randn(1, len(row.input_ids), 32, dtype=torch.float64)
    layer(x, **attention.index(row)).square().sum().backward()
    assert len(seen) == 1 and seen[0].is_contiguous()


def test_compiled_layers_give_what_plain_ones_give_on_rows_of_any_length():
    model = hybrid("Qwen3_5Text")
    layer = model.model.layers[0]
    graphs = []
    compiled = torch.compile(layer, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph)
    counts = []
    for seed in (1, 2, 3):
        row = pack([make_sample(ids) for ids in random_samples(seed, longest=20)]).to("cpu")
        x = torch.randn(1, len(row.input_ids), 32, dtype=torch.float64)
        inputs = dict(position_embeddings=None, attention_mask=None, **attention.index(row))
        torch.testing.assert_close(compiled(x, **inputs), layer(x, **inputs))
        counts.append(len(graphs))
    assert counts[1] == counts[2]


@pytest.fixture(scope="module")
def saved_hybrid(tmp_path_factory):
    """A directory that train.py can start from."""
    directory = tmp_path_factory.mktemp("hybrid")
    hybrid("Qwen3_5Text", torch.float32, vocab_size=260).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(ROOT / "tiny").save_pretrained(directory)
    return directory


def test_two_ranks_give_a_hybrid_the_gradients_of_one(saved_hybrid, tmp_path):
    model = ["--model", str(saved_hybrid)]
    alone = gradients(tmp_path / "1.pt", 1, [*model, "--token_budget", "4096", "--share_prefixes", "false"])
    shared = gradients(tmp_path / "2.pt", 2, [*model, "--token_budget", "128"])
    assert alone.keys() == shared.keys()
    assert any("linear_attn" in name for name in alone)
    for name, gradient in alone.items():
        # float32 sums in another order, through weights larger than any a model starts from
        assert (shared[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def vision_language(family, dtype):
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 0])
    config = getattr(transformers, f"{family}Config")(
        text_config=TINY | HYBRIDS[f"{family}Text"] | {"rope_parameters": rope},
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
    )
    attention.register()
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    return kind._from_config(config, attn_implementation="tree", dtype=dtype)


@pytest.mark.parametrize("make", [partial(hybrid, "Qwen3_5Text"), partial(vision_language, "Qwen3_5")])
def test_sent_parameters_have_the_names_of_the_checkpoint(make, tmp_path):
    model = make(torch.float32)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        names = set(saved.keys())
    assert {name for name, _ in sent_parameters(model)} == names


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_of_a_vision_language_wrapper_trains_on_tries(family):
    model = vision_language(family, torch.float64)
    model.set_experts_implementation("eager")
    attention.check(model)
    assert_row_equals_separate(model, random_samples(1, longest=16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"])
def test_flops_of_a_hybrid_are_two_for_each_weight_a_token_meets(family):
    model = hybrid(family, torch.float32)
    share = {"experts": EXPERTS["num_experts_per_tok"] / EXPERTS["num_experts"]}
    total = 0.0
    for name, weight in model.model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            total += 2 * weight.numel() * next((part for key, part in share.items() if key in name), 1)
    total += 7 * 4 * 8 * 8  # the state of each value head: decayed, read, written, read again
    assert row_cost_from_config(model.config).token == 3 * total


# ---- refusals


def test_without_the_hook_a_hybrid_does_not_pass_the_check(monkeypatch):
    monkeypatch.setattr(delta, "hook", lambda model: None)
    model = tiny_model("Qwen3_5Text", **LINEAR)
    module = sys.modules[type(model).__module__]
    for name in (delta.CONVOLUTION, delta.RULE):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
    with pytest.raises(ValueError, match="qwen3_5_text.*other branches"):
        attention.check(model)


@pytest.mark.parametrize("name", [delta.CONVOLUTION, delta.RULE])
def test_modelling_code_without_the_functions_is_refused_by_name(name, monkeypatch):
    model = tiny_model("Qwen3_5Text", **LINEAR)
    monkeypatch.delattr(sys.modules[type(model).__module__], name)
    with pytest.raises(ValueError, match=f"Qwen3_5GatedDeltaNet has no {name}"):
        attention.check(model)


def test_a_recurrent_layer_refuses_a_cache_and_a_row_of_another_length():
    model = hybrid("Qwen3_5Text")
    layer = model.model.layers[0].linear_attn
    index = attention.index(SimpleNamespace(
        subtree_end=torch.full((5,), 5, dtype=torch.int32), position_ids=torch.arange(5)
    ))  # fmt: skip
    with pytest.raises(ValueError, match="1 x 7 tokens.*one row of 5"):
        layer(torch.zeros(1, 7, 32, dtype=torch.float64), **index)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(torch.tensor([[3, 4, 5, 6, 7]]), use_cache=True, **index)


def test_hooking_twice_is_hooking_once_and_leaves_other_calls_alone():
    model = hybrid("Qwen3_5Text")
    module = sys.modules[type(model).__module__]
    before = [getattr(module, name) for name in (delta.CONVOLUTION, delta.RULE)]
    delta.hook(model)
    assert before == [getattr(module, name) for name in (delta.CONVOLUTION, delta.RULE)]
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    plain = before[0].__wrapped__(x, weight, None, activation="silu")
    assert torch.equal(before[0](x, weight, None, activation="silu"), plain)
