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
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import ascii_lowercase

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  # steps and values, measured ones only, in the order of steps


class ReportError(Exception):
    """A run directory that cannot be read: what is wrong and what to do."""


@dataclass
class Run:
    path: Path
    records: list[dict]
    options: dict
    name: str

    def values(self, key: str) -> np.ndarray:
        """One value per window, NaN where it was not measured."""
        return np.array([record.get(key) for record in self.records], dtype=float)

    def curve(self, key: str) -> Curve:
        values = self.values(key)
        measured = ~np.isnan(values)
        return self.values("step")[measured], values[measured]

    def seconds(self, key: str) -> np.ndarray:
        """Seconds of each window, whose record holds the mean per optimizer step."""
        steps = self.values("step")
        return self.values(key) * np.diff(steps, prepend=steps[0] - self.options.get("logging_steps", 1))


def read_run(path: Path, name: str) -> Run:
    metrics, options = path / "metrics.jsonl", path / "options.json"
    if not metrics.is_file():
        raise ReportError(
            f"{path} has no metrics.jsonl: give the output_dir of a run that has started training"
        )
    records = []
    for number, line in enumerate(read_lines(metrics), 1):
        try:
            record = json.loads(line)
            float(record["step"])
            records.append(record)
        except (ValueError, TypeError, KeyError):
            raise ReportError(f"{metrics} line {number} is not a record with a step: mend it") from None
    if not records:
        raise ReportError(f"{metrics} holds no window yet: wait for the first logging_steps steps of the run")
    try:
        return Run(path, records, json.loads(options.read_text("utf-8")) if options.is_file() else {}, name)
    except ValueError:
        raise ReportError(f"{options} is not JSON: mend it or remove it") from None


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file; one cut short by a kill, or still being written, is left out."""
    return re.findall("(.*)\n", path.read_text(encoding="utf-8")) if path.exists() else []


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a twentieth of the curve."""
    radius = max(1, len(values) // 40) if len(values) >= 8 else 0
    return np.array([values[max(0, i - radius) : i + radius + 1].mean() for i in range(len(values))])


def ratio(parts: np.ndarray, wholes: np.ndarray) -> float:
    """Total over total, of the windows that have both; NaN where there is none."""
    both = ~np.isnan(parts + wholes)
    return parts[both].sum() / wholes[both].sum() if wholes[both].any() else math.nan


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
    _, reward = run.curve("reward")
    tenth = max(1, round(len(reward) / 10))
    first, last = (part.mean() if len(part) else math.nan for part in (reward[:tenth], reward[-tenth:]))
    step_s = run.seconds("perf/step_s")
    tokens = run.values("perf/wall_clock_trained_tokens_per_s") * step_s
    wall = np.nansum(step_s) or math.nan

    def mean(key: str) -> float:
        return ratio(run.values(key), np.ones(len(run.records)))

    return [
        ("reward, first 10%", show(first, ".3f")),
        ("reward, last 10%", show(last, ".3f")),
        ("lift", show(last - first, "+.3f")),
        ("steps", show(run.values("step")[-1], ",.0f")),
        ("wall seconds", show(wall, ",.0f")),
        ("trained tokens/s", show(ratio(tokens, step_s), ",.0f")),
        ("trainer waited", show(ratio(run.seconds("perf/rollout_wait_s"), step_s), ".1%")),
        ("generation held", show(ratio(run.seconds("rollout/backpressure_s"), step_s), ".1%")),
        ("staleness", show(mean("sample/staleness_mean"), ".2f")),
        ("ratio", show(mean("sampling/importance_sampling_ratio/mean"), ".4f")),
        ("packing ratio", show(mean("batch/packing_ratio"), ".2f")),
    ]


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


# ---- terminal ----

WIDTH, HEIGHT = 62, 12  # characters of the plot, without its axes


def plot(runs: list[Run]) -> str:
    """Reward over steps, smoothed: of one run, over its windows as points; of several, in letters."""
    curves = [run.curve("reward") for run in runs]
    steps, values = map(np.concatenate, zip(*curves, strict=True))
    if not len(steps):
        return "no reward was measured yet"
    first, last = steps.min(), steps.max()
    marks = ticks(values.min(), values.max(), 5)
    cells = np.full((HEIGHT, WIDTH), " ")

    def line_at(value):
        return np.rint((marks[-1] - value) / (marks[-1] - marks[0]) * (HEIGHT - 1)).astype(int)

    def draw(steps: np.ndarray, values: np.ndarray, character: str) -> None:
        columns = np.rint((steps - first) / ((last - first) or 1) * (WIDTH - 1)).astype(int)
        cells[line_at(values), columns] = character

    for number, (steps, values) in enumerate(curves):
        if len(runs) == 1:
            draw(steps, values, ".")
        if len(steps):
            fine = np.linspace(steps[0], steps[-1], 4 * WIDTH)
            draw(fine, np.interp(fine, steps, smooth(values)), "*" if len(runs) == 1 else letter(number))
    names = {int(line_at(mark)): show(mark) for mark in marks}
    rows = [f"{names.get(y, ''):>7} |{''.join(row)}" for y, row in enumerate(cells)]
    ends = show(first), show(last)
    below = f"{ends[0]}{'step':^{WIDTH - len(ends[0] + ends[1])}}{ends[1]}"
    return "\n".join(["reward", *rows, f"{'':7} +{'-' * WIDTH}", f"{'':9}{below}"])


def letter(number: int) -> str:
    return ascii_lowercase[number % 26]


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

CHARTS = {  # the metrics of a chart, and what it shows and when it is healthy
    "reward reward_kept eval/reward": "Means of scored rollouts, samples trained on, evaluations; to rise.",
    "entropy": "Of the policy, in nats; a slow fall is healthy, a quick one to 0 is collapse.",
    "sampling/importance_sampling_ratio/mean": "Trainer's over sampler's probability; within 0.02 of 1.",
    "sampling/masked_mean": "Share of tokens left out for their ratio; healthy below 0.01.",
    "sample/staleness_mean sample/staleness_max": "Weight updates since sampling; up to max_staleness.",
    "perf/step_s perf/rollout_wait_s perf/fwd_bwd_s perf/weight_sync_s": "Seconds; healthy: waiting near 0.",
    "rollout/backpressure_s": "Seconds of a step that generation was held back; healthy near 0.",
    "loss": "Per trained token; it moves around 0 and says little of progress.",
    "jsd": "Divergence from the teacher, per trained token; it should fall.",
    "grad_norm": "Before clipping; growing spikes ask for a lower learning rate.",
    "completions/mean_length completions/mean_terminated_length": "A gap means rollouts that are cut off.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal and teach nothing; below 0.5.",
    "batch/packing_ratio": "Tokens of samples over tokens forwarded; 1: nothing is shared.",
    "batch/row_fill_frac": "Share of token_budget that rows use; healthy above 0.8.",
    "perf/wall_clock_trained_tokens_per_s perf/wall_clock_forwarded_tokens_per_s": "Wall-clock throughput.",
}


def drawing(curves: list[Curve], width: int, height: int) -> str:
    """An svg of some curves, smoothed: axes, and spikes far outside the rest cut at the frame."""
    steps, values = map(np.concatenate, zip(*curves, strict=True))
    low, high = np.quantile(values, [0.02, 0.98])
    if high > low:
        values = values.clip(2 * low - high, 2 * high - low)
    marks = ticks(values.min(), values.max(), 5)
    left, right, bottom = 46, width - 10, height - 22
    first, span = steps.min(), np.ptp(steps) or 1

    def x(step):
        return left + (step - first) / span * (right - left)

    def y(value):
        return 8 + (marks[-1] - value) / (marks[-1] - marks[0]) * (bottom - 8)

    parts = []
    for mark in marks:
        parts.append(f'<path class="grid" d="M{left} {y(mark):.1f}H{right}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{show(mark)}</text>')
    for step in ticks(first, first + span, width // 100):
        if first <= step <= first + span and step == round(step):
            parts.append(f'<text x="{x(step):.1f}" y="{height - 5}" text-anchor="middle">{show(step)}</text>')
    for number, (steps, values) in enumerate(curves):
        shown = smooth(values.clip(marks[0], marks[-1]))
        points = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(steps, shown, strict=True)]
        if points:
            parts.append(f'<path class="line c{number % 6}" d="M{"L".join(points)}h0"/>')
    return f'<svg viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'


def card(note: str, curves: dict[str, Curve], width: int = 360, height: int = 180) -> str:
    """A chart under its legend, which has the last values, and over its sentence; nothing without values."""
    if not any(len(steps) for steps, _ in curves.values()):
        return ""
    legend = "".join(
        f'<span class="key c{number % 6}">{escape(label)} <b>{show(values[-1])}</b></span>'
        for number, (label, (_, values)) in enumerate(curves.items())
        if len(values)
    )
    image = drawing(list(curves.values()), width, height)
    return f'<article><div class="keys">{legend}</div>{image}<p>{note}</p></article>'


def page(run: Run, runs: list[Run]) -> str:
    """The report of `run`; the reward chart shows all `runs`."""
    charts = [(note, {name: run.curve(name) for name in names.split()}) for names, note in CHARTS.items()]
    (note, rewards), *others = charts
    if len(runs) > 1:
        rewards = {other.name: other.curve("reward") for other in runs}
    numbers = "".join(f"<div><dt>{what}</dt><dd>{value}</dd></div>" for what, value in headline(run))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: training report</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(run.name)}</h1><dl>{numbers}</dl>{card(note, rewards, 1040, 300)}"
        f'<section class="charts">{"".join(card(*chart) for chart in others)}</section>'
        "<p>Lines are smoothed over a twentieth of the run; spikes far outside the rest are cut.</p>"
        f"<details><summary>Options</summary><pre>{escape(json.dumps(run.options, indent=1))}</pre></details>"
        "</body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --soft: #888; --rule: #8883; }
body { max-width: 1100px; margin: 0 auto; padding: 24px; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; overflow-wrap: anywhere; }
p, dt, .keys { color: var(--soft); font-size: 13px; margin: 6px 0 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px; }
dd { margin: 0; font-size: 22px; font-weight: 600; }
article { border: 1px solid var(--rule); border-radius: 10px; padding: 14px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 16px;
  margin: 16px 0; }
svg { display: block; width: 100%; margin-top: 6px; }
text { fill: var(--soft); font-size: 11px; }
path { fill: none; stroke: var(--rule); }
.line { stroke: var(--c); stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }
.key { display: inline-block; margin-right: 14px; border-left: 10px solid var(--c); padding-left: 5px;
    overflow-wrap: anywhere; }
.c0 { --c: #3b82f6; } .c1 { --c: #e8703a; } .c2 { --c: #22a876; }
.c3 { --c: #9061d8; } .c4 { --c: #c89a1e; } .c5 { --c: #dd5570; }
"""


def write_page(run: Run, runs: list[Run]) -> None:
    (run.path / "report.html").write_text(page(run, runs), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Learning curve of runs, in the terminal and as RUN_DIR/report.html."
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="output_dir of a run")
    paths = parser.parse_args().run_dirs
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    sys.stdout.reconfigure(errors="replace")  # a run's name may hold what the terminal cannot show
    try:
        runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
        print(f"{plot(runs)}\n\n{table(runs)}\n")
        for run in runs:
            write_page(run, runs)
            print(f"page: {run.path / 'report.html'}")
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
