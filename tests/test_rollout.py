"""Claims about rollout.py: the loop in this process, on a scripted server.

Run: pytest tests/test_rollout.py
"""

import asyncio
import contextlib
import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rollout_tasks
from cases import case, reduced
from fake_server import EOS, VOCABULARY, FakeServer, choice_of
from rollout_run import Run, calling, options_for, replies, tool_options

import rollout
from conversation import read_template
from rollout import (
    GroupMessage,
    MetricsMessage,
    RolloutError,
)

HERE = Path(__file__).parent


# ---- generation


def test_every_prompt_gives_one_whole_group_in_order(model):
    with FakeServer() as fake, Run(options_for(model, fake)) as run:
        groups = run.groups(4)
        time.sleep(0.2)
        assert len(run.groups()) == 4, "one epoch is 4 prompts"
    assert sorted(g.group_id for g in groups) == [0, 1, 2, 3]
    assert all(len(g.samples) == 4 and g.dropped is None and g.dataset_size == 4 for g in groups)
    one = min(groups, key=lambda g: g.group_id)
    sample = one.samples[1]
    assert sample.input_ids[:5].tolist() == [3, 7, 7, 2, 4], "user 0 0 <eos> assistant"
    assert not sample.trained[:5].any() and sample.trained[5:].all() and sample.input_ids[-1] == EOS
    assert sample.topk_ids.shape == (len(sample.input_ids), 3) and sample.candidate_ids is None
    assert (sample.version, sample.row_index, sample.rollout_id) == (1, 0, 1)
    assert sample.advantage == pytest.approx((1 - 1.5) / math.sqrt(1.25))
    assert one.generated == {"samples": 4, "tokens": sum(int(s.trained.sum()) for s in one.samples)}
    assert sample.metrics["rewards/by_place/mean"] == 1.0 and sample.metrics["reward_kept"] == 1.0
    assert abs(sample.enqueued_at - time.time()) < 20


def test_every_request_has_a_seed_of_its_own(model):
    with FakeServer() as fake, Run(options_for(model, fake, num_train_epochs=2.0)) as run:
        run.groups(8)
        seeds = [body["seed"] for body in fake.requests]
    assert len(set(seeds)) == 32
    with FakeServer() as fake, Run(options_for(model, fake)) as run:
        run.groups(4)
        assert {body["seed"] for body in fake.requests} < set(seeds), "and a run can be repeated"


def test_requests_ask_for_no_more_log_probabilities_than_the_objective_needs(model):
    for changes, wanted in [
        ({}, 3),
        ({"score_centering": False}, 0),
        ({"top_k": 5, "top_p": 0.9}, 5),
        ({"top_k": 2}, 2),
        ({"top_k": 2, "score_centering": False}, 2),
    ]:
        with FakeServer() as fake, Run(options_for(model, fake, **changes)) as run:
            sample = run.groups(1)[0].samples[0]
        assert fake.requests[0]["logprobs"] == wanted
        assert fake.requests[0]["stop_token_ids"] == [EOS, 5]
        assert (sample.candidate_ids is not None) == ("top_k" in changes)
        assert (sample.topk_ids is not None) == changes.get("score_centering", True)


def test_resume_starts_behind_what_is_done(model):
    expect = case("A20_dropped_group_accounting")["expect"]["resume"]
    options = options_for(model, task_kwargs={"size": 3}, num_train_epochs=3.0)
    with FakeServer() as fake:
        options.vllm_server_base_url = [fake.url]
        with Run(options, position=7) as run:
            groups = run.groups(expect["groups_until_the_end"])
            time.sleep(0.2)
            groups = run.groups()
        assert [g.group_id for g in groups] == [7, 8]
        assert groups[0].samples[0].row_index == expect["first_prompt_row"]
        with Run(options, position=4, finished={6, 8}) as run:
            assert sorted(g.group_id for g in run.groups(3)) == [4, 5, 7]


def test_prompt_that_was_too_old_is_sampled_again_with_other_seeds(model):
    with FakeServer() as fake, Run(options_for(model, fake)) as run:
        run.groups(4)
        run.link.again_in.send([2])
        again = run.groups(5)[-1]
        assert again.group_id == 2 and len(again.samples) == 4
        assert len({body["seed"] for body in fake.requests}) == 20


def test_failing_requests_are_retried_and_counted(model):
    with FakeServer() as fake:
        fake.script = ["500", "reset", "503", "truncated", "cut"]
        with Run(options_for(model, fake)) as run:
            assert all(len(g.samples) == 4 for g in run.groups(4))
            asyncio.run_coroutine_threadsafe(run.loop.routing.look(), run.event_loop).result(5)
            assert run.metrics()["rollout/vllm_retry_count"] == 5


def test_refused_request_stops_the_run_with_the_servers_text(model):
    text = case("A06_http_retries")["expect"]["rejected"]["error_text_contains"]
    with FakeServer() as fake:
        fake.script = [(400, {"error": {"message": text}})]
        with (
            Run(options_for(model, fake)) as run,
            pytest.raises(RolloutError, match=f"dataset row 0 .*{text}"),
        ):
            run.groups(4)


def test_answer_with_a_wrong_number_of_tokens_stops_the_run(model):
    with FakeServer() as fake:
        fake.script = [(200, {"choices": [choice_of([9, EOS], [{9: -0.5}, {EOS: -0.5}], "stop")]})]
        fake.script[0][1]["choices"][0]["token_ids"].append(EOS)
        options = options_for(model, fake, score_centering=False)
        with Run(options) as run, pytest.raises(RolloutError, match="row 0 .* 3 token ids but 2 log-prob"):
            run.groups(1)


def test_token_that_the_model_has_no_row_for_stops_the_run(model):
    def answer(token):
        return lambda body: ([token, EOS], [{token: -0.5}, {EOS: -0.5}], "stop")

    with FakeServer() as fake:
        fake.answer = answer(VOCABULARY - 1)  # a row of the head without a word
        with Run(options_for(model, fake, score_centering=False)) as run:
            assert run.groups(1)[0].samples[0].input_ids[-2] == VOCABULARY - 1
        fake.answer = answer(VOCABULARY)
        with Run(options_for(model, fake)) as run, pytest.raises(RolloutError, match="token 60, .* 60 rows"):
            run.groups(1)


def test_samples_carry_the_version_their_group_began_with(model):
    given = case("A18_transfer_order_and_version")["given"]["in_flight"]
    with FakeServer() as fake:
        fake.gate = threading.Event()
        with Run(options_for(model, fake), version=given["started_at_version"]) as run:
            run.until(lambda: len(fake.requests) == 4)
            for version in given["versions_published_while_generating"]:
                run.link.version.value = version
            fake.gate.set()
            first, second = sorted(run.groups(2), key=lambda g: g.group_id)[:2]
    expect = case("A18_transfer_order_and_version")["expect"]["in_flight"]
    assert {s.version for s in first.samples} == {expect["stamped_version"]}
    assert {s.version for s in second.samples} == {5}
    salts = [body["cache_salt"] for body in fake.requests]
    assert salts[:4] == [str(given["started_at_version"])] * 4 and salts[-1] == "5", (
        "no keys of older weights"
    )


def test_versions_the_server_reports_win_over_the_groups(model):
    with FakeServer() as fake:
        fake.answer = lambda body: ([9, 8, EOS], [{9: -1.0}, {8: -1.0}, {EOS: -1.0}], "stop")
        fake.weight_versions = [
            {"version": "4", "start": 0, "end": 1},
            {"version": "5", "start": 1, "end": 3},
        ]
        with Run(options_for(model, fake, score_centering=False), version=3) as run:
            sample = run.groups(1)[0].samples[0]
    assert sample.version == 4 and sample.token_version[sample.trained].tolist() == [4, 5, 5]


def test_a_server_that_was_restarted_is_never_used_quietly(model):
    """It samples with the weights it started with, under a label that no update has set."""
    with FakeServer() as fake:
        fake.answer = lambda body: ([9, EOS], [{9: -1.0}, {EOS: -1.0}], "stop")
        fake.weight_versions = [{"version": "default", "start": 0, "end": 2}]
        options = options_for(model, fake, score_centering=False)
        with Run(options, version=3) as run, pytest.raises(RolloutError, match="it was restarted"):
            run.groups(1)


def test_a_prompt_without_room_for_a_token_is_skipped_by_name_and_the_run_goes_on(model, capfd):
    with FakeServer() as fake:
        fake.max_model_len = 5  # as long as the prompts
        with Run(options_for(model, fake, score_centering=False)) as run:
            groups = run.groups(2)
            assert run.metrics()["rollout/prompt_too_long_count"] >= 2
    assert all(group.dropped and not group.samples for group in groups)
    assert "dataset row 0 is skipped" in capfd.readouterr().out


def test_rollout_over_its_time_is_abandoned_and_its_group_goes_on(model):
    with FakeServer() as fake:
        slow = threading.Event()

        def answer(body, first=[True]):  # noqa: B006
            if first.pop() if first else False:
                slow.wait(10)
            return [9, EOS], [{9: -1.0}, {EOS: -1.0}], "stop"

        fake.answer = answer
        with Run(options_for(model, fake, rollout_timeout=2.0, score_centering=False)) as run:
            group = next(g for g in run.groups(4) if g.group_id == 0)
            assert run.metrics()["rollout/timeout_count"] == 1
            assert run.metrics()["completions/clipped_ratio"] == (1, 16), "it counts as cut off"
        slow.set()
    assert len(group.samples) == 3 and group.dropped is None
    np.testing.assert_allclose(
        sorted(s.advantage for s in group.samples), [-1.2247449, 0, 1.2247449], atol=1e-6
    )


def test_a_request_that_finds_no_time_left_is_a_rollout_out_of_time(monkeypatch):
    """Also before Python 3.11, where asyncio's TimeoutError is a class of its own."""
    monkeypatch.setattr(rollout.asyncio, "TimeoutError", type("TimeoutError", (Exception,), {}))
    loop = rollout.RolloutLoop(
        options_for("m", SimpleNamespace(url="http://s"), rollout_timeout=9.0), None, print
    )
    loop.task = SimpleNamespace(environments={})
    group = SimpleNamespace(row_index=0, prefix="")
    place = rollout.Place(group, 0, loop.loads[0], time.monotonic(), 0)
    loop._running.add(place)

    async def converse(place):
        raise TimeoutError("no time left for the request")

    loop._converse = converse
    assert asyncio.run(loop._play(place)).given_up == "timeout"


def test_conversation_that_grows_in_place_is_rendered_anew(model):
    with FakeServer() as fake, Run(options_for(model, fake)) as run:
        run.groups(1)
        messages = [{"role": "user", "content": "1"}]
        assert run.loop.render(messages) == [3, 8, 2, 4]
        messages.append({"role": "tool", "content": "2"})
        assert run.loop.render(messages) == [3, 8, 2, 6, 9, 2, 4]


def test_template_of_the_options_replaces_the_tokenizers(model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}{{ mark }}")
    for text in (str(template), template.read_text()):
        options = options_for(model, chat_template=text, chat_template_kwargs={"mark": "39"})
        with FakeServer() as fake:
            options.vllm_server_base_url = [fake.url]
            with Run(options) as run:
                run.groups(1)
            assert fake.requests[0]["prompt"] == [7, 7, 46]
    with pytest.raises(ValueError, match="there is no file templates/absent"):
        read_template("templates/absent")


# ---- limits


def test_dropped_groups_give_their_tokens_back(model):
    given, expect = case("A20_dropped_group_accounting")["given"]["allowance"], 200
    with FakeServer() as fake:
        fake.answer = lambda body: ([9] * 9 + [EOS], [{9: -1.0}] * 9 + [{EOS: -1.0}], "stop")
        options = options_for(model, fake, task="rollout_tasks:mostly_equal", score_centering=False)
        assert given["tokens_per_group"] == 4 * (5 + 10)
        with Run(options, allowance=expect) as run:
            groups = run.groups(11)
            kept = lambda: sum(g.dropped is None for g in run.groups())  # noqa: E731
            run.until(lambda: run.link.held.value and kept() == 4)  # 240 tokens are past 200, 180 are not
            assert [g.dropped for g in groups if g.group_id < 10] == ["equal rewards"] * 10
            assert groups[0].samples == [] and groups[0].generated == {"samples": 4, "tokens": 40}
            assert run.loop._sent_tokens == 240 and not run.loop._flights


def test_generation_stops_at_the_allowance_and_goes_on_with_it(model):
    with FakeServer() as fake:
        fake.answer = lambda body: ([9] * 9 + [EOS], [{9: -1.0}] * 9 + [{EOS: -1.0}], "stop")
        options = options_for(model, fake, task_kwargs={"size": 20}, score_centering=False)
        with Run(options, allowance=0) as run:
            time.sleep(0.3)
            assert not fake.requests, "nothing before the first weights"
            run.link.allowance.value = 100
            run.until(lambda: len(run.groups()) == 2 and run.link.held.value)
            run.until(lambda: "staleness limit" in run.link.said())
            assert len(run.groups()) == 2
            run.link.allowance.value = 200
            run.until(lambda: len(run.groups()) == 4 and run.link.held.value)
            assert len(fake.requests) == 16
            assert reduced(run.metrics()["rollout/backpressure_s"]) > 0


def test_without_overlap_generation_is_at_rest_once_nothing_is_in_flight(model):
    with FakeServer() as fake:
        fake.answer = lambda body: ([9] * 9 + [EOS], [{9: -1.0}] * 9 + [{EOS: -1.0}], "stop")
        options = options_for(model, fake, task_kwargs={"size": 20}, score_centering=False, overlap=False)
        with Run(options, allowance=100) as run:
            run.until(lambda: len(run.groups()) == 2 and run.link.held.value)
            fake.gate = threading.Event()
            run.link.allowance.value = 200
            run.until(lambda: len(fake.requests) == 16 and "staleness limit" in run.link.said())
            assert not run.link.held.value
            fake.gate.set()
            run.until(lambda: len(run.groups()) == 4 and run.link.held.value)


def test_one_group_at_a_time_until_lengths_are_known(model):
    with FakeServer() as fake:
        fake.gate = threading.Event()
        with Run(options_for(model, fake)) as run:
            run.until(lambda: len(fake.requests) == 4)
            time.sleep(0.2)
            assert len(fake.requests) == 4
            fake.gate.set()
            run.groups(4)


def test_full_scoring_queue_holds_generation(model):
    with FakeServer() as fake, Run(options_for(model, fake, task="rollout_tasks:never_scored")) as run:
        run.until(lambda: "scoring queue" in run.loop._waiting_for)
        time.sleep(0.2)
        started = len(fake.requests) // 4
        assert run.loop._queued >= rollout.SCORE_QUEUE
        assert started <= 2 * rollout.SCORE_QUEUE + 64 // 4 + 1


# ---- rewards


def test_a_reward_that_hangs_ends_the_run_by_name_of_the_limit(model):
    with FakeServer() as fake:
        options = options_for(model, fake, task="rollout_tasks:never_scored", vllm_server_timeout=1.0)
        with Run(options) as run, pytest.raises(RolloutError, match="row 0 are not .*--vllm_server_timeout"):
            run.groups(1)


@pytest.mark.parametrize(
    "name", ["one_value", "one_too_many", "bare_number", "raises_sync", "raises_async", "a_word"]
)
def test_broken_reward_function_stops_the_run_by_name(model, name):
    expect = case("A02_reward_contract")["expect"].get(name, {})
    with FakeServer() as fake:
        options = options_for(model, fake, task="rollout_tasks:broken", task_kwargs={"name": name})
        with (
            Run(options) as run,
            pytest.raises(RolloutError, match=f"function {name} on dataset row 0: ") as caught,
        ):
            run.groups(1)
        assert expect.get("error_text_contains", "") in str(caught.value)
        assert not run.messages or not any(isinstance(m, GroupMessage) for m in run.messages)


def test_skipped_reward_errors_are_counted_and_score_nothing(model):
    with FakeServer() as fake:
        options = options_for(
            model,
            fake,
            task="rollout_tasks:broken_beside_good",
            task_kwargs={"name": "raises_sync"},
            on_reward_error="skip",
        )
        with Run(options) as run:
            samples = run.groups(4)[0].samples
            assert run.metrics()["rewards/raises_sync/error_count"] == 4
    assert len(samples) == 4 and "rewards/raises_sync/mean" not in samples[0].metrics
    assert [s.metrics["reward_kept"] for s in samples] == [0, 1, 2, 3]


def test_reward_functions_run_at_the_same_time(model):
    with FakeServer() as fake, Run(options_for(model, fake, task="rollout_tasks:slow")) as run:
        run.groups(1)
        run.until(lambda: "rollout/score_s" in run.metrics())
        assert 0.3 <= reduced(run.metrics()["rollout/score_s"]) < 0.55


def test_sync_reward_function_never_runs_twice_at_once(model):
    with FakeServer() as fake, Run(options_for(model, fake, task="rollout_tasks:stateful")) as run:
        assert all(g.dropped is None for g in run.groups(8))


def test_rewards_are_summed_and_named_after_their_functions(model):
    with FakeServer() as fake, Run(options_for(model, fake, task="rollout_tasks:several")) as run:
        samples = run.groups(1)[0].samples
        assert run.metrics()["reward"] == [1.0, 10.0, 20.0, 30.0]
    assert samples[0].metrics["rewards/only_some/mean"] == 1.0
    assert "rewards/only_some/mean" not in samples[1].metrics
    assert samples[3].metrics["rewards/scaled/mean"] == 30.0
    assert samples[0].metrics["rewards/only_some/group_std"] == 0.5
    assert not any("Judge" in name for name in samples[0].metrics), "it scored nothing"


def test_group_with_equal_rewards_is_dropped_and_counted(model):
    expect = case("A01_group_scoring")["expect"]["all_equal"]
    with FakeServer() as fake, Run(options_for(model, fake, task="rollout_tasks:equal")) as run:
        groups = run.groups(4)
        metrics = run.metrics()
    assert all(len(g.samples) == expect["samples"] and g.dropped == "equal rewards" for g in groups)
    assert metrics["frac_reward_zero_std"] == (4, 4)
    assert reduced(metrics["reward_dropped"]) == expect["reward_dropped"] == reduced(metrics["reward"])


def test_run_that_no_pass_ends_is_over_when_a_whole_pass_was_in_vain(model):
    for changes, error in (({}, None), ({"max_steps": 9}, "none of the last 4 groups .* near the top")):
        with FakeServer() as fake:
            run = Run(options_for(model, fake, task="rollout_tasks:equal", **changes))
            run.loop.drought.patience = 0.0
            with run, pytest.raises(RolloutError, match=error) if error else contextlib.nullcontext():
                run.groups(4)
                run.until(lambda: "every prompt was sampled" in run.link.said())  # noqa: B023


# ---- evaluation


def test_held_out_prompts_are_played_at_the_start_and_every_eval_steps(model):
    with FakeServer() as fake:
        options = options_for(
            model,
            fake,
            eval_dataset="rollout_tasks:held_out",
            eval_steps=4,
            weight_sync_steps=2,
            task_kwargs={"size": 1},
        )
        with Run(options, version=1) as run:
            group = run.groups(1)[0]
            evaluated = lambda: run.metrics().get("eval/version", [])  # noqa: E731
            run.until(lambda: evaluated() == [1])
            training = [body for body in fake.requests if body["prompt"][1] == 7]
            first = [body["seed"] for body in fake.requests if body["prompt"][1] != 7]
            run.link.version.value = 2
            run.until(lambda: evaluated() == [1, 2])
            run.link.version.value = 3
            time.sleep(0.4)
            assert evaluated() == [1, 2], "4 steps are 2 versions"
            metrics = run.metrics()
    seeds = [body["seed"] for body in fake.requests if body["prompt"][1] != 7]
    assert len(training) == 4 and len(set(first)) == 12
    asked = {(body["prompt"][1] != 7, body["logprobs"]) for body in fake.requests}
    assert asked == {(False, 3), (True, None)}, "nothing is trained in an evaluation"
    assert sorted(seeds) == sorted(first * 2), "an evaluation can be compared with the one before"
    assert len(run.groups()) == 1 and run.loop._sent_tokens == sum(len(s.input_ids) for s in group.samples)
    assert metrics["reward"] == [0.0, 1.0, 2.0, 3.0] and metrics["eval/reward"] == [0.0, 1.0, 2.0, 3.0] * 6
    assert reduced(metrics["eval/pass@1"]) == 0.75 and metrics["eval/pass@4"] == (6, 6)
    assert metrics["eval/completions/clipped_ratio"] == (0, 24)
    assert len(metrics["rollout/duration_s"]) == 4 and len(metrics["eval/rollout/duration_s"]) == 24


def test_weights_that_a_run_ends_with_are_evaluated_once(model):
    with FakeServer() as fake:
        options = options_for(model, fake, eval_dataset="rollout_tasks:held_out", eval_steps=4, max_steps=9)
        with Run(options, version=1, allowance=1) as run:
            run.until(lambda: run.metrics().get("eval/version") == [1])
            run.link.version.value = 3
            run.link.allowance.value = 10**9
            run.groups(4)
            assert run.metrics()["eval/version"] == [1], "3 is not due before the end"
            run.link.finish.value = 1
            run.until(lambda: run.metrics()["eval/version"] == [1, 3])
            run.until(lambda: "the run is over" in run.link.said())
            started = len(run.groups())
            time.sleep(0.5)
            assert run.metrics()["eval/version"] == [1, 3] and len(run.groups()) == started


def test_evaluation_in_environments_keeps_its_tool_metrics_apart(tokenizer):
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calling("increment", {"step": 3}), "done")
        options = tool_options(
            fake, "counting", eval_dataset="rollout_tasks:counting_rows", eval_steps=1, num_generations=2
        )
        with Run(options) as run:
            run.until(lambda: "eval/duration_s" in run.metrics())
            run.groups(1)
            metrics = run.metrics()
    assert metrics["eval/reward"] == [1.0] * 4
    assert metrics["eval/tools/increment/call_count"] == 4 and metrics["tools/increment/call_count"] == 2
    assert len(metrics["eval/env/reset_s"]) == 4 and len(metrics["env/reset_s"]) == 2


# ---- hooks


def test_hooks_are_called_in_their_place(model):
    with FakeServer() as fake:
        options = options_for(model, fake, rollout_loop="rollout_tasks:Recording", task="rollout_tasks:equal")
        with Run(options) as run:
            run.groups(4)
    called = run.loop.called
    assert called[0] == "setup" and called[-1] == "close" and len(called) == 6
    assert called[1].tolist() == [1.0] * 4, "dropped groups are seen too"


def test_close_is_called_after_a_failure(model):
    with FakeServer() as fake:
        options = options_for(
            model, fake, rollout_loop=rollout_tasks.Recording, task="rollout_tasks:late_image"
        )
        with Run(options) as run, pytest.raises(ValueError, match="dataset row 2 is not conv.*image"):
            run.groups(3)
    assert run.loop.called[-1] == "close"


def test_refused_prompts_are_through_for_this_epoch(model):
    with FakeServer() as fake, Run(options_for(model, fake, rollout_loop="rollout_tasks:Odd")) as run:
        groups = {g.group_id: g for g in run.groups(4)}
    assert [groups[i].dropped for i in range(4)] == ["refused by filter_prompt", None] * 2
    assert groups[0].generated == {} and len(fake.requests) == 8


def test_refusing_every_prompt_of_an_epoch_is_an_error(model):
    for task in ("rollout_tasks:lengths", "rollout_tasks:streaming"):
        with FakeServer() as fake:
            options = options_for(
                model, fake, rollout_loop="rollout_tasks:Nothing", task=task, task_kwargs={"size": 3}
            )
            with Run(options) as run, pytest.raises(RolloutError, match="refused every prompt of epoch 0"):
                run.groups(4)


def test_rollout_may_bring_its_own_reward_and_turns(model):
    with FakeServer() as fake, Run(options_for(model, fake, rollout_loop="rollout_tasks:SelfScored")) as run:
        samples = run.groups(1)[0].samples
        metrics = run.metrics()
    assert not fake.requests and len(samples) == 4
    assert samples[0].trained.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert samples[0].advantage < samples[3].advantage
    assert reduced(metrics["rollout/turns_mean"]) == 2 and reduced(metrics["rollout/fork_frac"]) == 0


def test_loop_that_is_no_rollout_loop_is_refused():
    with pytest.raises(TypeError, match="is not a subclass of rollout.RolloutLoop"):
        rollout.load_loop("rollout_tasks:Judge")


# ---- reports


def test_metrics_say_what_happened(model):
    with FakeServer() as fake:
        fake.load |= {"usage": 0.4, "running": 3, "waiting": 2}
        with Run(options_for(model, fake)) as run:
            run.groups(4)
            run.until(lambda: any(isinstance(m, MetricsMessage) for m in run.messages))
            metrics = run.metrics()
            generated = sum(g.generated["tokens"] for g in run.groups())
    assert metrics["rollout/generated_tokens_per_s"][0] == generated
    assert len(metrics["rollout/duration_s"]) == 16 and metrics["rollout/turns_max"] == 1
    assert reduced(metrics["rollout/samples_per_rollout"]) == 1
    assert metrics["rollout/vllm_kv_cache_usage_frac"][0] == 0.4
    assert (
        metrics["rollout/vllm_running_requests"][0] == 3 and metrics["rollout/vllm_queued_requests"][0] == 2
    )
    assert metrics["completions/clipped_ratio"] == (0, 16) and metrics["completions/min_length"] >= 2
    for name in ("concurrency", "concurrency_cap", "score_queue_size", "score_wait_s", "score_s"):
        assert f"rollout/{name}" in metrics
    assert "rollout/score_block_s" not in metrics and "rollout/backpressure_s" not in metrics


def test_completions_are_written_and_printed_once_a_version(model, capfd, tmp_path):
    with FakeServer() as fake:
        options = options_for(
            model, fake, log_completions=True, num_completions_to_print=2, output_dir=str(tmp_path / "new")
        )
        with Run(options) as run:
            run.groups(4)
    printed = capfd.readouterr().out
    assert printed.count("sampled by version 1") == 1 and printed.count("  reward ") == 2
    lines = [json.loads(line) for line in (tmp_path / "new" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and sorted(line["reward"] for line in lines[:4]) == [0, 1, 2, 3]
    assert lines[0]["rewards"] == {"by_place": 0.0} and lines[0]["advantage"] < 0
    assert lines[0]["completion"][0]["role"] == "assistant" and lines[0]["prompt"][0]["role"] == "user"


def test_status_tells_what_goes_on(model):
    with FakeServer() as fake:
        fake.gate = threading.Event()
        with Run(options_for(model, fake)) as run:
            run.until(lambda: "4 rollouts in flight" in run.link.said())
            assert "oldest" in run.link.said() and "the first group" in run.link.said()
            fake.gate.set()
            run.groups(4)
