"""Claims about process.py: real rollout processes, how they fail and how they end.

Run: pytest tests/test_process.py
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import rollout_tasks
from cases import case
from fake_server import FakeServer
from leaks import resident_sets
from rollout_run import options_for

import process as process_module
from conversation import RolloutError
from process import DeathMessage, RolloutProcess
from rollout import GroupMessage

HERE = Path(__file__).parent


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(process_module, "CLOSE_S", 0.5)


def check_until_error(process: RolloutProcess, seconds: float) -> RolloutError:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            process.check()
        except RolloutError as error:
            return error
        time.sleep(0.05)
    raise AssertionError(f"nothing was wrong after {seconds} s: {process.status()}")


def next_groups(process: RolloutProcess, count: int, wanted=lambda message: True) -> list[GroupMessage]:
    """The next `count` groups that the process sends, of the wanted ones."""
    groups = []
    while len(groups) < count:
        message = process.queue.get(timeout=30)
        groups += [message] if isinstance(message, GroupMessage) and wanted(message) else []
    return groups


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return True


def test_process_sends_groups_and_ends_when_told(model):
    with FakeServer() as fake:
        process = RolloutProcess(options_for(model, fake, task=rollout_tasks.Fixed(), num_train_epochs=50.0))
        process.start(position=0, finished=set(), version=0)
        try:
            process.publish(1, 500)
            first = next_groups(process, 3)
            assert first[0].samples[0].version == 1
            os.kill(process._process.pid, signal.SIGINT)  # Ctrl-C reaches every process; the trainer decides
            process.publish(1, 10**9, again=[0])
            next_groups(process, 1, wanted=lambda message: message.group_id == 0)
            process.check()
            pid = process._process.pid
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"CUDA_VISIBLE_DEVICES=" in environment
        finally:
            started = time.monotonic()
            process.stop()
            process.stop()
        assert time.monotonic() - started < 5 and gone(pid) and process._process.exitcode == 0


def test_killed_process_is_noticed(model):
    with FakeServer() as fake:
        process = RolloutProcess(options_for(model, fake))
        process.start(0, set(), 0)
        os.kill(process._process.pid, signal.SIGKILL)
        assert "exit code -9" in str(check_until_error(process, 10))
        process.stop()


def test_failing_reward_reaches_the_trainer_with_its_traceback(model):
    expect = case("A02_reward_contract")["expect"]["raises_sync"]
    with FakeServer() as fake:
        options = options_for(model, fake, task="rollout_tasks:broken", task_kwargs={"name": "raises_sync"})
        process = RolloutProcess(options)
        process.start(0, set(), 0)
        process.publish(1, 10**6)
        error = str(check_until_error(process, expect["max_seconds_to_surface"]))
        assert (
            "reward function raises_sync on dataset row 0: ValueError: bad gold answer" in error
            and "Traceback" in error
        )
        messages = list(process.queue.queue)
        assert sum(isinstance(m, DeathMessage) for m in messages) == 1
        assert not any(isinstance(m, GroupMessage) for m in messages)
        process.stop()


def test_held_event_loop_stops_the_heart_and_is_ended_by_force(model, quick):
    with FakeServer() as fake:
        options = options_for(model, fake, rollout_loop=rollout_tasks.Stuck, rollout_worker_timeout=1.0)
        process = RolloutProcess(options)
        process.start(0, set(), 0)
        process._link.beat.value += 30  # imports on a busy machine
        process.publish(1, 10**6)
        while process._link.beat.value > time.monotonic():
            time.sleep(0.05)
        error = str(check_until_error(process, 30))
        assert "no heartbeat of the rollout process" in error and "rollout_worker_timeout" in error
        started = time.monotonic()
        process.stop()
        assert time.monotonic() - started < 5 and gone(process._process.pid)


def test_the_process_ends_with_its_parent(model):
    with FakeServer() as fake:
        program = textwrap.dedent(f"""
            import sys, time
            sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
            from process import RolloutProcess
            from options import Options
            if __name__ == "__main__":
                process = RolloutProcess(Options(model={model!r}, task="rollout_tasks:lengths",
                    num_generations=4, vllm_server_base_url=[{fake.url!r}]))
                process.start(0, set(), 0)
                print(process._process.pid, flush=True)
                time.sleep(600)
        """)
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        assert not gone(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 5
        while not gone(child):
            assert time.monotonic() < deadline, "the rollout process outlived its parent"
            time.sleep(0.05)


def test_option_that_cannot_be_handed_over_is_refused_before_anything_starts(model):
    process = RolloutProcess(options_for(model, task_kwargs={"judge": lambda: 1}))
    with pytest.raises(TypeError, match="option task_kwargs cannot be handed to the rollout process"):
        process.start(0, set(), 0)


def test_full_pipe_does_not_block_the_end_of_the_process():
    messages_out, messages_in = multiprocessing.Pipe(duplex=False)
    sender = process_module.Sender(messages_in)
    sender.put("x" * 10**6)  # nobody reads
    started = time.monotonic()
    sender.close(timeout=0.2)
    assert time.monotonic() - started < 1
    messages_out.close()
    sender.close(timeout=5)
    messages_in.close()


def test_trainer_says_which_servers_hold_the_version(model):
    urls = ["http://a:1/", "http://b:2"]
    process = RolloutProcess(options_for(model, vllm_server_base_url=urls))
    link = process._link
    for servers, holds, told in [(None, [1, 1], 0), (["http://a:1"], [1, 0], 1), (None, [1, 0], 1)]:
        process.publish(3, 100, servers=servers)
        assert (link.holds[:], link.told.value, link.version.value) == (holds, told, 3)


def test_rollouts_leave_nothing_in_memory():
    """1,000 rollouts after the first 500; their samples alone are 13 MiB. `make soak` plays 20,000."""
    first, _, last = resident_sets(1500, looks=3)
    assert last - first < 5
