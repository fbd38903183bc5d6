"""python -m pytest tests/test_train.py: the step does not depend on how samples are dealt out."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attention
import train
from head import head_of
from loss import router_coefficient
from options import Options
from packing import Sample, pack
from start import make_optimizer

ROOT = Path(__file__).parent.parent

SPLITS = {
    "one row per rank, one rank": (1, ["--token_budget", "4096"]),
    "many small rows": (1, ["--token_budget", "64"]),
    "nothing shared": (1, ["--token_budget", "256", "--share_prefixes", "false"]),
    "a fixed number of samples": (1, ["--token_budget", "0", "--per_device_train_batch_size", "3"]),
    "recomputed activations": (1, ["--token_budget", "256", "--gradient_checkpointing", "true"]),
    "two ranks": (2, ["--token_budget", "4096"]),
    "two ranks, many small rows": (2, ["--token_budget", "64"]),
    "three ranks": (3, ["--token_budget", "200"]),
}


def gradients(path: Path, ranks: int, arguments: list[str]) -> dict[str, torch.Tensor]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if "--gradient_checkpointing" not in arguments:
        arguments = arguments + ["--gradient_checkpointing", "false"]
    command = [sys.executable, *launcher, str(ROOT / "tests/gradients.py"), str(path), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(path)


@pytest.mark.parametrize("kind, rate", [("constant", 1e-5), ("linear", 0.6e-5)])
def test_a_resumed_run_has_the_learning_rate_that_is_asked_for(kind, rate, monkeypatch):
    """Step 4 of 10, whatever rate and schedule the checkpoint was made with."""
    options = Options(model="m", learning_rate=1e-5, lr_scheduler_type=kind, max_steps=10)
    model = torch.nn.Linear(2, 2)
    optimizer, scheduler = make_optimizer(options, model)
    state = {"step": 4, "version": 4, "position": 0, "beyond": [], "num_tokens": 9}
    monkeypatch.setattr(train.checkpoint, "read_state", lambda path: state)
    monkeypatch.setattr(train.checkpoint, "load", lambda *_: None)
    step, version, progress = train.resume(Path("x"), model, optimizer, scheduler)
    assert (step, version, progress.tokens) == (4, 4, 9)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert scheduler.get_last_lr() == [pytest.approx(rate)]


ROUTED = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ROUTED)
def test_load_balancing_weighs_by_the_trained_tokens_of_a_row(family, recompute, monkeypatch):
    """Its gradient is what transformers' own has, times the coefficient and the row's terms."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **ROUTED[family])
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tree").train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    monkeypatch.setattr(train, "gathered_head", head_of)
    ids = torch.randint(3, 40, (9,), generator=torch.Generator().manual_seed(1)).int().numpy()
    logp = np.full(9, -3.0, dtype=np.float32)
    row = pack([Sample(ids, np.arange(9) >= 4, logp, 1.0, 0, 0, 0, 0)]).to("cpu")

    def gradients_at(coefficient):
        options = Options(model="m", router_aux_loss_coef=coefficient)
        model.zero_grad()
        stats = train.forward_backward(model, row, row.terms, train.make_objective(options), options)[1]
        return stats.get("aux_loss"), {name: p.grad.clone() for name, p in model.named_parameters()}

    (_, without), (balance, balanced) = gradients_at(0.0), gradients_at(0.5)
    model.set_attn_implementation("eager")
    model.zero_grad()
    expected = model(input_ids=row.input_ids[None], output_router_logits=True).aux_loss
    expected.backward()
    torch.testing.assert_close(balance, expected)
    for name, parameter in model.named_parameters():
        slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = balanced[name] - without[name]
        torch.testing.assert_close(difference, 0.5 * row.terms * slope, rtol=1e-4, atol=1e-5)


def test_a_router_coefficient_is_refused_where_nothing_is_routed():
    dense, routed = AutoConfig.for_model("qwen3"), AutoConfig.for_model("mixtral", router_aux_loss_coef=0.02)
    assert router_coefficient(None, dense) == 0.0 and router_coefficient(None, routed) == 0.02
    assert router_coefficient(0.0, routed) == 0.0 and router_coefficient(0.3, routed) == 0.3
    for asked in (0.0, 0.1):
        with pytest.raises(ValueError, match="leave it out"):
            router_coefficient(asked, dense)


def steps(gradients, max_grad_norm=1.0):
    """Weights after a step for each gradient (all entries alike) and divisor, and the norms."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    optimizer, scheduler = make_optimizer(Options(model="m", learning_rate=0.1), model)
    norms = []
    for value, divisor in gradients:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        norms.append(train.optimizer_step(model, optimizer, scheduler, divisor, max_grad_norm))
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(bad):
    weights, norms = steps([(1.0, 2), (bad, 2), (3.0, 5)])
    without, _ = steps([(1.0, 2), (3.0, 5)])
    torch.testing.assert_close(weights, without, rtol=0, atol=0)
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]


@pytest.mark.parametrize("value, clipped", [(1.0, False), (100.0, True)])
def test_gradients_are_divided_then_clipped_by_their_norm(value, clipped):
    weights, norms = steps([(value, 10), (1.0, 10)])
    assert norms[0] == pytest.approx(value / 10 * 4)  # 16 equal entries
    assert (norms[0] > 1.0) == clipped
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for gradient in (value / 10, 0.1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return gradients(tmp_path_factory.mktemp("expected") / "g.pt", *SPLITS["one row per rank, one rank"])


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_gradient_does_not_depend_on_packing(split, expected, tmp_path):
    """Nor on the number of ranks, nor on how a step is cut into micro-batches (float32: 1e-5 of its norm)."""
    found = gradients(tmp_path / "g.pt", *SPLITS[split])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, f"{name}: {difference}"
