"""Two GPUs, vLLM installed: does it learn, from how far behind, and what do overlap and sharing save?

    python runs/proof_2gpu.py MODEL OUT [--runs NAME ...] [--steps 200] [--seconds 300]

Trains sums (tasks/sums.py) in several runs at once: their trainers share GPU 0, each has a vLLM server on
GPU 1, so their speeds compare with one another and with nothing else. A line is printed per run and 20
steps, as they come; after --seconds everything is ended. Other options are handed to train.py.
`python tools/smollm2.py` makes a small MODEL. The GPUs are the first two of CUDA_VISIBLE_DEVICES;
where it names one alone that does for all, and vLLM needs tools/vllm_gloo.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIPPED = ["--score_centering", "false"]
RUNS = {
    **{f"seed {seed}": ["--seed", str(seed)] for seed in (1, 2, 3)},
    **{f"staleness {bound}": ["--max_staleness", str(bound)] for bound in (1, 16)},
    **{f"clipped {bound}": [*CLIPPED, "--max_staleness", str(bound)] for bound in (1, 4, 16)},
    "in turn": ["--overlap", "false"],
    "side by side": ["--share_prefixes", "false"],
}
COMMON = """--task tasks/sums.py --eval_dataset tasks/sums.py:held_out --eval_steps 100 --num_generations 8
    --max_completion_length 48 --token_budget 0 --per_device_train_batch_size 64 --max_staleness 4
    --learning_rate 1e-5 --seed 1 --compile false --save_steps 0"""
SERVER = """--host 127.0.0.1 --logprobs-mode processed_logprobs
    --max-logprobs 64 --generation-config vllm --max-model-len 512 --max-num-seqs 128
    --max-num-batched-tokens 2048 --gpu-memory-utilization 0.05 --kv-cache-memory-bytes 2000000000
    --enforce-eager"""
WINDOW = 20
SHOWN = {  # of a window of steps, means
    "reward": "reward",
    "eval": "eval/reward",
    "equal": "frac_reward_zero_std",
    "length": "completions/mean_length",
    "step s": "perf/step_s",
    "wait s": "perf/rollout_wait_s",
    "held s": "rollout/backpressure_s",
    "train s": "perf/fwd_bwd_s",
    "sync s": "perf/weight_sync_s",
    "trained/s": "perf/wall_clock_trained_tokens_per_s",
    "sampled/s": "rollout/generated_tokens_per_s",
    "stale": "sample/staleness_mean",
    "ratio": "sampling/importance_sampling_ratio/mean",
    "masked": "sampling/masked_mean",
    "packing": "batch/packing_ratio",
    "grad": "grad_norm",
}


def gpus() -> list[str]:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]


class Trial:
    """A run and its server."""

    def __init__(self, name: str, number: int, arguments):
        self.name, self.shown = name, 0
        self.folder = arguments.out / name.replace(" ", "-")
        self.folder.mkdir(parents=True)
        self.port = 8100 + number
        server = ["vllm", "serve", str(arguments.model), "--port", str(self.port), *SERVER.split()]
        backend = "nccl" if len(gpus()) > 1 else "gloo"
        server += ["--weight-transfer-config", json.dumps({"backend": backend})]
        self.server = self.start("server", server, -1, {"VLLM_SERVER_DEV_MODE": "1"})

    def train(self, arguments) -> None:
        common = [*COMMON.split(), "--max_steps", str(arguments.steps), *arguments.others]
        words = [sys.executable, "train.py", "--model", str(arguments.model), *common, *RUNS[self.name]]
        words += ["--vllm_server_base_url", f"http://127.0.0.1:{self.port}", "--output_dir", str(self.folder)]
        self.trainer = self.start("trainer", words, 0, {"OMP_NUM_THREADS": "1"})

    def start(self, what: str, words: list[str], gpu: int, settings: dict) -> subprocess.Popen:
        log = (self.folder / f"{what}.log").open("w")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus()[gpu], **settings}
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def records(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def show(self, every: bool = False) -> None:
        """Print the windows that are full, with `every` the last one too."""
        records = self.records()
        last = max((record["step"] for record in records), default=0)
        while self.shown + WINDOW <= last or every and self.shown < last:
            steps = range(self.shown + 1, self.shown + WINDOW + 1)
            window = [record for record in records if record["step"] in steps]
            self.shown += WINDOW
            values = [f"{label} {mean(window, name):.4g}" for label, name in SHOWN.items()]
            print(f"{self.name:13}{min(self.shown, last):4}  {'  '.join(values)}", flush=True)

    def last_words(self, name: str, count: int) -> str:
        lines = [line for line in (self.folder / name).read_text().splitlines() if line.strip()]
        return "\n".join(line[:400] for line in lines[-count:])


def mean(records: list[dict], name: str) -> float:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else float("nan")


def end(trials: list[Trial]) -> None:
    """Trainers first, which print their ledgers; then the servers."""
    for processes in ([t.trainer for t in trials], [t.server for t in trials]):
        for number in (signal.SIGINT, signal.SIGKILL):
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            until = time.monotonic() + 6
            while time.monotonic() < until and any(process.poll() is None for process in processes):
                time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="the runs are ended then")
    arguments, others = parser.parse_known_args()
    arguments.model, arguments.out = arguments.model.absolute(), arguments.out.absolute()
    arguments.others = others
    began = time.monotonic()
    trials = [Trial(name, number, arguments) for number, name in enumerate(arguments.runs)]
    for trial in trials:
        trial.train(arguments)
    spoke = began
    try:
        while any(t.trainer.poll() is None for t in trials) and time.monotonic() - began < arguments.seconds:
            time.sleep(1)
            for trial in trials:
                trial.show()
            if time.monotonic() - spoke > 30:
                spoke = time.monotonic()
                steps = [len(t.records()) for t in trials]
                print(f"{spoke - began:.0f} s: records {steps}", flush=True)
    finally:
        end(trials)
        for trial in trials:
            trial.show(every=True)
        for trial in trials:
            print(f"--- {trial.name}: exit code {trial.trainer.returncode}")
            print(trial.last_words("trainer.log", 3), flush=True)
            if trial.trainer.returncode and not trial.records():
                print(trial.last_words("server.log", 6), flush=True)


if __name__ == "__main__":
    main()
