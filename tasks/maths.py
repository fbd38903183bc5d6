r"""Word problems with a number for an answer, from a file or the hub: GSM8K, or any table of that shape.

    python train.py --task tasks/maths.py --task_kwargs '{"path": "problems.jsonl"}' ...
    python train.py --task tasks/maths.py --task_kwargs '{"path": "openai/gsm8k", "name": "main"}' ...

The model is asked to put its answer in \boxed{...}; the reward is 1 where the last box holds the right number
(1,000 is 1000, 0.5 is 1/2), else 0. A solution in the table may end in "#### 42" or in a box of its own; a
bare answer does too.
"""

import re
from fractions import Fraction
from pathlib import Path

import datasets

ASK = "Reason step by step, and put the final answer in \\boxed{}."


def dataset(
    path: str = "openai/gsm8k",
    name: str | None = None,
    split: str = "train",
    question: str = "question",
    answer: str = "answer",
    size: int | None = None,
) -> datasets.Dataset:
    """Prompts and right answers. `path`: a .jsonl, .json or .parquet file, or a data set of the hub (`name`:
    its configuration); `question` and `answer`: its columns; `size`: the first so many rows."""
    suffix = Path(path).suffix
    if suffix in (".jsonl", ".json", ".parquet"):
        kind = "parquet" if suffix == ".parquet" else "json"
        rows = datasets.load_dataset(kind, data_files=path, split="train")
    else:
        rows = datasets.load_dataset(path, name, split=split)
    if missing := {question, answer} - set(rows.column_names):
        raise ValueError(f"{path} has no column {missing.pop()}; it has {rows.column_names}")
    rows = rows if size is None else rows.select(range(min(size, len(rows))))

    def prompt(row) -> dict:
        messages = [{"role": "user", "content": f"{row[question]}\n{ASK}"}]
        return {"prompt": messages, "answer": final(str(row[answer]))}

    return rows.map(prompt, remove_columns=rows.column_names)


def final(solution: str) -> str:
    """The answer that a solution ends in."""
    if "####" in solution:
        return solution.rsplit("####", 1)[1].strip()
    return boxed(solution) or solution.strip()


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, brackets inside it balanced; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip()
    return None


def number(text: str) -> Fraction | str:
    """A number where the text is one, else the text without its white space."""
    plain = re.sub(r"[\s,$%]|\\[,!%$]", "", text)
    plain = re.sub(r"^(-?)\\d?frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", plain)
    try:
        return Fraction(plain) if len(plain) < 50 else plain
    except (ValueError, ZeroDivisionError):
        return plain


def is_right(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1.0 where the last box of the last message holds the answer."""
    boxes = [boxed(completion[-1]["content"] or "") if completion else None for completion in completions]
    return [
        float(box is not None and number(box) == number(right))
        for box, right in zip(boxes, answer, strict=True)
    ]


rewards = [is_right]
