"""Rank 0's end of the queue: takes groups, drops what is too old, plans rows, and says what it waits for.

    queue -> receive -> (too old? sample again) -> Planner -> packets(): a packed row per rank
                                                     |
         rollouts.publish(version, allowance) <------+  how far generation may run ahead, in raw tokens

A micro-batch is planned and packed while the device is busy with the one before (`take_ahead`), for the
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
from dataclasses import dataclass, field

import numpy as np

from checkpoint import Progress
from client import Notice
from conversation import RolloutError
from metrics import Window
from packing import Row, Sample, pack
from process import DeathMessage
from rollout import TOO_OLD, EndMessage, GroupMessage, MetricsMessage
from scoring import EQUAL_REWARDS, PASS

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


@dataclass
class OpenStep:
    """What the step that is being made has taken so far."""

    tokens: int = 0  # raw
    forwarded: int = 0  # unique tokens
    trained: int = 0  # tokens
    samples: int = 0
    cost: float = 0.0  # FLOPs
    prompts: set[int] = field(default_factory=set)
    held_s: float = 0.0  # that the allowance held generation back
    growth: int = 0  # of the allowance, while both sides would wait
    flushed: bool = False


class Feed:
    """See the module. `rollouts` is any producer with queue, check, publish, held and status."""

    def __init__(self, rollouts, planner, progress: Progress, options, peak_flops: float = math.nan):
        self.rollouts = rollouts
        self.planner = planner
        self.peak_flops = peak_flops  # of all ranks together
        self.progress = progress  # prompts trained or dropped, for checkpoints: those of closed steps
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
        self.bad_news = lambda: None  # looked at while waiting: why the run cannot go on, if so
        self.leaving = lambda: None  # was the run asked to end? LEAVING or PREEMPTED
        self.window = Window()
        self.used_tokens = 0  # raw tokens of samples trained or dropped
        self.accumulation = options.gradient_accumulation_steps
        full = planner.token_budget if planner.token_budget < math.inf else 1  # see `receive`
        self.step_tokens = planner.ranks * full * self.accumulation  # of the last step
        self.generated = self.trained = 0  # samples: the ledger
        self.dropped = Counter()  # by reason
        self.unfit = 0  # groups in a row of which nothing fits into a row
        self.patience = options.vllm_server_timeout  # with them, where only --max_steps ends the run
        self.forwarded_tokens = progress.tokens  # unique tokens since the start
        self.last_plan: list[list[Sample]] = []
        self.planned = None  # (samples per rank, rows) handed to the ranks; training on them has not begun
        self.notice = Notice()
        self.last_group = time.monotonic()
        self.last_growth = 0.0
        self.step = OpenStep()

    def check(self) -> None:
        """Raise what ends the run while the queue is empty: a dead producer, or `bad_news`."""
        self.rollouts.check()
        if news := self.bad_news():
            raise RuntimeError(news)

    def publish(self, servers=None) -> None:
        limit = max(self.max_staleness, 1) * self.step_tokens
        if not self.overlap:  # one step, counted from where the open one began
            limit = self.step_tokens - self.step.tokens
        ready = self.again if self.served == self.version else []
        self.again = [] if ready else self.again
        self.rollouts.publish(self.served, self.used_tokens + limit + self.step.growth, ready, servers)

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
            ready = self.overlap or self.step.tokens or at_rest
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
                self.step.flushed = True
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
            self.step.held_s += sum(message.values.pop("rollout/backpressure_s", []))
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
        samples = message.generated.get("samples", 0)
        self.generated += samples
        if message.dropped is not None:
            self.dropped[message.dropped] += samples
            if message.dropped == TOO_OLD:
                self.window.add("sample/dropped_stale_count", samples)
                self.sample_again(message.group_id)
            else:
                self.progress.done(message.group_id)
            return
        fresh = [s for s in message.samples if self.version - s.version <= self.max_staleness]
        stale = [s for s in message.samples if self.version - s.version > self.max_staleness]
        self.window.add("sample/dropped_stale_count", len(stale))
        self.drop(stale, TOO_OLD)
        oversize = [s for s in fresh if not self.planner.add(s)]
        self.window.add("batch/dropped_oversize_count", len(oversize))
        self.drop(oversize, "longer than the token budget")
        if stale and not fresh:  # nothing of it will be trained: its prompt is sampled again
            self.sample_again(message.group_id)
        elif len(oversize) == len(fresh):
            self.progress.done(message.group_id)
            self.unfit += 1
        else:
            self.unfit = 0
        through = self.epochs == math.inf and self.unfit >= min(self.dataset_size or PASS, PASS)
        if through and self.notice.waited() > self.patience:
            raise RolloutError(
                f"none of the last {self.unfit} groups fits into a row, and nothing was trained for "
                f"{self.notice.waited():.0f} s (--vllm_server_timeout): raise --token_budget "
                f"{self.planner.token_budget}, or lower --max_completion_length"
            )
        if self.planner.batch_samples and not self.trained:  # a first guess at what a step takes
            mean = sum(map(len, fresh)) // max(len(fresh), 1)
            self.step_tokens = max(self.step_tokens, self.planner.batch_samples * self.accumulation * mean)
            self.publish()

    def sample_again(self, *prompts: int) -> None:
        self.again += prompts
        self.publish()

    def drop(self, samples: list[Sample], reason: str) -> None:
        if samples:
            self.dropped[reason] += len(samples)
            self.used_tokens += sum(len(s.input_ids) for s in samples)
            self.publish()

    def grow(self, now: float) -> None:
        if now - self.last_growth > GROW_EVERY_S:
            self.last_growth = now
            self.step.growth += max(self.step_tokens // 4, 1)
            self.publish()

    def ended(self) -> bool:
        """Is every prompt of the run trained, dropped, or held by the planner?"""
        if self.dataset_size is None or self.epochs == math.inf:
            return False
        held = self.planner.held_groups() | self.step.prompts
        held = sum(not self.progress.includes(prompt) for prompt in held)
        return self.progress.count + held >= self.epochs * self.dataset_size

    def start_version(self, version: int, servers: list[str] | None = None) -> None:
        """Servers (None = all) have new weights."""
        self.served = self.version = version
        self.publish(servers=servers)
        self.expect(version)

    def expect(self, version: int) -> None:
        """What is planned from now on is trained at `version`: what the planner holds may be too old then."""
        self.version = version
        stale = self.planner.evict(lambda s: version - s.version > self.max_staleness)
        self.window.add("sample/dropped_stale_count", len(stale))
        left = self.planner.held_groups() | self.step.prompts | {s.group_id for s in self.planned_samples()}
        lost = {s.group_id for s in stale} - left
        self.again += sorted(prompt for prompt in lost if not self.progress.includes(prompt))
        self.drop(stale, TOO_OLD)

    def losses(self) -> str:
        """What was dropped, for whoever wonders why nothing is trained."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        if set(self.dropped) == {EQUAL_REWARDS}:
            reasons += ": the task is too easy, too hard, or gives no partial credit"
        return f"; samples dropped so far: {reasons}" if reasons else ""

    def packets(self, patience: float, ahead_for: int | None = None) -> list:
        """What each rank gets: its Batch, or the same word: None, WAITING, LEAVING, PREEMPTED.

        `ahead_for`: the version that the micro-batch after this one is trained at; nothing is waited for.
        """
        plan = self.take(patience) if ahead_for is None else self.take_ahead(ahead_for)
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
        self.last_plan = plan
        self.used_tokens += sum(lengths)
        self.step.tokens += sum(lengths)
        self.step.samples += len(samples)
        self.step.trained += sum(trained)
        self.step.prompts.update(s.group_id for s in samples)
        for teacher in {*self.teachers, *(s.teacher_id for s in samples)} - {None}:
            its = sum(count for s, count in zip(samples, trained, strict=True) if s.teacher_id == teacher)
            self.window.add(f"teacher_tokens_frac/{teacher}", (its, sum(trained)))
        spread = {
            "forwarded_tokens": lengths,
            "staleness": [self.version - s.version for s in samples],
            "token_staleness": self.version - np.concatenate([*map(token_versions, samples), []]),
        }
        for name, values in spread.items():
            self.window.update({f"sample/{name}_mean": values, f"sample/{name}_max": values})
        self.window.add("sample/trained_tokens_mean", trained)
        self.window.add("sample/time_in_queue_s", [now - s.enqueued_at for s in samples])
        for sample in samples:
            self.window.update({name: [value] for name, value in sample.metrics.items()})
        self.publish()

    def measure_rows(self, rows: list[Row]) -> None:
        unique = [row.unique_tokens for row in rows]
        costs = [self.planner.cost.row(row) for row in rows]
        self.step.forwarded += sum(unique)
        self.step.cost += sum(costs)
        scored = sum(np.count_nonzero(np.diff(row.position)) + min(row.terms, 1) for row in rows)
        self.window.update(
            {
                "batch/masked_token_frac": (sum(unique) - scored, sum(unique)),  # tokens in no loss term
                "batch/samples_per_row": [row.sample_count for row in rows],
                "batch/row_tokens_mean": unique,
                "batch/row_tokens_max": unique,
                "batch/row_imbalance": max(costs) * len(costs) / sum(costs),
                "batch/packing_ratio": (sum(row.raw_tokens for row in rows), sum(unique)),
            }
        )
        if self.planner.token_budget < math.inf:
            used = sum(max(row.unique_tokens, row.terms) for row in rows)  # the budget bounds both
            self.window.add("batch/row_fill_frac", (used, self.planner.token_budget * len(rows)))

    def close_step(self, seconds: dict[str, float], microbatches: int) -> None:
        """An optimizer step was made of what was used since the last one; it took `seconds`, by phase."""
        done, self.step = self.step, OpenStep()
        for prompt in done.prompts:
            self.progress.done(prompt)
        self.trained += done.samples
        self.forwarded_tokens += done.forwarded
        self.step_tokens = max(self.step_tokens, done.tokens) if done.flushed else done.tokens
        fwd_bwd, step = seconds["perf/fwd_bwd_s"], seconds["perf/step_s"]
        self.window.update(
            {
                "batch/forwarded_tokens_per_step": done.forwarded,
                "batch/trained_tokens_per_step": done.trained,
                "batch/samples_per_step": done.samples,
                "batch/groups_per_step": len(done.prompts),
                "batch/microbatches_per_step": microbatches,
                "rollout/backpressure_s": done.held_s,
                "perf/fwd_bwd_forwarded_tokens_per_s": (done.forwarded, fwd_bwd),
                "perf/wall_clock_forwarded_tokens_per_s": (done.forwarded, step),
                "perf/wall_clock_trained_tokens_per_s": (done.trained, step),
                "perf/fwd_bwd_mfu": (done.cost, fwd_bwd * self.peak_flops),
                "perf/wall_clock_mfu": (done.cost, step * self.peak_flops),
            }
        )
        if not self.overlap:
            self.publish()

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
                queued += message.generated.get("samples", 0)
        held = self.step.samples + len(self.planned_samples()) + self.planner.held_samples + queued
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return (
            f"samples: {self.generated + queued} generated = {self.trained} trained + "
            f"{self.dropped.total()} dropped ({reasons}) + {held} in flight"
        )


def token_versions(sample: Sample) -> np.ndarray:
    """The version that made each trained token, as far as it is known."""
    if sample.token_version is None:
        return np.full(int(sample.trained.sum()), sample.version)
    return sample.token_version[sample.trained]
