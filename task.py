"""A task: the prompts, the tools and environments of a conversation, and the functions that score it.

A task is a module (tasks/sort.py), or an object, with

    dataset         a dataset, or a function of task_kwargs that returns one; columns beside `prompt` reach
                    rewards and environments. May be left out where environments give the prompts
    rewards         functions of prompts, completions, completion_ids and the other columns -> a number or
                    None per rollout; may be left out where environments score
    tools           functions the model may call, with type hints and a docstring in Google's style
    environments    a factory, or a dict of factories chosen by the column `environment`

Each function may also be named by its import path, "module:function" or "path.py:function". Everything must
reach another process, so lambdas and closures are refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GIVEN = {"prompts", "completions", "completion_ids"}  # what rewards are handed beside the columns


@dataclass
class Task:
    """What is learnt, and by what."""

    name: str
    dataset: object | None  # datasets.Dataset or IterableDataset; None = environments give the prompts
    rewards: list
    tools: list = field(default_factory=list)
    environments: dict = field(default_factory=dict)  # name -> factory; the only one's name is None


def load_task(spec, task_kwargs: dict | None = None) -> Task:
    """The task named by `spec`: path, path:function, module or module:function; or an object that is one.

    A function named in `spec` returns such an object. Raises ValueError for an unknown task or prompts that
    cannot be used, TypeError for a function that the rollout process cannot be handed or the model not shown.
    """
    task_kwargs = task_kwargs or {}
    source = locate(spec, "task")
    if inspect.isfunction(source):
        takes_kwargs = bool(inspect.signature(source).parameters)
        source, task_kwargs = (source(**task_kwargs), {}) if takes_kwargs else (source(), task_kwargs)
    name = spec if isinstance(spec, str) else type(spec).__name__
    environments = getattr(source, "environments", None) or {}
    if not isinstance(environments, dict):
        environments = {None: environments}
    factories = handed_over(list(environments.values()), "environment", name)
    task = Task(
        name,
        getattr(source, "dataset", None),
        handed_over(getattr(source, "rewards", None), "reward", name),
        handed_over(getattr(source, "tools", None), "tool", name),
        dict(zip(environments, factories, strict=True)),
    )
    names = [schema_of(tool)["function"]["name"] for tool in task.tools]
    if twice := [tool for tool in names if names.count(tool) > 1]:
        raise TypeError(f"task {name} has two tools named {twice[0]}")
    if callable(task.dataset):
        task.dataset = task.dataset(**task_kwargs)
    elif task_kwargs:
        raise ValueError(f"task_kwargs {sorted(task_kwargs)}: nothing in task {name} takes them")
    check_dataset(task)
    return task


def check_dataset(task: Task) -> None:
    """ValueError or TypeError unless the first row can be sampled and scored, a second time too."""
    name, dataset = task.name, task.dataset
    if dataset is None and not task.environments:
        raise ValueError(f"task {name} has no dataset: define dataset(**task_kwargs)")
    if dataset is None and None not in task.environments:
        raise ValueError(f"task {name} has several environments: a dataset must say which, in `environment`")
    if dataset is None:
        return
    rows = iter(dataset)
    if rows is dataset:
        raise ValueError(
            f"the dataset of task {name} can be read only once, being a {type(rows).__name__}: return a "
            "list, or datasets.IterableDataset.from_generator of it"
        )
    row = next(rows, None)
    if row is None:
        raise ValueError(f"the dataset of task {name} is empty")
    check_row(row, task, f"row 0 of task {name}")
    for reward in task.rewards:
        check_call(reward, {*row, *GIVEN} - {"prompt"}, name)


def eval_rows(spec: str, task: Task) -> list[dict]:
    """Held-out rows: what the function that `spec` names returns, or a .jsonl, .json or .parquet file."""
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(spec).suffix)
    if kind is None:
        function = locate(spec, "eval_dataset")
        if not callable(function):
            raise ValueError(f"{spec} is neither a file of rows nor path.py:function or module:function")
        rows = list(function())
    elif Path(spec).is_file():
        import datasets

        rows = list(datasets.load_dataset(kind, data_files=spec, split="train"))
    else:
        raise ValueError(f"there is no file {spec}")
    if not rows:
        raise ValueError(f"{spec} holds no rows")
    for number, row in enumerate(rows):
        check_row(row, task, f"row {number} of {spec}")
    return rows


def locate(spec, what: str):
    """The module, or the thing inside it, that `path.py`, `path.py:name`, `module` or `module:name` names."""
    if not isinstance(spec, str):
        return spec
    place, _, name = spec.partition(":")
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


def handed_over(functions, what: str, task_name: str) -> list:
    """A list of functions, those named by import path looked up; TypeError for one that cannot be pickled."""
    functions = [functions] if callable(functions) or isinstance(functions, str) else list(functions or [])
    functions = [locate(function, what) for function in functions]
    for function in functions:
        if not callable(function):
            hint = "call a served model from one"
            raise TypeError(f"{what} {function!r} of task {task_name} is no function; {hint}")
        inner = unwrapped(function)
        qualname = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        if "<lambda>" in qualname or "<locals>" in qualname:
            raise TypeError(
                f"{what} {qualname} of task {task_name} is a lambda or closure, which cannot reach the "
                "rollout process: use a module-level function, a partial of one or an instance of a class"
            )
    return functions


def unwrapped(function):
    """What a partial is one of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def source_names(rewards: list) -> list[str]:
    """Names in metrics: __name__, a partial's function's, an instance's class. A repeated one is numbered."""
    names = []
    for reward in map(unwrapped, rewards):
        name = getattr(reward, "__name__", type(reward).__name__)
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def check_call(reward, columns: set[str], task_name: str) -> None:
    """TypeError for a reward function that does not take what it will be handed."""
    with contextlib.suppress(ValueError):  # what is written in C has no signature to look at
        signature = inspect.signature(reward)
        try:
            signature.bind(**dict.fromkeys(columns))
        except TypeError as error:
            given = ", ".join(sorted(map(str, columns)))
            raise TypeError(
                f"reward {source_names([reward])[0]}{signature} of task {task_name} is called with {given}: "
                f"{error}. Let it take **columns, the rest of them, too"
            ) from None


def check_row(row: dict, task: Task, where: str) -> None:
    """ValueError unless a rollout can start from the row."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is no row of columns but {row!r}; of a DatasetDict choose one split")
    if task.rewards and (clash := row.keys() & GIVEN):
        raise ValueError(f"{where} has a column {min(clash)}, which rewards get from the rollouts: rename it")
    if task.environments:
        environment_name(row, task.environments, where)
    if "prompt" in row:
        check_prompt(row["prompt"], where)
    elif not task.environments:
        raise ValueError(f"{where} has no column `prompt`; its columns are {sorted(row)}")


def check_prompt(prompt, where: str) -> None:
    """ValueError unless it is a list of text messages."""
    wrong = [m for m in prompt if not is_message(m)] if isinstance(prompt, list) and prompt else [prompt]
    if wrong:
        raise ValueError(
            f"the prompt of {where} is not conversational: it must be a list of messages of text like "
            f"[{{'role': 'user', 'content': ...}}], and holds {str(wrong[0])[:80]!r}"
        )


def is_message(message) -> bool:
    """Has it a role, and a text, or parts that are texts? One that calls tools need not say anything."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        return len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return isinstance(content, str) or content is None and bool(message.get("tool_calls"))


# --------------------------------------------------------------------------------------------------- tools


def schema_of(tool) -> dict:
    """What the model is shown of a function; TypeError when it lacks a name, type hints or descriptions."""
    from transformers.utils import get_json_schema

    if not hasattr(tool, "__name__"):
        raise TypeError(f"tool {tool!r} has no __name__, under which the model could call it: use a function")
    try:
        return get_json_schema(tool)
    except Exception as error:  # of several kinds, all about the function's text
        raise TypeError(
            f"tool {tool.__name__}: {error}. A tool needs type hints and a docstring in Google's style that "
            "describes every argument"
        ) from error


def tools_of(environment) -> list:
    """The public methods of an environment, without those that the loop itself calls."""
    kind = type(environment)
    names = [name for name in dir(kind) if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(environment, n) for n in names if inspect.isfunction(inspect.getattr_static(kind, n))]


# ---------------------------------------------------------------------------------------------- environments


def environment_name(row: dict, factories: dict, where: str) -> str | None:
    """Which environment a row is for; None where there is only one. ValueError names the row."""
    if None in factories:
        return None
    if "environment" not in row:
        raise ValueError(
            f"{where} has no column `environment`, which says which of {sorted(factories)} it is"
        )
    name = row["environment"]
    if name not in factories:
        raise ValueError(f"{where} is for environment {name!r}; there are {sorted(factories)}")
    return name


class Environments:
    """Instances of a task's environments. Each serves one rollout at a time, the next one after a reset."""

    def __init__(self, factories: dict):
        self.factories = factories
        self._free = {name: [] for name in factories}

    def take(self, row: dict, where: str) -> tuple:
        """The name of a row's environment, and an instance that no other rollout uses."""
        name = environment_name(row, self.factories, where)
        try:
            return name, self._free[name].pop()
        except IndexError:
            return name, self.factories[name]()

    def give_back(self, name: str | None, environment) -> None:
        self._free[name].append(environment)


def opened(prompt: list[dict], text: str | None, where: str) -> list[dict]:
    """The prompt with what reset() said at the end of its last user message. ValueError names the row."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"reset() must return a text or None, not {text!r} ({where})")
    if text is None:
        if not prompt:
            raise ValueError(f"{where} has no prompt, and reset() returned none")
        return prompt
    place = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if place is None:
        return [*prompt, {"role": "user", "content": text}]
    content = prompt[place]["content"]
    more = [{"type": "text", "text": text}] if isinstance(content, list) else text
    return [*prompt[:place], prompt[place] | {"content": content + more}, *prompt[place + 1 :]]
