"""python -m pytest tests/test_metrics.py: reductions of a logging window, the diagnosis, metrics.jsonl."""

import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from metrics import Logger, Stopwatch, Window, diagnose, term_metrics
from options import OptionError, Options
from start import check_inputs

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
    assert not window.totals  # nothing was copied from the device yet
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
    row = SimpleNamespace(target=torch.arange(3), sample=torch.tensor([0, 0, 1]))
    term_metrics(window, stats, row, ["a", "b"])
    window.settle()
    expected = {"entropy": 1.0, "jsd": 0.3, "teacher_jsd/a": 0.2, "teacher_jsd/b": 0.4, "aux_loss": 2.5}
    assert window.values() == pytest.approx(expected)


WAITS = {"perf/step_s": 1.0, "perf/rollout_wait_s": 0.5, "rollout/backpressure_s": 0.0}


@pytest.mark.parametrize(
    "waiting, held, verdict",
    [
        (0.5, 0.0, "generation-bound: the trainer waits 50% of a step"),
        (0.0, 0.5, "trainer-bound: generation is held back 50% of the time by --max_staleness"),
        (0.5, 0.5, "raise --max_staleness"),
        (0.0, 0.0, "balanced: neither side waits"),
    ],
)
def test_diagnosis_names_the_side_that_waits(waiting, held, verdict):
    record = {"perf/step_s": 1.0, "perf/rollout_wait_s": waiting, "rollout/backpressure_s": held}
    assert diagnose([record], 512).endswith(verdict)


@pytest.mark.parametrize(
    "concurrency, cap, use, verdict",
    [
        (100, 100, 0.7, "of a step, limited by the server: add one"),
        (512, 800, 0.2, "of a step, limited by --max_concurrent_rollouts: raise it"),
        (512, 512, None, "of a step, limited by --max_concurrent_rollouts: raise it"),
        (512, 800, 0.9, "of a step, limited by the server: add one"),
        (40, 800, 0.2, "of a step"),
    ],
)
def test_diagnosis_names_what_holds_generation(concurrency, cap, use, verdict):
    rollout = {"concurrency": concurrency, "concurrency_cap": cap, "vllm_kv_cache_usage_frac": use}
    assert diagnose([WAITS | {f"rollout/{n}": v for n, v in rollout.items()}], 512).endswith(verdict)


def windows(**courses) -> list[dict]:
    """Eight windows in which each metric goes evenly from one value to another, or stays."""
    courses = {name.replace("__", "/"): c if isinstance(c, tuple) else (c, c) for name, c in courses.items()}
    return [{n: low + (high - low) * i / 7 for n, (low, high) in courses.items()} for i in range(8)]


KEPT = {"reward_kept": 0.5, "reward_group_std": 0.4}  # the other groups, which are trained on


@pytest.mark.parametrize(
    "courses, words",
    [
        ({"frac_reward_zero_std": 0.2, "reward_dropped": 0.9, "reward": (0.3, 0.5)}, None),
        (
            {"frac_reward_zero_std": (0.1, 0.4), "reward_dropped": 0.95, "reward": (0.5, 0.9)},
            "near the top: it gets too easy",
        ),
        (
            {
                "frac_reward_zero_std": 0.8,
                "reward_dropped": 0.02,
                "reward": 0.1,
                "completions__clipped_ratio": 0.6,
            },
            "near the bottom: too hard, or the reward never credits; 60% of the rollouts are cut off",
        ),
        (
            {"frac_reward_zero_std": (0.2, 0.7), "reward_dropped": (0.9, 0.1), "reward": (0.8, 0.2)},
            "a regression; look at duplicate_frac and entropy",
        ),
        (
            {"frac_reward_zero_std": 0.7, "reward_dropped": 0.5, "reward": 0.5},
            "in the middle: too easy and too hard",
        ),
    ],
    ids=["healthy", "too easy", "too hard", "regression", "mixture"],
)
def test_diagnosis_says_what_groups_of_equal_rewards_mean(courses, words):
    said = diagnose(windows(**KEPT, **courses), 512)
    assert words in said if words else said == "balanced: neither side waits"


@pytest.mark.parametrize(
    "courses, words",
    [
        ({"completions__duplicate_frac": 0.85}, "is sampling random?"),
        ({"completions__duplicate_frac": 0.85, "entropy": 0.1, "completions__mean_length": 7.0}, None),
        ({"completions__duplicate_frac": 0.5}, None),
        ({"completions__duplicate_frac": (0.1, 0.5), "entropy": (0.9, 0.3)}, "entropy falls: collapse"),
        ({"completions__duplicate_frac": (0.1, 0.5), "entropy": (0.3, 0.9)}, None),
        (
            {"completions__duplicate_frac": (0.1, 0.5), "entropy": (0.9, 0.3), "reward": (0.4, 0.9)},
            None,
        ),
        ({"batch__samples_per_row": 1.1}, "raise --token_budget"),
        ({"batch__samples_per_row": 6.0}, None),
        ({"jsd": (0.5, 0.2), "entropy": (0.9, 0.3)}, "narrowing, not learning"),
        (
            {"completions__duplicate_frac": (0.1, 0.5), "entropy": (0.9, 0.8999), "jsd": (0.5, 0.2)},
            None,
        ),
        ({"jsd": (0.5, 0.2), "entropy": 0.9}, None),
        (
            {"teacher_tokens_frac__a": 0.95, "teacher_tokens_frac__b": 0.05},
            "teacher b is starved: 5% of the tokens",
        ),
        ({"teacher_tokens_frac__a": 0.6, "teacher_tokens_frac__b": 0.4}, None),
        ({"teacher_tokens_frac__a": 1.0}, None),
    ],
)
def test_diagnosis_says_what_else_is_amiss(courses, words):
    said = diagnose(windows(**courses), 512, generations=8)
    assert words in said if words else said == "balanced: neither side waits"


def test_what_was_not_measured_is_passed_over():
    nothing = dict.fromkeys(["reward", "entropy", "frac_reward_zero_std", "teacher_tokens_frac/a", "jsd"])
    assert diagnose([nothing] * 8, 512) == diagnose([{}], 512) == "balanced: neither side waits"


def test_metrics_go_to_tensorboard_and_trackio(tmp_path, monkeypatch):
    seen = []

    class Writer:
        def __init__(self, place, purge_step):
            seen.append((place.name, purge_step))

        def add_scalar(self, name, number, step):
            seen.append((name, number, step))

        def flush(self):
            pass

    tensorboard, trackio = ModuleType("tensorboard"), ModuleType("trackio")
    tensorboard.SummaryWriter = Writer
    trackio.init = lambda **settings: seen.append((settings["project"], settings["name"]))
    trackio.log = lambda record, step: seen.append((record, step))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for kind in ("tensorboard", "trackio"):
        options = Options(model="m", output_dir=str(tmp_path / "run"), report_to=kind)
        Logger(options, step=0).record({"step": 1, "loss": 0.5, "reward": math.nan})
    assert seen == [
        ("tensorboard", 1),
        ("step", 1, 1),
        ("loss", 0.5, 1),
        ("treegrpo", "run"),
        ({"step": 1, "loss": 0.5}, 1),
    ]


def test_a_tracker_that_fails_ends_no_run(tmp_path, capsys):
    logger = Logger(Options(model="m", output_dir=str(tmp_path)), step=0)
    logger.sink = lambda record, step: 1 / 0
    for step in (1, 2):
        logger.record({"step": step})
    assert capsys.readouterr().out.count("division by zero; nothing more is reported") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_tracker_that_is_not_installed_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = Options(model="tiny", task="tasks/sort.py", output_dir=str(tmp_path), report_to="trackio")
    with pytest.raises(OptionError, match="--report_to trackio needs a package: pip install trackio"):
        check_inputs(options, None)


def test_the_live_line_has_the_time_left_the_reward_and_the_side_that_waits(tmp_path, monkeypatch, capsys):
    logger = Logger(Options(model="m", output_dir=str(tmp_path), max_steps=200), step=0)
    logger.live = True
    logger.progress(1, 0.1, "")
    assert "? left" in capsys.readouterr().out
    logger.started -= 60.0
    logger.record(WAITS | {"step": 2, "reward": 0.25})
    capsys.readouterr()
    logger.progress(2, 0.5, "31 in flight")
    line = capsys.readouterr().out.split("\x1b[K")[1]
    assert line == "step 2/200  50%  0:01:15 left  reward 0.250  generation-bound  31 in flight"


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
