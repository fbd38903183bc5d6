"""Run: pytest tests/test_head.py. The fused head: its passes, chunks, memory and kernels; heads of models."""

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_loss import BOTH, GRPO, OBJECTIVES, close, gradients, load, make_row, oracle, random_problem
from torch.utils._python_dispatch import TorchDispatchMode

import head
import loss
from head import CHUNK_BYTES, Head, fused_head, head_of, logit_gradient, row_statistics, transformed
from loss import Objective, row_loss
from metrics import Window, term_metrics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
spec = importlib.util.spec_from_file_location("bench", Path(__file__).parents[1] / "bench/loss.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gives_what_a_cpu_gives(dtype, objective):
    hidden, head, row = random_problem(3, dtype, softcap=3.0)
    total, stats = row_loss(hidden, head, row, OBJECTIVES[objective], 0.8)
    moved = [x.detach().cuda().requires_grad_() for x in (hidden, head.weight, head.bias)]
    row = row.host.to("cuda")
    gpu_head = Head(moved[1], moved[2], softcap=3.0)
    gpu_total, gpu_stats = row_loss(moved[0], gpu_head, row, OBJECTIVES[objective], 0.8)
    torch.testing.assert_close(gpu_total.cpu(), total, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gpu_stats["logp"].cpu(), stats["logp"], rtol=1e-5, atol=1e-5)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    pairs = zip(gradients(gpu_total, moved[0], gpu_head), gradients(total, hidden, head), strict=True)
    for ours, theirs in pairs:
        assert (ours.cpu() - theirs).abs().max() <= rounding * theirs.abs().max()


@BOTH
@pytest.mark.parametrize("variant", ["plain", "softcap"])
def test_the_fused_head_matches_the_reference(variant, dtype):
    data = load("reference/lm_head.json")
    want = data["variants"][variant]
    hidden, weight = (torch.tensor(data[x], dtype=dtype, requires_grad=True) for x in ("hidden", "weight"))
    head = Head(weight, softcap=want["softcap"])
    position, target = torch.tensor(data["position_of_term"]), torch.tensor(data["target"])
    row = make_row(position, target, torch.zeros(8), torch.zeros(8))
    g, g_ids = (torch.tensor(data[x], dtype=dtype) for x in ("g_logp", "g_logp_ids"))
    g = torch.cat([g[:, None], g_ids], dim=1)
    ids = torch.cat([target[:, None], torch.tensor(data["ids"])], dim=1)

    def linear(terms, logp):
        return (g[terms] * logp).sum(1), g[terms], {"logp": logp}

    total, stats = fused_head(hidden, head, row, ids, None, data["temperature"], linear)
    close(stats["logp"][:, 0], want["logp"], dtype)
    close(stats["logp"][:, 1:], want["logp_ids"], dtype)
    close(stats["entropy"], torch.tensor(want["entropy"], dtype=torch.float64)[position], dtype)
    # the reference differentiates the entropy too, which no objective here does: plain autograd adds it
    y = hidden @ weight.T
    y = y if want["softcap"] is None else want["softcap"] * torch.tanh(y / want["softcap"])
    logp = (y / data["temperature"]).log_softmax(-1)
    entropy = -(torch.tensor(data["g_entropy"], dtype=dtype) * (logp.exp() * logp).sum(1)).sum()
    (total + entropy).backward()
    scale = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 5e-6}
    close(hidden.grad, want["dhidden"], **scale)
    close(weight.grad, want["dweight"], **scale)


@BOTH
@pytest.mark.parametrize("variant", ["plain", "softcap"])
def test_restricted_log_probabilities_match_the_reference(variant, dtype):
    data = load("reference/lm_head.json")
    want = data["variants"][variant]
    hidden, weight = (torch.tensor(data[x], dtype=dtype, requires_grad=True) for x in ("hidden", "weight"))
    sets = [
        [v for v, there in zip(ids, mask, strict=True) if there]
        for ids, mask in zip(data["candidates"], data["candidate_mask"], strict=True)
    ]
    row = make_row(data["position_of_term"], data["target"], [0.0] * 8, [0.0] * 8, candidates=sets)
    g = torch.tensor(data["g_logp"], dtype=dtype)
    ids = torch.tensor(data["candidates"]).clamp(min=0)
    support, listed, unusable = loss.support_of(row, ids, 13)
    assert not unusable.any() and listed.tolist() == data["candidate_mask"]
    coefficient = torch.zeros_like(ids, dtype=dtype)
    coefficient[:, 0] = g

    def linear(terms, logp):
        return g[terms] * logp[:, 0], coefficient[terms], {"logp": logp}

    head = Head(weight, softcap=want["softcap"])
    total, stats = fused_head(hidden, head, row, ids, support, data["temperature"], linear)
    total.backward()
    close(stats["logp"][:, 0], want["restricted_logp"], dtype)
    expected = torch.tensor([[float(x or 0) for x in line] for line in want["restricted_logp_all"]])
    close(stats["logp"][listed], expected.double()[listed], rtol=1e-5, atol=1e-5)
    scale = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 5e-6}
    close(hidden.grad, want["dhidden_restricted"], **scale)
    close(weight.grad, want["dweight_restricted"], **scale)


@pytest.mark.parametrize("objective", [GRPO, OBJECTIVES["centred"]])
def test_chunk_size_does_not_change_the_result(objective, monkeypatch):
    results = []
    for rows in (1, 3, 1000):
        monkeypatch.setitem(CHUNK_BYTES, "cpu", rows * 32 * 8)  # 23, padded
        hidden, head, row = random_problem(7, softcap=3.0)
        total, stats = row_loss(hidden, head, row, objective, 0.7)
        results.append(
            [total, *gradients(total, hidden, head), *(stats[name].double() for name in sorted(stats))]
        )
    for other in results[:2]:
        for ours, whole in zip(other, results[2], strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-13)


def test_the_products_are_of_the_positions_that_carry_a_term_once_each(monkeypatch):
    """However many terms and ids there are: three products of U V E."""
    work, product = [], head.product

    def counted(a, b, *out, **how):
        work.append(a.numel() * b.shape[1])
        return product(a, b, *out, **how)

    monkeypatch.setattr(head, "product", counted)
    hidden, model, row = random_problem(3)
    row_loss(hidden, model, row, Objective(), 1.0)
    scored = len(row.position.unique())
    assert scored < min(len(hidden), len(row.position)) and work == [scored * 23 * 6] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("objective", [GRPO, Objective()])
@pytest.mark.parametrize("extras", [False, True])
def test_a_row_without_terms_gives_zero_with_zero_gradients(extras, objective, dtype):
    hidden, model, _ = random_problem(6, dtype)
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in (hidden, model.weight, model.bias)]
    nothing = torch.zeros(0, dtype=torch.long)
    topk = (torch.zeros(0, 4), torch.zeros(0, 4))
    row = make_row(nothing, nothing, [], [], *((topk, []) if extras else ())).host.to(DEVICE)
    values = inputs[1].detach()
    for whole in (Head(*inputs[1:]), Head(values.float().requires_grad_(), inputs[2], values=values)):
        total, stats = row_loss(inputs[0], whole, row, objective, 1.0)
        total.backward()
        assert total.item() == 0 and all(len(value) == 0 for value in stats.values())
        for parameter in (*inputs, whole.weight):
            assert parameter.grad is not None and (parameter.grad == 0).all()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("objective", [GRPO, Objective()])
def test_no_tensor_of_terms_by_vocabulary_is_made_or_saved(objective, monkeypatch):
    terms, vocabulary, width, rows = 300, 4000, 8, 5
    monkeypatch.setitem(CHUNK_BYTES, "cpu", rows * vocabulary * 4)
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(terms, width, generator=make, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=make, requires_grad=True)
    ids = torch.arange(8).expand(terms, 8)
    topk = (ids, torch.full((terms, 8), -3.0))
    args = (range(terms), range(terms), [-3.0] * terms, [1.0] * terms, topk)
    row = make_row(*args, candidates=[[m] for m in range(terms)])
    saved = []
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            total, _ = row_loss(hidden, Head(weight), row, objective, 1.0)
        total.backward()
    assert largest.elements <= max(rows, width) * vocabulary
    assert sum(saved) <= vocabulary * width + terms * (width + 1)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen):
    hidden, head, row = random_problem(8)
    parts = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    expected = dict(
        zip(parts, gradients(row_loss(hidden, head, row, GRPO, 1.0)[0], hidden, head), strict=True)
    )
    parts[frozen] = parts[frozen].detach()
    row_loss(parts["hidden"], Head(parts["weight"], parts["bias"]), row, GRPO, 1.0)[0].backward()
    assert parts.pop(frozen).grad is None
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor.grad, expected[name])


def test_without_autograd_only_the_values_are_computed(monkeypatch):
    hidden, head, row = random_problem(8)
    expected, _ = row_loss(hidden, head, row, GRPO, 1.0)
    monkeypatch.setattr("head.logit_gradient", None)  # any call of it would fail
    with torch.no_grad():
        total, _ = row_loss(hidden, head, row, GRPO, 1.0)
    assert not total.requires_grad and torch.equal(total, expected.detach())


def test_backward_scales_by_the_incoming_gradient():
    hidden, head, row = random_problem(9)
    once = gradients(row_loss(hidden, head, row, GRPO, 1.0)[0], hidden, head)
    thrice = gradients(row_loss(hidden, head, row, GRPO, 1.0)[0] * -3, hidden, head)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(-3 * a, b)


def test_a_second_backward_is_refused():
    hidden, head, row = random_problem(9)
    total, _ = row_loss(hidden, head, row, GRPO, 1.0)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        total.backward()


def test_autocast_does_not_round_the_logits():
    hidden, head, row = random_problem(10, torch.float32)
    expected, _ = row_loss(hidden, head, row, GRPO, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = row_loss(hidden, head, row, GRPO, 1.0)
    assert torch.equal(total, expected)


def test_a_float32_weight_under_bfloat16_states_gets_a_float32_gradient():
    hidden, head, row = random_problem(4, torch.bfloat16, bias=False)
    head = Head(head.weight.detach().float().requires_grad_())
    total, _ = row_loss(hidden, head, row, OBJECTIVES["centred"], 1.0)
    total.backward()
    wide = Head(head.weight.detach().double().requires_grad_())
    oracle(hidden.detach().double(), wide, row, OBJECTIVES["centred"], 1.0)[0].backward()
    assert head.weight.grad.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16
    close(head.weight.grad, wide.weight.grad, rtol=1e-5, atol=1e-5)


EXTREMES = {
    "large": lambda z: z[0].index_fill_(0, torch.tensor([3]), 1e4),
    "small": lambda z: z[1].index_fill_(0, torch.tensor([2, 5]), -1e4),
    "masked": lambda z: z[2, 9:].fill_(-9999.0),
    "padding": lambda z: z[:, 20:].fill_(-math.inf),
    "impossible target": lambda z: z[3].index_fill_(0, torch.tensor([7]), -math.inf),
}


@pytest.mark.parametrize("objective", ["surrogate", "centred"])
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_give_exact_probabilities_and_finite_gradients(dtype, kind, objective):
    """-inf comes through the bias, as the ids that pad a vocabulary get it in some models."""
    z = torch.randn(4, 23, generator=torch.Generator().manual_seed(0)).to(dtype)
    EXTREMES[kind](z)
    inputs = [
        torch.eye(4, dtype=dtype),
        z.nan_to_num(neginf=0.0).T.contiguous(),
        torch.zeros(23, dtype=dtype),
    ]
    if kind == "padding":
        inputs[2][20:] = -math.inf
    elif kind == "impossible target":
        inputs[2][7], z[:, 7] = -math.inf, -math.inf
    hidden, weight, bias = (x.requires_grad_() for x in inputs)
    target, topk = [3, 2, 1, 7], ([[3, 9, 7], [1, 5, 2], [9, 2, 20], [3, 7, -1]], [[-0.7, -1.5, -3.0]] * 4)
    row = make_row(range(4), target, [-1.0] * 4, [1.0, -1.0, 0.5, 2.0], topk)
    total, stats = row_loss(hidden, Head(weight, bias), row, OBJECTIVES[objective], 1.0)
    total.backward()
    logp = z.double().log_softmax(1)
    close(stats["logp"], logp[range(4), target], rtol=1e-6, atol=1e-5)
    close(stats["entropy"], -(logp.exp() * logp).nan_to_num().sum(1), rtol=1e-5, atol=1e-4)
    assert all(x.grad.isfinite().all() for x in (hidden, weight, bias))


def test_bfloat16_errors_are_far_below_those_of_full_logits():
    """Against float64; full logits in bfloat16 and autograd is what a model's own forward comes to."""
    inputs = bench.problem(300, 3000, 64, DEVICE)
    truth = bench.exact(*inputs)
    errors = {}
    for method in (bench.fused, bench.full_logits):
        hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
        found = (method(hidden, weight, inputs[2]), hidden.grad, weight.grad)
        errors[method] = [(a.double() - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)]
    for ours, full in zip(*errors.values(), strict=True):
        assert ours < full / 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [256, 1024])
def test_a_gpu_needs_less_than_a_gib_beyond_the_gradients(width):
    inputs = bench.problem(3000, 151936, width, "cuda")
    assert bench.measure("fused", *inputs, bench.exact(*inputs), repeats=1)["extra_gib"] < 1


class NeverWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), func
        return func(*args, **(kwargs or {}))


def test_no_device_is_waited_for():
    """The loss of a row, its backward and its metrics: nothing is copied back before the step's end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, model, row = random_problem(3, torch.bfloat16)
    hidden, weight, bias = (
        x.detach().to(device).requires_grad_() for x in (hidden, model.weight, model.bias)
    )
    ids, logp = row.host.topk_ids, row.host.topk_logp
    changed = {"sample": row.host.position // 4, "sample_count": 4, "teacher_ids": ids, "teacher_logp": logp}
    row = dataclasses.replace(row.host, **changed).to(DEVICE)
    settings = Objective(distill_coef=0.5, teacher_temperature=0.8)

    def scored():
        total, stats = row_loss(hidden, Head(weight, bias), row, settings, 0.8)
        total.backward()
        term_metrics(Window(), stats, row)

    with NeverWaits():
        scored()
        if DEVICE == "cuda":  # what has been compiled by now
            torch.cuda.set_sync_debug_mode("error")
            scored()
            torch.cuda.set_sync_debug_mode("default")


# The kernels: on the GPU where there is one, else under the interpreter, in a process of its own ------------

kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="see the test of the interpreter")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_pass_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "kernel and not interpreter"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def block_of_logits(kind, rows=6, vocabulary=1100):
    """Products y, as a part of wider memory, and 40 named ids with repeats; some rows have none."""
    make = torch.Generator().manual_seed(0)
    y = torch.randn(rows, vocabulary + 20, generator=make).mul(4)[:, :vocabulary]
    if kind == "extreme":
        y[0, 3], y[1, 5], y[2, 7:900], y[3, ::2], y[4] = 1e4, -1e4, -9999.0, -math.inf, 0.0
    row, ids = (torch.randint(n, (40,), generator=make) for n in (rows - 1, vocabulary))
    row[10:16], ids[10:16] = row[9], ids[9]
    row[20:24], ids[20:24] = 0, 3
    value = torch.randn(40, generator=make)
    share, bias = torch.randn(rows, generator=make), torch.randn(vocabulary, generator=make)
    return [x.to(DEVICE) for x in (y, row * vocabulary + ids, value, share, bias)]


@kernels
@pytest.mark.parametrize("kind", ["plain", "bias", "softcap", "extreme"])
def test_kernels_equal_the_plain_passes(kind):
    import head_triton

    y, key, value, share, bias = block_of_logits(kind)
    model = Head(None, bias if kind in ("bias", "softcap") else None, 1.3, 3.0 if kind == "softcap" else None)
    wide = dataclasses.replace(model, bias=None if model.bias is None else bias.double())
    lse, entropy = row_statistics(y.double(), wide, 0.7)
    found = head_triton.row_statistics(y, model, 0.7)
    for ours, plain in zip(found, (lse, entropy), strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-6, atol=2e-6)
    logit = transformed(y.double(), wide.bias, wide, 0.7).reshape(-1)[key].float()
    key, place = key.sort(stable=True)
    named = (key, place, value.double(), None)
    expected = logit_gradient(y.double(), wide, 0.7, lse, share.double(), named, torch.float64)
    narrow = 2**-7 if INTERPRETED else 2**-8  # the interpreter cuts off where the GPU rounds
    for dtype, rounding in ((torch.bfloat16, narrow + 2e-5), (torch.float32, 2e-5)):
        block = torch.zeros(len(y), y.shape[1] + 20, device=DEVICE)[:, : y.shape[1]].copy_(y)
        ours = head_triton.logit_gradient(
            block, model, 0.7, found[0], share, (key, place, value, logit), dtype
        )
        assert ours.dtype == dtype and ours.data_ptr() == block.data_ptr()
        torch.testing.assert_close(ours.double(), expected, rtol=rounding, atol=2e-6)


@kernels
@pytest.mark.parametrize("factor", [1.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_scaling_kernel_equals_a_product(dtype, factor):
    import head_triton

    gradient = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    expected = gradient * factor
    head_triton.scale(gradient, torch.tensor(factor, device=DEVICE))
    assert torch.equal(gradient, expected)


@kernels
@pytest.mark.parametrize("objective", ["surrogate", "centred"])
@pytest.mark.parametrize("sets", ["mixed", "none"])
def test_a_row_scored_by_kernels_equals_the_plain_path(objective, sets, monkeypatch):
    results = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr("head.passes_for", lambda x: head)
        hidden, model, row = random_problem(3, torch.float32, softcap=3.0, sets=sets)
        hidden, weight, bias = (
            x.detach().to(DEVICE).requires_grad_() for x in (hidden, model.weight, model.bias)
        )
        model = dataclasses.replace(model, weight=weight, bias=bias)
        total, stats = row_loss(hidden, model, row.host.to(DEVICE), OBJECTIVES[objective], 0.8)
        results.append([total, stats["logp"], stats["entropy"], *gradients(total, hidden, model)])
    for kernel, plain in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=1e-5)


# Heads of transformers models -------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "phi": {},  # a bias
    "gemma2": {"final_logit_softcapping": 0.05},
    "gemma3_text": {},  # a softcap that may be None
    "cohere": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_read_from_a_model_gives_its_log_probabilities(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    head = head_of(model)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    ids = torch.randint(3, 40, (1, 9))
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        logp = model(input_ids=ids).logits[0].div(0.7).log_softmax(-1)
    row = make_row(range(8), ids[0, 1:], [-3.0] * 8, [1.0] * 8)
    _, stats = row_loss(hidden, head, row, GRPO, 0.7)
    close(stats["logp"], logp[:-1].gather(1, ids[0, 1:, None])[:, 0], rtol=1e-6, atol=1e-6)


def fake_model(model_type="llama", linear=None, **values):
    linear = linear or torch.nn.Linear(4, 7, bias=False)
    config = SimpleNamespace(model_type=model_type, to_dict=lambda: values)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, get_output_embeddings=lambda: linear)


def test_a_transformation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="logits_mup_width_multiplier = 24"):
        head_of(fake_model(logits_mup_width_multiplier=24.0))
    with pytest.raises(ValueError, match="logit_scale = 'inv_sqrt'"):
        head_of(fake_model(logit_scale="inv_sqrt"))
    with pytest.raises(ValueError, match="must be a Linear"):
        head_of(fake_model(linear=torch.nn.Bilinear(2, 2, 7)))
    harmless = {"attn_logit_softcapping": 50.0, "output_router_logits": True, "num_logits_to_keep": 4}
    assert head_of(fake_model(**harmless)).softcap is None


def test_one_family_multiplies_where_the_others_divide():
    assert head_of(fake_model("hyperclovax", logits_scaling=4.0)).logit_scale == 4.0
    assert head_of(fake_model("granite", logits_scaling=4.0)).logit_scale == 0.25
