"""Claims about calls.py: tools and environments, played by the rollout loop on a scripted server.

Run: pytest tests/test_calls.py
"""

import pytest
import rollout_tasks
from cases import case, reduced
from fake_server import FakeServer
from rollout_run import Run, calling, conversations, options_for, replies, tool_options

import rollout
from options import Options

# ---- tools


def test_tool_faults_go_back_to_the_model(tokenizer):
    given, expect = case("A03_tool_faults")["given"], case("A03_tool_faults")["expect"]["first_rollout"]
    calls = "".join(calling(c["name"], c["arguments"]) for c in given["turn_1_assistant_tool_calls"])
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calls, given["turn_2_assistant"]["content"])
        with Run(tool_options(fake, "with_tools", rollout_loop="rollout_tasks:Keeping")) as run:
            (group,) = run.groups(1)
            metrics = run.metrics()
            completion = conversations(run)[0].completion
    results = [m["content"] for m in completion if m["role"] == "tool"]
    assert len(results) == expect["tool_messages"]
    assert [text.startswith("error: ") for text in results] == expect["is_error"]
    assert results[0] == expect["content_0"] and expect["content_4_contains"] in results[4]
    assert "there is no tool ad; there are add, explode" in results[1]
    assert '{"a": 1, "b"' in results[2] and "'b'" in results[5], "the model reads what was wrong"
    assert completion[-1] == {"role": "assistant", "content": "done"}
    assert len(fake.requests) == 4 * expect["server_requests"] and group.dropped is None
    assert metrics["tools/call_frequency"] == (4 * expect["call_count"], 4)
    assert metrics["tools/failure_frequency"] == (4 * expect["failure_count"], 4 * expect["call_count"])
    assert metrics["tools/unknown_name_count"] == 4 * expect["unknown_name_count"]
    assert reduced(metrics["tools/parallel_calls_mean"]) == expect["parallel_calls_mean"]
    assert metrics["tools/add/call_count"] == 4 * 5 and metrics["tools/add/failure_count"] == 4 * 4
    assert len(metrics["tools/add/latency_s"]) == 4 * 2, "add ran for the first call, and failed in the sixth"
    assert metrics["tools/loop_exhausted_frac"] == (0, 4)
    assert not any("/ad/" in name for name in metrics), "invented names make no metrics"


def test_reply_without_a_call_is_one_request(tokenizer):
    expect = case("A03_tool_faults")["expect"]["second_rollout"]
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, case("A03_tool_faults")["given"]["second_rollout_turn_1"]["content"])
        with Run(tool_options(fake, "with_tools")) as run:
            run.groups(1)
            metrics = run.metrics()
    assert len(fake.requests) == 4 * expect["server_requests"]
    assert metrics["tools/call_frequency"] == (expect["call_count"], 4)
    assert metrics["tools/failure_frequency"] == (0, 0), "a rate with nothing behind it is NaN"


def test_turns_become_one_sample_of_exactly_the_sampled_tokens(tokenizer):
    with FakeServer() as fake:
        first = "let me see  " + calling("add", {"a": 2, "b": 3}).replace(", ", " ,")
        fake.answer = replies(tokenizer, first, "5")
        with Run(tool_options(fake, "with_tools")) as run:
            samples = run.groups(1)[0].samples
            metrics = run.metrics()
    assert len(samples) == 4 and metrics["rollout/fork_frac"] == (0, 4)
    sample = samples[0]
    assert tokenizer.decode(sample.input_ids[sample.trained]) == f"{first}<|end|>5<|end|>"
    text = tokenizer.decode(sample.input_ids)
    assert text.endswith(f"<|assistant|>{first}<|end|><|tool|>5<|end|><|assistant|>5<|end|>")
    assert '"name": "add"' in text[: text.index("<|user|>")], "the model is shown the tools"
    assert [t.startswith(s) for s, t in zip(*prompt_pairs(fake), strict=True)] == [True] * 4


def prompt_pairs(fake: FakeServer) -> tuple[list[str], list[str]]:
    """First and second prompts of the rollouts, as texts of ids."""
    texts = [" ".join(map(str, body["prompt"])) for body in fake.requests]
    first = min(texts, key=len)
    return [first] * (len(texts) // 2), [text for text in texts if text != first]


def test_calls_of_a_message_run_in_order_and_rollouts_side_by_side(tokenizer):
    with FakeServer() as fake:
        calls = calling("look_up", {"word": "a"}) + calling("wait", {"seconds": 0.3}) + calling("add", {})
        fake.answer = replies(tokenizer, calls, "done")
        options = tool_options(fake, "with_tools", rollout_loop="rollout_tasks:Keeping", num_generations=8)
        with Run(options) as run:
            run.groups(1)
            duration = reduced(run.metrics()["rollout/duration_s"])
            completion = conversations(run)[3].completion
    assert [m["name"] for m in completion if m["role"] == "tool"] == ["look_up", "wait", "add"]
    assert 0.6 <= duration < 1.5, "one after the other would take 4.8 s"


def test_rounds_of_calls_are_bounded(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calling("add", {"a": 1, "b": 1}))
        options = tool_options(
            fake, "with_tools", rollout_loop="rollout_tasks:Keeping", max_tool_calling_iterations=2
        )
        with Run(options) as run:
            run.groups(1)
            metrics = run.metrics()
            one = conversations(run)[0]
    assert len(one.turns) == 3 and one.tool_call_count == 2, "the third message's call is not run"
    assert metrics["tools/loop_exhausted_frac"] == (4, 4)
    assert metrics["completions/clipped_ratio"] == (0, 4)


def test_later_turn_without_room_ends_its_rollout(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calling("add", {"a": 1, "b": 1}))
        options = tool_options(fake, "with_tools", rollout_loop="rollout_tasks:Keeping")
        fake.max_model_len = 1500
        with Run(options) as run:
            run.groups(1)
            turns = conversations(run)[0].turns
            metrics = run.metrics()
    longest = max(len(body["prompt"]) for body in fake.requests)
    assert len(turns) > 3 and 1400 < longest < 1500
    assert metrics["completions/clipped_ratio"] == (4, 4)
    assert metrics["tools/loop_exhausted_frac"] == (0, 4)


def test_message_that_was_cut_short_calls_nothing(tokenizer):
    def answer(body):
        ids = tokenizer.encode(calling("add", {"a": 1, "b": 1}))
        return ids, [{token: -1.0} for token in ids], "length"

    with FakeServer() as fake:
        fake.answer = answer
        with Run(tool_options(fake, "with_tools")) as run:
            run.groups(1)
            assert run.metrics()["completions/clipped_ratio"] == (4, 4)
    assert len(fake.requests) == 4


def test_template_that_rewrites_turns_is_reported_and_forks(tokenizer, tmp_path, capfd):
    template = tmp_path / "forgetful.jinja"
    forget = "(message.content if loop.last else message.content.split('</think>')[-1])"
    template.write_text(tokenizer.chat_template.replace('(message.content or "")', forget))
    with FakeServer() as fake:
        said = "<think>hm</think>" + calling("add", {"a": 2, "b": 3})
        fake.answer = replies(tokenizer, said, "5")
        with Run(tool_options(fake, "with_tools", chat_template=str(template))) as run:
            samples = run.groups(1)[0].samples
            metrics = run.metrics()
    printed = capfd.readouterr().out
    assert "the chat template rewrites earlier turns" in printed
    assert len(samples) == 8 and metrics["rollout/fork_frac"] == (4, 4)
    assert "<think>" not in tokenizer.decode(samples[1].input_ids)
    trained = [tokenizer.decode(s.input_ids[s.trained]) for s in samples[:2]]
    assert trained == [f"{said}<|end|>", "5<|end|>"]


def test_tools_that_no_template_can_carry_stop_the_run(model):
    with FakeServer() as fake:
        options = options_for(model, fake, task="rollout_tasks:with_tools")
        with (
            Run(options) as run,
            pytest.raises(ValueError, match="not known how .* writes tool calls"),
        ):
            run.groups(1)


def test_tools_are_checked_against_task_and_options():
    loop, load_task = rollout.RolloutLoop, rollout.load_task
    plain, tools = load_task("rollout_tasks:lengths"), load_task("rollout_tasks:with_tools")
    rollout.check_task(tools, loop, Options(max_tool_calling_iterations=3))
    with pytest.raises(ValueError, match="--max_tool_calling_iterations has no effect: task .*lengths"):
        rollout.check_task(plain, loop, Options(max_tool_calling_iterations=3))
    with pytest.raises(ValueError, match="no dataset.* set --max_steps"):
        rollout.check_task(load_task("rollout_tasks:no_dataset"), loop, Options())


# ---- environments


def test_environment_is_reset_for_every_rollout_and_scores_it(tokenizer):
    with FakeServer() as fake:
        texts = iter([3, 2, 3, 1] * 2)  # per rollout: the step of its first call

        def answer(body):
            if "increment" in tokenizer.decode(body["prompt"][-60:]):
                return replies(tokenizer, "done")(body)
            return replies(tokenizer, calling("increment", {"step": next(texts)}), "done")(body)

        fake.answer = answer
        options = tool_options(fake, "counting", task_kwargs={"size": 2}, max_concurrent_rollouts=4)
        rollout_tasks.Counter.made = 0
        with Run(options) as run:
            groups = run.groups(2)
            metrics = run.metrics()
        assert rollout_tasks.Counter.made == 4, "one per concurrent rollout, used again"
        assert sorted(metrics["reward"]) == [0.0] * 4 + [1.0] * 4
    prompt = tokenizer.decode(fake.requests[0]["prompt"])
    assert "<|user|>0 0 Count to 3.<|end|>" in prompt
    assert '"name": "add"' in prompt and '"name": "increment"' in prompt
    assert all(name not in prompt for name in ("get_reward", "reset", "broken", "_hidden"))
    assert groups[0].samples[0].metrics["rewards/Counter/group_std"] == 0.5
    assert len(metrics["env/reset_s"]) == len(metrics["env/reward_s"]) == 8


def test_row_sees_the_tools_of_its_own_environment_only(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, "done")
        with Run(tool_options(fake, "two_kinds")) as run:
            groups = sorted(run.groups(2), key=lambda g: g.group_id)
    first, second = (tokenizer.decode(fake.requests[i]["prompt"]) for i in (0, -1))
    assert "increment" in first and "look" not in first and "Count to 3." in first
    assert "look" in second and "increment" not in second and "<|user|>1 1<|end|>" in second
    assert groups[0].samples[0].metrics["rewards/Counter/mean"] == 0.0
    assert not any("Silent" in name for name in groups[1].samples[0].metrics)


def test_environments_may_give_the_prompts(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, "done")
        with Run(tool_options(fake, "no_dataset", max_steps=3)) as run:
            groups = run.groups(5)
            run.link.again_in.send([1])
            run.until(lambda: sum(g.group_id == 1 for g in run.groups()) == 2)
    assert all(g.dropped == "equal rewards" and g.dataset_size is None for g in groups)
    assert "<|user|>Count to three.<|end|>" in tokenizer.decode(fake.requests[0]["prompt"])


def test_instance_of_a_rollout_that_ran_out_of_time_is_not_used_again(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calling("increment", {"step": 1}), "done")
        rollout_tasks.Late.made = 0
        options = tool_options(fake, "counting", task_kwargs={"kind": "Late", "size": 2}, rollout_timeout=0.3)
        with Run(options) as run:
            assert [g.dropped for g in run.groups(2)] == ["fewer than two scored"] * 2
            assert run.metrics()["rollout/timeout_count"] == 8
    assert rollout_tasks.Late.made == 8


def test_environment_scores_no_rollout_whose_prompt_had_no_room(tokenizer):
    with FakeServer() as fake:
        options = tool_options(fake, "counting")
        fake.max_model_len = 100
        with Run(options) as run:
            assert run.groups(1)[0].dropped == "fewer than two scored"
            assert "env/reset_s" in run.metrics() and "env/reward_s" not in run.metrics()


@pytest.mark.parametrize(
    "task, kwargs, error",
    [
        ("counting", {"kind": "BadReset"}, "BadReset.reset failed on dataset row 0: OSError: no such level"),
        (
            "counting",
            {"kind": "BadReward"},
            "BadReward.get_reward on dataset row 0: TypeError: a reward must be a number",
        ),
        ("counting", {"kind": "Silent"}, "nothing scores Silent"),
        ("two_kinds", {"names": ["Counter", "Chess"]}, "dataset row 1 is for environment 'Chess'; there are"),
    ],
)
def test_broken_environment_stops_the_run_by_name(tokenizer, task, kwargs, error):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, "done")
        with Run(tool_options(fake, task, task_kwargs=kwargs)) as run, pytest.raises(Exception, match=error):
            run.groups(3)


def test_skipped_errors_of_an_environment_score_nothing(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, "done")
        options = tool_options(fake, "counting", task_kwargs={"kind": "BadReward"}, on_reward_error="skip")
        with Run(options) as run:
            assert run.groups(1)[0].dropped == "fewer than two scored"
            assert run.metrics()["rewards/BadReward/error_count"] == 4
