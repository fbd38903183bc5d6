"""Scoring: what reward functions return -> the rewards of a group, whether it is kept, and its metrics.

Never: turn a missing reward into a zero (tests/test_scoring.py::test_group_scoring_case).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import numbers
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conversation import Rollout, RolloutError
from metrics import rule
from task import source_names, unwrapped

EQUAL_REWARDS = "equal rewards"
PASS = 1000  # groups that stand for a pass over a dataset, where that is longer or nobody knows


@dataclass(eq=False)
class Group:
    """One prompt and its rollouts, as compute_advantages sees it."""

    rollouts: list[Rollout]
    prompts: list[list[dict]]  # the same prompt once per rollout, as reward functions get it
    reward_kwargs: dict[str, list]  # the row's other columns, once per rollout
    rewards: np.ndarray  # float64 [num_generations], NaN = unscored
    group_id: int
    row_index: int
    version: int  # when its first rollout began


def is_async(function) -> bool:
    """Is it an `async def`, a partial of one, or an instance whose calls are?"""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_rewards(result, count: int) -> np.ndarray:
    """What a reward function returned, float64 [count], NaN = does not apply; TypeError, ValueError."""
    if isinstance(result, (str, bytes, dict, set)) or not hasattr(result, "__len__"):
        raise TypeError(f"it must return a list of {count} values, not {result!r}")
    if len(result) != count:
        raise ValueError(f"it returned {len(result)} values for {count} completions")
    return np.array([as_reward(value) for value in result], dtype=np.float64)


def as_reward(value) -> float:
    """One reward; None becomes NaN. TypeError for anything but a number, ValueError for an infinite one."""
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward must be a number or None, not {value!r}")
    if math.isinf(value):
        raise ValueError(f"a reward must be finite, not {value!r}")
    return float(value)


class Rewards:
    """A task's reward functions at work. `record(name, value)` takes what is measured."""

    def __init__(self, functions: list, on_error: str, record):
        self.functions = dict(zip(source_names(functions), functions, strict=True))
        self.on_error = on_error
        self.record = record
        # a thread each: a sync function is never called twice at once, since it may keep state
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix="reward") for name in self.functions}

    async def score(self, group: Group) -> dict[str, np.ndarray]:
        """Set group.rewards. Returns the rewards of every source, float64 [num_generations].

        NaN = does not apply, or was given up. An environment is a source under the name of its class.
        """
        rollouts, count = group.rollouts, len(group.rollouts)
        scored = [i for i, rollout in enumerate(rollouts) if not rollout.given_up]
        arguments = {name: [values[i] for i in scored] for name, values in group.reward_kwargs.items()} | {
            "prompts": [group.prompts[i] for i in scored],
            "completions": [rollouts[i].completion for i in scored],
            "completion_ids": [rollouts[i].completion_ids for i in scored],
        }
        names = list(self.functions) if scored else []
        answers = await asyncio.gather(*[self._call(name, arguments, group) for name in names])
        sources = {name: np.full(count, np.nan) for name in names}
        for name, answer in zip(names, answers, strict=True):
            sources[name][scored] = answer
        for index, rollout in enumerate(rollouts):
            if rollout.earned:
                kind, reward = rollout.earned
                sources.setdefault(kind, np.full(count, np.nan))[index] = reward
        if any(rollout.reward is not None for rollout in rollouts):
            sources["rollout"] = as_rewards([rollout.reward for rollout in rollouts], count)
        group.rewards = total_rewards(sources, count)
        return sources

    async def _call(self, name: str, arguments: dict, group: Group) -> np.ndarray:
        count = len(arguments["prompts"])
        call = functools.partial(self.functions[name], **arguments)
        try:
            if is_async(call):
                result = await call()
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._threads[name], call)
            return as_rewards(result, count)
        except (Exception, SystemExit) as error:
            what = f"reward function {name} on dataset row {group.row_index}"
            return np.full(count, self.failed(name, what, error))

    def failed(self, name: str, what: str, error: Exception) -> float:
        """End the run, or under on_reward_error skip count it and score nothing."""
        if self.on_error == "stop":
            raise RolloutError(f"{what}: {type(error).__name__}: {error}") from error
        self.record(f"rewards/{name}/error_count", 1)
        return math.nan


def total_rewards(sources: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Sum over the sources that scored a rollout; NaN where none did. float64 [count]."""
    values = np.array(list(sources.values())).reshape(-1, count)  # [sources, count]
    return np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0))


def drop_reason(rewards: np.ndarray) -> str | None:
    """Why a group teaches nothing, or None. Compares rewards: the std of equal ones can be above 0."""
    scored = rewards[~np.isnan(rewards)]
    if len(scored) < 2:
        return "fewer than two scored"
    high, low = scored.max(), scored.min()
    return EQUAL_REWARDS if high - low <= 1e-8 * max(1.0, abs(high)) else None


class Drought:
    """Groups in a row that were not kept: under --max_steps nothing else ends a run that learns nothing.

    It ends once a whole pass over the dataset (at most PASS groups) and `patience` seconds were in vain.
    """

    def __init__(self, patience: float):
        self.patience = patience
        self.low = self.high = 0.0  # of the rewards so far, and of 0, which is what no credit gives
        self.reasons = Counter()  # of the groups since the last one that was kept
        self.rewards: list[float] = []  # theirs
        self.since = 0.0

    def note(self, rewards: np.ndarray, dropped: str | None, size: int | None) -> None:
        """One group of a dataset of `size` prompts; RolloutError when it was one too many."""
        scored = rewards[~np.isnan(rewards)].tolist()
        self.low, self.high = min(self.low, *scored, 0.0), max(self.high, *scored, 0.0)
        if dropped is None:
            self.reasons.clear()
            return
        if not self.reasons:
            self.since, self.rewards = time.monotonic(), []
        self.reasons[dropped] += 1
        self.rewards += scored
        seconds, groups = time.monotonic() - self.since, self.reasons.total()
        if seconds >= self.patience and groups >= min(size or PASS, PASS):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
            raise RolloutError(
                f"none of the last {groups} groups was kept ({reasons}), for {seconds:.0f} s "
                f"(--vllm_server_timeout): {self.diagnosis()}. Take another --task or --task_kwargs, or let "
                "the rollouts of a prompt differ more (--temperature) or be more (--num_generations)"
            )

    def diagnosis(self) -> str:
        if not self.rewards:
            return "none of their rollouts has a reward"
        mean = float(np.mean(self.rewards))
        height = (mean - self.low) / ((self.high - self.low) or 1.0)
        where = "in the middle: all answers to a prompt earn the same"
        if height < 1 / 3:
            where = "near the bottom: the task is too hard, or its reward never credits"
        elif height > 2 / 3:
            where = "near the top: the task has become too easy"
        return f"their mean reward is {mean:.3g} in a range from {self.low:g} to {self.high:g}, {where}"


def std_of(values: np.ndarray) -> float:
    """Population standard deviation of the scored ones; NaN when there are none."""
    scored = values[~np.isnan(values)]
    return float(scored.std()) if len(scored) else math.nan


def reward_metrics(rewards: np.ndarray, dropped: str | None) -> dict:
    """Of a group that was scored, and perhaps dropped for it."""
    scored = rewards[~np.isnan(rewards)].tolist()
    share = (int(dropped is not None), 1)
    return {"reward": scored, "frac_reward_zero_std": share, "reward_dropped": scored if dropped else []}


def completion_metrics(rollouts: list[Rollout], eos_ids: set[int], calls: bool = False) -> dict:
    """completions/*: lengths in generated tokens, the share that was cut, the share that is a repetition.

    A rollout that was given up counts as cut, and as nothing else. `calls`: tools/* of the rollouts too.
    """
    count, rollouts = len(rollouts), [rollout for rollout in rollouts if not rollout.given_up]
    outputs = [[list(turn.output_ids) for turn in rollout.turns] for rollout in rollouts]
    lengths = [sum(map(len, turns)) for turns in outputs]
    terminated = [
        length
        for length, turns, rollout in zip(lengths, outputs, rollouts, strict=True)
        if turns and turns[-1] and turns[-1][-1] in eos_ids and not rollout.out_of_room
    ]
    values = {
        "completions/clipped_ratio": (count - len(terminated), count),
        "completions/duplicate_frac": (len(rollouts) - len(set(map(str, outputs))), len(rollouts)),
    }
    if calls:
        made, failed = (sum(r.tool_call_count for r in rollouts), sum(r.tool_failure_count for r in rollouts))
        values |= {"tools/call_frequency": (made, len(rollouts)), "tools/failure_frequency": (failed, made)}
    for kind, some in (("length", lengths), ("terminated_length", terminated)):
        if some:
            values |= {
                f"completions/mean_{kind}": some,
                f"completions/min_{kind}": min(some),
                f"completions/max_{kind}": max(some),
            }
    return values


class MetricsBuffer:
    """Values since the last message. Lists and pairs are joined, single values reduced as their names say."""

    def __init__(self):
        self.values = {}

    def record(self, name: str, value) -> None:
        reduced, held = rule(name), self.values.get(name)
        if isinstance(value, tuple):
            self.values[name] = value if held is None else (held[0] + value[0], held[1] + value[1])
        elif isinstance(value, list):
            self.values.setdefault(name, []).extend(value)
        elif reduced == "sum":
            self.values[name] = value + (held or 0)
        elif reduced in ("max", "min"):
            self.values[name] = value if held is None else {"max": max, "min": min}[reduced](held, value)
        else:
            self.values.setdefault(name, []).append(value)

    def update(self, values: dict) -> None:
        for name, value in values.items():
            self.record(name, value)

    def take(self) -> dict:
        values, self.values = self.values, {}
        return values


def trained_metrics(sources: dict[str, np.ndarray], rewards: np.ndarray, index: int) -> dict[str, float]:
    """What a sample of rollout `index` says about rewards once it is trained."""
    values = {"reward_kept": rewards[index], "reward_group_std": std_of(rewards)}
    for name, scores in sources.items():
        values[f"rewards/{name}/mean"] = scores[index]
        values[f"rewards/{name}/group_std"] = std_of(scores)
    return {name: float(value) for name, value in values.items() if not math.isnan(value)}


def completion_lines(group: Group, sources: dict[str, np.ndarray], advantages: np.ndarray) -> list[dict]:
    """One group for a reader: a record per rollout."""
    return [
        {
            "group_id": group.group_id,
            "version": group.version,
            "prompt": group.prompts[index],
            "completion": rollout.completion,
            "rewards": {name: optional(values[index]) for name, values in sources.items()},
            "reward": optional(group.rewards[index]),
            "advantage": float(advantages[index]),
        }
        for index, rollout in enumerate(group.rollouts)
    ]


def append_lines(path: Path, lines: list[dict]) -> None:
    """Lines of JSON, unless the disk is full: that is said, and ends no run."""
    text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:  # in one write: groups do not mix
            file.write(text.encode())
    except OSError as error:
        print(f"completions are missing in {path}: {error}", flush=True)


def optional(reward: float) -> float | None:
    return None if math.isnan(reward) else float(reward)


def print_completions(lines: list[dict]) -> None:
    """Completions of one group, with their rewards by source."""
    first = lines[0]
    print(f"\nprompt {first['group_id']}, sampled by version {first['version']}: {first['prompt']}")
    for line in lines:
        rewards = ", ".join(f"{name} {value}" for name, value in line["rewards"].items())
        scores = f"reward {line['reward']} ({rewards}), advantage {line['advantage']:.3f}"
        print(f"  {scores}: {line['completion']}")
    sys.stdout.flush()
