"""Two GPUs, vLLM installed: does it learn, from how far behind, and what do overlap and sharing save?

    python runs/proof_2gpu.py MODEL OUT [--runs NAME ...] [--at_once 4] [--steps 200] [--seconds 300]

Trains sums (tasks/sums.py) in several runs, so many at once: their trainers share GPU 0, each has a vLLM
server on GPU 1 to itself, which the next run takes over when it ends. So their speeds compare with one
another and with nothing else. A line is printed per run and 20 steps, as they come; after --seconds
everything is ended. Other options are handed to train.py. `python tools/smollm2.py` makes a small MODEL. The
GPUs are the first two of CUDA_VISIBLE_DEVICES; where it names one alone that does for all.
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
    --weight-transfer-config {"backend":"nccl"}
    --compilation-config
    {"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,8,32,128]}"""
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


def start(log: Path, words: list[str], gpu: int, settings: dict) -> subprocess.Popen:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus()[gpu], **settings}
    if len(gpus()) == 1:  # to NCCL, which takes one process per GPU, the other one is another host's
        environment |= {"NCCL_HOSTID": log.stem, "NCCL_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Server:
    def __init__(self, number: int, arguments):
        self.url = f"http://127.0.0.1:{8100 + number}"
        self.log = arguments.out / f"server-{number}.log"
        words = ["vllm", "serve", str(arguments.model), "--port", str(8100 + number), *SERVER.split()]
        self.process = start(self.log, words, -1, {"VLLM_SERVER_DEV_MODE": "1"})


class Trial:
    """A run on a server."""

    def __init__(self, name: str, server: Server, arguments):
        self.name, self.server, self.shown = name, server, 0
        self.folder = arguments.out / name.replace(" ", "-")
        self.folder.mkdir()
        words = [sys.executable, "train.py", "--model", str(arguments.model), *COMMON.split()]
        words += ["--max_steps", str(arguments.steps), *arguments.others, *RUNS[name]]
        words += ["--vllm_server_base_url", server.url, "--output_dir", str(self.folder)]
        self.process = start(self.folder / "trainer.log", words, 0, {"OMP_NUM_THREADS": "1"})

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


def last_words(log: Path, count: int) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return "\n".join(line[:400] for line in lines[-count:])


def mean(records: list[dict], name: str) -> float:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else float("nan")


def end(processes: list[subprocess.Popen]) -> None:
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
    parser.add_argument("--at_once", type=int, default=4, help="servers, and runs at a time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="the runs are ended then")
    arguments, arguments.others = parser.parse_known_args()
    arguments.model, arguments.out = arguments.model.absolute(), arguments.out.absolute()
    arguments.out.mkdir(parents=True)
    began = time.monotonic()
    names = list(arguments.runs)
    servers = [Server(number, arguments) for number in range(min(arguments.at_once, len(names)))]
    trials: list[Trial] = []
    spoke = began
    try:
        while time.monotonic() - began < arguments.seconds:
            for server in servers:
                busy = any(t.server is server and t.process.poll() is None for t in trials)
                if names and not busy:
                    trials.append(Trial(names.pop(0), server, arguments))
            for trial in trials:
                trial.show()
            if not names and all(t.process.poll() is not None for t in trials):
                break
            if time.monotonic() - spoke > 30:
                spoke = time.monotonic()
                steps = {t.name: len(t.records()) for t in trials}
                print(f"{spoke - began:.0f} s: records {steps}", flush=True)
            time.sleep(1)
    finally:
        end([trial.process for trial in trials])  # these print their ledgers
        end([server.process for server in servers])
        for trial in trials:
            trial.show(every=True)
        for trial in trials:
            print(f"--- {trial.name}: exit code {trial.process.returncode}")
            print(last_words(trial.folder / "trainer.log", 3), flush=True)
            if trial.process.returncode and not trial.records():
                print(last_words(trial.server.log, 6), flush=True)


if __name__ == "__main__":
    main()
