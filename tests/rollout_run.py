"""A rollout loop in this process on a scripted server: how tests run one, and what its model says."""

import asyncio
import json
import multiprocessing
import threading
import time
from pathlib import Path

from fake_server import FakeServer

import rollout
from options import Options
from process import Link
from rollout import GroupMessage, MetricsMessage

TINY = str(Path(__file__).parent.parent / "tiny")


def options_for(model: str, *servers: FakeServer, **changes) -> Options:
    defaults = dict(
        model=model,
        task="rollout_tasks:lengths",
        num_generations=4,
        max_completion_length=16,
        num_train_epochs=1.0,
        vllm_server_base_url=[server.url for server in servers],
        vllm_server_timeout=20.0,
        num_sampler_logprobs=3,
    )
    return Options(**(defaults | changes))


class Run:
    """A loop in this process, on a thread with its own event loop, and what it sent."""

    def __init__(self, options, allowance=10**9, position=0, finished=(), version=1):
        self.link = Link(multiprocessing.get_context("spawn"), len(options.vllm_server_base_url))
        self.link.version.value = version
        self.link.allowance.value = allowance
        self.messages = []
        self.loop = rollout.load_loop(options.rollout_loop)(options, self.link, self.messages.append)
        for load in self.loop.loads:
            load.server.backoff_s = 0.001
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(position, set(finished)))

    def _run(self, position, finished):
        try:
            asyncio.run(self._main(position, finished))
        except Exception as error:
            self.error = error

    async def _main(self, position, finished):
        self.event_loop = asyncio.get_running_loop()
        await self.loop.run(position, finished)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.link.stop.value = 1
        self._thread.join(15)
        assert not self._thread.is_alive()

    def until(self, ready, seconds=15.0):
        """Wait until ready() is true; the loop's error is raised here."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self.error is not None:
                raise self.error
            assert time.monotonic() < deadline, f"nothing came of it: {self.loop.status(time.monotonic())}"
            time.sleep(0.005)

    def groups(self, count: int = 0) -> list[GroupMessage]:
        """The group messages so far, once there are `count`."""
        found = lambda: [m for m in list(self.messages) if isinstance(m, GroupMessage)]  # noqa: E731
        self.until(lambda: len(found()) >= count)
        return found()

    def metrics(self) -> dict:
        """Everything measured so far."""
        buffer = rollout.MetricsBuffer()
        for values in [m.values for m in self.messages if isinstance(m, MetricsMessage)] + [
            self.loop.metrics.values
        ]:
            for name, value in values.items():
                buffer.record(name, value)
        return buffer.values


def calling(name, arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def replies(tokenizer, *texts: str):
    """Answers of the shipped model's tokens: the nth turn of a rollout says the nth text, the last one on."""
    assistant, end = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|assistant|>", "<|end|>"))

    def answer(body):
        turn = body["prompt"].count(assistant) - 1
        ids = tokenizer.encode(texts[min(turn, len(texts) - 1)]) + [end]
        return ids, [{token: -1.0} for token in ids], "stop"

    return answer


def tool_options(server: FakeServer, task: str, **changes) -> Options:
    server.max_model_len = 4000  # bytes are tokens, and the schemas of the tools alone are a thousand
    return options_for(TINY, server, task=f"rollout_tasks:{task}", score_centering=False, **changes)


def conversations(run: Run) -> list[rollout.Rollout]:
    """Every rollout that compute_advantages has seen."""
    return [one for group in run.loop.groups for one in group.rollouts]
