"""Tasks and loops that tests/test_rollout.py names; importable by the spawned rollout process too."""

import asyncio
import itertools
import time
from functools import partial
from types import SimpleNamespace

import rollout


def prompts(size: int = 4, **columns) -> list[dict]:
    rows = [{"prompt": [{"role": "user", "content": f"{i} {i}"}], "number": i} for i in range(size)]
    return [row | columns for row in rows]


def by_place(completions, **_):
    """Different for every rollout of a group."""
    return list(range(len(completions)))


def ones(completions, **_):
    return [1.0] * len(completions)


def lengths(size: int = 4):
    return SimpleNamespace(dataset=prompts(size), rewards=[by_place])


def equal(size: int = 4):
    return SimpleNamespace(dataset=prompts(size), rewards=[ones])


def first_ten_equal(completions, number, **_):
    return ones(completions) if number[0] < 10 else by_place(completions)


def mostly_equal():
    return SimpleNamespace(dataset=prompts(40), rewards=[first_ten_equal])


# ---- rewards that break the contract


def one_value(completions, **_):
    return [1.0]


def one_too_many(completions, **_):
    return [0.0, 1.0, 1.0, 0.0, 1.0]


def bare_number(completions, **_):
    return 0.5


def a_word(completions, **_):
    return ["good"] * len(completions)


def raises_sync(completions, **_):
    raise ValueError("bad gold answer")


async def raises_async(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("solution")


def broken(name: str):
    return SimpleNamespace(dataset=prompts(), rewards=[globals()[name]])


def broken_beside_good(name: str):
    return SimpleNamespace(dataset=prompts(), rewards=[by_place, globals()[name]])


# ---- rewards that take their time, or do not always apply


def slow_sync(completions, **_):
    time.sleep(0.3)
    return by_place(completions)


async def slow_async(completions, **_):
    await asyncio.sleep(0.3)
    return by_place(completions)


def slow():
    return SimpleNamespace(dataset=prompts(1), rewards=[slow_sync, slow_async])


class Counts:
    """Not made for two threads."""

    inside = 0

    def __call__(self, completions, **_):
        self.inside += 1
        time.sleep(0.02)
        assert self.inside == 1
        self.inside -= 1
        return by_place(completions)


def stateful():
    return SimpleNamespace(dataset=prompts(8), rewards=[Counts(), slow_async])


async def never(completions, **_):
    await asyncio.sleep(3600)


def never_scored():
    return SimpleNamespace(dataset=prompts(100), rewards=[never])


def only_some(completions, **_):
    return [1.0, None, 0.0, float("nan")]


def scaled(completions, factor, **_):
    return [factor * value for value in by_place(completions)]


class Judge:
    def __call__(self, completions, prompts, number, **_):
        assert all(len(column) == len(completions) for column in (prompts, number))
        return [None] * len(completions)


def several():
    return SimpleNamespace(dataset=prompts(1), rewards=[only_some, partial(scaled, factor=10.0), Judge()])


def closure():
    return SimpleNamespace(dataset=prompts(), rewards=[lambda completions, **_: [0.0]])


class Fixed:
    """A task handed over as an object."""

    dataset = prompts()
    rewards = [by_place]


# ---- datasets


class Stream:
    """No length and no index, like datasets.IterableDataset."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(prompts(self.size))


def streaming(size: int):
    return SimpleNamespace(dataset=Stream(size), rewards=[by_place])


def dataset_of(rows):
    return SimpleNamespace(dataset=lambda: rows, rewards=[by_place])


def empty():
    return dataset_of([])


def no_prompt():
    return dataset_of([{"question": "1"}])


def plain_text():
    return dataset_of([{"prompt": "1 2"}])


def image():
    return dataset_of([{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}]}])


def late_image():
    return dataset_of(prompts(2) + image().dataset())


# ---- loops


class Recording(rollout.RolloutLoop):
    """Notes what was called."""

    async def setup(self):
        self.called = ["setup"]

    async def close(self):
        self.called.append("close")

    def compute_advantages(self, group):
        self.called.append(group.rewards)
        return super().compute_advantages(group)


class Keeping(rollout.RolloutLoop):
    """Keeps its groups."""

    async def setup(self):
        self.groups = []

    def compute_advantages(self, group):
        self.groups.append(group)
        return super().compute_advantages(group)


class Odd(rollout.RolloutLoop):
    """Refuses rows with an even number."""

    def filter_prompt(self, row_index, row, epoch):
        return row["number"] % 2 == 1


class Nothing(rollout.RolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return False


class SelfScored(rollout.RolloutLoop):
    """Two turns a rollout, scored while it is made; asks for no server."""

    numbers = itertools.count()

    async def generate_one(self, prompt, tools, group_id):
        first = rollout.Turn([3, 7], [8, 9], [-0.1, -0.2])
        second = rollout.Turn([3, 7, 8, 9, 4], [10, 2], [-0.3, -0.4])
        return rollout.Rollout([], [8, 9, 10, 2], [first, second], reward=next(self.numbers))


class Stuck(rollout.RolloutLoop):
    """Holds its event loop."""

    def filter_prompt(self, row_index, row, epoch):
        time.sleep(3600)


# ---- tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def explode() -> str:
    """Fail."""
    raise RuntimeError("disk full")


async def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    await asyncio.sleep(0.3)
    return f"{word} is a word"


def wait(seconds: float) -> str:
    """Do nothing for a while.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


def undescribed(a: int) -> int:
    """Add one."""
    return a + 1


TOOLS = [add, explode, look_up, wait]


def with_tools(size: int = 1):
    return SimpleNamespace(dataset=prompts(size), rewards=["rollout_tasks:by_place"], tools=TOOLS)


def tools_of_kind(tools: list):
    return SimpleNamespace(dataset=prompts(1), rewards=[by_place], tools=tools)


def nested_tool():
    def inner(a: int) -> int:
        """Nothing.

        Args:
            a: number
        """

    return tools_of_kind([inner])


def held_out():
    return prompts(4)[1:]


# ---- environments


class Counter:
    """Counts to a target; notes its life in `log`."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.resets = 0

    def reset(self, target, **columns):
        assert "environment" not in columns
        self.count, self.target = 0, target
        self.resets += 1
        return f" Count to {target}."

    def increment(self, step: int) -> int:
        """Raise the counter.

        Args:
            step: by how much
        """
        self.count += step
        return self.count

    async def get_reward(self):
        await asyncio.sleep(0)
        return float(self.count == self.target)

    @property
    def broken(self):
        raise AssertionError("a property is no tool, and nobody looks at it")

    def _hidden(self):
        pass


class Silent:
    """Neither says nor scores anything."""

    def reset(self, **columns):
        return None

    def look(self) -> str:
        """Look around."""
        return "nothing"


class Late(Counter):
    made = 0

    def increment(self, step: int) -> int:
        """Raise the counter, slowly.

        Args:
            step: by how much
        """
        time.sleep(0.6)
        return super().increment(step)


class BadReset(Counter):
    def reset(self, **columns):
        raise OSError("no such level")


class BadReward(Counter):
    def get_reward(self):
        return "good"


def counting(kind: str = "Counter", size: int = 1, rewards=(), **columns):
    kinds = {name: globals()[name] for name in kind.split("+")}
    environments = kinds if len(kinds) > 1 else kinds[kind]
    rows = prompts(size, **({"target": 3} | columns))
    return SimpleNamespace(dataset=rows, rewards=list(rewards), environments=environments, tools=[add])


def counting_rows():
    return prompts(2, target=3)


def two_kinds(names=("Counter", "Silent")):
    rows = [row | {"environment": name, "target": 3} for row, name in zip(prompts(2), names, strict=True)]
    return SimpleNamespace(
        dataset=rows, rewards=[by_place], environments={"Counter": Counter, "Silent": Silent}
    )


class Puzzle(Counter):
    def reset(self):
        self.count, self.target = 0, 3
        return "Count to three."


def no_dataset():
    return SimpleNamespace(environments=Puzzle)
