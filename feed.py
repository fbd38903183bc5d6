"""Rank 0's end of the queue: takes groups, drops what is too old, plans rows, and says what it waits for.

    queue -> receive -> (too old? sample again) -> Planner -> packets(): a packed row per rank
                                                     |
         rollouts.publish(version, allowance) <------+  how far generation may run ahead, in raw tokens

A micro-batch is planned and packed while the device is busy with the one before (`packets_ahead`), for the
version it will be trained at, and counts as used when its own turn comes (`begin`).

The allowance is cumulative: tokens used up (trained or dropped) plus max(max_staleness, 1) x the tokens of
the last step. Neither side may wait for the other: when the queue is empty while the allowance holds
generation back, the allowance grows until a step closes
(tests/test_feed.py::test_allowance_grows_while_both_sides_wait).

With --overlap false it stands still while a step is trained, and no step begins before generation has come to
rest at it (tests/test_feed.py::test_without_overlap_one_side_works_at_a_time).

Never: take "empty" for "finished". The stream has ended when every prompt is settled or held by the planner.
"""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from checkpoint import Progress
from client import Notice
from conversation import RolloutError
from metrics import Window
from packing import Row, Sample, pack
from process import DeathMessage
from rollout import TOO_OLD, EndMessage, GroupMessage, MetricsMessage
from scoring import EQUAL_REWARDS

# what the ranks are told instead of a plan
WAITING = "waiting"  # nothing yet; so that their collectives do not time out
LEAVING = "leaving"  # a signal ends the run here, between two micro-batches
PREEMPTED = "preempted"  # the same, after a checkpoint
STARVED_S = 30.0  # a queue that stays empty this long gets what the planner holds back trained
GROW_EVERY_S = 0.25  # how often the allowance grows while both sides would wait


@dataclass
class Batch:
    """What one rank gets for one micro-batch."""

    row: Row
    trained_tokens: int  # of the micro-batch, over all ranks
    teachers: list[str | None]  # of the row's samples


class Feed:
    """See the module. `rollouts` is any producer with queue, check, publish, held and status."""

    def __init__(self, rollouts, planner, progress: Progress, options, peak_flops: float = math.nan):
        self.rollouts = rollouts
        self.planner = planner
        self.peak_flops = peak_flops  # of all ranks together
        self.progress = progress  # prompts done, for checkpoints: moves when a step closes
        self.settled = Progress(
            progress.position, progress.beyond
        )  # trained or dropped, the open step included
        self.max_staleness = options.max_staleness
        self.overlap = options.overlap
        self.max_steps = options.max_steps
        self.epochs = options.num_train_epochs if options.max_steps < 0 else math.inf
        self.teachers = options.teacher_server_urls or {}
        self.dataset_size: int | None = None
        self.version = 0  # of the weights that the next micro-batch is trained at
        self.served = 0  # of the weights on the servers
        self.again = []  # prompts to be sampled again, as soon as the servers have that version
        self.evaluated = -1  # the last version whose evaluation is in
        self.on_wait = []  # called while waiting; may raise
        self.leaving = lambda: None  # was the run asked to end? LEAVING or PREEMPTED
        self.window = Window()
        self.used_tokens = 0  # raw tokens of samples trained or dropped
        self.accumulation = options.gradient_accumulation_steps
        full = planner.token_budget if planner.token_budget < math.inf else 1  # see `receive`
        self.step_tokens = planner.ranks * full * self.accumulation  # of the last step
        self.generated = Counter()  # the ledger, in samples and in tokens
        self.trained = Counter()
        self.dropped = Counter()
        self.forwarded_tokens = 0  # unique tokens since the start, a resumed run's earlier ones included
        self.last_plan: list[list[Sample]] = []
        self.planned = None  # (samples per rank, rows) handed to the ranks; training on them has not begun
        self.notice = Notice()
        self.last_group = time.monotonic()
        self.last_growth = 0.0
        self.open()

    def check(self) -> None:
        """Raise what ends the run while the queue is empty: a dead producer, or what `on_wait` finds."""
        self.rollouts.check()
        for look in self.on_wait:
            look()

    def publish(self, again=(), servers=None) -> None:
        limit = max(self.max_staleness, 1) * self.step_tokens
        if not self.overlap:  # one step, counted from where the open one began
            limit = self.step_tokens - self.open_tokens
        self.again += again
        ready = self.again if self.served == self.version else []
        self.again = [] if ready else self.again
        self.rollouts.publish(self.served, self.used_tokens + limit + self.growth, ready, servers)

    def take(self, patience: float):
        """Samples of a micro-batch, a list per rank; or None when no prompts are left, WAITING after
        `patience` seconds, LEAVING or PREEMPTED when the run was asked to end.

        Raises RolloutError with the producer's own traceback when it has died or fallen silent.
        """
        started = time.monotonic()
        while True:
            if word := self.leaving():
                return word
            at_rest = self.rollouts.held and self.rollouts.queue.empty()
            ready = self.overlap or self.open_tokens or at_rest
            if ready and (batch := self.planner.pop()) is not None:
                return batch
            if self.ended():
                return self.planner.flush()
            received = self.receive_one()
            if not self.leaving():  # what ends this process may have ended the other one first
                self.check()
            now = time.monotonic()
            self.notice.say(f"rollouts: {self.rollouts.status()}{self.losses()}")
            starved = now - max(self.last_group, started) > STARVED_S
            if not received and self.rollouts.held:
                self.grow(now)
            elif not received and starved and self.planner.held_tokens:
                self.flushed = True
                return self.planner.flush()
            if now - started > patience:
                return WAITING

    def take_ahead(self, version: int):
        """`take` for the micro-batch after this one, trained at `version`: WAITING rather than waiting."""
        if word := self.leaving():
            return word
        self.expect(version)
        while (batch := self.planner.pop()) is None and self.receive_one(patience=0.0):
            pass
        return WAITING if batch is None else batch

    def receive_one(self, patience: float = 0.1) -> bool:
        """Take one message; False when there is none within `patience` seconds."""
        try:
            message = self.rollouts.queue.get(timeout=patience)
        except queue.Empty:
            return False
        if isinstance(message, DeathMessage):
            raise RolloutError(f"the rollout process died:\n{message.traceback}")
        if isinstance(message, MetricsMessage):
            self.held_seconds += sum(message.values.pop("rollout/backpressure_s", []))
            self.evaluated = max([self.evaluated, *message.values.get("eval/version", [])])
            self.window.update(message.values)
        elif isinstance(message, EndMessage):
            self.dataset_size = message.dataset_size
        elif isinstance(message, GroupMessage):
            self.last_group = time.monotonic()
            self.receive(message)
        return True

    def evaluations(self):
        """The run is over: values of every evaluation still to come, the last that of the current weights."""
        self.rollouts.finish()
        notice = Notice()
        while True:
            if "eval/version" in self.window.totals:
                yield self.take_window().values()
            if self.evaluated >= self.served or self.leaving():
                return
            self.receive_one()
            self.check()
            notice.say(f"the last evaluation: {self.rollouts.status()}")

    def receive(self, message: GroupMessage) -> None:
        """One group: hand its samples to the planner, or note why there are none."""
        self.dataset_size = message.dataset_size
        self.generated.update(message.generated)
        if message.dropped is not None:
            samples = message.generated.get("samples", 0)
            self.dropped[message.dropped] += samples
            if message.dropped == TOO_OLD:
                self.window.add("sample/dropped_stale_count", samples)
                self.publish(again=[message.group_id])
            else:
                self.finish(message.group_id)
            return
        fresh = [s for s in message.samples if self.version - s.version <= self.max_staleness]
        stale = [s for s in message.samples if self.version - s.version > self.max_staleness]
        self.window.add("sample/dropped_stale_count", len(stale))
        self.drop(stale, TOO_OLD)
        oversize = [s for s in fresh if not self.planner.add(s)]
        self.window.add("batch/dropped_oversize_count", len(oversize))
        self.drop(oversize, "longer than the token budget")
        if stale and not fresh:  # nothing of it will be trained: its prompt is sampled again
            self.publish(again=[message.group_id])
        elif len(oversize) == len(fresh):
            self.finish(message.group_id)
        if self.planner.batch_samples and not self.trained:  # a first guess at what a step takes
            lengths = [len(s) for s in fresh] or [1]
            mean = sum(lengths) // len(lengths)
            self.step_tokens = max(self.step_tokens, self.planner.batch_samples * self.accumulation * mean)
            self.publish()

    def finish(self, group_id: int) -> None:
        self.settled.done(group_id)
        self.progress.done(group_id)

    def drop(self, samples: list[Sample], reason: str) -> None:
        if samples:
            self.dropped[reason] += len(samples)
            self.used_tokens += sum(len(s.input_ids) for s in samples)
            self.publish()

    def grow(self, now: float) -> None:
        if now - self.last_growth > GROW_EVERY_S:
            self.last_growth = now
            self.growth += max(self.step_tokens // 4, 1)
            self.publish()

    def ended(self) -> bool:
        """Is every prompt of the run settled, or held by the planner?"""
        if self.dataset_size is None or self.epochs == math.inf:
            return False
        held = sum(not self.settled.includes(group) for group in self.planner.held_groups())
        return self.settled.count + held >= self.epochs * self.dataset_size

    def start_version(self, version: int, servers: list[str] | None = None) -> None:
        """Servers (None = all) have new weights."""
        self.served = self.version = version
        self.publish(servers=servers)
        self.expect(version)
        self.publish()

    def expect(self, version: int) -> None:
        """What is planned from now on is trained at `version`: what the planner holds may be too old then."""
        self.version = version
        stale = self.planner.evict(lambda s: version - s.version > self.max_staleness)
        self.window.add("sample/dropped_stale_count", len(stale))
        self.drop(stale, TOO_OLD)
        held = self.planner.held_groups() | {s.group_id for s in self.planned_samples()}
        lost = {s.group_id for s in stale if s.group_id not in held and not self.settled.includes(s.group_id)}
        self.again += sorted(lost)

    def losses(self) -> str:
        """What was dropped, for whoever wonders why nothing is trained."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        if set(self.dropped) == {EQUAL_REWARDS}:
            reasons += ": the task is too easy, too hard, or gives no partial credit"
        return f"; samples dropped so far: {reasons}" if reasons else ""

    def packets(self, patience: float) -> list:
        """What each rank gets: its Batch, or the same word: None, WAITING, LEAVING, PREEMPTED."""
        return self.packed(self.take(patience))

    def packets_ahead(self, version: int) -> list:
        """`packets` of the micro-batch after this one, trained at `version`, without waiting."""
        return self.packed(self.take_ahead(version))

    def packed(self, plan) -> list:
        if not isinstance(plan, list):
            return [plan] * self.planner.ranks
        rows = [pack(samples, self.planner.share) for samples in plan]
        self.planned = (plan, rows)
        trained_tokens = sum(row.terms for row in rows)
        teachers = [[s.teacher_id for s in samples] for samples in plan]
        return [Batch(row, trained_tokens, names) for row, names in zip(rows, teachers, strict=True)]

    def planned_samples(self) -> list[Sample]:
        """Those of the micro-batch that is packed and not begun; a spare rank's copies train nothing."""
        return [s for row in self.planned[0] for s in row if s.trained.any()] if self.planned else []

    def begin(self) -> None:
        """The micro-batch of the last packets is trained now: count it."""
        plan, rows = self.planned
        self.planned = None
        self.use(plan)
        self.measure_rows(rows)
        with self.rollouts.queue.mutex:
            waiting = [m for m in self.rollouts.queue.queue if isinstance(m, GroupMessage)]
        self.window.add("rollout/queue_size", sum(len(message.samples) for message in waiting))

    def use(self, plan: list[list[Sample]]) -> None:
        """Count a micro-batch that is about to be trained."""
        self.notice = Notice()
        now = time.time()
        samples = [s for row in plan for s in row if s.trained.any()]  # a spare rank's copies train nothing
        lengths = [len(s) for s in samples]
        trained = [int(s.trained.sum()) for s in samples]
        staleness = [self.version - s.version for s in samples]
        self.last_plan = plan
        self.used_tokens += sum(lengths)
        self.open_tokens += sum(lengths)
        self.open_samples += len(samples)
        self.open_trained += sum(trained)
        self.open_prompts.update(s.group_id for s in samples)
        for prompt in self.open_prompts:
            self.settled.done(prompt)
        window = self.window
        for teacher in {*self.teachers, *(s.teacher_id for s in samples)} - {None}:
            its = sum(count for s, count in zip(samples, trained, strict=True) if s.teacher_id == teacher)
            window.add(f"teacher_tokens_frac/{teacher}", (its, sum(trained)))
        for name in ("sample/forwarded_tokens_mean", "sample/forwarded_tokens_max"):
            window.add(name, lengths)
        window.add("sample/trained_tokens_mean", trained)
        window.add("sample/time_in_queue_s", [now - s.enqueued_at for s in samples])
        for name in ("sample/staleness_mean", "sample/staleness_max"):
            window.add(name, staleness)
        versions = np.concatenate([*map(token_versions, samples), []])
        for name in ("sample/token_staleness_mean", "sample/token_staleness_max"):
            window.add(name, self.version - versions)
        for sample in samples:
            window.update({name: [value] for name, value in sample.metrics.items()})
        self.publish()

    def measure_rows(self, rows: list[Row]) -> None:
        unique = [row.unique_tokens for row in rows]
        costs = [self.planner.cost.row(row) for row in rows]
        self.open_forwarded += sum(unique)
        self.open_cost += sum(costs)
        window = self.window
        scored = [np.count_nonzero(np.diff(row.position)) + min(row.terms, 1) for row in rows]  # positions
        silent = sum(unique) - sum(scored)  # tokens in no loss term
        window.add("batch/masked_token_frac", (silent, sum(unique)))
        window.add("batch/samples_per_row", [row.sample_count for row in rows])
        window.add("batch/row_tokens_mean", unique)
        window.add("batch/row_tokens_max", unique)
        if self.planner.token_budget < math.inf:
            used = sum(max(row.unique_tokens, row.terms) for row in rows)  # the budget bounds both
            window.add("batch/row_fill_frac", (used, self.planner.token_budget * len(rows)))
        window.add("batch/row_imbalance", max(costs) * len(costs) / sum(costs))
        window.add("batch/packing_ratio", (sum(row.raw_tokens for row in rows), sum(unique)))

    def close_step(self, seconds: dict[str, float], microbatches: int) -> None:
        """An optimizer step was made of what was used since the last one; it took `seconds`, by phase."""
        for prompt in self.open_prompts:
            self.progress.done(prompt)
        trained = self.open_trained
        self.trained.update(samples=self.open_samples, tokens=trained)
        window = self.window
        window.add("batch/forwarded_tokens_per_step", self.open_forwarded)
        window.add("batch/trained_tokens_per_step", trained)
        window.add("batch/samples_per_step", self.open_samples)
        window.add("batch/groups_per_step", len(self.open_prompts))
        window.add("batch/microbatches_per_step", microbatches)
        window.add("rollout/backpressure_s", self.held_seconds)
        fwd_bwd, step = seconds["perf/fwd_bwd_s"], seconds["perf/step_s"]
        window.add("perf/fwd_bwd_forwarded_tokens_per_s", (self.open_forwarded, fwd_bwd))
        window.add("perf/wall_clock_forwarded_tokens_per_s", (self.open_forwarded, step))
        window.add("perf/wall_clock_trained_tokens_per_s", (trained, step))
        window.add("perf/fwd_bwd_mfu", (self.open_cost, fwd_bwd * self.peak_flops))
        window.add("perf/wall_clock_mfu", (self.open_cost, step * self.peak_flops))
        self.forwarded_tokens += self.open_forwarded
        self.step_tokens = max(self.step_tokens, self.open_tokens) if self.flushed else self.open_tokens
        self.open()
        if not self.overlap:
            self.publish()

    def open(self) -> None:
        """Start counting a step."""
        self.open_tokens = self.open_samples = self.open_forwarded = self.open_trained = 0
        self.open_cost = 0.0
        self.held_seconds = 0.0  # that the allowance held generation back
        self.open_prompts: set[int] = set()
        self.growth = 0
        self.flushed = False

    def take_window(self) -> Window:
        window, self.window = self.window, Window()
        return window

    def share_done(self, step: int) -> float:
        """How much of the run is done, 0 to 1; NaN before the number of prompts is known."""
        return step / self.max_steps if self.max_steps > 0 else self.epoch / self.epochs

    @property
    def epoch(self) -> float:
        return self.progress.count / self.dataset_size if self.dataset_size else math.nan

    def ledger(self) -> str:
        """What became of every sample that was generated: each count is taken where it happens."""
        queued = 0
        while not self.rollouts.queue.empty():
            message = self.rollouts.queue.get_nowait()
            if isinstance(message, GroupMessage):
                self.generated.update(message.generated)
                queued += message.generated.get("samples", 0)
        dropped = sum(self.dropped.values())
        held = self.open_samples + len(self.planned_samples()) + self.planner.held_samples + queued
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return (
            f"samples: {self.generated['samples']} generated = {self.trained['samples']} trained + "
            f"{dropped} dropped ({reasons}) + {held} in flight"
        )


def token_versions(sample: Sample) -> np.ndarray:
    """The version that made each trained token, as far as it is known."""
    if sample.token_version is None:
        return np.full(int(sample.trained.sum()), sample.version)
    return sample.token_version[sample.trained]
