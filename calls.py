"""Tool calls: from what the model wrote to what it is told. Nothing that a tool raises ends a rollout.

    message with calls -> each in its order -> a message of role `tool` per call; errors are texts too

A task's own functions, tools and environments alike, run here: coroutines on the loop, the rest on threads.
"""

from __future__ import annotations

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor

from conversation import FORMATS, Call, Renderer, Rollout, call_id, probe
from scoring import is_async
from task import Environments, Task, schema_of, tools_of

SHOWN = 200  # characters of a malformed call that the model is shown again


class Caller:
    """Runs tools. `record(name, value)` takes what is measured, `most` is how many may run at once."""

    def __init__(self, record, most: int):
        self.record = record
        self.threads = ThreadPoolExecutor(most, thread_name_prefix="tool")
        self._schemas = {}  # tool -> what the model is shown of it

    def schema(self, tool) -> dict:
        function = getattr(tool, "__func__", tool)  # instances of an environment share their methods
        if function not in self._schemas:
            self._schemas[function] = schema_of(tool)
        return self._schemas[function]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function, metrics=(), /, **arguments):
        """Call a task's own function, a coroutine here, others on a thread; `metrics` take the seconds."""
        started = time.monotonic()
        try:
            if is_async(function):
                return await function(**arguments)
            call = functools.partial(function, **arguments)
            return await asyncio.get_running_loop().run_in_executor(self.threads, call)
        finally:
            for name in metrics:
                self.record(name, [time.monotonic() - started])

    async def answer(self, calls: list[Call], tools: dict, rollout: Rollout) -> list[dict]:
        """Run the calls of one message in their order: the messages that answer them."""
        self.record("tools/parallel_calls_mean", [len(calls)])
        results = []
        for number, call in enumerate(calls):
            text, failed = await self._answer(call, tools)
            rollout.tool_call_count += 1
            rollout.tool_failure_count += failed
            results.append(
                {"role": "tool", "name": call.name, "tool_call_id": call_id(number), "content": text}
            )
        return results

    async def _answer(self, call: Call, tools: dict) -> tuple[str, bool]:
        """What the model is told, and whether the call failed."""
        record, tool = self.record, tools.get(call.name)
        if tool is not None:
            record(f"tools/{call.name}/call_count", 1)
            record(f"tools/{call.name}/failure_count", 0)
        elif call.name:
            record("tools/unknown_name_count", 1)
            return f"error: there is no tool {call.name}; there are {', '.join(tools)}", True
        try:
            if call.error is not None:
                raise ValueError(f"{call.error}: {str(call.arguments)[:SHOWN]}")
            names = "tools/latency_s", f"tools/{call.name}/latency_s"
            return str(await self.run(tool, names, **call.arguments)), False
        except (Exception, SystemExit) as error:
            if tool is not None:
                record(f"tools/{call.name}/failure_count", 1)
            return f"error: {type(error).__name__}: {error}", True


def check_tools(task: Task, environments: Environments, renderer: Renderer, rewarded: bool) -> None:
    """Look at the tools that each kind of row will see, and at what the template makes of them.

    rewarded: are there rewards at all? A distillation has none.
    """
    sets = [task.tools]
    for name in task.environments:
        _, environment = environments.take({"environment": name}, "the task")
        environments.give_back(name, environment)
        methods = tools_of(environment)
        if clash := {t.__name__ for t in methods} & {t.__name__ for t in task.tools}:
            raise TypeError(f"two tools are named {clash.pop()}: one of {type(environment).__name__}")
        if rewarded and not task.rewards and not hasattr(environment, "get_reward"):
            raise ValueError(
                f"nothing scores {type(environment).__name__}: it has no get_reward, and task {task.name} no "
                "rewards"
            )
        sets.append(task.tools + methods)
    schemas = [schema_of(tool) for tools in sets for tool in tools]
    if not schemas:
        return
    if not (renderer.parses or renderer.format):
        raise ValueError(
            "it is not known how a model with this chat template writes tool calls: none of "
            f"{[mark for mark, _ in FORMATS]} is in it. Give --chat_template, or override generate_one"
        )
    if (warning := probe(renderer, schemas)) is not None:
        print(warning, flush=True)
