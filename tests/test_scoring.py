"""Claims about scoring.py: rewards of a group, whether it is kept, metrics of completions.

Run: pytest tests/test_scoring.py
"""

import asyncio

import numpy as np
import pytest
from cases import case, reduced

import scoring
from conversation import Rollout, RolloutError, Turn
from rollout import RolloutLoop
from scoring import Group, completion_metrics, drop_reason, total_rewards


def turn(prompt, output, **more) -> Turn:
    return Turn(prompt, output, [-0.1 * (i + 1) for i in range(len(output))], **more)


def group_of(rewards) -> Group:
    return Group([], [], {}, np.array(rewards, dtype=np.float64), 0, 0, 0)


def test_group_scoring_case():
    expect = case("A01_group_scoring")["expect"]
    for one in case("A01_group_scoring")["given"]["groups"]:
        rewards = one.get("rewards") or [eval(text) for text in one["rewards_as_expressions"]]
        column = np.array(
            [np.nan if value in (None, "NaN") else value for value in rewards], dtype=np.float64
        )
        group = group_of(total_rewards({"f": column}, len(column)))
        advantages = RolloutLoop.compute_advantages(None, group)
        assert not np.isnan(advantages).any()
        wanted = expect[one["name"]]
        dropped = True if one["name"] == "equal_up_to_rounding" else wanted["dropped"]
        assert (drop_reason(group.rewards) is not None) == dropped
        if "advantages" in wanted:
            np.testing.assert_allclose(advantages, wanted["advantages"], rtol=0, atol=wanted["tolerance"])
            assert advantages[1] == 0.0 == advantages[3]


def test_sources_are_summed_and_a_rollout_nobody_scored_stays_unscored():
    sources = {"a": np.array([1.0, np.nan, np.nan]), "b": np.array([2.0, 5.0, np.nan])}
    np.testing.assert_array_equal(total_rewards(sources, 3), [3.0, 5.0, np.nan])
    np.testing.assert_array_equal(total_rewards({}, 2), [np.nan, np.nan])


@pytest.mark.parametrize(
    "rewards, reason",
    [
        ([1, 1 + 5e-9, np.nan], "equal rewards"),
        ([1, 1 + 5e-8], None),
        ([1e6, 1e6 + 1e-3], "equal rewards"),
        ([1, np.nan], "fewer than two scored"),
        ([np.nan, np.nan], "fewer than two scored"),
    ],
)
def test_groups_are_dropped_by_comparing_rewards(rewards, reason):
    assert drop_reason(np.array(rewards, dtype=np.float64)) == reason


@pytest.mark.parametrize(
    "kept, rewards, says",
    [
        ([0, 1], [0, 0], "mean reward is 0 in a range from 0 to 1, near the bottom: the task is too hard"),
        ([], [-1, -1], "mean reward is -1 in a range from -1 to 0, near the bottom"),
        ([], [1, 1], "mean reward is 1 in a range from 0 to 1, near the top: the task has become too easy"),
        ([0, 2], [1, 1], "in the middle: all answers to a prompt earn the same"),
        ([0, 2], [np.nan, np.nan], "none of their rollouts has a reward"),
    ],
)
def test_a_pass_without_a_kept_group_ends_the_run_and_says_where_its_rewards_lie(kept, rewards, says):
    drought, rewards = scoring.Drought(patience=0.0), np.array(rewards, dtype=float)
    drought.note(rewards, "equal rewards", 3)
    drought.note(np.array(kept, dtype=float), None, 3)
    for _ in range(2):
        drought.note(rewards, "equal rewards", 3)
    drought.patience = 100.0
    drought.note(rewards, "equal rewards", 3)
    drought.patience = 0.0
    with pytest.raises(RolloutError, match=rf"last 4 groups was kept \(4 equal rewards\).*{says}.*--temp"):
        drought.note(rewards, "equal rewards", 3)


def test_completion_metrics_case():
    given, expect = case("A08_metric_definitions")["given"], case("A08_metric_definitions")["expect"]
    rollouts = [Rollout([], [], [turn([1], ids) for ids in turns]) for turns in given["completions"].values()]
    values = completion_metrics(rollouts, set(given["eos_token_ids"]))
    for name in ("mean_length", "min_length", "max_length", "clipped_ratio"):
        assert reduced(values[f"completions/{name}"]) == pytest.approx(expect[f"completions/{name}"])
    for name in ("mean", "min", "max"):
        name = f"completions/{name}_terminated_length"
        assert reduced(values[name]) == pytest.approx(expect[name])
    group = [
        Rollout([], [], [turn([1], ids) for ids in turns]) for turns in given["group_for_duplicates"].values()
    ]
    duplicates = completion_metrics(group, {100})["completions/duplicate_frac"]
    assert reduced(duplicates) == expect["completions/duplicate_frac"]


def test_metrics_buffer_joins_values_as_their_names_say():
    buffer = scoring.MetricsBuffer()
    for value in (2, 5, 1):
        buffer.record("rollout/turns_max", value)
        buffer.record("completions/min_length", value)
        buffer.record("rollout/vllm_retry_count", value)
        buffer.record("rollout/concurrency", value)
        buffer.record("rollout/fork_frac", (value, 10))
    assert buffer.take() == {
        "rollout/turns_max": 5,
        "completions/min_length": 1,
        "rollout/vllm_retry_count": 8,
        "rollout/concurrency": [2, 5, 1],
        "rollout/fork_frac": (8, 30),
    }
    assert buffer.take() == {}


@pytest.mark.parametrize(
    "result", ["ab", {0.0, 1.0}, {0: 1.0, 1: 2.0}, (r for r in "ab"), None, ["1", "2"], [1j, 0]]
)
def test_what_is_no_list_of_rewards_is_refused(result):
    with pytest.raises(TypeError, match="must"):
        scoring.as_rewards(result, 2)


def test_a_full_disk_costs_completions_and_no_run(tmp_path, capsys):
    (tmp_path / "full").symlink_to("/dev/full")
    scoring.append_lines(tmp_path / "full", [{"prompt": "p"}])
    assert "completions are missing in" in capsys.readouterr().out
    scoring.append_lines(tmp_path / "free", [{"prompt": "p"}])
    assert (tmp_path / "free").read_text() == '{"prompt": "p"}\n'


def test_reward_function_may_return_an_array():
    expect = case("A02_reward_contract")["expect"]["array_ok"]
    group = group_of(scoring.as_rewards(np.array([0.0, 1.0, 0.0, 1.0]), 4))
    advantages = RolloutLoop.compute_advantages(None, group)
    np.testing.assert_allclose(advantages, expect["advantages"], rtol=0, atol=expect["tolerance"])


def leaves(**_):
    raise SystemExit("bye")


def test_a_reward_that_exits_is_a_reward_that_fails():
    group = Group([Rollout([], [], [])], [[]], {}, np.zeros(1), 0, 0, 0)
    errors = []
    rewards = scoring.Rewards([leaves], "skip", lambda *measured: errors.append(measured))
    assert np.isnan(asyncio.run(rewards.score(group))["leaves"]).all() and np.isnan(group.rewards).all()
    assert errors == [("rewards/leaves/error_count", 1)]
