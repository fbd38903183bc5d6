"""python -m pytest tests/test_faults.py: nothing hangs, nothing is lost, and whoever stops says why.

Most tests here start real runs and break something: a process, a signal, the disk, an option. Every run is
found again by a mark in its environment, so that a process it left behind fails the test.
"""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import requests
import torch
import torch.distributed as dist
from fake_server import FakeServer
from replay import ListRollouts, NoSync, random_groups
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import checkpoint
import client
import serve
import train
from client import Server
from feed import Feed
from metrics import Logger, read_lines
from options import OptionError, Options
from start import check_inputs, claim, load_model
from sync import SyncError, WeightSync

ROOT = Path(__file__).parent.parent
BASE = [
    *("--model", "tiny", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--max_completion_length", "12", "--num_generations", "4", "--token_budget", "256"),
    *("--learning_rate", "1e-4", "--num_sampler_logprobs", "4"),
]
MARK = "TREEGRPO_TEST_RUN"
PROMPTLY_S = 20.0  # a fault ends every process of a run within this


class Run:
    """A run in processes of its own. `end` waits for it, checks that nothing of it is left, returns its code.

    `text()` is what all its processes have printed so far.
    """

    def __init__(self, output_dir: Path, *arguments: str, ranks: int = 1, script: str = "train.py", first=()):
        self.output_dir, self.mark = output_dir, uuid.uuid4().hex
        self.log = output_dir.with_name(f"{output_dir.name}-{self.mark[:8]}.log")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / script), *map(str, first), *BASE]
        self.process = subprocess.Popen(
            [*command, "--output_dir", str(output_dir), *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self.mark},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def text(self) -> str:
        return self.log.read_text()

    def members(self, word: str = "", rank: int | None = None) -> list[psutil.Process]:
        """Its living processes whose command line holds `word`, of one rank and its children."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                line = " ".join(process.cmdline())
                alive = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            of_rank = rank is None or environment.get("RANK") == str(rank)
            if alive and environment.get(MARK) == self.mark and word in line and of_rank:
                found.append(process)
        return found

    def until(self, condition, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = self.process.poll() is not None
            assert not ended or condition(), f"ended too early:\n{self.text()}"
            assert time.monotonic() < deadline, f"still waiting:\n{self.text()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(records(self.output_dir)) >= step)

    def end(self, timeout: float) -> int:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {timeout:.0f} s:\n{self.text()}")
        deadline = time.monotonic() + 3.0
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {[p.cmdline() for p in left]}\n{self.text()}"
        return code

    def kill(self) -> None:
        for process in self.members():
            process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts runs; those a failed test leaves are killed."""
    runs = []

    def begin(*arguments, **kwargs) -> Run:
        runs.append(Run(kwargs.pop("output_dir", tmp_path / "out"), *arguments, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def records(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in read_lines(output_dir / "metrics.jsonl")]


def ledger(text: str) -> dict[str, int]:
    """The counts of the last ledger, which have to balance; drops by their reasons too."""
    line = re.findall(
        r"samples: (\d+) generated = (\d+) trained \+ (\d+) dropped \((.*)\) \+ (\d+) in flight", text
    )
    assert line, f"no ledger:\n{text}"
    generated, trained, dropped, reasons, held = line[-1]
    counts = {
        "generated": int(generated),
        "trained": int(trained),
        "dropped": int(dropped),
        "in flight": int(held),
    }
    assert counts["generated"] == counts["trained"] + counts["dropped"] + counts["in flight"]
    by_reason = {reason: int(count) for count, reason in re.findall(r"(\d+) ([^,]+)", reasons)}
    assert counts["dropped"] == sum(by_reason.values())
    return counts | by_reason


def words_in(text: str, *words: str) -> None:
    for word in words:
        assert word in text, f"{word!r} is missing in:\n{text}"


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve_at(port: int, *arguments: str):
    words = ["--model", "tiny", "--port", str(port), "--dtype", "float32", "--max_model_len", "64"]
    return serve.launch([*words, *arguments], 60)


@pytest.fixture(scope="module")
def server():
    """One server for the runs whose own server is not what breaks: each run sends it all weights first."""
    process, url = serve_at(0)
    yield url
    process.terminate()
    process.wait(10)


def at(url: str, task: str = "tests/fault_tasks.py:steady") -> list[str]:
    return ["--task", task, "--vllm_server_base_url", url, "--vllm_server_timeout", "30"]


EMBEDDED = ["--embedded_max_model_len", "64", *at("embedded")]


# ---- a part fails: the run ends, everywhere, with the cause


def test_a_reward_function_that_raises_ends_every_rank_with_its_name_and_traceback(start, server):
    run = start(*at(server, "tests/fault_tasks.py:raising"), ranks=2)
    run.until(lambda: "bad gold answer" in run.text())
    assert run.end(PROMPTLY_S) != 0
    words_in(
        run.text(), "reward function raises on dataset row ", "ValueError: bad gold", "nothing was saved"
    )


def test_a_killed_rollout_process_ends_the_run_and_is_named(start, server):
    run = start(*at(server))
    run.until_step(2)
    run.members("spawn_main")[0].kill()
    assert run.end(PROMPTLY_S) == 1
    words_in(run.text(), "the rollout process ended with exit code -9")
    ledger(run.text())


def test_a_server_that_never_comes_up_is_given_up_after_the_timeout(start):
    """And it is the server that is named: a short --ddp_timeout does not end the other rank's wait first."""
    url = f"http://127.0.0.1:{free_port()}"
    run = start(*at(url), "--vllm_server_timeout", "3", "--ddp_timeout", "1", ranks=2)
    run.until(lambda: "did not come up" in run.text())
    assert run.end(PROMPTLY_S) == 1
    words_in(run.text(), f"{url} did not come up within 3 s")


def test_a_preempted_run_saves_and_leaves_with_code_0(start, server):
    """SIGTERM to every process of it, as a scheduler sends it; the resumed run goes on at the next step."""
    run = start(*at(server), "--save_steps", "0", "--gradient_accumulation_steps", "2")
    run.until_step(2)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.end(PROMPTLY_S) == 0
    step = records(run.output_dir)[-1]["step"]
    saved = run.output_dir / f"checkpoint-{step}"
    words_in(run.text(), f"SIGTERM: stopped after step {step}; go on with --resume_from_checkpoint {saved}")
    state = checkpoint.read_state(saved)
    assert (state["step"], state["version"]) == (step, step)
    ledger(run.text())
    rest = start(*at(server), "--resume_from_checkpoint", "true", "--max_steps", str(step + 1))
    assert rest.end(60) == 0
    assert [r["step"] for r in records(run.output_dir)] == list(range(1, step + 2))


def test_a_run_killed_while_it_saves_leaves_whole_checkpoints_only(start, server):
    run = start(*at(server), "--save_steps", "1", ranks=2)
    run.until(lambda: (run.output_dir / "checkpoint-2").is_dir())
    run.until(lambda: any(run.output_dir.glob("partial-*/state")))
    run.kill()
    assert any(run.output_dir.glob("partial-*"))
    saved = list(run.output_dir.glob("checkpoint-*"))
    assert checkpoint.newest(run.output_dir) == max(saved, key=lambda path: int(path.name[11:]))
    for path in saved:
        assert checkpoint.read_state(path)["step"] == int(path.name[11:])
        assert load_file(path / "model.safetensors").keys() == load_file("tiny/model.safetensors").keys()
        assert (path / "state/.metadata").is_file() and (path / "config.json").is_file()
    rest = start(*at(server), "--resume_from_checkpoint", "true", "--max_steps", str(len(saved) + 1))
    assert rest.end(60) == 0
    assert not any(run.output_dir.glob("partial-*"))


@pytest.mark.parametrize("fault", ["ctrl-c", "sigterm", "kill rank 1", "kill rank 0"])
def test_a_run_that_is_ended_from_outside_leaves_nothing_behind(start, fault):
    """The ranks, the rollout process, the embedded server, its port; and it says how to go on."""
    run = start(*EMBEDDED, "--save_steps", "2", ranks=2)
    run.until_step(3)
    server = run.members("serve.py")[0]
    port = next(c.laddr.port for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    if fault == "ctrl-c":
        os.killpg(run.process.pid, signal.SIGINT)
    elif fault == "sigterm":
        run.process.terminate()
    else:
        run.members("train.py", rank=int(fault[-1]))[0].kill()
    assert run.end(PROMPTLY_S) != 0
    assert port_is_free(port)
    if fault != "kill rank 0":  # which is the one that talks
        words_in(run.text(), "go on with --resume_from_checkpoint")
        ledger(run.text())
        saved = Path(re.findall(r"--resume_from_checkpoint (\S+)", run.text())[-1])
        assert checkpoint.read_state(saved)["step"] >= 2
    if fault == "sigterm":  # torchrun has its own exit code; its ranks have saved
        assert checkpoint.read_state(saved)["step"] == records(run.output_dir)[-1]["step"]


def test_a_rank_that_waits_for_one_that_never_joins_can_be_ended():
    """There it waits where no handler of Python's runs: a signal has to end it as it ends any program."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    code = (
        "import start, options; print('joins', flush=True); start.join_ranks(options.Options(model='tiny'))"
    )
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = os.environ | place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "joins\n"
        time.sleep(1.0)
        assert process.poll() is None
        process.terminate()
        assert process.wait(PROMPTLY_S) == -signal.SIGTERM
    finally:
        process.kill()


def test_a_killed_embedded_server_ends_the_run_in_words(start):
    run = start(*EMBEDDED)
    run.until_step(2)
    run.members("serve.py")[0].kill()
    assert run.end(PROMPTLY_S) == 1
    words_in(run.text(), "the embedded server ended with exit code -9")


def test_a_server_that_dies_and_comes_back_is_never_used_quietly(start):
    """No update is due meanwhile: nothing but its answers tells that it holds other weights again."""
    port = free_port()
    process, url = serve_at(port)
    run = start(*at(url), "--weight_sync_steps", "1000", "--max_staleness", "1000")
    try:
        run.until_step(2)
        process.kill()
        process.wait()
        process, _ = serve_at(port)
        assert run.end(PROMPTLY_S) == 1
    finally:
        process.kill()
        process.wait()
    words_in(run.text(), "weights that this run has not sent", "restarted", "Resume the run")


def test_a_run_goes_on_without_a_server_that_dies_and_takes_it_back(start):
    ports = free_port(), free_port()
    (one, url), (two, other) = serve_at(ports[0]), serve_at(ports[1])
    task, urls = ("--task", "tests/fault_tasks.py:steady"), ("--vllm_server_base_url", url, other)
    run = start(*task, *urls, "--vllm_server_timeout", "60", "--num_train_epochs", "10000")
    try:
        run.until_step(2)
        two.kill()
        two.wait()
        run.until(lambda: "the run goes on without it" in run.text())
        run.until_step(len(records(run.output_dir)) + 2)
        two, _ = serve_at(ports[1])
        run.until(lambda: f"{other} is up again, with the current weights" in run.text())
        assert int(Server(other).weight_version()) > 2
        run.process.terminate()
        assert run.end(PROMPTLY_S) == 0  # SIGTERM saves and leaves
    finally:
        for process in (one, two):
            process.kill()
            process.wait()
    words_in(run.text(), f"{other} is back, and gets the next update")
    ledger(run.text())


def test_a_server_found_paused_gets_all_weights_and_the_run_ends_with_a_full_queue(start, server, tmp_path):
    """Another path of the same model alone is a notice; a queue that nobody empties holds up no exit."""
    shutil.copytree(ROOT / "tiny", tmp_path / "copy")
    requests.post(f"{server}/pause?mode=keep", timeout=10).raise_for_status()
    run = start(*at(server), "--model", tmp_path / "copy", "--max_steps", "3", "--max_staleness", "20")
    assert run.end(60) == 0
    words_in(run.text(), "was left paused", "note: ", f"trained is {tmp_path / 'copy'}", "done after 3 steps")
    assert ledger(run.text())["in flight"] > 0
    assert not Server(server).is_paused()


def test_a_full_disk_costs_a_checkpoint_and_at_the_end_the_exit_code(start, server):
    """A limit on the size of files, set from outside in the middle of the run, stands for the full disk."""
    run = start(*at(server), "--max_steps", "8", "--save_steps", "3")
    run.until(lambda: (run.output_dir / "checkpoint-3").is_dir())
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    assert run.end(60) == 1
    kept = run.output_dir / "checkpoint-3"
    words_in(run.text(), "could not write", "training goes on from memory, free some space")
    words_in(run.text(), "checkpoint-8", f"stopped after step 8; go on with --resume_from_checkpoint {kept}")
    assert list(run.output_dir.glob("*checkpoint*")) == [kept]
    assert checkpoint.read_state(kept)["step"] == 3
    assert [r["step"] for r in records(run.output_dir)] == list(range(1, 9))
    ledger(run.text())


def test_a_full_disk_costs_a_record_of_the_metrics_and_not_the_run(tmp_path, capsys):
    logger = Logger(Options(output_dir=str(tmp_path)), step=0)
    logger.record({"step": 1, "loss": 0.5})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (logger.path.stat().st_size + 5, before[1]))
    try:
        logger.record({"step": 2, "loss": 0.4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logger.record({"step": 3, "loss": 0.3})
    assert [r["step"] for r in records(tmp_path)] == [1, 3]
    words_in(capsys.readouterr().out, "a record is missing")
    shutil.rmtree(tmp_path)
    logger.record({"step": 4, "loss": 0.3})
    words_in(capsys.readouterr().out, "a record is missing")


# ---- resume: nothing is lost, nothing comes twice

EPOCHS = [  # two passes over 8 prompts, a group a step: 12 steps, since rows 0 and 4 are dropped in both
    *("--num_train_epochs", "2", "--token_budget", "0", "--per_device_train_batch_size", "4"),
    *("--warmup_steps", "10", "--save_steps", "5"),
    *("--max_staleness", "99"),  # nothing may be dropped for its age, which depends on timing
]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, server):
    """What an uninterrupted run trained; and a run that crashed in step 8, after the checkpoint of step 5."""
    directory = tmp_path_factory.mktemp("resume")
    task = at(server, "tests/fault_tasks.py:every_fourth_dropped")

    def run(name: str, stop_in: int, *arguments) -> tuple[list, int, str]:
        out = directory / f"{name}.jsonl"
        ended = Run(
            directory / name.split("-")[0],
            *(*task, *EPOCHS, *arguments),
            script="tests/trained.py",
            first=(out, stop_in),
        )
        try:
            code = ended.end(90)
        finally:
            ended.kill()
        return [json.loads(line) for line in out.open()] if out.exists() else [], code, ended.text()

    whole = run("whole", 0)
    crashed = run("broken-1", 8)
    rest = run("broken-2", 0, "--resume_from_checkpoint", "true")
    again = run("broken-3", 0, "--resume_from_checkpoint", "true")
    return directory, whole, crashed, rest, again


def test_a_resumed_run_trains_the_prompts_of_an_uninterrupted_one_each_once(resumed):
    _, whole, crashed, rest, _ = resumed
    assert (whole[1], crashed[1], rest[1]) == (0, 1, 0), whole[2] + crashed[2] + rest[2]
    assert len(crashed[0]) == 7  # steps 6 and 7 were made, and lost: they came after the checkpoint

    def trained(steps):
        return [tuple(sample) for step in steps for sample in step]

    expected = [
        (group, group % 8, 4 * group + rollout)
        for group in range(16)
        for rollout in range(4)
        if group % 8 not in (0, 4)
    ]
    assert sorted(trained(whole[0])) == expected
    assert sorted(trained(crashed[0][:5] + rest[0])) == expected


def test_a_resumed_run_keeps_the_schedule_and_counts_on(resumed):
    directory, whole, crashed, rest, _ = resumed
    before, after = records(directory / "whole"), records(directory / "broken")
    assert [r["step"] for r in after] == list(range(1, 13))
    rates = [r["learning_rate"] for r in after]
    assert rates == [r["learning_rate"] for r in before] and len(set(rates)) == 11
    assert after[-1]["epoch"] == before[-1]["epoch"] == 2.0
    assert after[5]["sampling/sampling_logp_difference/max"] < 1e-4  # the weights went out first
    for text in (whole[2], crashed[2], rest[2]):
        ledger(text)
    counts = ledger(whole[2])
    assert (counts["trained"], counts["equal rewards"], counts["in flight"]) == (48, 16, 0)
    saved = [checkpoint.read_state(directory / f"{name}/checkpoint-12") for name in ("whole", "broken")]
    assert all(state.pop("num_tokens") > 0 for state in saved)  # rows are packed as samples arrive
    assert saved[0] == saved[1]
    assert (saved[0]["position"], saved[0]["beyond"], saved[0]["version"]) == (16, [], 12)


def test_a_fresh_run_never_mixes_with_an_earlier_ones_checkpoints(tmp_path):
    """Its checkpoints would be deleted as the oldest, and a resume would take the other run's."""
    old = tmp_path / "checkpoint-7"
    old.mkdir()
    (old / "rollout_state.json").write_text('{"step": 7, "only_model": false}')
    options = Options(model="tiny", task="tasks/sort.py", output_dir=str(tmp_path))
    with pytest.raises(OptionError, match="checkpoint-7 of an earlier run"):
        check_inputs(options, None)


def test_two_runs_never_write_to_one_directory(tmp_path):
    """One that begins before the other has saved; it may once the first is over."""
    with ExitStack() as first:
        claim(str(tmp_path), first)
        with ExitStack() as second, pytest.raises(OptionError, match="--output_dir .*another run"):
            claim(str(tmp_path), second)
    with ExitStack() as later:
        claim(str(tmp_path), later)
        with pytest.raises(OptionError, match="--output_dir /proc/x: .*No such file"):
            claim("/proc/x", later)  # root may write to /proc, and yet make nothing there


def test_a_backend_that_this_machine_lacks_is_refused_before_the_model_loads(monkeypatch):
    monkeypatch.setattr("attention.flash.missing", lambda: "needs a package")
    with pytest.raises(OptionError, match="--attention flash needs a package"):
        load_model(Options(model="tiny", attention="flash"), None)


def test_an_output_dir_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    options = Options(model="tiny", task="tasks/sort.py", output_dir=str(tmp_path / "file/out"))
    with pytest.raises(OptionError, match="--output_dir"):
        check_inputs(options, None)


def test_a_run_that_was_at_its_end_ends_at_once_when_it_is_resumed(resumed):
    _, _, _, _, again = resumed
    assert again[1] == 0, again[2]
    assert again[0] == []
    words_in(again[2], "done after 12 steps")


class Interrupted(NoSync):
    """Ends the run, as if killed, when it is to send version `at`."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def send(self, model, version):
        super().send(model, version)
        if version == self.at:
            raise RuntimeError("killed by the test")


def test_weights_optimizer_schedule_and_random_state_go_on_as_if_never_stopped(tmp_path, monkeypatch, alone):
    """Same samples in the same order: a run that stopped after a save ends with bit-equal weights."""
    seen, step = [], train.optimizer_step

    def noted(model, optimizer, scheduler, divisor, max_grad_norm):
        rate = optimizer.param_groups[0]["lr"]
        norm = step(model, optimizer, scheduler, divisor, max_grad_norm)
        seen.append((rate, norm, torch.rand(1).item()))
        return norm

    monkeypatch.setattr(train, "optimizer_step", noted)

    def run(name, sync, **changes):
        seen.clear()
        options = Options(
            model="tiny",
            bf16=False,
            gradient_checkpointing=False,
            token_budget=0,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            warmup_steps=2,
            max_steps=6,
            max_staleness=99,
            save_steps=3,
            output_dir=str(tmp_path / name),
            **changes,
        )
        train.train(options, rollouts=ListRollouts(random_groups(6)), sync=sync)
        return list(seen)

    whole = run("whole", NoSync())
    with pytest.raises(RuntimeError, match="killed by the test"):
        run("broken", Interrupted(5))
    dist.destroy_process_group()
    rest = run("broken", NoSync(), resume_from_checkpoint="true")
    assert len({rate for rate, _, _ in whole}) >= 4
    assert rest == whole[3:]
    ends = [(tmp_path / name / "checkpoint-6/model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert ends[0] == ends[1]


def test_a_run_whose_queue_holds_rows_waits_for_the_first_one_only(tmp_path, monkeypatch, alone):
    """Every other micro-batch has been planned, packed and uploaded before the one it follows has ended."""
    waits, take = [], Feed.take
    monkeypatch.setattr(Feed, "take", lambda *arguments: waits.append(1) or take(*arguments))
    options = Options(
        model="tiny",
        bf16=False,
        token_budget=100,
        gradient_accumulation_steps=2,
        max_steps=4,
        max_staleness=99,
        output_dir=str(tmp_path),
    )
    train.train(options, rollouts=ListRollouts(random_groups(40)), sync=NoSync())
    assert len(waits) == 1 and len(records(tmp_path)) == 4


def test_a_record_cut_short_by_a_kill_does_not_stop_the_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    logger = Logger(Options(output_dir=str(tmp_path)), step=2)
    logger.record({"step": 3})
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_deleted_half_way_is_never_picked_up(tmp_path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}/state").mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}/rollout_state.json").write_text("{}")

    def killed(path):
        (path / "state").rmdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove(tmp_path / "checkpoint-2")
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-1"


# ---- whoever waits says so


@pytest.fixture
def quick_notices(monkeypatch):
    monkeypatch.setattr(client, "FIRST_NOTICE_S", 0.2)


def test_a_trainer_without_rollouts_says_what_the_other_side_last_did(quick_notices, alone, tmp_path, capsys):
    class Silent(ListRollouts):
        def status(self):
            return "31 rollouts in flight, oldest 118 s"

        def check(self):
            if time.monotonic() > self.over:
                raise RuntimeError("over")

    rollouts = Silent([])
    rollouts.over = time.monotonic() + 15
    options = Options(
        model="tiny", bf16=False, gradient_checkpointing=False, token_budget=99, output_dir=str(tmp_path)
    )
    threading.Timer(4.0, lambda: setattr(rollouts, "over", 0)).start()
    with pytest.raises(RuntimeError, match="over"):
        train.train(options, rollouts=rollouts, sync=NoSync())
    words_in(capsys.readouterr().out, "s for rollouts: 31 rollouts in flight, oldest 118 s")


def test_a_wait_for_a_server_says_which_and_why(quick_notices, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(client.ServerError, match="did not come up within 2 s"):
        Server(url, timeout=2.0).wait_until_ready()
    words_in(capsys.readouterr().out, f"s for {url} to come up", "refused")


def test_a_wait_for_an_update_says_whose(quick_notices, capsys):
    """The server agrees to join the group of senders and never does."""
    with FakeServer() as fake:
        fake.replies["/server_info"] = 200, GLOO_INFO
        with pytest.raises(SyncError, match="the rendezvous"):
            WeightSync([Server(fake.url, timeout=2.0)], 2.0).init()
        words_in(capsys.readouterr().out, f"s for the rendezvous of {fake.url}")


def test_an_error_of_the_server_ends_a_wait_for_it_at_once():
    with FakeServer() as fake:
        fake.replies["/server_info"] = 200, GLOO_INFO
        fake.replies["/init_weight_transfer_engine"] = 500, {"error": {"message": "no network"}}
        started = time.monotonic()
        with pytest.raises(SyncError, match="no network"):
            WeightSync([Server(fake.url, timeout=60.0)], 60.0).init()
    assert time.monotonic() - started < 10


GLOO_INFO = {
    "vllm_config": {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"dtype": "torch.float32"}}
}


# ---- bad input: one line that names the option and says what to do, exit code 2, before anything is loaded


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path, alone):
    """Runs train.py's main with a bad command line; returns the line it ends with."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def main(*arguments: str, loads: bool = False) -> str:
        def never(*_, **__):
            raise AssertionError("something was loaded or started")

        if not loads:
            for name in ("load_model", "join_ranks", "start_embedded"):
                monkeypatch.setattr(f"start.{name}", never)
        command = ["train.py", *BASE, "--output_dir", str(tmp_path / "out"), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()  # what a server that was started here has said
        with pytest.raises(SystemExit) as ended:
            train.main()
        assert ended.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        assert not (tmp_path / "out").exists()
        return lines[0]

    return main


SORT = ["--task", "tasks/sort.py"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["--task is required", "tasks/sort.py"]),
        (["--task", "tasks/srot.py"], ["--task", "there is no file tasks/srot.py"]),
        (["--task", "no_such_module"], ["--task", "there is no module no_such_module", ".py"]),
        (["--task", "tests/fault_tasks.py:nothing"], ["--task", "has no nothing"]),
        (["--task", "tests/fault_tasks.py:empty"], ["--task", "is empty"]),
        (["--task", "tests/fault_tasks.py:no_prompt"], ["row 0", "no column `prompt`", "question"]),
        (["--task", "tests/fault_tasks.py:plain_text"], ["row 0", "not conversational", "list of messages"]),
        (["--task", "tests/fault_tasks.py:closure"], ["lambda", "a module-level function"]),
        ([*SORT, "--model", "./nomodel"], ["--model ./nomodel: there is no such directory"]),
        ([*SORT, "--model", "./nomodel", "--dry_run"], ["--model ./nomodel: there is no such directory"]),
        ([*SORT, "--router_aux_loss_coef", "0.1", "--dry_run"], ["--router_aux_loss_coef", "leave it out"]),
        (["--task", "tests/fault_tasks.py:no_reward"], ["--task", "no rewards"]),
        ([*SORT, "--task_kwargs", '{"size": 0}'], ["--task", "size (0)"]),
        ([*SORT, "--task_kwargs", '{"colour": 1}'], ["--task", "colour"]),
        ([*SORT, "--num_generations", "1"], ["--num_generations is 1", "at least 2"]),
        ([*SORT, "--temperature", "0"], ["--temperature is 0", "[0.01, inf)"]),
        ([*SORT, "--epsilon", "1.5"], ["--epsilon is 1.5", "[0, 1)"]),
        ([*SORT, "--colour", "1"], ["no such option: --colour"]),
        ([*SORT, "--model", "no/such-model"], ["--model no/such-model"]),
        ([*SORT, "--rollout_loop", "no_such:Loop"], ["rollout_loop", "no_such"]),
        ([*SORT, "--chat_template", "no_such.jinja"], ["chat_template", "no_such.jinja"]),
        ([*SORT, "--vllm_server_base_url", "localhost:8000"], ["http://", "localhost:8000"]),
        (
            [*SORT, "--resume_from_checkpoint", "tasks"],
            ["--resume_from_checkpoint", "not a complete checkpoint"],
        ),
        (
            [*SORT, "--resume_from_checkpoint", "true"],
            ["--resume_from_checkpoint true", "no complete checkpoint"],
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_before_anything_loads(refused, arguments, words):
    words_in(refused(*arguments), *words)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_whole_model_is_refused(refused, tmp_path, missing):
    shutil.copytree(ROOT / "tiny", tmp_path / "model", ignore=shutil.ignore_patterns(missing))
    line = refused(*SORT, "--model", tmp_path / "model")
    words_in(line, f"--model {tmp_path / 'model'}", missing.removeprefix("model"))


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory):
    """A model that has more ids than the one that is trained, and is like it otherwise."""
    directory = tmp_path_factory.mktemp("other")
    torch.manual_seed(0)
    AutoTokenizer.from_pretrained(ROOT / "tiny").save_pretrained(directory)
    config = Qwen3Config.from_pretrained(ROOT / "tiny")
    size = config.vocab_size
    config.vocab_size += 8
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory, size


def test_a_server_with_another_vocabulary_is_refused(refused, other_vocabulary):
    directory, size = other_vocabulary
    served = serve.start(directory, max_model_len=64)
    try:
        line = refused(*at(served.url), loads=True)
    finally:
        served.close()
    words_in(line, served.url, f"vocab_size {size + 8} (trained: {size})")


def test_a_server_with_too_few_log_probabilities_is_refused(refused):
    served = serve.start("tiny", max_model_len=64, max_logprobs=2)
    try:
        line = refused(*at(served.url), loads=True)
    finally:
        served.close()
    words_in(line, served.url, "at most 2", "needs 4", "--max-logprobs 4", "--num_sampler_logprobs")


def test_a_command_line_with_a_bad_option_ends_within_seconds(tmp_path):
    command = [
        sys.executable,
        "train.py",
        *BASE,
        "--task",
        "tasks/srot.py",
        "--output_dir",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROMPTLY_S)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --task: ") and done.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "serve.py", "--model", "tiny", "--port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROMPTLY_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --port {port} ") and done.stderr.count("\n") == 1
