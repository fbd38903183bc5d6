"""Metrics: what is measured becomes a record per logging window: printed, written down, diagnosed.

    rollout process -> MetricsMessage --\\
    ranks           -> term statistics ---> Window -> Logger -> console, metrics.jsonl, diagnosis
    feed, phases    -> counts, seconds --/

A value's name decides how a window reduces it (its last part, after the last slash):

    a list             mean over all its members (per rollout, per sample); NaN members are left out
    a pair (n, d)      total n / total d: rates and fractions
    ..count..          sum            ..max.. / ..min..  the extreme            else  mean of the values

Nothing behind a value (0/0, an empty list) is NaN, null in JSON. Metrics must never end a run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np

import report
from client import FIRST_NOTICE_S, Notice
from options import describe
from report import read_lines

# bf16 FLOP/s of one device, dense, from the vendors' data sheets; MFU is reported only for these
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}

# the table on the console: heading, metric, format
COLUMNS = [
    ("step", "step", "{:.0f}"),
    ("epoch", "epoch", "{:.2f}"),
    ("reward", "reward", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("jsd", "jsd", "{:.4f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("ratio", "sampling/importance_sampling_ratio/mean", "{:.3f}"),
    ("stale", "sample/staleness_mean", "{:.2f}"),
    ("length", "completions/mean_length", "{:.0f}"),
    ("packing", "batch/packing_ratio", "{:.2f}"),
    ("fill", "batch/row_fill_frac", "{:.2f}"),
    ("tok/s", "perf/wall_clock_trained_tokens_per_s", "{:.0f}"),
    ("step s", "perf/step_s", "{:.2f}"),
    ("wait s", "perf/rollout_wait_s", "{:.2f}"),
    ("sync s", "perf/weight_sync_s", "{:.2f}"),
]


EXTREMES = {"max": max, "min": min}


def rule(name: str) -> str:
    """How single values of this name are reduced: sum, max, min or mean."""
    last = name.rsplit("/", 1)[-1].split("_")
    if "count" in last:
        return "sum"
    return "max" if "max" in last else "min" if "min" in last else "mean"


class Window:
    """Values of one logging window, reduced as they arrive: name -> (total, weight) or (the extreme, 1)."""

    def __init__(self):
        self.totals: dict[str, tuple[float, float]] = {}
        self.on_device: list[tuple] = []  # (name, numerator, denominator) until `settle`

    def add(self, name: str, value) -> None:
        """One value: a number, a list (mean over its members) or a pair (numerator, denominator).

        A number or numerator may be a tensor without dimensions, a denominator too; they stay on their device
        until `settle`.
        """
        numerator, denominator = value if isinstance(value, tuple) else (value, 1)
        if any(hasattr(x, "is_cuda") and x.ndim == 0 for x in (numerator, denominator)):
            return self.on_device.append((name, numerator, denominator))
        if isinstance(value, (list, np.ndarray)):  # every token of a step may be a member
            members = np.asarray(value, dtype=float)
            members = members[~np.isnan(members)]
            if rule(name) in EXTREMES:
                numerator = getattr(members, rule(name))() if len(members) else None
            else:
                numerator, denominator = members.sum(), len(members)
        if numerator is None or (not isinstance(value, tuple) and math.isnan(numerator)):
            numerator, denominator = 0.0, 0  # measured, and nothing behind it
            if rule(name) != "mean":
                return
        self.total(name, float(numerator), denominator)

    def total(self, name: str, numerator: float, denominator: float) -> None:
        if keep := EXTREMES.get(rule(name)):
            self.totals[name] = keep(self.totals.get(name, (numerator, 1)), (numerator, 1))
        else:
            n, d = self.totals.get(name, (0.0, 0.0))
            self.totals[name] = (n + numerator, d + denominator)

    def update(self, values: dict) -> None:
        for name, value in values.items():
            self.add(name, value)

    def settle(self) -> None:
        """Take over what is still on a device: one copy, which waits for the device, for all of it."""
        if not self.on_device:
            return
        import torch

        tensors = [x for _, *members in self.on_device for x in members if isinstance(x, torch.Tensor)]
        numbers = iter(torch.stack([tensor.double() for tensor in tensors]).tolist())
        entries, self.on_device = self.on_device, []
        for name, *members in entries:
            n, d = (next(numbers) if isinstance(x, torch.Tensor) else x for x in members)
            self.add(name, n if rule(name) in EXTREMES else (n, d))

    def merge(self, other: Window) -> None:
        """What another rank measured in the same window."""
        for name, pair in other.totals.items():
            self.total(name, *pair)

    def values(self) -> dict[str, float]:
        def reduced(name: str, numerator: float, denominator: float) -> float:
            if rule(name) == "sum":
                return numerator
            return numerator / denominator if denominator else math.nan

        return {name: reduced(name, *pair) for name, pair in self.totals.items()}


def term_metrics(window: Window, stats: dict, row, teachers=()) -> None:
    """What the loss measured on one row (tensors [M], see loss.row_loss) as values of the window.

    teachers: the names of those that scored the row's samples, one a sample.
    Nothing here waits for a device: see `Window.settle`.
    """
    terms = len(row.target)
    if terms == 0:  # a spare rank
        return
    means = {"entropy": stats["entropy"], "sampling/sampler_mass": stats.get("sampler_mass")}
    if "log_ratio" in stats:
        means |= ratio_metrics(window, stats, row)
    for name, values in means.items():
        if values is not None:
            window.add(name, (values.double().sum(), terms))
    if "jsd" in stats:
        jsd, signal = stats["jsd"].double(), stats["signal"]  # zero where there is no signal
        window.add("jsd", (jsd.sum(), signal.sum()))
        for name in sorted(set(filter(None, teachers))):
            its = signal.new_tensor([teacher == name for teacher in teachers], device="cpu")  # [samples]
            its = its.to(signal.device, non_blocking=True)[row.sample]  # [M]
            window.add(f"teacher_jsd/{name}", ((jsd * its).sum(), (signal & its).sum()))
    if "aux_loss" in stats:
        window.add("aux_loss", (stats["aux_loss"].detach() * terms, terms))


def ratio_metrics(window: Window, stats: dict, row) -> dict:
    """Adds the extremes of what a policy objective measures; returns what is to be averaged, by name."""
    difference = stats["log_ratio"].double().abs()
    ratio = stats["log_ratio"].double().exp()
    low, high = stats["clipped_low"].double(), stats["clipped_high"].double()
    window.add("sampling/sampling_logp_difference/max", difference.max())
    window.add("sampling/importance_sampling_ratio/min", ratio.min())
    window.add("sampling/importance_sampling_ratio/max", ratio.max())
    window.add("clip_ratio/low_min", per_sample_mean(low, row).nan_to_num(nan=math.inf).min())
    window.add("clip_ratio/high_max", per_sample_mean(high, row).nan_to_num(nan=-math.inf).max())
    return {
        "sampling/sampling_logp_difference/mean": difference,
        "sampling/importance_sampling_ratio/mean": ratio,
        "sampling/masked_mean": ~stats["kept"],
        "sampling/support_unusable_frac": stats["support_unusable"],
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }


def per_sample_mean(values, row):
    """Mean of per-term values [M] inside each sample -> [samples]; NaN for one without terms."""
    sums = values.new_zeros(2, row.sample_count)
    return sums[0].index_add(0, row.sample, values) / sums[1].index_add(
        0, row.sample, values.new_ones(len(values))
    )


def peak_flops(device_name: str) -> float:
    """bf16 FLOP/s of a device, NaN where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), math.nan)


def value(record: dict, name: str) -> float:
    found = record.get(name)
    return math.nan if found is None else found


def change(records: list[dict], name: str) -> float:
    """The mean over the later half of the windows less that over the earlier half; NaN when there are few."""
    found = [v for v in (value(record, name) for record in records) if not math.isnan(v)]
    half = len(found) // 2
    return statistics.fmean(found[half:]) - statistics.fmean(found[:half]) if half >= 2 else math.nan


def diagnose(records: list[dict], max_concurrent: int, generations: int = 8) -> str:
    """What the last windows say: which side waits, then whatever else is amiss. What was not measured (NaN)
    compares false, and is passed over."""
    now = records[-1]
    said = [bottleneck(now, max_concurrent), saturation(records)]
    duplicates, entropy_change = value(now, "completions/duplicate_frac"), change(records, "entropy")
    nats = value(now, "entropy") * value(now, "completions/mean_length")  # below 1 few completions differ
    if duplicates > 0.9 * (generations - 1) / generations and not nats < 1:
        said.append("most rollouts repeat one of their group: is sampling random?")
    more_alike = change(records, "completions/duplicate_frac") > 0.05 and entropy_change < 0
    jsd_falls = change(records, "jsd") < -0.05 * abs(value(now, "jsd"))
    if more_alike and not change(records, "reward") > 0 and not jsd_falls:
        said.append("rollouts repeat each other more and more while entropy falls: collapse")
    if value(now, "batch/samples_per_row") < 1.5:
        said.append("a row holds one sample, so nothing can be shared: raise --token_budget")
    if jsd_falls and entropy_change < -0.05 * value(now, "entropy"):
        said.append("the divergence falls with the entropy: narrowing, not learning")
    shares = {n.split("/")[1]: value(now, n) for n in now if n.startswith("teacher_tokens_frac/")}
    for name, share in shares.items() if len(shares) > 1 else ():
        if share < 0.2 / len(shares):
            said.append(f"teacher {name} is starved: {share:.0%} of the tokens")
    return "; ".join(filter(None, said))


def bottleneck(now: dict, max_concurrent: int) -> str:
    """Which side waits for the other, and what holds generation where the trainer waits for it."""
    step = max(value(now, "perf/step_s"), 1e-9)
    waiting = value(now, "perf/rollout_wait_s") / step
    held = min(value(now, "rollout/backpressure_s") / step, 1.0)  # a hold counts in the step it ends in
    if waiting > 0.1 and held > 0.1:
        return f"trainer waits {waiting:.0%} and generation is held {held:.0%}: raise --max_staleness"
    if held > 0.1:
        return f"trainer-bound: generation is held back {held:.0%} of the time by --max_staleness"
    if not waiting > 0.1:
        return "balanced: neither side waits"
    concurrency, cap = value(now, "rollout/concurrency"), value(now, "rollout/concurrency_cap")
    limit = ""
    if concurrency >= 0.9 * min(cap, max_concurrent):
        limit = ", limited by the server: add one"
        if cap >= max_concurrent and not value(now, "rollout/vllm_kv_cache_usage_frac") > 0.6:
            limit = ", limited by --max_concurrent_rollouts: raise it"
    return f"generation-bound: the trainer waits {waiting:.0%} of a step{limit}"


def saturation(records: list[dict]) -> str:
    """What groups whose rewards are all equal say, and where in the range of the others they lie."""
    now = records[-1]
    zero, dropped = value(now, "frac_reward_zero_std"), value(now, "reward_dropped")
    kept, spread = value(now, "reward_kept"), value(now, "reward_group_std") / 2
    more, reward = change(records, "frac_reward_zero_std") > 0.05, change(records, "reward")
    if more and reward < 0 and change(records, "reward_dropped") < 0:
        return "rewards fall, and more groups fail together: a regression; look at duplicate_frac and entropy"
    if not zero > 0.5 and not (more and dropped > kept + spread):
        return ""
    equal = f"{zero:.0%} of the groups have equal rewards, "
    if dropped > kept + spread and not reward < 0:
        return equal + "near the top: it gets too easy; stop, or take harder prompts"
    if dropped < kept - spread:
        cut = value(now, "completions/clipped_ratio")
        return (
            equal
            + f"near the bottom: too hard, or the reward never credits; {cut:.0%} of the rollouts are cut off"
        )
    return equal + "in the middle: too easy and too hard prompts, or partial scores; read rollouts"


class Logger:
    """Rank 0's sinks: metrics.jsonl, a table row per window, one live line on a terminal, report.html."""

    def __init__(self, options, step: int):
        self.path = Path(options.output_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        (self.path.parent / "options.json").write_text(describe(options))
        # records of steps that a resumed run makes again are dropped; a fresh run starts a fresh file
        kept = [line for line in read_lines(self.path) if step_of(line) <= step]
        fresh = self.path.with_suffix(".partial")  # renamed when it is whole: a kill may come in between
        fresh.write_text("".join(line + "\n" for line in kept))
        fresh.replace(self.path)
        self.options = options
        self.recent: deque[dict] = deque(maxlen=20)
        self.sink = sink(options, step)
        self.started, self.begun_at = time.monotonic(), None
        self.rows = 0
        self.live = sys.stdout.isatty()
        self.last_verdict = ""
        idle = {"reward", "ratio"} if options.distills else set() if options.has_teachers else {"jsd"}
        self.columns = [column for column in COLUMNS if column[0] not in idle]

    def record(self, record: dict) -> None:
        """Write one window: a line of metrics.jsonl, a table row, now and then the diagnosis."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.write(json.dumps(clean) + "\n")
        try:
            self.sink({k: v for k, v in clean.items() if v is not None}, record["step"])
        except Exception as error:  # a tracker that fails ends no run
            self.line(f"--report_to: {error}; nothing more is reported")
            self.sink = lambda record, step: None
        if self.rows % 20 == 0:
            self.line(" ".join(f"{heading:>8}" for heading, _, _ in self.columns))
        self.rows += 1
        self.line(" ".join(f"{cell(record, name, form):>8}" for _, name, form in self.columns))
        self.recent.append(record)
        options = self.options
        verdict = diagnose(list(self.recent), options.max_concurrent_rollouts, options.num_generations)
        words = re.sub(r"[\d.]+", "", verdict)
        if words != self.last_verdict and self.rows % 5 == 0:
            self.line(f"  {verdict}")
            self.last_verdict = words

    def write(self, line: str) -> None:
        """Append to metrics.jsonl; where the disk is full the whole line is missing, and the run goes on."""
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            with suppress(OSError):  # it may be gone altogether
                os.truncate(self.path, before)
            self.line(f"a record is missing in {self.path}: {error}")

    def close(self) -> None:
        """The run is over: report.html, of all its steps."""
        with suppress(report.ReportError, OSError):
            run = report.read_run(self.path.parent, self.path.parent.resolve().name)
            report.write_page(run, [run])

    def line(self, text: str) -> None:
        print("\r\x1b[K" + text if self.live else text, flush=True)

    def progress(self, step: int, done: float, text: str) -> None:
        """The live line: where the run is (`done` of it, 0 to 1), what it waits for. Only on a terminal."""
        if not self.live:
            return
        self.begun_at = done if self.begun_at is None else self.begun_at
        left = "?"
        if done > self.begun_at:
            passed = time.monotonic() - self.started
            left = timedelta(seconds=round(passed * (1 - done) / (done - self.begun_at)))
        total = f"/{self.options.max_steps}" if self.options.max_steps > 0 else ""
        parts = [f"step {step}{total}", f"{done:.0%}", f"{left} left"]
        if self.recent:
            parts += [f"reward {cell(self.recent[-1], 'reward', '{:.3f}')}"]
            parts += [bottleneck(self.recent[-1], self.options.max_concurrent_rollouts).split(":")[0]]
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{'  '.join([*parts, text])[:width]}", end="", flush=True)


def sink(options, step: int):
    """What takes a record (name -> number) and its step, by --report_to."""
    if options.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(Path(options.output_dir) / "tensorboard", purge_step=step + 1)

        def write(record: dict, step: int) -> None:
            for key, number in record.items():
                writer.add_scalar(key, number, step)
            writer.flush()

        return write
    if options.report_to == "trackio":
        import trackio

        name = options.run_name or Path(options.output_dir).name
        trackio.init(project="treegrpo", name=name, config=vars(options), resume="allow")
        return lambda record, step: trackio.log(record, step=step)
    return lambda record, step: None


def step_of(line: str) -> float:
    """The step of a record; infinite for a line that is none (cut off by a crash, say)."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def cell(record: dict, name: str, form: str) -> str:
    value = record.get(name)
    return "-" if value is None or math.isnan(value) else form.format(value)


class Stopwatch:
    """Seconds spent in named phases: `with watch("perf/fwd_bwd_s"): ...`; `take()` gives and resets them."""

    def __init__(self, cuda: bool = False):
        self.seconds: dict[str, float] = {}
        self.running: list[str] = []
        self.cuda = cuda
        self.events = []  # (name, start, end) of phases that the device may still be busy with

    @contextmanager
    def __call__(self, name: str, on_device: bool = False):
        """`on_device`: on CUDA, how long the device takes for what is launched inside; nothing waits here."""
        start = time.perf_counter()
        if on_device and self.cuda:
            import torch

            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        self.running.append(name)
        try:
            yield
        finally:
            self.running.pop()
            if on_device and self.cuda:
                events[1].record()
                self.events.append((name, *events))
            else:
                self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def speak_up(self, speaks_for_itself: str) -> None:
        """From now on a phase that takes long is named on the console: it may wait for a rank that is stuck.

        A collective says nothing until its timeout, so this is done from a thread.
        """

        def watch():
            seen, notice = None, Notice()
            while True:
                time.sleep(min(1.0, FIRST_NOTICE_S))
                phase = self.running[-1] if self.running else None
                if phase != seen or phase in (None, speaks_for_itself):
                    seen, notice = phase, Notice()
                notice.say(f"{phase} to end: for another rank, a server or the device")

        threading.Thread(target=watch, daemon=True).start()

    def take(self) -> dict[str, float]:
        for name, start, end in self.events:
            end.synchronize()
            self.add(name, start.elapsed_time(end) / 1e3)
        self.events = []
        seconds, self.seconds = self.seconds, {}
        return seconds
