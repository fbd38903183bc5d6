"""python -m pytest tests/test_feed.py: rank 0's end of the queue, with a producer that is a list."""

import queue
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from checkpoint import Progress
from conversation import RolloutError
from feed import LEAVING, WAITING, Feed
from flops import RowCost
from packing import Planner, Sample
from process import DeathMessage
from rollout import TOO_OLD, GroupMessage, MetricsMessage


class Producer:
    """Stands for the rollout process: a queue filled by the test, and a record of what was published."""

    def __init__(self, *messages):
        self.queue = queue.Queue()
        self.published = []
        self.again = []
        self.held = False
        for message in messages:
            self.queue.put(message)

    def publish(self, version, allowance, again=(), servers=None):
        self.published.append((version, allowance))
        self.again += again

    def check(self):
        pass

    def status(self):
        return "nothing in flight"


def sample(group, length=10, version=0, first=None):
    ids = np.arange(length, dtype=np.int32) + (first if first is not None else 100 * group)
    trained = np.zeros(length, bool)
    trained[length // 2 :] = True
    return Sample(ids, trained, np.zeros(length, np.float32), 1.0, group, group, 0, version, enqueued_at=0.0)


def group(number, count=2, size=100, dropped=None, **kwargs):
    samples = (
        [] if dropped else [sample(number, first=1000 * number + 50 * i, **kwargs) for i in range(count)]
    )
    return GroupMessage(number, samples, dropped, size, {"samples": count, "tokens": 5 * count})


def feed_of(
    producer, ranks=1, budget=20, max_staleness=4, epochs=1.0, progress=None, accumulation=1, overlap=True
):
    options = SimpleNamespace(
        max_staleness=max_staleness,
        overlap=overlap,
        num_train_epochs=epochs,
        max_steps=-1,
        gradient_accumulation_steps=accumulation,
        teacher_server_urls=None,
        vllm_server_timeout=0.0,
    )
    planner = Planner(ranks, budget, RowCost(token=1.0, pair=0.001))
    return Feed(producer, planner, progress or Progress(), options)


def close(feed):
    feed.close_step({"perf/fwd_bwd_s": 1.0, "perf/step_s": 1.0}, 1)


def take(feed, patience):
    """The samples of a micro-batch whose training begins at once."""
    if isinstance(plan := feed.take(patience), list):
        feed.use(plan)
    return plan


def drain(feed, patience=5.0):
    plans = []
    while (plan := take(feed, patience)) not in (None, WAITING):
        plans.append(plan)
        close(feed)
    return plans, plan


def test_every_sample_is_planned_once_and_the_stream_ends():
    feed = feed_of(Producer(*[group(i, size=6) for i in range(6)]))
    plans, last = drain(feed)
    assert last is None
    planned = sorted((s.group_id, int(s.input_ids[0])) for plan in plans for row in plan for s in row)
    assert planned == sorted((i, 1000 * i + 50 * j) for i in range(6) for j in range(2))
    assert feed.progress.position == 6 and not feed.progress.beyond


def test_empty_is_not_finished():
    feed = feed_of(Producer(group(0, size=6)), budget=100)
    assert take(feed, 0.3) == WAITING


def test_dropped_groups_count_towards_the_end_of_the_epoch():
    """An epoch of three prompts, one dropped for its rewards, does not wait for a fourth."""
    feed = feed_of(Producer(group(0, size=3), group(1, size=3, dropped="equal rewards"), group(2, size=3)))
    plans, last = drain(feed)
    assert last is None and len(plans) <= 3
    assert feed.dropped == {"equal rewards": 2}


@pytest.mark.parametrize("max_staleness, kept", [(4, 3), (3, 2)])
def test_samples_beyond_max_staleness_are_dropped_and_counted(max_staleness, kept):
    """At version 7, samples of versions 2, 3, 7 and 6: staleness 5, 4, 0, 1."""
    messages = [group(i, count=1, size=4, version=v) for i, v in enumerate([2, 3, 7, 6])]
    feed = feed_of(Producer(*messages), max_staleness=max_staleness, budget=10)
    feed.start_version(7)
    plans = []
    while (plan := take(feed, 0.3)) != WAITING:
        plans.append(plan)
    versions = [s.version for plan in plans for row in plan for s in row]
    held = feed.planner.held_tokens // 10
    assert len(versions) + held == kept
    assert feed.dropped["too old"] == 4 - kept
    assert feed.window.values()["sample/dropped_stale_count"] == 4 - kept


def test_a_prompt_whose_group_was_too_old_is_sampled_again():
    producer = Producer(group(0, size=2, version=0), group(1, size=2, version=9))
    feed = feed_of(producer, max_staleness=4)
    feed.start_version(9)
    drain(feed, patience=0.3)
    assert producer.again == [0]
    assert feed.progress.position == 0
    producer.queue.put(group(0, size=2, version=9))
    _, last = drain(feed)
    assert last is None and feed.progress.position == 2


def test_a_prompt_is_sampled_again_where_the_producer_says_that_its_group_is_too_old():
    producer = Producer(group(0, size=2, dropped=TOO_OLD), group(1, size=2))
    feed = feed_of(producer)
    drain(feed, patience=0.3)
    assert producer.again == [0] and feed.progress.position == 0
    assert feed.dropped == {"too old": 2} and feed.window.values()["sample/dropped_stale_count"] == 2


def test_what_the_planner_holds_never_gets_older_than_max_staleness():
    """Held samples are looked at again at every update; a group of which nothing is left is sampled again."""
    producer = Producer(group(0, size=3), group(1, size=3, version=1))
    feed = feed_of(producer, max_staleness=1, budget=1000)
    assert take(feed, 0.3) == WAITING and feed.planner.held_samples == 4
    feed.start_version(1)
    assert feed.planner.held_samples == 4 and producer.again == []
    feed.start_version(2)
    assert feed.planner.held_samples == 2 and producer.again == [0]
    assert feed.dropped == {"too old": 2} and not feed.ended()
    producer.queue.put(group(0, size=3, version=2))
    assert take(feed, 0.3) == WAITING
    plan = feed.planner.flush()
    feed.use(plan)
    assert sorted(s.group_id for row in plan for s in row) == [0, 0, 1, 1]
    assert feed.window.values()["sample/staleness_max"] == 1


def test_a_stream_of_dropped_groups_does_not_keep_the_ranks_waiting():
    """Patience, health checks and notices go on while messages keep arriving."""
    feed = feed_of(Producer())
    feed.receive_one = lambda: time.sleep(0.01) or True
    looked = []
    feed.bad_news = lambda: looked.append(1)
    start = time.monotonic()
    assert take(feed, 0.3) == WAITING
    assert time.monotonic() - start < 3 and looked


def test_the_notice_says_what_was_dropped(monkeypatch, capsys):
    monkeypatch.setattr("client.FIRST_NOTICE_S", 0.0)
    feed = feed_of(Producer(*[group(i, dropped="equal rewards") for i in range(3)]))
    take(feed, 0.5)
    assert "2 equal rewards: the task is too easy, too hard, or" in capsys.readouterr().out
    feed.dropped["too old"] += 1
    assert feed.losses().endswith("equal rewards, 1 too old")


def test_saved_position_is_the_first_prompt_neither_trained_nor_dropped_for_its_rewards():
    progress = Progress()
    for prompt in (0, 1, 2, 3, 6):
        progress.done(prompt)
    assert progress.position == 4 and progress.beyond == {6}


def test_a_prompt_is_done_when_its_step_closes_not_when_it_is_planned():
    feed = feed_of(Producer(*[group(i, size=9) for i in range(4)]))
    take(feed, 5.0)
    assert feed.progress.count == 0
    close(feed)
    assert feed.progress.count >= 1


@pytest.mark.parametrize("max_staleness, limit", [(2, 200), (1, 100), (0, 100)])
def test_allowance_is_what_was_used_plus_staleness_times_the_last_step(max_staleness, limit):
    """Steps of 100 tokens: max(max_staleness, 1) of them may be queued or in flight."""
    producer = Producer(*[group(i, count=10) for i in range(3)])
    feed = feed_of(producer, budget=100, max_staleness=max_staleness)
    feed.publish()
    assert producer.published[-1] == (0, limit)
    take(feed, 5.0)
    close(feed)
    feed.publish()
    assert producer.published[-1] == (0, feed.used_tokens + max(max_staleness, 1) * feed.step_tokens)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_allowance_grows_while_both_sides_wait(max_staleness):
    producer = Producer(group(0))
    producer.held = True
    feed = feed_of(producer, budget=1000, max_staleness=max_staleness)
    feed.publish()
    before = producer.published[-1][1]
    assert take(feed, 1.0) == WAITING
    assert producer.published[-1][1] > before


class Paced(Producer):
    """Generation that obeys the allowance. A group is one prompt of nine tokens and eight last tokens: 80 raw
    tokens, 17 unique ones."""

    def __init__(self, prompts):
        super().__init__()
        self.todo = list(range(prompts))
        self.prompts, self.sent = prompts, 0

    def publish(self, version, allowance, again=(), servers=None):
        super().publish(version, allowance, again)
        self.todo += again
        while self.todo and self.sent < allowance:
            message = group(self.todo.pop(0), count=8, size=self.prompts, version=version)
            for i, s in enumerate(message.samples):
                s.input_ids = np.append(np.arange(9) + 100 * message.group_id, 5000 + i).astype(np.int32)
            self.queue.put(message)
            self.sent += 80
        self.held = bool(self.todo)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_neither_side_waits_for_the_other_with_rows_that_share(max_staleness, ranks):
    """A full row takes five times its budget in raw tokens, and the planner holds some back on top."""
    feed = feed_of(Paced(60), ranks=ranks, budget=200, max_staleness=max_staleness)
    steps = 0
    feed.publish()
    start = time.monotonic()
    while (plan := take(feed, 20.0)) is not None:
        assert plan != WAITING
        steps += 1
        close(feed)
        feed.start_version(feed.version + 1)
    assert steps > 3 and feed.progress.count == 60
    assert time.monotonic() - start < 15


def test_without_overlap_one_side_works_at_a_time():
    producer = Paced(60)
    feed = feed_of(producer, budget=200, overlap=False)
    feed.publish()
    producer.held = False  # the last group is on its way
    assert take(feed, 0.3) == WAITING and feed.planner.held_tokens > 200
    producer.held = True
    sent = []
    while (plan := take(feed, 20.0)) is not None:
        assert plan != WAITING
        sent.append(producer.sent)
        feed.start_version(feed.version + 1)
        assert producer.sent == sent[-1] or not producer.todo, "generated while a step was trained"
        close(feed)
    assert feed.progress.count == 60 and len(set(sent)) > 3


def test_a_starved_planner_is_flushed_and_does_not_shrink_the_allowance(monkeypatch):
    monkeypatch.setattr("feed.STARVED_S", 0.3)
    feed = feed_of(Producer(group(0)), budget=1000)
    plan = take(feed, 5.0)
    assert sum(len(row) for row in plan) == 2
    close(feed)
    assert feed.step_tokens == 1000


def test_death_of_the_producer_carries_its_traceback():
    feed = feed_of(Producer(DeathMessage("Traceback: ValueError: bad gold answer")))
    with pytest.raises(RolloutError, match="bad gold answer"):
        take(feed, 5.0)


def test_oversize_samples_are_dropped_counted_and_do_not_stop_the_run():
    feed = feed_of(Producer(group(0, size=2, length=50), group(1, size=2)), budget=20)
    _, last = drain(feed)
    assert last is None
    assert feed.dropped["longer than the token budget"] == 2
    assert feed.progress.position == 2


def test_rows_that_hold_no_sample_end_a_run_that_only_max_steps_would():
    """After a pass over the dataset; one group that fits begins it anew."""
    lengths = (50, 10, 50, 50)
    feed = feed_of(
        Producer(*(group(i, size=2, length=n) for i, n in enumerate(lengths))), epochs=float("inf")
    )
    take(feed, 5.0)
    with pytest.raises(RolloutError, match="none of the last 2 groups.* raise --token_budget 20"):
        take(feed, 5.0)
    assert feed.rollouts.queue.empty()


def test_ledger_balances():
    messages = [group(0, size=4), group(1, size=4, dropped="equal rewards"), group(2, size=4, version=-9)]
    feed = feed_of(Producer(*messages))
    drain(feed, patience=0.3)
    feed.rollouts.queue.put(group(3, size=4))
    numbers = [int(n) for n in re.findall(r"(\d+) (?:generated|trained|dropped|in flight)", feed.ledger())]
    assert numbers[0] == 8 == sum(numbers[1:])
    assert "2 equal rewards" in feed.ledger() and "2 too old" in feed.ledger()


def test_seconds_held_back_are_added_up_over_a_step():
    held = {"rollout/backpressure_s": [0.5, 0.25]}
    feed = feed_of(Producer(MetricsMessage(dict(held)), MetricsMessage(dict(held)), group(0, size=1)))
    drain(feed)
    assert feed.take_window().values()["rollout/backpressure_s"] == 1.5


def test_a_run_that_is_asked_to_leave_does_so_between_two_micro_batches():
    feed = feed_of(Producer(*[group(i, size=9) for i in range(6)]), ranks=2)
    take(feed, 5.0)
    feed.leaving = lambda: LEAVING
    assert feed.packets(5.0) == [LEAVING, LEAVING]
    numbers = [int(n) for n in re.findall(r"(\d+) (?:generated|trained|dropped|in flight)", feed.ledger())]
    assert numbers[0] == 12 == sum(numbers[1:])


def test_what_is_looked_at_while_waiting_can_end_the_run():
    feed = feed_of(Producer())
    feed.bad_news = lambda: "the server is gone"
    with pytest.raises(RuntimeError, match="the server is gone"):
        take(feed, 5.0)


def test_spare_ranks_train_nothing_and_are_not_counted():
    feed = feed_of(Producer(group(0, count=1, size=1)), ranks=3)
    packets = feed.packets(5.0)
    feed.begin()
    assert [packet.row.terms > 0 for packet in packets].count(True) == 1
    assert all(packet.row.unique_tokens > 0 for packet in packets)
    assert len({packet.trained_tokens for packet in packets}) == 1
    close(feed)
    assert feed.trained == 1


def test_metrics_of_the_producer_reach_the_window():
    feed = feed_of(Producer(MetricsMessage({"reward": [1.0, 0.0], "rollout/score_s": 2.0})))
    take(feed, 0.2)
    assert feed.take_window().values() == {"reward": 0.5, "rollout/score_s": 2.0}


# ---- the micro-batch after this one


def test_what_is_taken_ahead_counts_when_its_own_turn_comes():
    feed = feed_of(Producer(*[group(i, size=9) for i in range(6)]))
    feed.packets(5.0)
    feed.begin()
    used = feed.used_tokens
    ahead = feed.packets(5.0, ahead_for=1)
    assert ahead[0].row.terms > 0 and feed.used_tokens == used
    close(feed)
    first = feed.trained
    numbers = [int(n) for n in re.findall(r"(\d+) (?:generated|trained|dropped|in flight)", feed.ledger())]
    assert numbers[0] == sum(numbers[1:]) and numbers[1] == first
    feed.start_version(1)
    feed.begin()
    close(feed)
    assert feed.used_tokens > used and feed.trained > first
    assert feed.window.values()["sample/staleness_max"] == 1


def test_nothing_is_waited_for_ahead():
    feed = feed_of(Producer(group(0, size=9)), budget=1000)
    started = time.monotonic()
    assert feed.packets(5.0, ahead_for=0) == [WAITING]
    assert time.monotonic() - started < 0.1 and feed.planner.held_samples == 2


def test_age_is_that_of_the_update_a_sample_is_trained_at():
    """With staleness 0 nothing made before an update is trained after it, whenever it was taken; a prompt is
    sampled again only by servers that have the update."""
    producer = Producer(group(0, size=9), group(1, size=9))
    feed = feed_of(producer, max_staleness=0)
    assert feed.packets(5.0, ahead_for=1) == [WAITING]
    assert feed.dropped == {"too old": 4} and producer.again == []
    assert all(version == 0 for version, _ in producer.published)
    feed.start_version(1)
    assert producer.again == [0, 1] and producer.published[-1][0] == 1


def test_end_of_a_run_waits_for_the_evaluation_of_its_last_weights():
    producer = Producer(*[MetricsMessage({"eval/version": [v], "eval/reward": [v / 10]}) for v in (3, 5)])
    feed, said = feed_of(producer), []
    producer.finish = lambda: said.append("finish")
    feed.start_version(5)
    assert [values["eval/reward"] for values in feed.evaluations()] == [0.3, 0.5], "each by itself"
    assert said == ["finish"] and producer.queue.empty()
