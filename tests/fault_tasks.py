"""Tasks of tests/test_faults.py, sound ones and broken ones: --task tests/fault_tasks.py:name."""

import time
from types import SimpleNamespace

LETTERS = ["dcb", "zaq", "mlk", "cab", "fed", "hgi", "tsr", "pon"]


def prompts(size: int = len(LETTERS)) -> list[dict]:
    rows = range(size)
    return [{"prompt": [{"role": "user", "content": f"sort: {LETTERS[i % 8]}"}], "number": i} for i in rows]


def by_place(completions, **_):
    """Different for every rollout of a group, whatever it says."""
    return [float(place) for place in range(len(completions))]


def equal_for_every_fourth(completions, number, **_):
    """Rows 0, 4, 8 ... teach nothing and are dropped."""
    return [1.0] * len(completions) if number[0] % 4 == 0 else by_place(completions)


def raises(completions, number, **_):
    raise ValueError(f"bad gold answer in row {number[0]}")


def slowly(completions, **_):
    time.sleep(0.2)
    return by_place(completions)


def every_fourth_dropped():
    return SimpleNamespace(dataset=prompts(), rewards=[equal_for_every_fourth])


def raising():
    return SimpleNamespace(dataset=prompts(), rewards=[raises])


def steady():
    return SimpleNamespace(dataset=prompts(64), rewards=[by_place])


def slow():
    return SimpleNamespace(dataset=prompts(64), rewards=[slowly])


# ---- what must be refused before anything starts


def empty():
    return SimpleNamespace(dataset=[], rewards=[by_place])


def no_prompt():
    return SimpleNamespace(dataset=[{"question": "sort: cba"}], rewards=[by_place])


def plain_text():
    return SimpleNamespace(dataset=[{"prompt": "sort: cba"}], rewards=[by_place])


def closure():
    return SimpleNamespace(dataset=prompts(), rewards=[lambda completions, **_: by_place(completions)])


def no_reward():
    return SimpleNamespace(dataset=prompts(), rewards=[])
