"""Claims about task.py: what a task may bring, and what is refused before anything starts.

Run: pytest tests/test_task.py
"""

import functools
import json
import textwrap
import types

import pytest
import rollout_tasks

from task import eval_rows, load_task, opened


@pytest.mark.parametrize(
    "spec, error, text",
    [
        ("tasks/absent.py", ValueError, "no file tasks/absent.py"),
        ("absent_module", ValueError, "no module absent_module"),
        ("rollout_tasks:absent", ValueError, "rollout_tasks has no absent"),
        ("rollout_tasks", ValueError, "rollout_tasks has no dataset"),
        ("rollout_tasks:empty", ValueError, "dataset of task rollout_tasks:empty is empty"),
        ("rollout_tasks:no_prompt", ValueError, r"no column `prompt`; its columns are \['question'\]"),
        ("rollout_tasks:plain_text", ValueError, "not conversational"),
        ("rollout_tasks:image", ValueError, "row 0 .* not conversational.*image"),
        ("rollout_tasks:closure", TypeError, "closure.<locals>.<lambda> .* lambda or closure"),
    ],
)
def test_unusable_tasks_are_refused_by_name(spec, error, text):
    with pytest.raises(error, match=text):
        load_task(spec, {})


def user(content) -> dict:
    return {"prompt": [{"role": "user", "content": content}]}


def task_of(dataset, *rewards) -> types.SimpleNamespace:
    return types.SimpleNamespace(dataset=dataset, rewards=list(rewards or [rollout_tasks.by_place]))


@pytest.mark.parametrize(
    "row, text",
    [
        ("train", "'train'; of a DatasetDict choose one split"),
        (["prompt"], "no row of columns"),
        *((user(content), "row 0 .* not conversational") for content in (None, 5, {"a": 1}, ["a"])),
        (user([{"type": "text", "text": None}]), "not conversational"),
        (user([{"type": "video", "video": "x"}]), "not conversational"),
        ({"prompt": [{"role": "user"}]}, "not conversational"),
        ({"prompt": [{"role": None, "content": "x"}]}, "not conversational"),
        (user("x") | {"completions": 1}, "has a column completions, which rewards get"),
    ],
)
def test_rows_that_are_no_text_conversation_are_refused(row, text):
    with pytest.raises(ValueError, match=text):
        load_task(task_of([row]))


def test_a_message_with_calls_needs_no_content():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    load_task(task_of([{"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}]}]))


def test_a_dataset_that_can_be_read_only_once_is_refused():
    with pytest.raises(ValueError, match="read only once, being a generator"):
        load_task(task_of(user("x") for _ in range(3)))


def takes_answer(prompts, completions, completion_ids, answer):
    return [0.0] * len(prompts)


def test_a_reward_that_cannot_be_called_with_the_columns_is_refused_at_once():
    load_task(task_of([user("x") | {"answer": 1}], takes_answer, functools.partial(takes_answer), dict))
    rows = user("x"), user("x") | {"answer": 1, "level": 2}, user("x") | {"answer": 1, 3: 2}
    for row, text in zip(rows, ("missing .* 'answer'", "'level'", "3, .*must be strings"), strict=True):
        with pytest.raises(TypeError, match=rf"reward takes_answer\(.*{text}.*\*\*columns"):
            load_task(task_of([row], takes_answer))


def test_task_is_found_by_path_and_by_module(tmp_path):
    file = tmp_path / "numbers.py"
    file.write_text(
        textwrap.dedent("""
            def dataset(size, start=0):
                return [{"prompt": [{"role": "user", "content": str(start + i)}]} for i in range(size)]
            def good(completions, **_):
                return [0.0] * len(completions)
            rewards = good
        """)
    )
    task = load_task(str(file), {"size": 3, "start": 5})
    assert len(task.dataset) == 3 and task.rewards[0].__name__ == "good"
    assert load_task("rollout_tasks:lengths", {"size": 2}).dataset == rollout_tasks.prompts(2)
    with pytest.raises(ValueError, match=r"task_kwargs \['size'\]: nothing in task .* takes them"):
        load_task("rollout_tasks:Fixed", {"size": 2})


def test_held_out_rows_come_from_a_function_or_a_file(tmp_path):
    task = load_task("rollout_tasks:lengths")
    assert eval_rows("rollout_tasks:held_out", task) == rollout_tasks.held_out()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rollout_tasks.held_out()))
    assert eval_rows(str(path), task) == rollout_tasks.held_out()
    path.write_text('{"question": "1"}\n')
    for spec, text in [
        (str(path), "row 0 of .* has no column `prompt`"),
        ("absent.jsonl", "no file absent.jsonl"),
        ("rollout_tasks:TOOLS", "neither a file of rows"),
    ]:
        with pytest.raises(ValueError, match=text):
            eval_rows(spec, task)


@pytest.mark.parametrize(
    "tools, text",
    [
        (["undescribed"], "tool undescribed: .*no description for the argument 'a'"),
        (["add", "add"], "two tools named add"),
        (["Judge"], "has no __name__"),
        ([5], "tool 5 of task .* is no function"),
    ],
)
def test_tools_that_the_model_could_not_be_shown_are_refused(tools, text):
    found = [getattr(rollout_tasks, name) if isinstance(name, str) else name for name in tools]
    found = [tool() if tool is rollout_tasks.Judge else tool for tool in found]
    source = rollout_tasks.tools_of_kind(found)
    with pytest.raises(TypeError, match=text):
        load_task(source)


def test_functions_of_a_task_may_be_named_by_import_path():
    task = load_task("rollout_tasks:with_tools")
    assert task.rewards == [rollout_tasks.by_place] and task.tools == rollout_tasks.TOOLS
    with pytest.raises(ValueError, match="rollout_tasks has no absent"):
        load_task(rollout_tasks.tools_of_kind(["rollout_tasks:absent"]))
    with pytest.raises(TypeError, match="tool .*nested_tool.<locals>.inner .* is a lambda or closure"):
        load_task("rollout_tasks:nested_tool")


@pytest.mark.parametrize(
    "prompt, text, wanted",
    [
        ([{"role": "user", "content": "a"}], " b", [{"role": "user", "content": "a b"}]),
        ([{"role": "user", "content": "a"}], None, [{"role": "user", "content": "a"}]),
        ([], "b", [{"role": "user", "content": "b"}]),
        (
            [{"role": "system", "content": "s"}],
            "b",
            [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "b",
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
    ],
)
def test_what_reset_says_ends_the_last_user_message(prompt, text, wanted):
    before = repr(prompt)
    assert opened(prompt, text, "row 3") == wanted and repr(prompt) == before
    for said, error in ((5, "must return a text or None, not 5 .row 3"), (None, "row 3 has no prompt")):
        with pytest.raises(ValueError, match=error):
            opened([], said, "row 3")


def test_rows_that_name_no_environment_are_refused():
    with pytest.raises(ValueError, match="row 0 of task .* is for environment 'Chess'; there are"):
        load_task(rollout_tasks.two_kinds(("Chess", "Counter")))
    rows = rollout_tasks.two_kinds()
    rows.dataset = rollout_tasks.prompts(1)
    with pytest.raises(ValueError, match="has no column `environment`"):
        load_task(rows)
    rows.dataset = None
    with pytest.raises(ValueError, match="has several environments"):
        load_task(rows)
