"""Tree attention equals attention on each path alone: values, gradients, whole models, and refusals.

python -m pytest tests/test_attention.py
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.utils import _apply_to_tensors

import attention
import start
from attention import flash, reference
from packing import Sample, pack

DATA = Path(__file__).parent / "data"
REFERENCE = json.loads((DATA / "reference" / "tree_attention.json").read_text())
VARIANTS = {variant["name"]: variant for variant in REFERENCE["variants"]}

TINY = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = dict(sliding_window=3)
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen2-window": dict(use_sliding_window=True, max_window_layers=1, **WINDOW),
    "Qwen3": {},
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "Mistral": WINDOW,
    "Mixtral": dict(num_local_experts=4),
    "Phi": {},
    "Phi3": {},
    "SmolLM3": dict(no_rope_layers=[1, 0]),
    "Olmo2": {},
    "Cohere2": WINDOW,
    "Gemma2": dict(attn_logit_softcapping=2.0, **WINDOW),
    "Gemma3Text": dict(sliding_window_pattern=2, **WINDOW),
    "GptOss": dict(
        num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default"}, **WINDOW
    ),
}


def tiny_model(family, dtype=torch.float64, implementation="tree", **changes):
    attention.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.split('-')[0]}Config")(
        **{**TINY, **FAMILIES.get(family, {}), **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=dtype
    )
    model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # as initialised, heads and sinks of tiny models hardly matter
    return model.train()


def make_sample(ids):
    length = len(ids)
    trained = np.arange(length) > 0
    zeros = np.zeros(length, np.float32)
    return Sample(
        np.array(ids, np.int32), trained, zeros, 1.0, group_id=0, row_index=0, rollout_id=0, version=0
    )


def random_samples(seed, count=6, vocabulary=3, longest=12):
    """Sequences of few distinct tokens: they share prefixes of every length, contain or repeat each other."""
    rng = np.random.default_rng(seed)
    samples = [rng.integers(3, 3 + vocabulary, rng.integers(2, longest)).tolist() for _ in range(count)]
    return samples + [samples[0], samples[1] + samples[0], samples[0][: len(samples[0]) // 2 + 1]]


tries = st.builds(
    random_samples, st.integers(0, 10**6), st.integers(2, 8), st.integers(2, 4), st.integers(3, 20)
)


def row_logp(forward, samples):
    """Log-probability of every trained token, sample by sample, from one row."""
    row = pack([make_sample(ids) for ids in samples]).to("cpu")
    logits = forward(row.input_ids[None], row.position_ids[None], **attention.index(row))[0]  # [N, V]
    terms = logits.log_softmax(-1)[row.position, row.target]  # [M]
    return [terms[row.sample == number] for number in range(len(samples))]


def separate_logp(forward, samples):
    """The same from one forward per sample: a tree without a branch, or ordinary attention."""
    result = []
    for ids in samples:
        ids = torch.tensor(ids)
        end = torch.full((len(ids),), len(ids), dtype=torch.int32)
        alone = attention.index(SimpleNamespace(subtree_end=end, position_ids=torch.arange(len(ids))))
        logits = forward(ids[None], torch.arange(len(ids))[None], **alone)[0]  # [L, V]
        result.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return result


def backward(logp, model):
    """Gradients of an uneven sum of the log-probabilities, so that no two tokens can be swapped."""
    model.zero_grad()
    everything = torch.cat(logp)
    (everything * torch.linspace(-1, 2, len(everything), dtype=everything.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_row_equals_separate(model, samples, rtol, atol, alone=None):
    def forward_with(one):
        return lambda ids, positions, **tree: (
            one(
                input_ids=ids, position_ids=positions, use_cache=False, **(tree if one is model else {})
            ).logits
        )

    alone = alone or model
    together, apart = row_logp(forward_with(model), samples), separate_logp(forward_with(alone), samples)
    torch.testing.assert_close(together, apart, rtol=rtol, atol=atol)
    grads, expected = backward(together, model), backward(apart, alone)
    assert grads.keys() == expected.keys() and len(grads) > 0
    torch.testing.assert_close(grads, expected, rtol=rtol, atol=atol * 20)


def tensor(values, dtype=torch.float64, grad=True):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


@pytest.fixture(params=["one block", "blocks of 1", "blocks of 4", "blocks of 4, recomputed"])
def blocks(request, monkeypatch):
    """The ways in which a row is cut; the values must not know."""
    if request.param != "one block":
        monkeypatch.setattr(reference, "SHORTEST_BLOCK", 1 if request.param == "blocks of 1" else 4)
    if "recomputed" in request.param:
        monkeypatch.setattr(reference, "KEPT_PAIRS", 0)


# ---- the definition


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_reference_values_and_gradients_hold_in_float64(name, with_lse, blocks):
    variant = VARIANTS[name]
    q, k, v = (tensor(REFERENCE[key]) for key in "qkv")
    sinks = tensor(REFERENCE["sink_logits"]) if variant["sink"] else None
    plan = reference.plan(
        torch.tensor(REFERENCE["subtree_end"], dtype=torch.int32), torch.tensor(REFERENCE["position_ids"])
    )
    options = dict(window=variant["window"], softcap=variant["softcap"], sinks=sinks, with_lse=with_lse)
    out = reference.attend(q, k, v, plan, REFERENCE["scale"], **options)
    if with_lse:
        out, lse = out
        torch.testing.assert_close(lse, tensor(variant["lse"]), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out, tensor(variant["out"]), rtol=1e-9, atol=1e-12)
    out.backward(tensor(REFERENCE["dout"]))
    for found, key in ((q, "dq"), (k, "dk"), (v, "dv"), (sinks, "dsink")):
        if found is not None:
            torch.testing.assert_close(found.grad, tensor(variant[key], grad=False), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_branches_end_aligned_with_their_path_and_never_leak(dtype, blocks):
    case = json.loads((DATA / "cases" / "A15_tree_attention_alignment.json").read_text())
    inputs, expect = case["given"], case["expect"]
    q, k, v = (tensor(inputs[key], dtype) for key in "qkv")
    plan = reference.plan(
        torch.tensor([8, 8, 5, 5, 5, 8, 8, 8], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 4, 2, 3, 4])
    )
    out = reference.attend(*(x.view(8, 1, 1) for x in (q, k, v)), plan, inputs["softmax_scale"])
    out.sum().backward()
    exact = dtype != torch.bfloat16
    tolerance = dict(rtol=0, atol=expect["tolerance"]) if exact else dict(rtol=0.02, atol=0.02)
    for found, key in ((out.flatten(), "outputs"), (v.grad, "grad_v"), (k.grad, "grad_k")):
        torch.testing.assert_close(found.double(), tensor(expect[key], grad=False), **tolerance)


@settings(max_examples=15, deadline=None)
@given(tries, st.sampled_from([None, 1, 2, 5]), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_blocks_equal_the_definition_over_ancestors(samples, window, capped, groups, shortest):
    row = pack([make_sample(ids) for ids in samples]).to("cpu")
    length = len(row.input_ids)
    torch.manual_seed(0)
    q = torch.randn(length, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(length, groups, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    dout = torch.randn(length, 4, 3, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SHORTEST_BLOCK", shortest)
        plan = reference.plan(row.subtree_end, row.position_ids)
        out = reference.attend(q, k, v, plan, 0.7, window=window, softcap=1.3 if capped else None)
    found = torch.autograd.grad(out, (q, k, v), dout)

    scores = 0.7 * torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(4 // groups, 1))
    scores = 1.3 * torch.tanh(scores / 1.3) if capped else scores
    visible = torch.zeros(length, length, dtype=torch.bool)
    path = []  # of the token at hand, from its root
    for i, depth in enumerate(row.position_ids.tolist()):
        path = path[:depth] + [i]
        visible[i, path if window is None else path[-window:]] = True
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(4 // groups, 1))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), dout), rtol=1e-9, atol=1e-12)


def test_long_row_makes_no_square_array(monkeypatch):
    prompt, branch, branches = 2000, 2000, 8
    length = prompt + branch * branches
    end = [length] * prompt + [prompt + branch * (b + 1) for b in range(branches) for _ in range(branch)]
    depth = [*range(prompt)] + [*range(prompt, prompt + branch)] * branches
    plan = reference.plan(torch.tensor(end, dtype=torch.int32), torch.tensor(depth))
    sizes = []
    made = reference._mask
    monkeypatch.setattr(reference, "_mask", lambda *a: sizes.append((mask := made(*a)).numel()) or mask)
    torch.manual_seed(0)
    q, k, v = (torch.randn(length, 1, 8, requires_grad=True) for _ in range(3))
    out = reference.attend(q, k, v, plan, 1.0)
    assert len(plan.made) == 1 and max(sizes) <= reference.LONGEST_BLOCK * (prompt + 2 * branch)
    last = length - 1
    path = [*range(prompt), *range(length - branch, length)]
    alone = (k[path, 0] @ q[last, 0]).softmax(0) @ v[path, 0]  # [D]
    torch.testing.assert_close(out[last, 0], alone, rtol=1e-4, atol=1e-5)
    count = len(sizes)
    grad = torch.autograd.grad(out[last].sum(), v)[0]
    assert len(sizes) == 2 * count and (grad[:, 0, 0] != 0).nonzero().flatten().tolist() <= path


# ---- kernels: on the GPU where there is one, else under the interpreter, in a process of its own

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="see the test of the interpreter")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_pass_under_the_interpreter():
    # Triton reads the variable when it is first imported, which transformers may have done long ago.
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "kernels", __file__]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def tree(monkeypatch):
    module = pytest.importorskip("attention.tree")
    if DEVICE == "cpu":  # small tiles, so that small rows have many
        monkeypatch.setattr(
            module, "sizes", lambda kind, *_: (16, 32, 1, 1) if kind == "dkv" else (32, 16, 1, 1)
        )
    return module


@contextmanager
def guarded(band=256):
    """New tensors hold NaN (-77 if integers) and lie between bands of it, which must be whole at the end."""
    made, full = [], torch.full

    def empty(*shape, dtype=F32, device=DEVICE):
        shape = torch.Size(shape[0] if isinstance(shape[0], (tuple, torch.Size)) else shape)
        poison = torch.nan if dtype.is_floating_point else -77
        made.append((full([2 * band + shape.numel()], poison, dtype=dtype, device=device), poison))
        return made[-1][0][band : band + shape.numel()].view(shape)

    def new_empty(tensor, *shape, dtype=None, device=DEVICE):
        return empty(*shape, dtype=dtype or tensor.dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", lambda tensor: empty(tensor.shape, dtype=tensor.dtype))
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield
    assert made
    for buffer, poison in made:
        bands = torch.cat([buffer[:band], buffer[-band:]])
        assert (bands.isnan() if buffer.is_floating_point() else bands == poison).all()


def gradients(module, tensors, sinks, end, depth, scale, dout, dlse, **options):
    """[out, lse, dq, dk, dv, dsinks] in the dtype of the tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors + ([] if sinks is None else [sinks])]
    plan = reference.plan(end, depth)
    options.update(sinks=None if sinks is None else leaves[3], with_lse=True)
    out, lse = module.attend(*leaves[:3], plan, scale, **options)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse.to(lse.dtype)))]


def row_of(parents):
    """subtree_end [N] int32 and depth [N] of a forest of tokens in depth-first order."""
    depth, end = [], list(range(1, len(parents) + 1))
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            end[parents[token]] = max(end[parents[token]], end[token])
    return torch.tensor(end, dtype=torch.int32, device=DEVICE), torch.tensor(depth, device=DEVICE)


def random_row(length, seed, turn):
    """After every token, with probability `turn`, the next one hangs on a random ancestor or is a root."""
    rng, path, parents = np.random.default_rng(seed), [], []
    for token in range(length):
        if rng.random() < turn:
            path = path[: rng.integers(len(path) + 1)]
        parents.append(path[-1] if path else -1)
        path = path + [token]
    return row_of(parents)


KERNEL_ROWS = {
    "one token": lambda: row_of([-1]),
    "chain": lambda: row_of(range(-1, 49)),
    "one-token segments": lambda: random_row(60, 0, 0.7),
    "300 branches": lambda: row_of([-1, 0, 1] + [2] * 300),
    "depth 200": lambda: random_row(230, 1, 0.05),
    "forest": lambda: row_of([-1] * 20 + list(range(19, 60)) + [-1, 61, 62]),
}
F32, F16 = torch.float32, torch.float16
KERNEL_CASES = [  # row, query heads, K/V heads, head size, options
    ("one token", 2, 1, 16, dict()),
    ("chain", 2, 2, 64, dict(dtype=F16)),
    ("one-token segments", 4, 2, 16, dict()),
    ("300 branches", 2, 1, 16, dict()),
    ("depth 200", 1, 1, 16, dict(window=70)),
    ("forest", 6, 2, 80, dict(window=5, sinks=True)),
    ("chain", 16, 1, 16, dict(window=2, sinks=True, dtype=F16)),
    ("chain", 5, 1, 96, dict(softcap=1.5)),
    ("one-token segments", 4, 2, 128, dict(dtype=F16)),
    ("chain", 2, 1, 256, dict(softcap=0.7, window=9, sinks=True)),
    ("forest", 7, 1, 8, dict(scale=0.3)),
    ("forest", 2, 2, 24, dict(value_size=16)),
    ("one-token segments", 2, 1, 192, dict(value_size=128)),
    ("chain", 8, 1, 64, dict(softcap=2.0, window=7, sinks=True, dtype=F16)),
    ("forest", 4, 2, 128, dict(softcap=0.5, dtype=F16)),
]


@kernels
@pytest.mark.parametrize("name, heads, groups, size, options", KERNEL_CASES)
def test_kernels_equal_the_reference(tree, name, heads, groups, size, options):
    options = dict(options)
    dtype, value_size = options.pop("dtype", F32), options.pop("value_size", size)
    scale = options.pop("scale", size**-0.5)
    end, depth = KERNEL_ROWS[name]()
    length = len(end)
    torch.manual_seed(0)

    def surrounded(heads, size):
        """A view into a buffer of NaN: who reads outside it is found out."""
        buffer = torch.full((length + 64, heads + 2, size), torch.nan, dtype=dtype, device=DEVICE)
        view = buffer[32 : 32 + length, 1:-1]
        return view.copy_(torch.randn(length, heads, size))

    tensors = [surrounded(heads, size), surrounded(groups, size), surrounded(groups, value_size)]
    dout, dlse = surrounded(heads, value_size), torch.randn(length, heads, device=DEVICE)
    sinks = torch.randn(heads, device=DEVICE) if options.pop("sinks", False) else None
    rest = (end, depth, scale, dout, dlse)
    exact = [x.double() for x in tensors], None if sinks is None else sinks.double()
    wanted = gradients(reference, *exact, *rest, **options)
    with guarded():
        found = gradients(tree, tensors, sinks, *rest, **options)
    tolerance = 2e-3 if dtype == F16 else 3e-6
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= tolerance * max(b.norm(), 1e-2)
    if DEVICE == "cuda":  # programs of the interpreter run one after the other: equal in any case
        again = gradients(tree, tensors, sinks, *rest, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@kernels
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_hold_the_reference_values(tree, name):
    variant = VARIANTS[name]
    tensors = [torch.tensor(REFERENCE[key], device=DEVICE) for key in "qkv"]
    sinks = torch.tensor(REFERENCE["sink_logits"], device=DEVICE) if variant["sink"] else None
    end = torch.tensor(REFERENCE["subtree_end"], dtype=torch.int32, device=DEVICE)
    depth, dout = (torch.tensor(REFERENCE[key], device=DEVICE) for key in ("position_ids", "dout"))
    options = dict(window=variant["window"], softcap=variant["softcap"])
    zero = torch.zeros(len(end), 4, device=DEVICE)
    found = gradients(tree, tensors, sinks, end, depth, REFERENCE["scale"], dout, zero, **options)
    keys = ["out", "lse", "dq", "dk", "dv"] + ["dsink"] * variant["sink"]
    for a, key in zip(found, keys, strict=True):
        torch.testing.assert_close(a.cpu(), torch.tensor(variant[key]), rtol=2e-5, atol=2e-6)


@kernels
def test_kernels_take_heads_before_tokens_and_an_expanded_gradient(tree):
    end, depth = random_row(70, 2, 0.1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 70, 16, device=DEVICE).transpose(0, 1) for heads in (4, 2, 2))
    found, wanted = [], []
    for module, result in ((tree, found), (reference, wanted)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = module.attend(*leaves, reference.plan(end, depth), 0.25)
        result += [out, *torch.autograd.grad(out.sum(), leaves)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@kernels
def test_the_operator_of_compiled_layers_has_the_gradients_of_the_kernels(tree):
    attention.register()
    end, depth = random_row(70, 2, 0.1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(70, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    sinks, gradient = torch.randn(4, device=DEVICE), torch.randn(70, 4, 16, device=DEVICE)
    index = attention.Index(end.to(DEVICE), depth.to(DEVICE), "triton")
    results = []
    for operator in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        if operator:
            out, _ = attention.attend_opaquely(*leaves, index.number, 0.25, 9, None)
        else:
            out = index.attend(*leaves[:3], 0.25, window=9, sinks=leaves[3])
        results.append([out, *torch.autograd.grad(out, leaves, gradient)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@kernels
@pytest.mark.parametrize("owner", ["tile", "block"])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("repeat, tile, block", [(1, 16, 16), (3, 32, 32), (16, 128, 16)])
def test_kernels_visit_the_blocks_they_need_and_mask_those_that_need_one(
    tree, owner, window, repeat, tile, block, monkeypatch
):
    monkeypatch.setattr(
        "attention.meetings.PROCESSORS", 2
    )  # else everything in rows so short is longer than a share
    for seed, (length, turn) in enumerate([(1, 0.0), (50, 0.3), (83, 0.05), (70, 0.6)]):
        end, depth = (x.cpu() for x in random_row(length, seed, turn))
        i = torch.arange(length)
        visible = (i <= i[:, None]) & (i[:, None] < end)  # [N, N], queries by keys
        if window is not None:
            visible &= depth[:, None] - depth < window
        tiles, blocks = -(-length * repeat // tile), -(-length // block)
        need, whole = (torch.zeros(tiles, blocks, dtype=torch.bool) for _ in range(2))
        for t in range(tiles):
            queries = slice(t * tile // repeat, ((t + 1) * tile - 1) // repeat + 1)
            for b in range(blocks):
                part = visible[queries, b * block : (b + 1) * block]
                need[t, b] = part.any()
                whole[t, b] = part.all() and (b + 1) * block <= length
        if owner == "block":
            need, whole = need.T, whole.T
        plan = reference.plan(end.to(DEVICE), depth.to(DEVICE))
        lists = tree.meetings(plan, owner, 2, tile, block, repeat, window)
        work, other = lists.work.tolist(), lists.other.tolist()
        assert sorted((head, own) for own, head, *_ in work) == [
            (h, o) for h in (0, 1) for o in range(len(need))
        ]
        for own, _, begin, middle, stop, first, *_ in work:
            masked, free = set(other[begin:middle]), set(other[middle:stop])
            needed, wholly = (set(x[own].nonzero().flatten().tolist()) for x in (need, whole))
            assert needed <= masked | free and free <= wholly and first == other[begin]
            assert window is not None or (masked | free == needed and free == wholly)  # and nothing in vain


@kernels
@pytest.mark.parametrize("owner", ["tile", "block"])
def test_kernels_lists_become_columns_of_flash_attention(tree, owner):
    plan = reference.plan(*random_row(300, 4, 0.1))
    lists = tree.meetings(plan, owner, 1, 16, 32, 1, None)
    counts, columns, free_counts, free = (x[0, 0].tolist() for x in flash._columns(lists))
    other = lists.other.tolist()
    assert len(lists.work) == len(counts)
    for own, _, begin, middle, stop, *_ in lists.work.tolist():
        assert columns[own][: counts[own]] == other[begin:middle]
        assert free[own][: free_counts[own]] == other[middle:stop]


@kernels
def test_kernels_give_a_model_the_gradients_of_the_reference(tree):
    model = tiny_model("Qwen3", torch.float32).to(DEVICE)
    attention.check(model, "triton")
    row = pack([make_sample(ids) for ids in random_samples(5)]).to(DEVICE)
    results = []
    for backend in ("triton", "reference"):
        model.zero_grad()
        out = model(row.input_ids[None], position_ids=row.position_ids[None], **attention.index(row, backend))
        out.logits.logsumexp(-1).sum().backward()
        results.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="needs a CPU without the interpreter")
@pytest.mark.parametrize(
    "backend, message", [("triton", "runs on CUDA devices"), ("flash", "(needs the package|runs on Hopper)")]
)
def test_backend_refuses_a_cpu(backend, message):
    pytest.importorskip("triton")
    row = SimpleNamespace(subtree_end=torch.full((5,), 5, dtype=torch.int32), position_ids=torch.arange(5))
    q, k = torch.zeros(1, 4, 5, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=f"the {backend} attention backend {message}"):
        attention.tree_attention(nn.Identity(), q, k, k, None, **attention.index(row, backend))


@kernels
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(size=264), "head sizes up to 256, not 264"),
        (dict(heads=3), "equal groups, not 3 for 2"),
        (dict(scale=-1.0), "a scale above 0, not -1"),
        (dict(window=0), "sliding_window"),
    ],
)
def test_kernels_refuse_by_name_what_they_cannot_do(tree, change, message):
    case = {"dtype": F32, "size": 16, "heads": 4, "scale": 1.0, "window": None, **change}
    end, depth = KERNEL_ROWS["chain"]()
    q, k, v = (
        torch.zeros(50, heads, case["size"], dtype=case["dtype"], device=DEVICE)
        for heads in (case["heads"], 2, 2)
    )
    with pytest.raises(ValueError, match=f"triton attention backend takes.*{message}"):
        tree.attend(q, k, v, reference.plan(end, depth), case["scale"], window=case["window"])


@pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
def test_every_launch_for_hopper_gives_what_its_function_names(monkeypatch):
    """All that can be seen of hopper.py without such a GPU: elsewhere nothing imports it."""
    hopper = pytest.importorskip("attention.hopper")
    launches = []

    class Kernel(SimpleNamespace):
        def __getitem__(self, grid):
            return self.launch

        def launch(self, *given, num_warps, maxnreg, **named):
            launches.append(sorted([*self.names[: len(given)], *named]) == sorted(self.names))

    for name in ("_forward", "_backward_query", "_backward_key"):
        monkeypatch.setattr(hopper, name, Kernel(names=getattr(hopper, name).arg_names))
    lists = SimpleNamespace(work=torch.zeros(3, 8), other=torch.zeros(1))
    monkeypatch.setattr(hopper, "meetings", lambda *_: lists)
    q, k = (torch.zeros(5, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    lse = torch.zeros(5, 4)
    plan = reference.plan(torch.full((5,), 5, dtype=torch.int32), torch.arange(5))
    hopper.forward(q, k, k, q, lse, None, plan, 1.0, None, None)
    hopper.backward(q, k, k, q, q, lse, lse, q, k, k, plan, 1.0, None, None)
    assert launches == [True] * 3


flash_attention = pytest.mark.skipif(
    DEVICE == "cpu" or bool(flash.missing()), reason="needs a Hopper GPU and flash-attn-4"
)


@flash_attention
@pytest.mark.parametrize(
    "length, heads, groups, size, options",
    [
        (1, 4, 2, 128, dict()),
        (1300, 16, 8, 128, dict(sinks=True, window=100)),
        (900, 8, 4, 256, dict(softcap=50.0)),
        (700, 8, 4, 256, dict(window=50, scale=0.05)),
        (900, 16, 2, 64, dict(sinks=True, dtype=F16)),
    ],
)
def test_flash_attention_equals_the_reference(length, heads, groups, size, options):
    options = dict(options)
    dtype, scale = options.pop("dtype", torch.bfloat16), options.pop("scale", size**-0.5)
    end, depth = random_row(length, 0, 0.02)
    torch.manual_seed(0)
    shapes = [(length, heads, size), (length, groups, size), (length, groups, size), (length, heads, size)]
    *tensors, dout = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)
    dlse = torch.randn(length, heads, device=DEVICE)
    sinks = torch.randn(heads, device=DEVICE) if options.pop("sinks", False) else None
    rest = (end, depth, scale, dout, dlse)
    exact = [x.double() for x in tensors], None if sinks is None else sinks.double()
    wanted = gradients(reference, *exact, *rest, **options)
    for a, b in zip(gradients(flash, tensors, sinks, *rest, **options), wanted, strict=True):
        assert (a.double() - b).norm() <= (2e-3 if dtype == F16 else 1e-2) * max(b.norm(), 1e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes without a GPU")
@pytest.mark.parametrize("trees", [1, 8])
def test_row_of_256k_tokens_equals_the_reference(tree, trees):
    branches, prompt, branch = (1, 0, 2**18) if trees == 1 else (28, 4096, 1024)
    span = prompt + branches * branch
    end, depth = [], []
    for root in range(0, 2**18, span):
        ends = [root + prompt + (number + 1) * branch for number in range(branches) for _ in range(branch)]
        end += [root + span] * prompt + ends
        depth += [*range(prompt)] + [*range(prompt, prompt + branch)] * branches
    plan = reference.plan(
        torch.tensor(end, dtype=torch.int32, device=DEVICE), torch.tensor(depth, device=DEVICE)
    )
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2**18, heads, 128, device=DEVICE).bfloat16() for heads in (2, 1, 1, 2))
    results = []
    for module, dtype in ((tree, torch.bfloat16), (reference, F32)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = module.attend(*leaves, plan, 128**-0.5)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))])
    for found, wanted in zip(*results, strict=True):
        for part in (slice(None), slice(-1000, None)):
            assert (found[part] - wanted[part]).norm() < 1e-2 * wanted[part].norm()


# ---- models


class Toy(nn.Module):
    """A float64 transformer of two layers, position by depth: nothing in it runs in float32."""

    def __init__(self):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(12, 16), nn.Embedding(64, 16), nn.Linear(16, 12)
        self.qkv = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2)
        )
        self.double()

    def forward(self, ids, positions, **tree):
        x = self.embed(ids) + self.place(positions)  # [1, N, E]
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            q, k, v = qkv(x).split([16, 8, 8], -1)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))  # [1, H or G, N, D]
            x = x + out(attention.tree_attention(self, q, k, v, None, **tree)[0].flatten(2))
            x = x + mlp(x)
        return self.head(x)


@settings(max_examples=15, deadline=None)
@given(tries)
def test_float64_model_gives_a_row_the_logp_and_gradients_of_its_samples(samples):
    torch.manual_seed(0)
    model = Toy()
    together, apart = row_logp(model, samples), separate_logp(model, samples)
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(backward(together, model), backward(apart, model), rtol=1e-9, atol=1e-11)


@settings(max_examples=8, deadline=None)
@given(tries)
def test_qwen3_gives_a_row_the_logp_and_gradients_of_its_samples(samples):
    # Its rotary embedding and norms run in float32 even in a float64 model, hence the tolerance.
    assert_row_equals_separate(tiny_model("Qwen3"), samples, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_gives_a_row_what_its_own_attention_gives_each_sample(family):
    alone = tiny_model(family, implementation="eager")
    model = tiny_model(family)
    model.load_state_dict(alone.state_dict())
    attention.check(model)
    assert_row_equals_separate(model, random_samples(1, longest=16), rtol=1e-5, atol=1e-5, alone=alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_replays_the_index(reentrant):
    samples = random_samples(2)
    model = tiny_model("Qwen3")

    def forward(ids, positions, **tree):
        return model(input_ids=ids, position_ids=positions, use_cache=False, **tree).logits

    plain = backward(row_logp(forward, samples), model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(backward(row_logp(forward, samples), model), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family, layers, graphs", [("Qwen3", 3, 1), ("Gemma2", 4, 2), ("GptOss", 2, None)])
def test_compiled_layers_share_a_graph_for_all_rows(family, layers, graphs, monkeypatch):
    """And give what eager ones do. Gemma2 has layers with and without a window; GptOss has sinks, and loops
    over its experts."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(family, num_hidden_layers=layers)

    def forward(ids, positions, **tree):
        kept.append(tree)
        return model(input_ids=ids, position_ids=positions, use_cache=False, **tree).logits

    rows, kept = [random_samples(seed) for seed in range(3)], []
    plain = [backward(row_logp(forward, samples), model) for samples in rows]
    start.compile_layers(model)
    start.checkpoint_layers(model, layers // 2)
    for samples, wanted in zip(rows, plain, strict=True):
        found = backward(row_logp(forward, samples), model)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    if graphs:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert not torch._dynamo.utils.counters["graph_break"]


def test_the_operator_refuses_a_row_that_is_not_its_indexs():
    q = torch.zeros(3, 4, 8)
    with pytest.raises(RuntimeError, match="keep it until the backward has ended"):
        attention.attend_opaquely(q, q, q, None, torch.tensor(-1), 1.0, None, None)
    index = attention.Index(torch.tensor([2, 2], dtype=torch.int32), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="3 tokens came with an index of 2"):
        attention.attend_opaquely(q, q, q, None, index.number, 1.0, None, None)


def test_the_length_of_the_longest_path_comes_with_the_row(monkeypatch):
    """A row says it, so that the host need not wait for the device; it is what the depths say."""
    row = pack([make_sample(ids) for ids in random_samples(0)]).to("cpu")
    assert attention.index(row)["tree"].plan.longest == int(row.position_ids.max()) + 1
    monkeypatch.setattr(torch.Tensor, "max", None)
    attention.index(row)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_nobody_looks_for_packed_samples_in_a_checked_model(family, monkeypatch):
    """transformers does in every forward, and the host waits for what it finds."""
    model = tiny_model(family)
    attention.check(model)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", None)
    row = pack([make_sample(ids) for ids in random_samples(0)]).to("cpu")
    model(input_ids=row.input_ids[None], position_ids=row.position_ids[None], **attention.index(row))
    monkeypatch.undo()
    attention.register()


def test_an_index_reaches_sharded_layers_itself():
    """FSDP rebuilds the dataclasses among a layer's arguments; the plan of a copy starts from nothing."""
    row = pack([make_sample(ids) for ids in random_samples(0)]).to("cpu")
    arguments = attention.index(row)
    assert _apply_to_tensors(lambda tensor: tensor, arguments)["tree"] is arguments["tree"]


def test_layers_share_the_masks_of_a_row(monkeypatch):
    made = []
    mask = reference._mask
    monkeypatch.setattr(reference, "_mask", lambda *arguments: made.append(arguments[2]) or mask(*arguments))
    model = tiny_model("Gemma3Text", num_hidden_layers=6)  # every second layer has the window
    row = pack([make_sample(ids) for ids in random_samples(3)]).to("cpu")
    model(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        use_cache=False,
        **attention.index(row),
    )
    assert sorted(made, key=str) == [3, None]


def test_autocast_reaches_the_attention_in_its_dtype():
    model = tiny_model("Qwen3", torch.float32)
    row = pack([make_sample(ids) for ids in random_samples(4)]).to("cpu")
    inputs = dict(input_ids=row.input_ids[None], position_ids=row.position_ids[None], use_cache=False)
    exact = model(**inputs, **attention.index(row)).logits
    tree = attention.index(row)
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs, **tree).logits.float().sum().backward()
        rough = model(**inputs, **tree).logits.float()
        attention.check(model)
    made = [asked for make, *asked in tree["tree"].plan.made if make is reference._masks]
    assert made == [[None, torch.bfloat16]]
    assert (rough - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_autocast_turns_float32_heads_into_its_dtype_and_keeps_scores_exact(softcap):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 30, 8).bfloat16() for heads in (4, 2, 2))
    row = SimpleNamespace(subtree_end=torch.full((30,), 30, dtype=torch.int32), position_ids=torch.arange(30))
    exact = attention.tree_attention(
        nn.Identity(), q.double(), k.double(), v.double(), None, softcap=softcap, **attention.index(row)
    )[0]
    with torch.autocast("cpu", torch.bfloat16):
        heads = (tensor.float() for tensor in (q, k, v))  # as norms with float32 weights leave them
        found = attention.tree_attention(
            nn.Identity(), *heads, None, softcap=softcap, **attention.index(row)
        )[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-8)


# ---- refusals


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(dropout=0.1), "attention_dropout=0"),
        (dict(position_bias=torch.zeros(1)), "position_bias"),
        (dict(head_mask=torch.zeros(1)), "head_mask"),
        (dict(output_attentions=True), "output_attentions"),
        (dict(is_causal=False), "non-causal"),
        (dict(attention_mask=torch.zeros(1, 1, 5, 5)), "mask of the model's own"),
        (dict(key=torch.zeros(1, 2, 7, 4)), "use_cache=False"),
        (dict(tree=None), r"\*\*attention.index\(row\)"),
        (dict(sliding_window=0), "sliding_window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    row = SimpleNamespace(subtree_end=torch.full((5,), 5, dtype=torch.int32), position_ids=torch.arange(5))
    inputs = dict(query=torch.zeros(1, 4, 5, 4), key=torch.zeros(1, 2, 5, 4), value=torch.zeros(1, 2, 5, 4))
    arguments = {**inputs, "attention_mask": None, **attention.index(row), "use_cache": False, **changes}
    with pytest.raises(ValueError, match=message):
        attention.tree_attention(nn.Linear(1, 1), **arguments)


def test_forward_without_index_raises_and_names_the_layer():
    with pytest.raises(ValueError, match=r"Qwen3Attention \(qwen3, layer 0\) got no tree index"):
        tiny_model("Qwen3")(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)


def test_padding_mask_is_refused():
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="attention_mask"):
        tiny_model("Qwen3")(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


@pytest.mark.parametrize(
    "device, size, refused, chosen",
    [
        ("cuda", 128, (), "triton"),
        ("cuda", 256, (), "flash"),
        ("cuda", 256, ("flash",), "triton"),
        ("cuda", 256, ("flash", "triton"), "reference"),
        ("cuda", 264, (), "reference"),
        ("cpu", 128, (), "reference"),
    ],
)
def test_auto_takes_the_fastest_backend_that_does_not_refuse(device, size, refused, chosen, monkeypatch):
    def backend(name):
        return SimpleNamespace(refusal=lambda *_: name in refused, attend=lambda *_, **options: name)

    monkeypatch.setattr(attention, "_module", backend)
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    index = attention.Index(torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.long))
    monkeypatch.setattr(attention, "reference", backend("reference"))
    query = SimpleNamespace(is_cuda=device == "cuda", shape=(5, 4, size))
    assert index.module(query, query, query, 1.0, None).attend() == chosen


def test_unknown_backend_is_refused():
    row = SimpleNamespace(
        subtree_end=torch.ones(1, dtype=torch.int32), position_ids=torch.zeros(1, dtype=torch.long)
    )
    with pytest.raises(ValueError, match="reference"):
        attention.index(row, backend="fast")


def test_check_refuses_recurrent_layers():
    model = tiny_model("Lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match="'lfm2'.*other branches"):
        attention.check(model)


def test_check_refuses_a_window_that_only_the_mask_knows():
    model = tiny_model("Llama4Text", attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48)
    with pytest.raises(ValueError, match="'llama4_text'.*2 layers have a local window"):
        attention.check(model)


def test_check_refuses_a_model_that_keeps_the_index_from_its_layers():
    with pytest.raises(ValueError, match="'nemotron'.*no tree index"):
        attention.check(tiny_model("Nemotron"))


def test_check_refuses_a_model_outside_the_interface():
    with pytest.raises(ValueError, match="'mamba'.*attention interface"):
        attention.check(tiny_model("Mamba"))


def test_check_refuses_a_model_that_ignores_positions(monkeypatch):
    model = tiny_model("Qwen3", torch.float32)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda position_ids, **kwargs: forward(**kwargs))
    with pytest.raises(ValueError, match="position_ids"):
        attention.check(model)


def test_check_refuses_another_attention_implementation():
    with pytest.raises(ValueError, match='attn_implementation="tree"'):
        attention.check(tiny_model("Qwen3", implementation="sdpa"))


def test_registering_twice_is_registering_once():
    attention.register()
    before = dict(transformers.AttentionInterface._global_mapping)
    attention.register()
    assert before == transformers.AttentionInterface._global_mapping
