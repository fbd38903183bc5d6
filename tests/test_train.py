"""python -m pytest tests/test_train.py: the step does not depend on how samples are dealt out."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from replay import ListRollouts, NoSync, random_groups, waits_of_a_step
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import attention
import start
import train
from head import head_of
from loss import router_coefficient, row_loss
from options import OptionError, Options
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
    "two ranks, compiled": (
        2,
        ["--token_budget", "200", "--compile", "true", "--gradient_checkpointing", "true"],
    ),
    "three ranks, at last one without a term": (
        3,
        ["--token_budget", "0", "--per_device_train_batch_size", "10"],
    ),
}


def gradients(path: Path, ranks: int, arguments: list[str]) -> dict[str, torch.Tensor]:
    launch(ranks, {path: arguments})
    return torch.load(path)


def launch(ranks: int, runs: dict[Path, list[str]]) -> None:
    """Write the gradients of several runs; more than one only of a single rank."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "tests/gradients.py")]
    for path, arguments in runs.items():
        given = [] if "--gradient_checkpointing" in arguments else ["--gradient_checkpointing", "false"]
        command += [str(path), *arguments, *given, "then"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command[:-1], cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
    assert scheduler.get_last_lr() == [pytest.approx(rate)] * 2


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
    monkeypatch.setattr(train, "gathered_head", lambda model: nullcontext(head_of(model)))
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


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen3", False), ("phi", False)])
def test_the_head_is_gathered_in_the_type_of_the_products(family, tied, alone):
    """Once for a tied one, with the embedding. The gradient reaches the shards in float32."""
    ranks = start.join_ranks(options := Options(model="m"))
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    weight = model.get_output_embeddings().weight.detach().to(ranks.device, copy=True).requires_grad_()
    start.shard(model, options, ranks)
    shard = model.get_output_embeddings().weight
    logp = np.full(9, -3.0, dtype=np.float32)
    row = pack([Sample(np.arange(3, 12), np.arange(9) >= 4, logp, 1.0, 0, 0, 0, 0)]).to(ranks.device)
    hidden = model.get_decoder()(row.input_ids[None]).last_hidden_state[0].detach()  # bfloat16 [N, E]
    objective = train.make_objective(options)
    with train.gathered_head(model) as head:
        assert head.values.dtype == hidden.dtype == torch.bfloat16
        assert not tied or head.values.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        assert head.weight.dtype == torch.float32 and head.weight.untyped_storage().nbytes() == 4
        row_loss(hidden, head, row, objective, 1.0)[0].backward()
    linear = model.get_output_embeddings()
    assert linear.weight is shard
    bias = None if head.bias is None else head.bias.detach().requires_grad_()
    row_loss(hidden, replace(head, weight=weight, bias=bias, values=None), row, objective, 1.0)[0].backward()
    for ours, whole in ((linear.weight, weight), (linear.bias, bias))[: 1 if bias is None else 2]:
        assert whole.grad.norm() > 0 and torch.equal(ours.grad.full_tensor(), whole.grad)


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


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1.0),
        partial(torch.optim.AdamW, betas=(0.0, 0.9)),
        partial(torch.optim.AdamW, betas=(0.0, 0.9), fused=True),
        partial(torch.optim.NAdam, betas=(0.0, 0.9)),
    ],
)
def test_every_optimizer_gets_gradients_divided_and_clipped_and_none_that_is_not_finite(optimizer):
    weight = torch.nn.Parameter(torch.zeros(4))
    model, optimizer = torch.nn.ParameterList([weight]), optimizer([weight])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    weight.grad = torch.full((4,), 100.0)
    train.optimizer_step(model, optimizer, scheduler, 10, 1.0)
    seen = optimizer.state[weight].get("exp_avg", -weight.detach())  # what a step without memory took
    torch.testing.assert_close(seen, torch.full((4,), 0.5), rtol=1e-5, atol=0)  # norm 1 over 4 entries
    before = weight.detach().clone()
    weight.grad = torch.tensor([1.0, math.nan, 1.0, 1.0])
    assert math.isnan(train.optimizer_step(model, optimizer, scheduler, 10, 1.0))
    assert torch.equal(weight, before)


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
def splits(tmp_path_factory):
    """name of a split -> a file of gradients, if that split runs here."""
    directory = tmp_path_factory.mktemp("splits")
    found = {name: directory / f"{number}.pt" for number, name in enumerate(SPLITS)}
    if not shutil.which("g++"):
        del found["two ranks, compiled"]
    launch(1, {path: SPLITS[name][1] for name, path in found.items() if SPLITS[name][0] == 1})
    for name, path in found.items():
        if SPLITS[name][0] > 1:  # ranks that have met once do not meet again
            launch(SPLITS[name][0], {path: SPLITS[name][1]})
    return found


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_gradient_does_not_depend_on_packing(split, splits):
    """Nor on the number of ranks, nor on how a step is cut into micro-batches (float32: 1e-5 of its norm)."""
    if split not in splits:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    assert_same(torch.load(splits[split]), torch.load(splits[list(SPLITS)[0]]))


def test_gradient_of_adapters_does_not_depend_on_packing(tmp_path):
    """One rank with rows that share against two with small rows that do not."""
    adapters = ["--lora_r", "4", "--lora_modules_to_save", "norm"]
    whole = gradients(tmp_path / "a.pt", 1, ["--token_budget", "4096", *adapters])
    assert sum(name.endswith("lora_A") for name in whole) > 10 and "model.norm.weight" in whole
    split = ["--token_budget", "200", "--share_prefixes", "false"]
    assert_same(gradients(tmp_path / "b.pt", 2, [*split, *adapters]), whole)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, f"{name}: {difference}"


# ---- three steps, on other numbers of ranks, and with a stop in between


def command_of(directory: Path, ranks: int, steps: int, *arguments: str, launcher=()) -> list[str]:
    if ranks > 1 and not launcher:
        launcher = ["--nproc-per-node", str(ranks)]
    options = ["--output_dir", str(directory), "--max_steps", str(steps), "--learning_rate", "1e-3"]
    torchrun = ["-m", "torch.distributed.run", *launcher] if launcher else []
    script = [str(ROOT / "tests/steps.py"), *options, "--weight_decay", "0.1", *arguments]
    return [sys.executable, *torchrun, *script]


def together(*commands: list[str], **environment: str) -> None:
    """Run commands side by side to their end."""
    settings = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    running = [subprocess.Popen(command, env=environment, **settings) for command in commands]
    try:
        for process in running:
            text, _ = process.communicate(timeout=120)
            assert process.returncode == 0, text
    finally:
        for process in running:
            process.kill()


def ended(directory: Path, steps: int = 3):
    """The records and the final weights of a run."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], load_file(
        directory / f"checkpoint-{steps}/model.safetensors"
    )


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """name -> what it ended with: of 1 rank, of 2, and of 2 that were resumed on 3 and on 1."""
    directory = tmp_path_factory.mktemp("steps")
    together(command_of(directory / "one rank", 1, 3))
    together(command_of(directory / "two ranks", 2, 3, "--save_steps", "2"))
    for ranks, name in ((3, "resumed on three"), (1, "resumed on one")):
        unfinished = shutil.ignore_patterns("checkpoint-3")
        shutil.copytree(directory / "two ranks", directory / name, ignore=unfinished)
        together(command_of(directory / name, ranks, 3, "--resume_from_checkpoint", "true"))
    return directory


def assert_ended_alike(expected: Path, found: Path) -> None:
    """Loss, gradient norm and every weight, to the rounding of float32."""
    (before, weights), (after, others) = ended(expected), ended(found)
    assert [r["step"] for r in after] == [1, 2, 3]
    for a, b in zip(before, after, strict=True):
        assert a["loss"] != 0 and a["grad_norm"] > 0
        for metric in ("loss", "grad_norm", "entropy", "batch/trained_tokens_per_step", "learning_rate"):
            assert b[metric] == pytest.approx(a[metric], rel=1e-4, abs=1e-6), metric
    start = load_file(ROOT / "tiny/model.safetensors")
    for key, weight in weights.items():
        moved = (weight - start[key].float()).norm()
        assert moved > 0 and (others[key] - weight).norm() < 1e-3 * moved, key


@pytest.mark.parametrize("name", ["two ranks", "resumed on three", "resumed on one"])
def test_three_steps_end_alike_on_any_number_of_ranks(three_steps, name):
    assert_ended_alike(three_steps / "one rank", three_steps / name)


def namespaces() -> str | None:
    """Two network namespaces with a wire between them, 10.77.0.1 and .2; None where they cannot be made."""
    if shutil.which("ip") is None:
        return None
    script = """
        ip netns add nodeA && ip netns add nodeB &&
        ip link add wireA netns nodeA type veth peer name wireB netns nodeB &&
        for n in A B; do ip -n node$n link set lo up; ip -n node$n link set wire$n up; done &&
        ip -n nodeA addr add 10.77.0.1/24 dev wireA && ip -n nodeB addr add 10.77.0.2/24 dev wireB
    """
    made = subprocess.run(["sh", "-c", script], capture_output=True)
    return "made" if made.returncode == 0 else None


@pytest.fixture
def nodes():
    made = namespaces()
    yield made
    for node in ("nodeA", "nodeB"):
        subprocess.run(["ip", "netns", "del", node], capture_output=True)


def test_two_nodes_with_a_copy_of_the_weights_each_end_like_one_rank(three_steps, nodes):
    """Each launches two ranks, in a network of its own; weights are sharded inside a node."""
    if nodes is None:
        pytest.skip("network namespaces cannot be made here")
    commands = []
    for rank, node in enumerate("AB"):
        place = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2"]
        place += ["--master-addr", "10.77.0.1", "--master-port", "29511"]
        inside = ["ip", "netns", "exec", f"node{node}", "env", f"GLOO_SOCKET_IFNAME=wire{node}"]
        run = command_of(three_steps / "two nodes", 4, 3, "--shard_size", "2", launcher=place)
        commands.append(inside + run)
    together(*commands)
    assert_ended_alike(three_steps / "one rank", three_steps / "two nodes")


def test_copies_of_the_weights_on_one_node_end_like_one_rank(three_steps):
    together(command_of(three_steps / "copies", 4, 3, "--shard_size", "2"))
    assert_ended_alike(three_steps / "one rank", three_steps / "copies")


def test_ranks_that_are_no_multiple_of_the_shards_are_refused():
    ranks = start.Ranks(0, 3, torch.device("cpu"), None, None)
    with pytest.raises(OptionError, match="--shard_size 2: 3 ranks are no multiple"):
        start.shard(None, Options(model="m", shard_size=2), ranks)


def test_float16_follows_float32(three_steps):
    together(command_of(three_steps / "half", 1, 3, "--fp16", "true"))
    for a, b in zip(ended(three_steps / "one rank")[0], ended(three_steps / "half")[0], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-2) and b["loss"] != a["loss"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2) and b["nonfinite_grad_count"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_host_waits_for_the_device_once_a_step(accumulation, tmp_path, monkeypatch, alone):
    """For the norm of the gradients, whatever the number of micro-batches."""
    monkeypatch.setattr(train, "accumulate", train.accumulate)  # both are put back
    monkeypatch.setattr(train, "optimizer_step", train.optimizer_step)
    waits = waits_of_a_step(train, step=2)
    run = dict(compile=False, token_budget=64, max_steps=3, max_staleness=99)
    options = Options(
        model="tiny", gradient_accumulation_steps=accumulation, output_dir=str(tmp_path / "run"), **run
    )
    train.train(options, rollouts=ListRollouts(random_groups(60)), sync=NoSync())
    assert waits == ["cudaStreamSynchronize"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype, noise", [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_two_gpus_end_like_one(dtype, noise, tmp_path):
    """Loss and norm of three steps; in bfloat16 a sum over other rows rounds otherwise."""
    bf16 = ["--bf16", "true" if dtype == "bfloat16" else "false", "--compile", "false"]
    for ranks in (1, 2):
        together(command_of(tmp_path / str(ranks), ranks, 3, *bf16))
    for one, two in zip(ended(tmp_path / "1")[0], ended(tmp_path / "2")[0], strict=True):
        print(dtype, {name: (one[name], two[name]) for name in ("loss", "grad_norm", "entropy")})
        for name in ("loss", "grad_norm", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=noise, abs=1e-6)


def test_the_loss_scale_follows_overflows_and_is_1_where_there_can_be_none():
    scale, still = train.LossScale("float16"), train.LossScale("bfloat16")
    scale.update(False)
    still.update(False)
    assert (scale.value, still.value) == (1 / 16, 1.0)
    for _ in range(200):
        scale.update(True)
    assert scale.value == 4 / 16


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer, _ = make_optimizer(Options(model="m", learning_rate=0.1, weight_decay=0.5), model)
    optimizer.step()
    decayed = {name: bool((p < 1).all()) for name, p in model.named_parameters()}
    assert decayed == {"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}


@pytest.mark.parametrize(
    "kind, kwargs, rates",
    [
        ("constant", {}, [0, 0.5, 1, 1, 1, 1, 1]),
        ("linear", {}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", {}, [0, 0.5, 1, 0.853553, 0.5, 0.146447, 0]),
        ("cosine_with_min_lr", {"min_lr_rate": 0.5}, [0, 0.5, 1, 0.926777, 0.75, 0.573223, 0.5]),
    ],
)
def test_learning_rate_warms_up_and_decays(kind, kwargs, rates):
    options = Options(
        model="m",
        learning_rate=2.0,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=2,
        max_steps=6,
    )
    optimizer, scheduler = make_optimizer(options, torch.nn.Linear(1, 1))
    found = []
    for _ in rates:
        found.append(scheduler.get_last_lr()[0] / 2.0)
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(rates, abs=1e-6)


# ---- gradients that are not finite


CASE = json.loads((ROOT / "tests/data/cases/A19_nonfinite_gradient_and_global_norm.json").read_text())


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing():
    case, expect = CASE["given"]["nan_step"], CASE["expect"]["nan_step"]
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, case["parameter"])
    options = Options(model="m", learning_rate=0.1, max_grad_norm=case["max_grad_norm"])
    optimizer, scheduler = make_optimizer(options, model)
    norms = []
    for gradients in case["accumulated_gradients"]:
        for gradient in gradients:
            (model.weight * float(gradient)).sum().backward()
        norms.append(train.optimizer_step(model, optimizer, scheduler, 1, options.max_grad_norm))
        if len(norms) == 1:
            assert model.weight.item() == case["parameter"]
    assert not math.isfinite(norms[0]) and norms[1] == 1.0
    assert model.weight.item() == pytest.approx(expect["parameter_after_step_2_if_skipped"], abs=1e-6)
    assert all(torch.isfinite(v).all() for v in optimizer.state[model.weight].values())


def poisoned(name: str, tmp_path, monkeypatch, alone, *steps: int):
    """A run on one rank in this process; the gradient of these steps (counted from 0) is made NaN."""
    seen, inner = [], train.optimizer_step

    def step(model, *arguments):
        if len(seen) in steps:
            next(p for p in model.parameters() if p.grad is not None).grad.mul_(math.nan)
        seen.append(inner(model, *arguments))
        return seen[-1]

    monkeypatch.setattr(train, "optimizer_step", step)
    options = Options(
        model="tiny",
        bf16=False,
        token_budget=64,
        num_train_epochs=1.0,
        max_staleness=99,
        output_dir=str(tmp_path / name),
    )
    train.train(options, rollouts=ListRollouts(random_groups(8)), sync=NoSync())
    return seen, tmp_path / name


def test_one_such_step_is_counted_and_the_run_goes_on(tmp_path, monkeypatch, alone):
    seen, out = poisoned("once", tmp_path, monkeypatch, alone, 1, 2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["nonfinite_grad_count"] for r in lines[:4]] == [0, 1, 1, 0] and len(seen) == len(lines) > 3
    assert [r["grad_norm"] is None for r in lines[:4]] == [False, True, True, False]
    (final,) = out.glob("checkpoint-*")
    assert all(t.isfinite().all() for t in load_file(final / "model.safetensors").values())


def test_the_metrics_of_a_step_are_one_collective(tmp_path, monkeypatch, alone):
    """Numerators and denominators of every metric, gathered once a record."""
    gathered, gather = [], train.dist.gather_object
    monkeypatch.setattr(
        train.dist, "gather_object", lambda *a, **k: gathered.extend(a[:1]) or gather(*a, **k)
    )

    def beside_the_loop(call, *given, **named):  # a checkpoint's thread may
        assert threading.current_thread() is not threading.main_thread()
        return call(*given, **named)

    for other in ("all_reduce", "reduce", "all_gather", "gather"):
        monkeypatch.setattr(train.dist, other, partial(beside_the_loop, getattr(train.dist, other)))
    seen, out = poisoned("measured", tmp_path, monkeypatch, alone)
    windows = sum(isinstance(x, train.Window) for x in gathered)  # the others are a checkpoint's
    assert windows == len(seen) == len((out / "metrics.jsonl").read_text().splitlines()) > 3


def test_three_in_a_row_stop_the_run_and_keep_the_batch(tmp_path, monkeypatch, alone):
    with pytest.raises(RuntimeError, match="three steps in a row; the last micro-batch is in"):
        poisoned("thrice", tmp_path, monkeypatch, alone, 1, 2, 3)
    (kept,) = (tmp_path / "thrice").glob("nonfinite-step-4.pickle")
    plan = pickle.loads(kept.read_bytes())
    assert sum(len(samples) for samples in plan) > 0 and not list((tmp_path / "thrice").glob("checkpoint-*"))
