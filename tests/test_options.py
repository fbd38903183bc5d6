"""python -m pytest tests/test_options.py: bad options are refused before anything expensive starts."""

import dataclasses
import json
import re

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
        ("temperature", 0.001),
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
        ("beta", 1.5),
        ("teacher_top_k", 0),
        ("teacher_temperature", 0.0),
        ("distill_coef", -1.0),
        ("router_aux_loss_coef", -0.1),
        ("weight_sync_steps", 0),
        ("eval_steps", 0),
        ("logging_steps", 0),
        ("vllm_server_timeout", 0.0),
        ("vllm_server_timeout", 1e30),
        ("ddp_timeout", 10**12),
        ("seed", -1),
        ("seed", 2**70),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_range(name, value):
    with pytest.raises(OptionError, match=re.escape(f"--{name} is {value}; it must be")):
        check(Options(model="m", task="t", **{name: value}))


@pytest.mark.parametrize(
    "values, text",
    [
        ({"model": ""}, "--model is required"),
        ({"top_p": 0.9}, "need --top_k"),
        ({"min_p": 0.1}, "need --top_k"),
        ({"lr_scheduler_type": "cosine"}, "--max_steps"),
        ({"lr_scheduler_kwargs": {"num_cycles": 1}}, "num_cycles has no effect"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "max_steps": 9}, "needs one of min_lr"),
        (
            {"lr_scheduler_type": "cosine", "max_steps": 9, "lr_scheduler_kwargs": {"num_cycles": "1"}},
            "num_cycles is '1'; it must be a number",
        ),
        ({"score_centering": False, "score_centering_tail": "drop"}, "no effect"),
        ({"score_centering": False, "num_sampler_logprobs": 4}, "no effect"),
        ({"per_device_train_batch_size": 4}, "no effect without --token_budget 0"),
        ({"run_name": "a", "report_to": "tensorboard"}, "no effect without --report_to trackio"),
        ({"embedded_max_num_seqs": 4}, "no effect without --vllm_server_base_url embedded"),
        ({"num_completions_to_print": 4}, "no effect without --log_completions"),
        ({"max_steps": 5, "num_train_epochs": 1.0}, "no effect with --max_steps"),
        ({"max_steps": 5, "warmup_steps": 5}, "--warmup_steps 5 leaves nothing"),
        ({"num_generations": 1}, "at least 2: an advantage compares"),
        ({"beta": 0.5}, "--beta has no effect without --objective distill or --distill_coef"),
        ({"teacher_top_k": 4}, "--teacher_top_k has no effect without"),
        ({"teacher_temperature": 2.0}, "--teacher_temperature has no effect without"),
        ({"add_tail_bucket": False}, "--add_tail_bucket has no effect without"),
        ({"teacher_server_urls": {"a": "http://x"}}, "--teacher_server_urls has no effect without"),
        ({"objective": "distill", "epsilon": 0.1}, "--epsilon has no effect with --objective distill"),
        ({"objective": "distill", "score_centering": False}, "--score_centering has no effect with"),
        ({"objective": "distill", "vllm_importance_sampling_clip_max": 2.0}, "no effect with --objective"),
        ({"objective": "distill", "distill_coef": 0.5}, "--distill_coef has no effect with --objective"),
        ({"objective": "distill", "on_reward_error": "skip"}, "--on_reward_error has no effect"),
        ({"objective": "distill", "beta": 1.0, "add_tail_bucket": False}, "--beta 1 needs"),
        ({"objective": "distill", "teacher_server_urls": ["a=b"]}, "--teacher_server_urls b: a URL starts"),
        ({"lora_sync": "merged"}, "--lora_sync has no effect without --lora_r"),
        (
            {"lora_r": 4, "lora_sync": "adapter", "rollout_only": True},
            "--lora_sync has no effect where nothing",
        ),
        ({"lora_r": 4, "lora_sync": "adapter", "lora_modules_to_save": ["norm"]}, "leave one out"),
        ({"learning_rate": float("inf")}, "--learning_rate is inf"),
        ({"vllm_importance_sampling_clip_min": 5.0}, "must be below"),
        ({"vllm_server_base_url": ["embedded", "http://x"]}, "stands alone"),
        ({"vllm_server_base_url": ["http://"]}, "names a host"),
        ({"vllm_server_base_url": ["http://x y"]}, "names a host"),
        ({"vllm_server_base_url": ["http://x:99999"]}, "names a host"),
        ({"vllm_server_base_url": ["http://x", "http://x/"]}, "names a server twice"),
        ({"objective": "distill", "teacher_server_urls": {"a": 5}}, "--teacher_server_urls 5: a URL starts"),
        ({"eval_dataset": "", "eval_steps": 1}, "--eval_dataset is empty"),
        ({"record": ""}, "--record is empty"),
        ({"record": "."}, "--record . is a directory"),
        ({"lora_r": 4, "lora_target_modules": ["q_proj", "("]}, "--lora_target_modules . is no regular expr"),
        ({"eval_steps": 4}, "only together"),
        ({"rollout_only": True, "max_steps": 4}, "as long as --num_train_epochs says"),
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


def test_teachers_are_words_or_an_object_and_one_is_the_default():
    distill = ["--objective", "distill", "--teacher_server_urls"]
    urls = {"a": "http://x:1", "b": "http://y?z=1"}
    assert parse([*distill, "a=http://x:1", "b=http://y?z=1"]).teacher_server_urls == urls
    assert parse([*distill, json.dumps(urls)]).teacher_server_urls == urls
    assert parse(distill[:2]).teacher_server_urls == {"default": "http://localhost:8001"}
    assert parse([]).teacher_server_urls is None
    check(Options(model="m", task="t", objective="distill", num_generations=1, top_p=0.9))
    check(Options(model="m", task="t", distill_coef=0.5, beta=0.5, teacher_server_urls=urls))
    for words in (["http://x"], ["a=http://x", "a=http://y"], ["=http://x"]):
        with pytest.raises(OptionError, match="words name=url, each name once"):
            parse([*distill, *words])


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
    "text, error",
    [
        ("on_reward_error: ignore", "invalid choice"),
        ("max_steps: 10.5", "invalid int"),
        ("num_generations: null", "--num_generations: it needs a value"),
        ("learning_rate: [1, 2]", "no such option: 2"),
        ("task_kwargs: [1]", "--task_kwargs must be a JSON object"),
        ("a: [1", "neither YAML nor JSON"),
        ("- 1", "one mapping"),
        ("learning_rate: -0.5e-6", "--learning_rate is -5e-07"),
        ("vllm_server_base_url: []", "--vllm_server_base_url is empty"),
        ("bf16: 3", "invalid bool value"),
    ],
)
def test_values_of_a_file_are_checked_as_if_they_had_been_typed(tmp_path, capsys, text, error):
    path = tmp_path / "a.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SystemExit) as exit:
        options.parse_or_exit([str(path), "--model", "m", "--task", "t"])
    told = capsys.readouterr().err
    assert exit.value.code == 2 and error in told and "usage:" not in told


def test_none_is_no_value_and_booleans_of_a_file_are_words(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("resume_from_checkpoint: true\nvllm_importance_sampling_clip_max: null\nbf16: false\n")
    parsed = parse([str(path), "--vllm_importance_sampling_clip_min", "none", "--token_budget", "None"])
    assert parsed.resume_from_checkpoint == "true" and parsed.bf16 is False
    assert parsed.vllm_importance_sampling_clip_min is parsed.vllm_importance_sampling_clip_max is None
    assert parse(["--rollout_timeout", "none", "--rollout_timeout", "3"]).rollout_timeout == 3.0


def test_what_a_run_resolved_is_a_file_of_options_for_the_next(tmp_path):
    path = tmp_path / "options.json"
    for arguments in ([], ["--objective", "distill"], ["--lora_r", "4", "--report_to", "none"]):
        first = parse(["--model", "m", "--task", "t", "--output_dir=-x", *arguments])
        path.write_text(options.describe(first))
        assert check(parse([str(path)])) == first
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="neither YAML nor JSON"):
        parse([str(path)])


def test_options_cannot_be_abbreviated():
    with pytest.raises(OptionError, match="no such option: --max_step"):
        parse(["--max_step", "3"])


def test_what_dropout_does_to_ratio_and_branches_is_a_notice(capsys):
    check(Options(model="m", lora_r=4, lora_dropout=0.1))
    said = capsys.readouterr().out
    assert "the ratio of an unchanged policy is not 1" in said and "branches of a prefix tree share" in said


def test_epsilon_under_score_centering_is_a_notice(capsys):
    check(Options(model="m", task="t", epsilon=0.1))
    assert "only feeds the clip_ratio metrics" in capsys.readouterr().out


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
    assert len(dataclasses.fields(Options)) == 91
