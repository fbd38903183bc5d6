"""Claims about task.py: what a task may bring, and what is refused before anything starts.

Run: pytest tests/test_task.py
"""

import textwrap

import pytest
import rollout_tasks

from task import load_task


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
        ("rollout_tasks:image", ValueError, "row 0 .* holds an image"),
        ("rollout_tasks:closure", TypeError, "closure.<locals>.<lambda> .* lambda or closure"),
    ],
)
def test_unusable_tasks_are_refused_by_name(spec, error, text):
    with pytest.raises(error, match=text):
        load_task(spec, {})


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
