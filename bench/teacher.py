"""What a teacher's server scores: python bench/teacher.py URL [--length 512] [--top_k 8] [--json FILE]

Random sequences are sent as a distillation sends its samples, --at_once of them at a time. Printed for every
number at once: tokens/s, seconds per request, and this process's share of a core, which a rollout process
spends too.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from client import Server  # noqa: E402


def measure(server: Server, samples: list[list[int]], at_once: int, top_k: int) -> dict[str, float]:
    def ask(sample: list[int]) -> float:
        started = time.monotonic()
        server.score(sample, top_k)
        return time.monotonic() - started

    started, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(at_once) as threads:
        waits = list(threads.map(ask, samples))
    seconds, used = time.monotonic() - started, time.process_time() - used
    rate = sum(map(len, samples)) / seconds
    return {
        "at_once": at_once,
        "tokens_per_s": rate,
        "request_s": np.mean(waits),
        "cpu_share": used / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second that a teacher's server scores.")
    parser.add_argument("url")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--vocabulary", type=int, default=200, help="ids are drawn below this one")
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--at_once", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument(
        "--samples", type=int, default=256, help="scored per measurement; a quarter of it for 1"
    )
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    draw, server = np.random.default_rng(0), Server(arguments.url)
    server.wait_until_ready()
    samples = draw.integers(3, arguments.vocabulary, (arguments.samples, arguments.length)).tolist()
    measure(server, samples[:2], 2, arguments.top_k)  # the first requests are slow for being the first
    figures = []
    for at_once in arguments.at_once:
        few = samples[: max(at_once, len(samples) // 4)] if at_once < 8 else samples
        figures.append(measure(server, few, at_once, arguments.top_k))
        print({name: round(float(value), 4) for name, value in figures[-1].items()}, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2, default=float))


if __name__ == "__main__":
    main()
