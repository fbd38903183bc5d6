"""What packing and planning cost and gain, on one core: python bench/packing.py [--json FILE] [--quick]

1. `pack` beside a dictionary trie (one dict per token, the straightforward row builder), raw tokens/s.
2. The planner on four workloads of 400 groups of 8, beside a greedy stream: a sample goes to the row that
   holds its group if it fits there, else to the least loaded row while some row is empty; otherwise the
   micro-batch is closed. A row costs N + P / 4000 (N unique tokens, P attention pairs; about Qwen3-0.6B).
   Throughput is trained tokens times ranks per unit of the sum of each micro-batch's largest cost. Prompts
   are normal, completions lognormal with a common factor per group. Averages of three seeds.
3. A step of 8 rows of 32k unique tokens: added, planned and packed, from a planner in mid-stream.
4. Samples through a multiprocessing queue: bytes per token, wall time from put to get and to a packed row.

Times are processor time of this process, except for the queue.
"""

import argparse
import json
import multiprocessing
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flops import RowCost  # noqa: E402
from packing import Planner, Sample, pack  # noqa: E402  (this script has the module's name)

COST = RowCost(token=1.0, pair=1 / 4000)


def make(ids, prompt: int, group: int = 0, k: int = 0) -> Sample:
    """A sample whose tokens after the prompt are trained, with k alternatives a token."""
    trained = np.arange(len(ids)) >= prompt
    sample = Sample(ids.astype(np.int32), trained, np.zeros(len(ids), np.float32), 0.5, group, group, 0, 0)
    if k:
        sample.topk_ids = np.where(trained[:, None], np.arange(k, dtype=np.int32), -1).astype(np.int32)
        sample.topk_logp = np.where(trained[:, None], np.float32(-1), np.float32(-np.inf)) * np.ones(
            k, np.float32
        )
    return sample


def groups_of(rng, count, prompt, completion, size=8, k=0) -> list[Sample]:
    samples = []
    for group in range(count):
        start = rng.integers(0, 150000, prompt)
        for _ in range(size):
            samples.append(make(np.append(start, rng.integers(0, 150000, completion)), prompt, group, k))
    return samples


def best_ms(run, repeats: int) -> float:
    """Shortest of several runs in ms of processor time, so that a busy machine does not count."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return 1e3 * min(times)


# 1. pack


def dictionary_trie(samples):
    """The row as a per-token builder makes it: one dict lookup and a few list appends per token."""
    input_ids, depth, parent, children = [], [], [], [{}]  # children[0] of the root, then of each row index
    terms = []
    for i, sample in enumerate(samples):
        at = 0
        trained, logp = sample.trained.tolist(), sample.sampler_logp.tolist()
        for t, token in enumerate(sample.input_ids.tolist()):
            if trained[t]:
                terms.append((at - 1, token, logp[t], sample.advantage, i))
            below = children[at]
            if token not in below:
                input_ids.append(token)
                depth.append(t)
                parent.append(at - 1)
                children.append({})
                below[token] = len(input_ids)
            at = below[token]
    return input_ids, depth, parent, terms


def pack_table(quick: bool) -> list[dict]:
    rng = np.random.default_rng(0)
    line = rng.integers(0, 150000, 4000)
    loose = [make(rng.integers(0, 150000, 4000), 1000) for _ in range(64)]
    cases = {
        "4 groups of 8, 1k + 1.2k": groups_of(rng, 4, 1000, 1200),
        "16 groups of 8, 200 + 800": groups_of(rng, 16, 200, 800),
        "4 groups of 8, 2k + 8k": groups_of(rng, 4, 2000, 8000),
        "the first, K = 8 lists": groups_of(rng, 4, 1000, 1200, k=8),
        "64 identical of 4k": [make(line, 1000) for _ in range(64)],
        "500, each a prefix of the next": [make(line[: 8 * n + 8], 4) for n in range(500)],
        "64 of 4k, nothing shared": loose,
        "10,000 of 20": [make(rng.integers(0, 150000, 20), 10) for _ in range(10000)],
        "one of 128k": [make(rng.integers(0, 150000, 131072), 1000)],
    }
    pack(loose + loose)  # grows the heap once, as a running trainer has
    table = []
    for name, samples in cases.items():
        raw = sum(map(len, samples))
        ms = best_ms(lambda s=samples: pack(s), 3 if quick else 15)
        trie_ms = best_ms(lambda s=samples: dictionary_trie(s), 1 if quick else 2)
        table.append({"case": name, "raw_tokens": raw, "ms": ms, "trie_ms": trie_ms})
    return table


# 2. planner


@dataclass
class Workload:
    name: str
    prompt: tuple[float, float]  # mean, spread / mean
    completion: tuple[float, float]
    group_spread: float
    budget: int
    ranks: int


WORKLOADS = [
    Workload("400 + 900, 4 x 8k", (400, 0.4), (900, 0.6), 0.3, 8192, 4),
    Workload("5.7k + 480, 4 x 16k", (5700, 0.2), (480, 0.3), 0.1, 16384, 4),
    Workload("2k + 8k, 4 x 32k", (2000, 0.3), (8000, 0.2), 0.2, 32768, 4),
    Workload("400 + 900, 8 x 16k", (400, 0.4), (900, 0.6), 0.25, 16384, 8),
]


def lognormal(rng, spread: float, size=None):
    """Lognormal factors of mean 1."""
    sigma = np.sqrt(np.log(1 + spread**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, size)


def lengths(load: Workload, seed: int) -> list[tuple[int, list[int]]]:
    """(prompt length, completion lengths) of each group; what fits no row is left out."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(400):
        mean, spread = load.prompt
        prompt = int(max(rng.normal(mean, spread * mean), 16))
        completions = (
            load.completion[0] * lognormal(rng, load.group_spread) * lognormal(rng, load.completion[1], 8)
        )
        groups.append(
            (prompt, [n for n in completions.astype(int).clip(1).tolist() if prompt + n <= load.budget])
        )
    return groups


def pairs(n):
    return n * (n + 1) // 2


class SketchRow:
    """A row by its numbers alone: samples of a group share its prompt and nothing else."""

    def __init__(self):
        self.tokens, self.pairs, self.trained, self.groups = 0, 0, 0, set()

    def extra(self, group, prompt, completion):
        """Tokens and pairs that a sample of a group adds."""
        tokens, more = completion, pairs(prompt + completion) - pairs(prompt)
        return (tokens, more) if group in self.groups else (tokens + prompt, more + pairs(prompt))

    def add(self, group, prompt, completion):
        tokens, more = self.extra(group, prompt, completion)
        self.tokens += tokens
        self.pairs += more
        self.trained += completion
        self.groups.add(group)

    def cost(self):
        return COST.token * self.tokens + COST.pair * self.pairs


def greedy(load: Workload, groups) -> list[list[SketchRow]]:
    batches, rows = [], [SketchRow() for _ in range(load.ranks)]
    for group, (prompt, completions) in enumerate(groups):
        for completion in completions:
            sample = (group, prompt, completion)
            home = [row for row in rows if group in row.groups]
            least = min(rows, key=lambda row: row.pairs)
            open_rows = home if home and least.tokens else [*home, least]
            fitting = [row for row in open_rows if row.tokens + row.extra(*sample)[0] <= load.budget]
            if not fitting:
                batches.append(rows)
                rows = fitting = [SketchRow() for _ in range(load.ranks)]
            fitting[0].add(*sample)
    return batches


def planned(load: Workload, groups, seed: int) -> tuple[list[list[SketchRow]], int]:
    """Our rows, measured with the same ruler, and the most micro-batches that a sample waited for its own."""
    rng, planner = np.random.default_rng(seed + 100), Planner(load.ranks, load.budget, COST)
    batches, added, waited = [], [], 0
    for group, (prompt, completions) in enumerate(groups):
        start = rng.integers(0, 150000, prompt)
        for n in completions:
            planner.add(make(np.append(start, rng.integers(0, 150000, n)), prompt, group))
        added.append(len(batches))
        while (rows := planner.pop()) is not None:
            waited = max(waited, *(len(batches) - added[s.group_id] for row in rows for s in row))
            batches.append([measured(row) for row in rows])
    return batches, waited


def measured(samples) -> SketchRow:
    row = SketchRow()
    for s in samples:
        trained = int(np.count_nonzero(s.trained))
        row.add(s.group_id, len(s) - trained, trained)
    return row


def figures_of(load: Workload, batches) -> dict:
    cost = np.array([[row.cost() for row in rows] for rows in batches])
    trained = sum(row.trained for rows in batches for row in rows)
    return {
        "throughput": load.ranks * trained / cost.max(axis=1).sum(),
        "fill": float(np.mean([row.tokens / load.budget for rows in batches for row in rows])),
        "imbalance": float((cost.max(axis=1) / cost.mean(axis=1)).mean()),
    }


def planner_table(quick: bool) -> list[dict]:
    table = []
    for load in WORKLOADS:
        results, most = {"greedy": [], "ours": []}, 0
        for seed in range(1 if quick else 3):
            groups = lengths(load, seed)
            batches, waited = planned(load, groups, seed)
            results["greedy"].append(figures_of(load, greedy(load, groups)))
            results["ours"].append(figures_of(load, batches))
            most = max(most, waited)
        entry = {"workload": load.name, "most_micro_batches_waited": most}
        for planner, runs in results.items():
            entry[planner] = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        table.append(entry)
    return table


# 3. a step


def step_times(quick: bool) -> list[dict]:
    rng = np.random.default_rng(7)
    table = []
    for name, prompt, completion, k in (
        ("400 + 900", 400, 900, 0),
        ("400 + 900, K = 8", 400, 900, 8),
        ("2k + 3k", 2000, 3000, 0),
        ("6k + 480", 6000, 480, 0),
        ("100 + 60", 100, 60, 0),
    ):
        planner, group = Planner(8, 32768, COST), 0
        times, figures = [], []
        for _ in range(4 if quick else 9):
            rows, add, plan = None, 0.0, 0.0
            while rows is None:
                start = rng.integers(0, 150000, prompt)
                sizes = np.maximum(completion * lognormal(rng, 0.5, 8), 4).astype(int)
                samples = [
                    make(np.append(start, rng.integers(0, 150000, n)), prompt, group, k) for n in sizes
                ]
                group += 1
                begin = time.process_time()
                for sample in samples:
                    planner.add(sample)
                middle = time.process_time()
                rows = planner.pop()
                add, plan = add + middle - begin, plan + time.process_time() - middle
            begin = time.process_time()
            packed = [pack(row) for row in rows]
            times.append((add, plan, time.process_time() - begin))
            cost = np.array([COST.row(row) for row in packed])
            fill = np.mean([row.unique_tokens / 32768 for row in packed])
            counts = sum(row.sample_count for row in packed), sum(row.raw_tokens for row in packed)
            figures.append((*counts, fill, cost.max() / cost.mean()))
        means = zip(("samples", "raw_tokens", "fill", "imbalance"), np.mean(figures[2:], axis=0), strict=True)
        medians = zip(("add_ms", "plan_ms", "pack_ms"), 1e3 * np.median(times[2:], axis=0), strict=True)
        table.append({"case": name} | {figure: float(value) for figure, value in (*means, *medians)})
    return table


# 4. the queue


def send(queue, start, samples) -> None:
    start.wait()
    queue.put(time.time())
    for group in samples:
        queue.put(group)


def queue_times(quick: bool) -> list[dict]:
    """A step of 256k raw tokens, K = 8, in 32 messages of one group, as the rollout process sends them."""
    context = multiprocessing.get_context("spawn")
    table = []
    for prompt, completion in ((100, 900), (300, 700), (600, 400)):
        flat = groups_of(np.random.default_rng(0), 32, prompt, completion, k=8)
        samples = [flat[n : n + 8] for n in range(0, len(flat), 8)]
        tokens = sum(map(len, flat))
        times = []
        for _ in range(1 if quick else 3):
            queue, start = context.Queue(), context.Event()
            sender = context.Process(target=send, args=(queue, start, samples))
            sender.start()
            time.sleep(2)  # the sender has unpickled its samples and waits
            start.set()
            begin = queue.get()
            arrived = [queue.get() for _ in samples]
            crossed = time.time()
            pack([s for group in arrived for s in group])
            times.append((crossed - begin, time.time() - begin))
            sender.join()
        size = sum(len(pickle.dumps(group)) for group in samples)
        plain = sum(sum(array.nbytes for array in vars(s).values() if hasattr(array, "nbytes")) for s in flat)
        table.append(
            {
                "case": f"{prompt} + {completion}",
                "tokens": tokens,
                "bytes_per_token": size / tokens,
                "array_bytes_per_token": plain / tokens,
                "bytes_per_sample": size / len(flat),
                "queue_ms": 1e3 * min(t[0] for t in times),
                "put_to_pack_ms": 1e3 * min(t[1] for t in times),
            }
        )
    return table


def words(figures: dict) -> str:
    shown = {name: f"{x:,.4g}" if isinstance(x, float) else x for name, x in figures.items()}
    return ", ".join(
        f"{name} ({words(x)})" if isinstance(x, dict) else f"{name} {x}" for name, x in shown.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one seed")
    args = parser.parse_args()
    results = {}
    for measure in (pack_table, planner_table, step_times, queue_times):
        results[measure.__name__] = measure(args.quick)
        print(measure.__name__, *map(words, results[measure.__name__]), sep="\n    ", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
