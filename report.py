"""The learning curve of a run, in the terminal and as one HTML page.

    python report.py RUN_DIR [RUN_DIR ...]

    metrics.jsonl --\\            /--> terminal: reward over steps, headline numbers
    options.json  ---> Run --> curves --> RUN_DIR/report.html: the same, and small charts of what to watch

train() writes the page when a run ends. Several directories (seeds, say) overlay their reward curves; each
gets its page. A value that was not measured is left out of its curve; a number with nothing behind it is "-".
The page must never load anything from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

Points = list[tuple[float, float]]  # (step, value), measured ones only, in the order of steps
RATIO = "sampling/importance_sampling_ratio/"


class ReportError(Exception):
    """A run directory that cannot be read: what is wrong and what to do."""


# ---- reading ----


@dataclass
class Run:
    path: Path
    records: list[dict]
    options: dict
    name: str

    def values(self, key: str) -> list[float]:
        """One value per window, NaN where it was not measured."""
        found = (record.get(key) for record in self.records)
        return [float(v) if isinstance(v, (int, float)) and math.isfinite(v) else math.nan for v in found]

    def points(self, values: list[float]) -> Points:
        return [(s, v) for s, v in zip(self.values("step"), values, strict=True) if not math.isnan(v)]

    def seconds(self, key: str) -> list[float]:
        """Seconds of each window, whose record holds the mean per optimizer step (of a sync: per sync)."""
        every = self.options.get("weight_sync_steps", 1) if key.startswith("perf/weight_sync") else 1
        ends = self.values("step")
        starts = [ends[0] - self.options.get("logging_steps", 1)] + ends[:-1]
        counts = [end // every - start // every for start, end in zip(starts, ends, strict=True)]
        return [mean * count for mean, count in zip(self.values(key), counts, strict=True)]

    def shares(self, key: str) -> list[float]:
        """Share of each window's step time; 0 where the phase did not happen, NaN when it never did."""
        seconds = self.seconds(key)
        if all(map(math.isnan, seconds)):
            return seconds
        pairs = zip(seconds, self.seconds("perf/step_s"), strict=True)
        return [0.0 if math.isnan(part) else part / step if step else math.nan for part, step in pairs]


def read_run(path: Path, name: str) -> Run:
    metrics, options = path / "metrics.jsonl", path / "options.json"
    if not metrics.is_file():
        raise ReportError(
            f"{path} has no metrics.jsonl: give the output_dir of a run that has started training"
        )
    lines = metrics.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            float(record["step"])
            records.append(record)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):  # the last line may be half written: the run is going on
                raise ReportError(f"{metrics} line {number} is not a record with a step: mend it") from None
    if not records:
        raise ReportError(f"{metrics} holds no window yet: wait for the first logging_steps steps of the run")
    try:
        return Run(path, records, json.loads(options.read_text("utf-8")) if options.is_file() else {}, name)
    except ValueError:
        raise ReportError(f"{options} is not JSON: mend it or remove it") from None


def total(values: list[float]) -> float:
    measured = [v for v in values if not math.isnan(v)]
    return math.fsum(measured) if measured else math.nan


def mean(values: list[float]) -> float:
    return ratio(values, [1.0] * len(values))


def ratio(parts: list[float], wholes: list[float]) -> float:
    """Total over total, of the windows that have both."""
    pairs = [(p, w) for p, w in zip(parts, wholes, strict=True) if not math.isnan(p + w)]
    whole = math.fsum(w for _, w in pairs)
    return math.fsum(p for p, _ in pairs) / whole if whole else math.nan


def smooth(points: Points) -> Points:
    """Centred moving mean over about a twentieth of the curve."""
    radius = max(1, len(points) // 40) if len(points) >= 8 else 0
    spans = [points[max(0, i - radius) : i + radius + 1] for i in range(len(points))]
    return [(step, mean([v for _, v in span])) for (step, _), span in zip(points, spans, strict=True)]


def show(value: float, form: str = "") -> str:
    """A number as short as it reads well; "-" when there is none."""
    if math.isnan(value):
        return "-"
    if form:
        return format(value, form)
    size = abs(value)
    return f"{value / 1e6:.3g}M" if size >= 1e6 else f"{value / 1e3:.3g}k" if size >= 1e4 else f"{value:.4g}"


def headline(run: Run) -> list[tuple[str, str]]:
    """The summary of a run: (what, value as text)."""
    reward = [
        value for value in run.values("reward") if not math.isnan(value)
    ]  # not measured in every window
    step_s = run.seconds("perf/step_s")
    tenth = max(1, round(len(reward) / 10))
    first, last = mean(reward[:tenth]), mean(reward[-tenth:])
    rate = run.values("perf/wall_clock_trained_tokens_per_s")
    tokens = [r * s for r, s in zip(rate, step_s, strict=True)]
    wall = total(step_s) or math.nan
    return [
        ("reward, first 10%", show(first, ".3f")),
        ("reward, last 10%", show(last, ".3f")),
        ("lift", show(last - first, "+.3f")),
        ("steps", show(run.values("step")[-1], ",.0f")),
        ("wall seconds", show(wall, ",.0f")),
        ("trained tokens/s", show(ratio(tokens, step_s), ",.0f")),
        ("trainer waited", show(total(run.seconds("perf/rollout_wait_s")) / wall, ".1%")),
        ("generation held", show(total(run.seconds("rollout/backpressure_s")) / wall, ".1%")),
        ("staleness", show(mean(run.values("sample/staleness_mean")), ".2f")),
        ("ratio", show(mean(run.values("sampling/importance_sampling_ratio/mean")), ".4f")),
        ("packing ratio", show(mean(run.values("batch/packing_ratio")), ".2f")),
    ]


# ---- axes, for both ----


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers, 1, 2 or 5 apart, that enclose low..high; the outer ones are the ends of the axis."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        pad = abs(high) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(start, end + 1)]


def bounds(values: list[float]) -> tuple[float, float]:
    """Lowest and highest of the values, but for spikes far outside the rest, which are cut at the frame."""
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = ordered[round(0.02 * last)], ordered[round(0.98 * last)]
    if high == low:
        return ordered[0], ordered[-1]
    return max(ordered[0], 2 * low - high), min(ordered[-1], 2 * high - low)


# ---- terminal ----

WIDTH, HEIGHT = 62, 12  # cells of the plot, without its axes
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell: [row][column]


def line_of(corners: list[tuple[float, float]]) -> set[tuple[int, int]]:
    """The dots of a polyline."""
    dots = {(round(x), round(y)) for x, y in corners}
    for (x0, y0), (x1, y1) in zip(corners, corners[1:], strict=False):
        count = math.ceil(max(abs(x1 - x0), abs(y1 - y0)))
        for i in range(1, count):
            dots.add((round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)))
    return dots


def plot(runs: list[Run], unicode: bool) -> str:
    """Reward over steps. One run: its windows as points under the smoothed line, in braille where the
    terminal can. Several: smoothed lines of a, b, c..."""
    curves = [run.points(run.values("reward")) for run in runs]
    every = [point for curve in curves for point in curve]
    if not every:
        return "no reward was measured yet"
    braille = unicode and len(runs) == 1
    across, down = (2, 4) if braille else (1, 1)
    marks = ticks(min(v for _, v in every), max(v for _, v in every), 5)
    first, last = min(s for s, _ in every), max(s for s, _ in every)

    def place(points: Points, across: int = 1, down: int = 1) -> list[tuple[float, float]]:
        x_unit = (WIDTH * across - 1) / ((last - first) or 1)
        y_unit = (HEIGHT * down - 1) / (marks[-1] - marks[0])
        return [((step - first) * x_unit, (marks[-1] - value) * y_unit) for step, value in points]

    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x, y in place(every) if len(runs) == 1 else []:
        cells[round(y)][round(x)] = "\u00b7" if braille else "."
    for number, curve in enumerate(curves):
        bits: dict[tuple[int, int], int] = {}
        for x, y in line_of(place(smooth(curve), across, down)):
            cell = (y // down, x // across)
            bits[cell] = bits.get(cell, 0) | DOTS[y % down][x % across]
        for (y, x), dots in bits.items():
            cells[y][x] = chr(0x2800 + dots) if braille else "*" if len(runs) == 1 else letter(number)
    names = {round(y): show(mark) for mark, (_, y) in zip(marks, place([(0, m) for m in marks]), strict=True)}
    rows = [f"{names.get(y, ''):>7} |{''.join(row)}" for y, row in enumerate(cells)]
    ends = show(first), show(last)
    steps = f"{ends[0]}{'step':^{WIDTH - len(ends[0] + ends[1])}}{ends[1]}"
    return "\n".join(["reward", *rows, f"{'':7} +{'-' * WIDTH}", f"{'':9}{steps}"])


def letter(number: int) -> str:
    return chr(ord("a") + number % 26)


def table(runs: list[Run]) -> str:
    """Headline numbers, one column per run."""
    columns = [headline(run) for run in runs]
    lines = [" " * 18, *(f"{what:<18}" for what, _ in columns[0])]
    for number, (run, column) in enumerate(zip(runs, columns, strict=True)):
        head = f"{letter(number)} {run.name}" if len(runs) > 1 else run.name
        width = max(12, len(head) + 2)
        cells = [head, *(value for _, value in column)]
        lines = [f"{line}{cell:>{width}}" for line, cell in zip(lines, cells, strict=True)]
    return "\n".join(lines)


# ---- page ----


@dataclass
class Chart:
    """One chart of the page. Kinds: line; band (the second and third series are the ends of a band around the
    first, log axis); share (of step time, all series but the last stacked)."""

    title: str
    note: str  # one sentence: what it is, and when it is healthy
    series: list[tuple[str, str]]  # (label, metric)
    kind: str = "line"
    guide: str | float | None = None  # a dashed line: a value, or the option that holds it


REWARD = Chart(
    "Reward",
    "Mean of all scored rollouts (of one run, also of samples trained on); it should rise, then level off.",
    [("all", "reward"), ("trained on", "reward_kept"), ("evaluation", "eval/reward")],
)
CHARTS = [
    Chart(
        "Entropy",
        "Of the policy at trained tokens, in nats; a slow fall is healthy, a quick one to 0 is collapse.",
        [("mean", "entropy")],
    ),
    Chart(
        "Importance ratio",
        "Trainer over sampler probability of a token, before masking; healthy with a mean within 0.02 of 1.",
        [("mean", RATIO + "mean"), ("min", RATIO + "min"), ("max", RATIO + "max")],
        "band",
        1.0,
    ),
    Chart(
        "Staleness",
        "Weight updates between making a sample and training on it; healthy below max_staleness (dashed).",
        [("mean", "sample/staleness_mean"), ("max", "sample/staleness_max")],
        guide="max_staleness",
    ),
    Chart(
        "Where step time goes",
        "Shares of step time, and of time generation was held (line); healthy with wait, held below 0.05.",
        [
            ("wait", "perf/rollout_wait_s"),
            ("fwd+bwd", "perf/fwd_bwd_s"),
            ("sync", "perf/weight_sync_s"),
            ("held", "rollout/backpressure_s"),
        ],
        "share",
    ),
    Chart(
        "Loss",
        "Policy objective per trained token; it moves around 0 and says little of progress; watch spikes.",
        [("loss", "loss")],
    ),
    Chart(
        "Gradient norm",
        "Before clipping at max_grad_norm (dashed); steady is healthy, growing spikes ask for a lower rate.",
        [("norm", "grad_norm")],
        guide="max_grad_norm",
    ),
    Chart(
        "Completion length",
        "Generated tokens per rollout; healthy when all and finished ones agree, a gap means cut-off ones.",
        [("all", "completions/mean_length"), ("finished", "completions/mean_terminated_length")],
    ),
    Chart(
        "Groups without signal",
        "Share of groups whose rewards are all equal and teach nothing; healthy below 0.5.",
        [("share", "frac_reward_zero_std")],
    ),
    Chart(
        "Packing ratio",
        "Tokens of the samples over tokens forwarded; 1 = nothing shared, above it prefixes saved work.",
        [("ratio", "batch/packing_ratio")],
    ),
    Chart(
        "Row fill",
        "Share of token_budget that rows use; healthy above 0.8, less means rows closed early.",
        [("share", "batch/row_fill_frac")],
    ),
    Chart(
        "Throughput",
        "Tokens per second of wall-clock time, shared ones forwarded once; steady is healthy.",
        [
            ("trained", "perf/wall_clock_trained_tokens_per_s"),
            ("forwarded", "perf/wall_clock_forwarded_tokens_per_s"),
        ],
    ),
    Chart(
        "Masked tokens",
        "Share of trained tokens masked for their ratio, which give no gradient; healthy below 0.01.",
        [("share", "sampling/masked_mean")],
    ),
]


@dataclass
class Frame:
    """Maps (step, value) to the units of an svg; `path` is empty for no points and a dot for one."""

    width: int
    height: int
    first: float
    last: float
    marks: list[float]
    log: bool
    left: int = 46

    def x(self, step: float) -> float:
        return self.left + (step - self.first) / ((self.last - self.first) or 1) * (
            self.width - self.left - 10
        )

    def y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return 8 + (high - value) / (high - low) * (self.height - 30)

    def cut(self, points: Points) -> Points:
        return [(step, min(max(value, self.marks[0]), self.marks[-1])) for step, value in points]

    def path(self, points: Points, join: str = "L") -> str:
        """join="L": a line; join="h0M": dots, by the round line cap."""
        ends = [f"{self.x(step):.1f} {self.y(value):.1f}" for step, value in points]
        return f"M{join.join(ends)}h0" if ends else ""


def frame_of(chart: Chart, curves: list[Points], guide: float, size: tuple[int, int]) -> Frame:
    steps = [step for curve in curves for step, _ in curve]
    low, high = bounds([value for curve in curves for _, value in curve])
    if chart.kind == "band":
        scale = (0.1, 0.2, 0.5, 1, 2, 5, 10)
        low = max((m for m in scale[:3] if m <= low), default=0.1)
        high = min((m for m in scale[4:] if m >= high), default=10)
        marks = [m for m in scale if low <= m <= high]
    elif chart.kind == "share":
        marks = ticks(0, max(1.0, high), 4)
    else:
        near = [guide] if guide <= 2 * high else []  # a far guide would flatten the curve
        marks = ticks(min([low, *near]), max([high, *near]), 5)
    return Frame(*size, min(steps), max(steps), marks, chart.kind == "band")


def grid(frame: Frame, guide: float) -> str:
    """Gridlines with their values, the steps below, and the guide."""
    right, bottom = frame.width - 10, frame.height - 22
    parts = []
    for mark in frame.marks:
        y = frame.y(mark)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{show(mark)}</text>')
    for step in ticks(frame.first, frame.last, frame.width // 100):
        if frame.first <= step <= frame.last and step == round(step):
            x = f"{frame.x(step):.1f}"
            parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{show(step)}</text>')
    if frame.marks[0] <= guide <= frame.marks[-1]:
        parts.append(f'<path class="guide" d="M{frame.left} {frame.y(guide):.1f}H{right}"/>')
    return "".join(parts)


def shape(chart: Chart, frame: Frame, curves: list[Points]) -> str:
    """The curves as paths: the smoothed lines, and under them what the kind of chart has."""
    smoothed = [smooth(frame.cut(points)) for points in curves]
    lines = list(enumerate(smoothed))
    parts = []  # (class, path)
    if chart.kind == "band":
        mean_, low, high = smoothed
        parts.append(("band c0", frame.path(high + low[::-1])))
        lines = [(0, mean_)]
    elif chart.kind == "share":
        floor: dict[float, float] = {}
        for number, points in lines[:-1]:
            lower = [(step, floor.get(step, 0.0)) for step, _ in points]
            upper = [(step, share + floor.get(step, 0.0)) for step, share in points]
            parts.append((f"area c{number}", frame.path(frame.cut(upper) + lower[::-1])))
            floor.update(upper)
        lines = lines[-1:]
    else:
        kind, join = ("dots", "h0M") if chart is REWARD else ("raw", "L")
        parts += [(f"{kind} c{i % 6}", frame.path(frame.cut(c), join)) for i, c in enumerate(curves)]
    parts += [(f"{'line' if len(p) > 1 else 'point'} c{i % 6}", frame.path(p)) for i, p in lines]
    return "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in parts if d)


def card(chart: Chart, curves: list[tuple[str, Points]], guide: float, size: tuple[int, int]) -> str:
    """A chart, its sentence, and its legend, which shows the last values or those under the pointer."""
    head, note = f"<article><h2>{chart.title}</h2>", f"<p>{chart.note}</p></article>"
    measured = [(number, label, points) for number, (label, points) in enumerate(curves) if points]
    if not measured:
        return f'{head}<div class="none">not measured in this run</div>{note}'
    frame = frame_of(chart, [points for _, points in curves], guide, size)
    keys = "".join(
        f'<span class="key c{0 if chart.kind == "band" else i % 6}">{escape(label)} '
        f"<b>{show(points[-1][1])}</b></span>"
        for i, label, points in measured
    )
    hover = {"first": frame.first, "last": frame.last, "left": frame.left, "right": frame.width - 10}
    hover["series"] = [[[s for s, _ in p], [float(f"{v:.4g}") for _, v in p]] for _, _, p in measured]
    drawing = grid(frame, guide) + shape(chart, frame, [points for _, points in curves])
    return (
        f'{head}<div class="keys">{keys}<span class="step"></span></div>'
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{chart.title} over steps" '
        f'data-hover="{escape(json.dumps(hover, separators=(",", ":")))}">{drawing}'
        f'<path class="cursor" d="M0 8V{frame.height - 22}"/></svg>{note}'
    )


def curves_of(chart: Chart, run: Run) -> list[tuple[str, Points]]:
    values = run.shares if chart.kind == "share" else run.values
    return [(label, run.points(values(key))) for label, key in chart.series]


def page(run: Run, runs: list[Run]) -> str:
    """The report of `run`; the reward chart shows all `runs`."""
    rewards = curves_of(REWARD, run)
    if len(runs) > 1:
        rewards = [(other.name, other.points(other.values("reward"))) for other in runs]
    cards = []
    for chart in CHARTS:
        guide = run.options.get(chart.guide) if isinstance(chart.guide, str) else chart.guide
        cards.append(card(chart, curves_of(chart, run), math.nan if guide is None else guide, (360, 180)))
    numbers = "".join(f"<div><dt>{what}</dt><dd>{value}</dd></div>" for what, value in headline(run))
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in run.options.items()
    )
    about = " \u00b7 ".join(str(run.options[key]) for key in ("model", "task") if run.options.get(key))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: training report</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(run.name)}</h1><p>{escape(about)}</p></header><dl>{numbers}</dl>"
        f'<section class="hero">{card(REWARD, rewards, math.nan, (1040, 300))}</section>'
        f'<section class="charts">{"".join(cards)}</section>'
        "<footer><p>Lines are smoothed over a twentieth of the run, windows are faint behind them. Spikes "
        "far outside the rest are cut at the frame; under the pointer stand the measured values.</p></footer>"
        f"<details><summary>Options ({len(run.options)})</summary><table>{rows}</table></details>"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --paper: #f6f6f4; --card: #fff; --ink: #1d1d1b; --soft: #686862;
  --rule: #e6e6e1; --c0: #2a6fd0; --c1: #e0662c; --c2: #189a6c; --c3: #7b4bc0; --c4: #b98900; --c5: #d0405f; }
@media (prefers-color-scheme: dark) { :root { --paper: #141413; --card: #1e1e1c; --ink: #ecece8;
  --soft: #a0a09a; --rule: #33332f; --c0: #5a9bf0; --c1: #f0875a; --c2: #3fbf8f; --c3: #a985e8; --c4: #d9ae3a;
  --c5: #ec7290; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; }
p { color: var(--soft); font-size: 13px; margin: 6px 0 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px 16px;
  margin: 24px 0; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.25; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 16px; }
.hero { margin-bottom: 16px; }
article { position: relative; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 16px; }
svg { display: block; width: 100%; height: auto; margin-top: 6px; overflow: visible; touch-action: pan-y; }
text { fill: var(--soft); font-size: 11px; }
path { fill: none; stroke-linecap: round; stroke-linejoin: round; }
dd, text, b, td { font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); }
.guide { stroke: var(--soft); stroke-dasharray: 4 4; }
.line { stroke: var(--c); stroke-width: 2; vector-effect: non-scaling-stroke; }
.point { stroke: var(--c); stroke-width: 8; }
.raw { stroke: var(--c); stroke-width: 1; opacity: .25; }
.dots { stroke: var(--c); stroke-width: 4; opacity: .35; }
.band { fill: var(--c); opacity: .18; }
.area { fill: var(--c); stroke: var(--card); stroke-width: 1; opacity: .8; }
.cursor { stroke: var(--soft); visibility: hidden; }
.keys { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12px; color: var(--soft); min-height: 18px; }
.keys b { color: var(--ink); }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 3px;
  margin-right: 5px; background: var(--c); }
.step { position: absolute; top: 16px; right: 16px; }
.none { color: var(--soft); display: grid; place-items: center; height: 120px; font-size: 13px; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
footer, details { margin-top: 20px; }
summary { cursor: pointer; font-weight: 600; }
table { border-collapse: collapse; font-size: 13px; margin-top: 8px; }
th { text-align: left; font-weight: 400; color: var(--soft); padding: 2px 20px 2px 0; vertical-align: top; }
td { overflow-wrap: anywhere; }
@media (max-width: 700px) { .hero text { font-size: 26px; } }
"""

SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const data = JSON.parse(svg.dataset.hover), cursor = svg.querySelector(".cursor");
  const labels = svg.parentNode.querySelectorAll("b"), step = svg.parentNode.querySelector(".step");
  const resting = [...labels].map(label => label.textContent);
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wide = data.right - data.left, span = data.last - data.first;
    const wanted = data.first + Math.min(Math.max((at - data.left) / wide, 0), 1) * span;
    let nearest = data.first;
    data.series.forEach(([steps, values], i) => {
      let best = 0;
      steps.forEach((s, j) => { if (Math.abs(s - wanted) < Math.abs(steps[best] - wanted)) best = j; });
      labels[i].textContent = +values[best].toPrecision(4);
      if (Math.abs(steps[best] - wanted) < Math.abs(nearest - wanted)) nearest = steps[best];
    });
    step.textContent = "step " + nearest;
    cursor.setAttribute("transform", `translate(${data.left + (nearest - data.first) / (span || 1) * wide})`);
    cursor.style.visibility = "visible";
  };
  svg.onpointerleave = () => {
    labels.forEach((label, i) => label.textContent = resting[i]);
    step.textContent = "";
    cursor.style.visibility = "hidden";
  };
}
"""


def write_page(run: Run, runs: list[Run]) -> None:
    (run.path / "report.html").write_text(page(run, runs), encoding="utf-8")


# ---- command ----


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Learning curve of runs, in the terminal and as RUN_DIR/report.html."
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="output_dir of a run")
    paths = parser.parse_args().run_dirs
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    unicode = "\u28ff".encode(sys.stdout.encoding, "ignore") != b""
    sys.stdout.reconfigure(errors="replace")  # a run's name may hold what the terminal cannot show
    try:
        runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
        print(f"{plot(runs, unicode)}\n\n{table(runs)}\n")
        for run in runs:
            write_page(run, runs)
            print(f"page: {run.path / 'report.html'}")
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
