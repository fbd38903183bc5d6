"""What the rollout process keeps in memory while it plays thousands of rollouts on a fake server."""

import queue

import psutil
from fake_server import FakeServer
from rollout_run import TINY, calling, replies, tool_options

from process import RolloutProcess
from rollout import GroupMessage


def resident_sets(rollouts: int, looks: int) -> list[float]:
    """MiB of the process after equal parts of `rollouts`, each of two turns with a tool of an environment."""
    from transformers import AutoTokenizer

    with FakeServer() as fake:
        answer = replies(AutoTokenizer.from_pretrained(TINY), calling("increment", {"step": 3}), "done")
        fake.answer = answer
        options = tool_options(
            fake,
            "counting",
            task_kwargs={"size": 64},
            num_generations=8,
            max_steps=10**6,
            max_concurrent_rollouts=64,
            vllm_server_timeout=10000.0,  # all rewards are equal, which ends a run sooner or later
        )
        process = RolloutProcess(options)
        process.start(0, set(), 1)
        process.publish(1, 2**60)
        sizes, done = [], 0
        try:
            while len(sizes) < looks:
                try:
                    message = process.queue.get(timeout=1)
                except queue.Empty:
                    process.check()
                    continue
                fake.requests.clear()
                fake.calls.clear()
                done += options.num_generations * isinstance(message, GroupMessage)
                if done >= rollouts * (len(sizes) + 1) / looks:
                    sizes.append(psutil.Process(process._process.pid).memory_info().rss / 2**20)
        finally:
            process.stop()
    return sizes
