"""python -m pytest tests/test_options.py: bad options are refused before anything expensive starts."""

import dataclasses
import json

import pytest

import options
from options import OptionError, Options, check, parse


def test_defaults_are_valid_and_documented():
    check(Options(model="m", task="t"))
    assert all(f.metadata.get("help") for f in dataclasses.fields(Options))


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_generations", 1),
        ("temperature", 0.0),
        ("max_tool_calling_iterations", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.0),
        ("max_staleness", -1),
        ("max_steps", 0),
        ("gradient_accumulation_steps", 0),
        ("learning_rate", -1.0),
        ("max_grad_norm", 0.0),
        ("epsilon", 1.0),
        ("weight_sync_steps", 0),
        ("eval_steps", 0),
        ("logging_steps", 0),
        ("vllm_server_timeout", 0.0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_range(name, value):
    with pytest.raises(OptionError, match=rf"--{name} is {value}; it must be"):
        check(Options(model="m", task="t", **{name: value}))


@pytest.mark.parametrize(
    "values, text",
    [
        ({"model": ""}, "--model is required"),
        ({"top_p": 0.9}, "need --top_k"),
        ({"min_p": 0.1}, "need --top_k"),
        ({"lr_scheduler_type": "cosine"}, "--max_steps"),
        ({"score_centering": False, "score_centering_tail": "drop"}, "no effect"),
        ({"vllm_importance_sampling_clip_min": 5.0}, "must be below"),
        ({"vllm_server_base_url": ["embedded", "http://x"]}, "stands alone"),
        ({"eval_steps": 4}, "only together"),
        ({"rollout_only": True, "max_steps": 4}, "--num_train_epochs bounds it"),
        ({"eval_dataset": "x.jsonl"}, "only together"),
        ({"eval_dataset": "x.jsonl", "eval_steps": 3, "weight_sync_steps": 2}, "must be a multiple"),
        ({"replay": "absent.jsonl"}, "there is no such file"),
        ({"replay": __file__}, "needs --token_budget"),
        ({"replay": __file__, "token_budget": 9, "record": "x"}, "--record has no effect with --replay"),
        ({"replay": __file__, "token_budget": 9, "log_completions": True}, "--log_completions has no effect"),
    ],
)
def test_combinations_that_cannot_work_are_refused(values, text):
    with pytest.raises(OptionError, match=text):
        check(Options(**{"model": "m", "task": "t", **values}))


def test_the_command_line_wins_over_a_file(tmp_path):
    for name, text in (
        ("a.json", json.dumps({"model": "x", "seed": 7, "top_k": 3})),
        ("a.yaml", "model: x\nseed: 7\n"),
    ):
        path = tmp_path / name
        path.write_text(text)
        parsed = parse([str(path), "--seed", "8"])
        assert (parsed.model, parsed.seed) == ("x", 8)


def test_a_file_with_an_unknown_option_names_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("modle: x\n")
    with pytest.raises(OptionError, match="modle"):
        parse([str(path)])


def test_json_options_become_dicts_and_lists_are_words():
    parsed = parse(["--task_kwargs", '{"size": 3}', "--vllm_server_base_url", "http://a", "http://b"])
    assert parsed.task_kwargs == {"size": 3}
    assert parsed.vllm_server_base_url == ["http://a", "http://b"]
    with pytest.raises(OptionError, match="--task_kwargs"):
        parse(["--task_kwargs", "[1]"])


@pytest.mark.parametrize(
    "arguments", [["--temperature", "0"], ["--no_such_option", "1"], ["--max_steps", "x"], ["--task", ""]]
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        options.parse_or_exit(["--model", "m", "--task", "t", *arguments])
    assert exit.value.code == 2
    assert "error" in capsys.readouterr().err


def test_the_list_of_options_grows_by_decision_only():
    """Adding an option is a decision: add it here too, and to README."""
    assert len(dataclasses.fields(Options)) == 68
