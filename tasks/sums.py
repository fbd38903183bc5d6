"""Sums in the head: no tools, one right number, and a reward for it as the last number of the answer.

    user       What is 47 + 38?
    assistant  47 + 38 = 85                   reward 1; any other last number, or none, 0

Two questions with answers come before it, so that a small model knows how to answer. Every problem has its
own place, in training or held out, the same in every run.
"""

import random
import re

SHOWN = [("7 + 5", "12"), ("30 - 8", "22")]


def problems() -> list[tuple[str, int]]:
    """All there are, in an order that is always the same."""
    numbers = range(10, 100)
    found = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    found += [(f"{a} - {b}", a - b) for a in numbers for b in numbers if a > b]
    found += [(f"{a} * {b}", a * b) for a in numbers for b in range(2, 10)]
    random.Random(0).shuffle(found)
    return found


def rows(chosen: list[tuple[str, int]]) -> list[dict]:
    shown = []
    for problem, answer in SHOWN:
        shown.append({"role": "user", "content": f"What is {problem}?"})
        shown.append({"role": "assistant", "content": f"{problem} = {answer}"})
    return [
        {"prompt": [*shown, {"role": "user", "content": f"What is {problem}?"}], "answer": str(answer)}
        for problem, answer in chosen
    ]


def dataset(size: int = 8192) -> list[dict]:
    return rows(problems()[64 : 64 + size])


def held_out() -> list[dict]:
    """For --eval_dataset tasks/sums.py:held_out."""
    return rows(problems()[:64])


def is_right(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1.0 where the last number of the answer is the right one."""
    texts = [completion[-1]["content"] or "" if completion else "" for completion in completions]
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in texts]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


rewards = [is_right]
