"""python -m pytest tests/test_loop.py: the whole system, with the model that ships with the project."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import attention
import serve
from client import Server
from conversation import Rollout, Turn, samples_of
from head import head_of
from loss import Objective, row_loss
from packing import pack
from sync import WeightSync

ROOT = Path(__file__).parent.parent
DEMO = [
    *("--model", "tiny", "--task", "tasks/sort.py", "--vllm_server_base_url", "embedded", "--bf16", "false"),
    *("--max_completion_length", "16", "--token_budget", "512", "--learning_rate", "1e-3"),
    *("--gradient_checkpointing", "false"),
]


def run(
    output_dir: Path, *arguments: str, ranks: int = 2, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Train in processes of their own; none of them may outlive the run."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *DEMO, "--output_dir", str(output_dir)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert not leftovers(output_dir)
    return done


def leftovers(output_dir: Path) -> list[str]:
    """Processes of a run that are still there a moment after it ended."""
    deadline = time.monotonic() + 5
    while True:
        left = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            try:
                words = process.info["cmdline"] or []
            except psutil.Error:
                continue
            if str(output_dir) in words or "serve.py" in " ".join(words) and process.ppid() == 1:
                left.append(" ".join(words))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def records(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def teacher():
    process, url = serve.launch(["--model", "tiny", "--port", "0", "--dtype", "float32"], 60)
    yield url
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module", params=["grpo", "distill"])
def finished_run(tmp_path_factory, request, teacher):
    """Six steps on two ranks, and two more after a resume."""
    output_dir = tmp_path_factory.mktemp("loop") / "out"
    taught = ["--objective", "distill", "--teacher_server_urls", f"same={teacher}"]
    objective = taught if request.param == "distill" else []
    first = run(output_dir, *objective, "--max_steps", "6", "--save_steps", "6")
    assert first.returncode == 0, first.stdout + first.stderr
    before = records(output_dir)
    more = [*objective, "--max_steps", "8", "--resume_from_checkpoint", "true"]
    second = run(output_dir, *more)
    assert second.returncode == 0, second.stdout + second.stderr
    return output_dir, before, first.stdout, second.stdout


def distils(output_dir: Path) -> bool:
    return json.loads((output_dir / "options.json").read_text())["objective"] == "distill"


def test_the_first_step_of_an_unchanged_policy_has_ratio_one(finished_run):
    """Nor is it any way from a teacher with the same weights."""
    output_dir, (first, *_), _, _ = finished_run
    if distils(output_dir):
        assert abs(first["teacher_jsd/same"]) < 1e-5
        assert first["teacher_tokens_frac/same"] == first["teacher_signal_frac"] == 1
    else:
        assert first["sampling/sampling_logp_difference/max"] < 1e-4
        assert first["sampling/masked_mean"] == 0
    assert first["sample/staleness_max"] == 0


def test_generation_runs_ahead_of_training_but_not_too_far(finished_run):
    _, before, _, _ = finished_run
    assert max(r["sample/staleness_max"] for r in before) in range(1, 5)
    trained = sum(r["batch/samples_per_step"] for r in before)
    assert sum(r["sample/dropped_stale_count"] for r in before) <= 0.02 * trained, (
        "it is held back, not thrown away"
    )


def test_a_resumed_run_goes_on_at_the_next_step(finished_run):
    output_dir, before, _, _ = finished_run
    assert [r["step"] for r in before] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(output_dir)] == [1, 2, 3, 4, 5, 6, 7, 8]
    seventh = records(output_dir)[6]
    assert seventh["epoch"] > before[-1]["epoch"]
    if not distils(output_dir):  # versions count on, and the first update went out before the first prompt
        assert seventh["sampling/sampling_logp_difference/max"] < 1e-4


ALWAYS = """
    num_tokens loss grad_norm nonfinite_grad_count learning_rate epoch entropy
    reward reward_dropped frac_reward_zero_std reward_kept reward_group_std
    completions/ mean_length min_length max_length mean_terminated_length min_terminated_length
        max_terminated_length clipped_ratio duplicate_frac
    rewards/is_sorted/ mean group_std
    sampling/ sampling_logp_difference/mean sampling_logp_difference/max importance_sampling_ratio/min
        importance_sampling_ratio/mean importance_sampling_ratio/max masked_mean sampler_mass
    clip_ratio/ region_mean low_mean low_min high_mean high_max
    rollout/ duration_s generated_tokens_per_s concurrency concurrency_cap turns_mean turns_max
        samples_per_rollout fork_frac drift_tokens_mean drift_tokens_max score_queue_size queue_size score_s
        score_wait_s backpressure_s vllm_retry_count vllm_kv_cache_usage_frac
        vllm_running_requests vllm_queued_requests vllm_preemption_count
    sample/ forwarded_tokens_mean forwarded_tokens_max trained_tokens_mean time_in_queue_s staleness_mean
        staleness_max token_staleness_mean token_staleness_max dropped_stale_count
    batch/ forwarded_tokens_per_step trained_tokens_per_step samples_per_step groups_per_step
        microbatches_per_step masked_token_frac samples_per_row row_tokens_mean row_tokens_max row_fill_frac
        row_imbalance packing_ratio dropped_oversize_count
    perf/ step_s fwd_bwd_s fwd_s optimizer_s rollout_wait_s weight_sync_s weight_sync_pause_s
        weight_sync_barrier_s weight_sync_transfer_s fwd_bwd_forwarded_tokens_per_s
        wall_clock_forwarded_tokens_per_s wall_clock_trained_tokens_per_s fwd_bwd_mfu wall_clock_mfu
"""


TAUGHT = {"jsd", "teacher_jsd/same", "teacher_tokens_frac/same", "teacher_signal_frac", "rollout/teacher_s"}


def test_every_metric_of_a_run_without_tools_is_there(finished_run):
    names, prefix = set(), ""
    for line in ALWAYS.strip().splitlines():
        for word in line.split():
            if word.endswith("/"):
                prefix = word
            else:
                names.add(prefix + word)
    record = set().union(*finished_run[1])
    assert len(names) == 90
    if "jsd" in record:  # no rewards, no policy term
        idle = {name for name in names if re.match("reward|frac_reward|sampling/|clip_ratio/", name)}
        assert not idle & record
        names = names - idle | TAUGHT
    assert not names - record, names - record
    last = finished_run[1][-1]
    assert 0 <= last["perf/fwd_s"] <= last["perf/fwd_bwd_s"] <= last["perf/step_s"]
    assert 0 < last["batch/masked_token_frac"] < 1


def test_the_ledger_balances(finished_run):
    for output in finished_run[2:]:
        line = re.search(
            r"samples: (\d+) generated = (\d+) trained \+ (\d+) dropped .* \+ (\d+) in flight", output
        )
        generated, trained, dropped, held = map(int, line.groups())
        assert generated == trained + dropped + held
        assert trained > 0


def test_the_final_checkpoint_loads_and_generates(finished_run):
    path = finished_run[0] / "checkpoint-8"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    prompt = [{"role": "user", "content": "sort: dbca"}]
    ids = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    assert "sort: dbca" in text and len(text) > len("sort: dbca")


def test_the_resolved_options_and_a_report_are_saved(finished_run):
    assert ">entropy <b>" in (finished_run[0] / "report.html").read_text()
    assert json.loads((finished_run[0] / "options.json").read_text())["learning_rate"] == 1e-3


def test_adapters_are_trained_saved_merged_and_resumed(tmp_path):
    """The servers get merged weights: the ratio is 1 at the first step, and at the first after a resume."""
    lora = ["--lora_r", "4", "--lora_alpha", "8", "--merge_on_save", "true"]
    for steps, resume in ("2", []), ("3", ["--resume_from_checkpoint", "true"]):
        done = run(tmp_path, *lora, "--max_steps", steps, *resume)
        assert done.returncode == 0, done.stdout + done.stderr
    differences = [r["sampling/sampling_logp_difference/max"] for r in records(tmp_path)]
    assert differences[0] < 1e-4 and differences[2] < 1e-4
    merged = load_file(tmp_path / "checkpoint-3/model.safetensors")
    base, adapter = load_file(ROOT / "tiny/model.safetensors"), tmp_path / "checkpoint-3/adapter"
    low = load_file(adapter / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        path = "base_model.model." + name.removesuffix(".weight")
        if (up := low.get(f"{path}.lora_B.weight")) is None:
            torch.testing.assert_close(merged[name], weight.float(), rtol=0, atol=0)
        else:
            assert up.abs().max() > 0
            change = 2 * up @ low[f"{path}.lora_A.weight"]
            torch.testing.assert_close(merged[name], weight.float() + change, rtol=1e-5, atol=1e-7)


# ---- trainer against server: one embedded server for the tests below


@pytest.fixture(scope="module")
def server():
    process, url = serve.launch(
        ["--model", "tiny", "--port", "0", "--dtype", "float32", "--max_logprobs", "32"], 60
    )
    yield Server(url, timeout=30)
    process.terminate()
    process.wait(10)


def load():
    attention.register()
    return AutoModelForCausalLM.from_pretrained("tiny", dtype="float32", attn_implementation="tree")


def sampled_row(server, count=12, **sampling):
    """Completions of one prompt as a packed row."""
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    message = [{"role": "user", "content": "sort: hqcbza"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    samples = []
    for seed in range(count):
        answer = server.complete(list(prompt), max_tokens=12, seed=seed, **sampling)
        topk = None if answer.topk_ids is None else (answer.topk_ids, answer.topk_logp)
        turn = Turn(list(prompt), answer.token_ids.tolist(), answer.logp, None, answer.candidate_ids, topk)
        samples += samples_of(Rollout([], [], [turn]), 0, 0, 0)[0]
    for sample in samples:
        sample.advantage = 1.0
    return pack(samples).to("cpu")


def log_ratio(model, row, temperature=1.0):
    hidden = model.get_decoder()(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        use_cache=False,
        **attention.index(row),
    ).last_hidden_state[0]
    _, stats = row_loss(hidden, head_of(model), row, Objective(), temperature)
    return stats["log_ratio"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6, "logprobs": 4},
        {"temperature": 1.5, "logprobs": 0},
        {"top_k": 5, "logprobs": 5},
        {"top_k": 20, "top_p": 0.7, "logprobs": 20},
        {"top_k": 20, "min_p": 0.1, "logprobs": 20},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "logprobs": 12},
    ],
    ids=lambda s: " ".join(s),
)
def test_unchanged_policy_has_ratio_one(server, sampling):
    row = sampled_row(server, **sampling)
    ratio = log_ratio(load(), row, sampling.get("temperature", 1.0)).exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-4)


def test_restricted_sampling_without_the_candidate_set_has_another_ratio(server):
    """What the test above would show if the candidate sets were lost: it can fail."""
    row = sampled_row(server, temperature=1.5, top_k=3, logprobs=3)
    row.candidate_ids = row.candidate_offsets = None
    assert (log_ratio(load(), row, 1.5).exp() - 1).abs().max() > 1e-3


def test_after_an_update_the_server_samples_from_the_trainers_weights(server):
    model = load()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    sync = WeightSync([server], 30)
    sync.init()
    before = log_ratio(model, sampled_row(server, logprobs=8))
    sync.prepare(model)
    sync.pause()
    sync.send(model, 7)
    sync.resume()
    after = log_ratio(model, sampled_row(server, logprobs=8))
    sync.close()
    assert before.abs().max() > 0.05
    assert after.abs().max() < 1e-4
    assert np.all(server.complete([1, 2], max_tokens=4, seed=0).versions == 7)


def test_replayed_losses_are_equal_bit_for_bit(tmp_path, teacher):
    """The same samples in the same rows: no server is asked, no teacher, and nothing is rounded otherwise."""
    recorded = str(tmp_path / "groups.jsonl")
    taught = ["--teacher_server_urls", f"same={teacher}"]
    runs = {"live": ["--record", recorded, *taught], "replayed": ["--replay", recorded]}
    found, names = {}, ("loss", "grad_norm", "reward_kept", "teacher_jsd/same", "teacher_tokens_frac/same")
    for name, arguments in runs.items():
        arguments += ["--distill_coef", "0.5", "--max_steps", "3", "--save_steps", "0"]
        done = run(tmp_path / name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [[r[name] for name in names] for r in map(json.loads, lines)]
    assert len(found["live"]) == 3 and found["replayed"] == found["live"]


def test_rollouts_alone_are_scored_and_recorded_without_training(tmp_path):
    recorded = tmp_path / "groups.jsonl"
    arguments = ["--task_kwargs", '{"size": 6}', "--num_train_epochs", "1", "--record", str(recorded)]
    done = run(tmp_path, "--rollout_only", "true", *arguments, ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    values = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert float(values["groups"]) == 6 == len(recorded.read_text().splitlines())
    assert 0.1 < float(values["reward"]) < 0.7 and not list(tmp_path.glob("checkpoint-*"))


def test_weights_that_a_run_ends_with_are_evaluated(tmp_path):
    arguments = ["--max_steps", "3", "--weight_sync_steps", "2", "--eval_steps", "2", "--save_steps", "0"]
    done = run(tmp_path / "out", *arguments, "--eval_dataset", "tasks/sort.py:held_out", ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    last = records(tmp_path / "out")[-1]
    assert (last["step"], last["eval/version"]) == (3, 2), (
        "step 3 is not due, and reaches the servers all the same"
    )
    assert 0 <= last["eval/reward"] <= 1
