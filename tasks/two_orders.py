"""Letters forwards or backwards, as the prompt's first word says: two kinds of prompts, a teacher for each.

    user  sort: dbcaae    assistant  aabcde    teacher_id  sort
    user  tros: dbcaae    assistant  edcbaa    teacher_id  tros

Both orders are among the answers that the model in tiny/ mixes, so rewards make a teacher of it in either
kind, and a student can be distilled from both (runs/distill_cpu.sh).
"""

import datasets

from tasks import sort

rewards = sort.rewards
KINDS = ("sort", "tros")


def dataset(kinds=KINDS, size: int = 4096, seed: int = 0) -> datasets.Dataset:
    """`size` prompts, of the `kinds` in turn. Columns: `prompt`, `answer`, `teacher_id` (the kind)."""
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"task_kwargs of two_orders: kinds is {kinds}, it must name some of {KINDS}")

    def of_kind(row, number):
        kind = kinds[number % len(kinds)]
        content = row["prompt"][0]["content"].replace("sort", kind, 1)
        answer = row["answer"] if kind == "sort" else row["answer"][::-1]
        return {"prompt": [{"role": "user", "content": content}], "answer": answer, "teacher_id": kind}

    return sort.dataset(size, seed).map(of_kind, with_indices=True)


def held_out() -> datasets.Dataset:
    """Prompts of both kinds for --eval_dataset tasks/two_orders.py:held_out."""
    return dataset(size=64, seed=10**6)
