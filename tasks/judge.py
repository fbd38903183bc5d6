"""A judge: completions are marked by a served model, asked over HTTP while other groups are generated.

    python train.py --task tasks/judge.py:task \
        --task_kwargs '{"url": "http://localhost:9000", "model": "Qwen/Qwen3-8B"}' ...

The server is any that speaks /v1/chat/completions. The reward is an `async def`: all completions of a group
are sent at once, and a slow judge holds up its own group only. A mark that cannot be read is None: no reward,
not a zero. A judge that does not answer stops the run, or under --on_reward_error skip is counted.
"""

import asyncio
import re
from types import SimpleNamespace

import datasets
import requests

SUBJECTS = ["rain", "a magnet", "the tides", "yeast", "an echo", "rust", "a rainbow", "a lens", "snow"]
MARK = re.compile(r"\b(10|[0-9])\b")
INSTRUCTIONS = (
    "Mark the answer from 0 (wrong or unclear) to 10 (right, and a child would understand it). "
    "Reply with the number alone."
)


class Judge:
    """A reward function with settings; an instance of a module's class can be handed to another process."""

    def __init__(self, url: str, model: str | None = None, timeout: float = 120.0):
        self.url = url.rstrip("/") + "/v1/chat/completions"
        self.model = model
        self.timeout = timeout

    async def __call__(self, prompts, completions, completion_ids, **columns) -> list[float | None]:
        """A mark from 0 to 1 for every completion."""
        pairs = zip(prompts, completions, strict=True)
        return await asyncio.gather(*[asyncio.to_thread(self.mark, *pair) for pair in pairs])

    def mark(self, prompt: list[dict], completion: list[dict]) -> float | None:
        answer = completion[-1]["content"] if completion else ""
        asked = f"{INSTRUCTIONS}\n\nQuestion: {prompt[-1]['content']}\n\nAnswer: {answer}"
        body = {"messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 8}
        if self.model:
            body["model"] = self.model
        response = requests.post(self.url, json=body, timeout=self.timeout)
        response.raise_for_status()
        found = MARK.search(response.json()["choices"][0]["message"]["content"])
        return int(found[0]) / 10 if found else None


def task(url: str = "http://localhost:9000", model: str | None = None) -> SimpleNamespace:
    prompts = [[{"role": "user", "content": f"Explain {subject} in one sentence."}] for subject in SUBJECTS]
    return SimpleNamespace(
        dataset=datasets.Dataset.from_dict({"prompt": prompts}), rewards=[Judge(url, model)]
    )
