"""python -m pytest tests/test_metrics.py: reductions of a logging window, the diagnosis, metrics.jsonl."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metrics import Logger, Stopwatch, Window, diagnose, term_metrics
from options import Options

CASE = json.loads((Path(__file__).parent / "data/cases/A08_metric_definitions.json").read_text())


def reduced(name, *values):
    window = Window()
    for value in values:
        window.add(name, value)
    return window.values().get(name, math.nan)


@pytest.mark.parametrize("key", sorted(CASE["given"]["window"]))
def test_window_reduces_each_name_by_its_last_part(key):
    name = key.split(" as ")[0].split(",")[0]
    values = CASE["given"]["window"][key]
    if " as (" in key:
        values = [tuple(pair) for pair in values]
    if name == "reward":  # measured per rollout
        values = [[math.nan if v == "NaN" else v for v in values]]
    assert reduced(name, *values) == pytest.approx(CASE["expect"]["window"][name])


def test_nothing_behind_a_value_is_nan():
    assert math.isnan(reduced("tools/failure_frequency", (0, 0)))
    assert math.isnan(reduced("reward", []))


def test_windows_of_ranks_merge_as_if_measured_together():
    together, left, right = Window(), Window(), Window()
    for i, values in enumerate([[1.0, 2.0], [5.0], [0.0, 0.0, 4.0]]):
        for name in ("a/mean", "a/max", "a/min", "a/count"):
            together.add(name, values)
            (left if i % 2 else right).add(name, values)
    left.merge(right)
    assert left.values() == together.values()


def test_term_metrics_are_taken_over_all_terms_before_masking():
    ratio = torch.tensor([0.4, 0.6, 1.3, 4.5, 6.0])
    stats = {
        "log_ratio": ratio.log(),
        "entropy": torch.ones(5),
        "support_unusable": torch.tensor([True, False, False, False, False]),
        "kept": torch.tensor([False, True, True, True, False]),
        "clipped_low": torch.zeros(5, dtype=torch.bool),
        "clipped_high": ratio > 1.2,
    }
    window = Window()
    sample = torch.tensor([0, 0, 0, 2, 2])  # sample 1 has no terms: neither minimum nor maximum
    term_metrics(window, stats, SimpleNamespace(target=torch.arange(5), sample=sample, sample_count=3))
    assert not window.totals and not window.extremes  # nothing was copied from the device yet
    window.settle()
    values = window.values()
    assert values["sampling/masked_mean"] == pytest.approx(0.4)
    assert values["sampling/importance_sampling_ratio/mean"] == pytest.approx(2.56)
    assert values["sampling/importance_sampling_ratio/min"] == pytest.approx(0.4)
    assert values["sampling/importance_sampling_ratio/max"] == pytest.approx(6.0)
    assert values["sampling/sampling_logp_difference/mean"] == pytest.approx(0.997063497222)
    assert values["sampling/sampling_logp_difference/max"] == pytest.approx(1.79175946923)
    assert values["sampling/support_unusable_frac"] == pytest.approx(0.2)
    assert values["clip_ratio/high_mean"] == pytest.approx(0.6)
    assert values["clip_ratio/high_max"] == pytest.approx(1.0)
    assert values["clip_ratio/low_min"] == 0.0


def test_a_divergence_is_averaged_over_the_terms_that_have_one():
    stats = {
        "entropy": torch.ones(3),
        "jsd": torch.tensor([0.2, 0.0, 0.4]),
        "signal": torch.tensor([True, False, True]),
        "aux_loss": torch.tensor(2.5),
    }
    window = Window()
    term_metrics(window, stats, SimpleNamespace(target=torch.arange(3)))
    window.settle()
    expected = {"entropy": 1.0, "jsd": 0.3, "teacher_signal_frac": 2 / 3, "aux_loss": 2.5}
    assert window.values() == pytest.approx(expected)


@pytest.mark.parametrize(
    "waiting, held, verdict",
    [
        (0.5, 0.0, "generation-bound"),
        (0.0, 0.5, "trainer-bound"),
        (0.5, 0.5, "max_staleness"),
        (0.0, 0.0, "balanced"),
    ],
)
def test_diagnosis_names_the_bottleneck(waiting, held, verdict):
    record = {"perf/step_s": 1.0, "perf/rollout_wait_s": waiting, "rollout/backpressure_s": held}
    assert verdict in diagnose(record, 512)


def test_a_phase_that_takes_long_is_named(monkeypatch, capsys):
    """Also while the main thread is inside a collective: a thread speaks."""
    monkeypatch.setattr("metrics.FIRST_NOTICE_S", 0.05)
    monkeypatch.setattr("client.FIRST_NOTICE_S", 0.2)
    watch = Stopwatch()
    watch.speak_up("perf/rollout_wait_s")
    with watch("perf/rollout_wait_s"):
        time.sleep(0.6)
    assert capsys.readouterr().out == ""
    with watch("perf/weight_sync_s"), watch("perf/weight_sync_transfer_s"):
        time.sleep(0.6)
    out = capsys.readouterr().out
    assert "for perf/weight_sync_transfer_s to end" in out and out.startswith("waited 0 s")


def test_records_are_json_with_null_for_what_was_not_measured(tmp_path):
    logger = Logger(Options(model="m", output_dir=str(tmp_path)), step=0)
    logger.record({"step": 1, "reward": math.nan, "loss": 0.5, "perf/fwd_bwd_mfu": math.inf})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "reward": None, "loss": 0.5, "perf/fwd_bwd_mfu": None}


def test_a_resumed_run_drops_the_records_it_makes_again(tmp_path):
    options = Options(model="m", output_dir=str(tmp_path))
    logger = Logger(options, step=0)
    for step in (1, 2, 3):
        logger.record({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # cut off by a crash
    Logger(options, step=2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]
