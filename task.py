"""A task: the prompts, and the functions that score what becomes of them.

A task is a module (tasks/sort.py), or an object, with `dataset` (a dataset, or a function of task_kwargs that
returns one) and `rewards`. Everything in it must reach another process, so lambdas and closures are refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Task:
    """What is learnt: prompts and the functions that score completions."""

    name: str
    dataset: object  # datasets.Dataset or IterableDataset, with a column `prompt`
    rewards: list
    tools: list = field(default_factory=list)


def load_task(spec, task_kwargs: dict | None = None) -> Task:
    """The task named by `spec`: path, path:function, module or module:function; or an object that is one.

    A task has `dataset` (a dataset, or a function of task_kwargs that returns one), `rewards` and optionally
    `tools`; a function named in `spec` returns such an object. Raises ValueError for an unknown task or
    prompts that cannot be used, TypeError for a reward that the rollout process cannot be handed.
    """
    task_kwargs = task_kwargs or {}
    source = locate(spec, "task")
    if inspect.isfunction(source):
        takes_kwargs = bool(inspect.signature(source).parameters)
        source, task_kwargs = (source(**task_kwargs), {}) if takes_kwargs else (source(), task_kwargs)
    name = spec if isinstance(spec, str) else type(spec).__name__
    rewards = reward_functions(source, name)
    dataset = getattr(source, "dataset", None)
    if callable(dataset):
        dataset = dataset(**task_kwargs)
    elif task_kwargs:
        raise ValueError(f"task_kwargs {sorted(task_kwargs)}: nothing in task {name} takes them")
    if dataset is None:
        raise ValueError(f"task {name} has no dataset: define dataset(**task_kwargs)")
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError(f"the dataset of task {name} is empty")
    check_prompt(row, f"row 0 of task {name}")
    return Task(name, dataset, rewards, list(getattr(source, "tools", None) or []))


def locate(spec, what: str):
    """The module, or the thing inside it, that `path.py`, `path.py:name`, `module` or `module:name` names."""
    if not isinstance(spec, str):
        return spec
    place, _, name = spec.partition(":")
    if not place:
        raise ValueError(f"{what} {spec!r} must be path.py, path.py:name, module or module:name")
    if place.endswith(".py"):
        module = module_at(Path(place), what)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, something it imports is not
            raise ValueError(
                f"unknown {what} {spec!r}: there is no module {place}; a file ends in .py"
            ) from None
    if not name:
        return module
    if not hasattr(module, name):
        raise ValueError(f"unknown {what} {spec!r}: {place} has no {name}")
    return getattr(module, name)


def module_at(path: Path, what: str):
    """Import a file, once per process, under a name that hides no other module."""
    if not path.is_file():
        raise ValueError(f"unknown {what}: there is no file {path}")
    path = path.resolve()
    name = f"{what}_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def reward_functions(source, task_name: str) -> list:
    """The task's rewards; TypeError names the first that cannot be handed to the rollout process."""
    rewards = getattr(source, "rewards", None) or []
    rewards = [rewards] if callable(rewards) else list(rewards)
    for reward in rewards:
        if not callable(reward):
            raise TypeError(
                f"reward {reward!r} of task {task_name} is no function; call a served model from one"
            )
        inner = reward
        while isinstance(inner, functools.partial):
            inner = inner.func
        qualname = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        if "<lambda>" in qualname or "<locals>" in qualname:
            raise TypeError(
                f"reward {qualname} of task {task_name} is a lambda or closure and cannot be handed to the "
                "rollout process; use a module-level function, functools.partial or an instance of a "
                "module-level class"
            )
    return rewards


def source_names(rewards: list) -> list[str]:
    """Names in metrics: __name__, a partial's function's, an instance's class. A repeated one is numbered."""
    names = []
    for reward in rewards:
        while isinstance(reward, functools.partial):
            reward = reward.func
        name = getattr(reward, "__name__", type(reward).__name__)
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def check_prompt(row: dict, where: str) -> None:
    """Raises ValueError unless the row's prompt is a list of text messages."""
    if "prompt" not in row:
        raise ValueError(f"{where} has no column `prompt`; its columns are {sorted(row)}")
    prompt = row["prompt"]
    conversational = (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    )
    if not conversational:
        raise ValueError(
            f"the prompt of {where} is not conversational: it must be a list of messages like "
            f"[{{'role': 'user', 'content': ...}}], not {str(prompt)[:80]!r}"
        )
    for message in prompt:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and "image" in str(part.get("type")):
                raise ValueError(f"the prompt of {where} holds an image; only text can be trained on")
