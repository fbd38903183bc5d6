"""Put the letters of a string in order: the task of the demo and of the tests.

    user       sort: dbcaae
    assistant  aabcde            reward 1; any other answer, however close, 0

The model in tiny/ has the skill but seldom shows it (tiny/make.py says why), so a run that works lifts the
reward within tens of steps, and one that does not can be told from it at once. Six letters of 26 give more
strings than any run sees twice: nothing here can be learnt by heart.
"""

import random
import string

import datasets


def question(letters: str) -> str:
    """The user's message. tiny/make.py trains on this very text."""
    return f"sort: {letters}"


def dataset(size: int = 4096, seed: int = 0, length: int = 6) -> datasets.Dataset:
    """`size` random strings of `length` letters a to z, repeats allowed; the same ones for the same seed.

    Columns: `prompt`, a list of one user message, and `answer`, the letters in order. The shipped model was
    trained on lengths 3 to 8; give another `seed` for held-out strings.
    """
    if size < 1 or length < 1:
        raise ValueError(f"task_kwargs of sort: size ({size}) and length ({length}) must be at least 1")
    rng = random.Random(seed)
    strings = ["".join(rng.choices(string.ascii_lowercase, k=length)) for _ in range(size)]
    prompts = [[{"role": "user", "content": question(letters)}] for letters in strings]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": ["".join(sorted(s)) for s in strings]})


def held_out() -> datasets.Dataset:
    """Strings for --eval_dataset tasks/sort.py:held_out."""
    return dataset(size=64, seed=10**6)


def is_sorted(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1.0 where the last message is exactly the answer (white space around it aside), else 0.0."""
    texts = [completion[-1]["content"] if completion else "" for completion in completions]
    return [float((text or "").strip() == right) for text, right in zip(texts, answer, strict=True)]


rewards = [is_sorted]
