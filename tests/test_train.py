"""python -m pytest tests/test_train.py: the step does not depend on how samples are dealt out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from options import Options
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
