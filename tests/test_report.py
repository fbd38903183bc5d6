"""report.py on synthetic runs: terminal, page, errors. Run: python -m pytest tests/test_report.py"""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import report

TOOL = Path(__file__).parent.parent / "report.py"


def record(step: int, **values) -> dict:
    """A window of a run whose reward rises by 0.01 a step; every fifth measured times only."""
    measured = {
        "reward": 0.01 * step,
        "reward_kept": 0.5,
        "entropy": 1.0,
        "loss": 0.0,
        "grad_norm": 0.3,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/min": 0.01,
        "sampling/importance_sampling_ratio/max": 40.0,
        "sample/staleness_mean": 1.5,
        "sample/staleness_max": 3,
        "batch/packing_ratio": 2.5,
        "perf/wall_clock_trained_tokens_per_s": 1000.0,
    }
    if step % 5 == 0:
        measured = dict.fromkeys(measured)
    times = {"perf/step_s": 2.0, "perf/rollout_wait_s": 0.5, "perf/fwd_bwd_s": 1.0, "perf/weight_sync_s": 0.2}
    return {"step": step, **measured, **times, "rollout/backpressure_s": 0.1, **values}


def write_run(path: Path, records: list[dict], **options) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options = {"model": "some/model", "max_staleness": 4, "note": "<b>&", **options}
    (path / "options.json").write_text(json.dumps(options))
    return path


def run_tool(*paths: Path, encoding: str = "utf-8") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, str(TOOL), *map(str, paths)]
    return subprocess.run(command, capture_output=True, encoding=encoding, env=environment, timeout=60)


def numbers(run: report.Run) -> dict[str, str]:
    return dict(report.headline(run))


class Page(HTMLParser):
    """Checks that tags are closed in order; collects tags, attributes and the text outside of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("script", "style") else ""


@pytest.fixture
def rising(tmp_path):
    return write_run(tmp_path / "rising", [record(step) for step in range(1, 101)])


def test_terminal_shows_the_curve_and_the_headline(rising):
    done = run_tool(rising)
    assert done.returncode == 0, done.stderr
    assert "****" in done.stdout and "." in done.stdout.split("\n\n")[0]
    assert max(map(len, done.stdout.split("\n\n")[0].splitlines())) <= 72
    for line in ("first 10% +0.050", "last 10% +0.950", r"lift +\+0.900", "steps +100", "wall seconds +200"):
        assert re.search(line, done.stdout), line


def test_a_terminal_that_knows_only_ascii_shows_it_too(tmp_path):
    done = run_tool(write_run(tmp_path / "r\u00fcn", [record(1), record(2)]), encoding="ascii")
    assert done.returncode == 0 and done.stdout.isascii()


def test_headline_weighs_by_time_and_leaves_out_nulls(rising):
    shown = numbers(report.read_run(rising, "r"))
    assert shown["trained tokens/s"] == "1,000"
    assert (shown["trainer waited"], shown["generation held"]) == ("25.0%", "5.0%")
    assert (shown["staleness"], shown["ratio"], shown["packing ratio"]) == ("1.50", "1.0000", "2.50")


def test_windows_of_several_steps_count_as_they_happened(tmp_path):
    records = [record(step) for step in (10, 20, 30)]
    run = report.read_run(write_run(tmp_path / "r", records, logging_steps=10), "r")
    assert run.seconds("perf/step_s").tolist() == [20.0] * 3
    assert numbers(run)["wall seconds"] == "60"


def test_page_parses_and_stands_alone(rising):
    run_tool(rising)
    text = (rising / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=", text)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert "color-scheme: light dark" in text and "NaN" not in text and ">nan" not in text
    shown = [names for names in report.CHARTS if f">{names.split()[0]} <b>" in text]
    assert len(shown) == page.tags.count("svg") == len(report.CHARTS) - 5  # of five nothing was measured
    assert "max_staleness" in page.text and "<b>&" in page.text and "<b>&" not in text


def test_curves_stay_inside_their_frame(rising):
    run_tool(rising)
    text = (rising / "report.html").read_text(encoding="utf-8")
    for width, height, body in re.findall(r'viewBox="0 0 (\d+) (\d+)".*?>(.*?)</svg>', text):
        for d in re.findall(r'class="line[^"]*" d="([^"]*)"', body):
            for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", d):
                assert 0 <= float(x) <= int(width) and 8 <= float(y) <= int(height) - 22


def test_several_runs_overlay_their_rewards_in_each_page(tmp_path):
    paths = [write_run(tmp_path / f"seed{i}", [record(s) for s in range(1, 31)]) for i in range(3)]
    done = run_tool(*paths)
    assert done.returncode == 0 and re.search(r"a seed0 +b seed1 +c seed2", done.stdout)
    for path in paths:
        hero = (path / "report.html").read_text(encoding="utf-8").split("<section")[0]
        assert all(f"seed{i} <b>" in hero for i in range(3))
        assert hero.count('class="line') == 3


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_just_started_is_shown(tmp_path, count):
    path = write_run(tmp_path / "young", [record(step) for step in range(1, count + 1)])
    (path / "options.json").unlink()
    assert run_tool(path).returncode == 0
    Page((path / "report.html").read_text(encoding="utf-8"))


def test_a_run_that_measured_nothing_is_shown(tmp_path):
    run = report.read_run(
        write_run(tmp_path / "blank", [{"step": s, "reward": None} for s in (1, 2, 3)]), "b"
    )
    assert "no reward was measured" in report.plot([run])
    assert {v for k, v in report.headline(run) if k != "steps"} == {"-"}
    assert Page(report.page(run, [run])).tags.count("svg") == 0


def test_a_half_written_last_line_is_left_out(rising):
    with (rising / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "rew')
    assert len(report.read_run(rising, "r").records) == 100


def test_errors_name_the_directory_and_what_to_do(tmp_path, rising):
    done = run_tool(rising, tmp_path / "nowhere")
    assert done.returncode == 2 and done.stdout == "" and not (rising / "report.html").exists()
    assert f"{tmp_path / 'nowhere'} has no metrics.jsonl: give the output_dir" in done.stderr
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(report.ReportError, match="holds no window yet"):
        report.read_run(empty, "e")
    (empty / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(report.ReportError, match="line 2"):
        report.read_run(empty, "e")


@pytest.mark.parametrize("low, high", [(0, 1), (-0.03, 0.02), (5, 5), (0, 0), (1e-7, 3e-7), (-2e6, 9e6)])
def test_ticks_enclose_the_values_evenly(low, high):
    marks = report.ticks(low, high, 5)
    steps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    assert marks[0] <= low <= high <= marks[-1] and 2 <= len(marks) <= 8
    assert max(steps) == pytest.approx(min(steps)) and min(steps) > 0


def test_smoothing_keeps_a_constant_and_halves_noise():
    assert report.smooth(np.full(50, 2.0)).tolist() == [2.0] * 50
    assert abs(report.smooth((-1.0) ** np.arange(200))).max() <= 0.5
