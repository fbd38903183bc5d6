"""What packing and planning cost and gain, on one core: python bench/packing.py [--json FILE] [--quick]

1. `pack` beside a dictionary trie (one dict per token, the straightforward row builder), raw tokens/s.
2. The planner on four workloads of 400 groups of 8, beside
     greedy  a stream: a sample goes to the row that holds its group if it fits there, else to the least
             loaded row while some row is empty; otherwise the micro-batch is closed
     spill   the same, but to the least loaded row also where that does not raise the most loaded one
     simple  of one micro-batch held: groups, cut by first-fit decreasing where they exceed a row, the oldest
             and then the most expensive first, each to the row it leaves cheapest; then what is left, sample
             by sample, wherever it fits
   A row costs N + P / 4000 (N unique tokens, P attention pairs; about Qwen3-0.6B). Throughput is trained
   tokens times ranks per unit of the sum of each micro-batch's largest cost. Prompts are normal, completions
   lognormal with a common factor per group; means and spreads (WORKLOADS) are chosen so that the three rules
   reproduce the figures of an earlier simulation (in brackets). Averages of three seeds.
3. A step of 8 rows of 32k unique tokens: added, planned and packed, from a planner in mid-stream.
4. Samples through a multiprocessing queue: bytes per token, wall time from put to get and to a packed row.

Times are processor time of this process, except for the queue.
"""

import argparse
import json
import math
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

# Throughput, fill and imbalance of the simulation: greedy, spill, simple (None: not given).
SIMULATED = {
    "400 + 900, 4 x 8k": ((9.45, 0.79, 1.25), (10.41, None, None), (10.67, 0.96, 1.09)),
    "5.7k + 480, 4 x 16k": ((2.23, 0.72, 1.27), (2.32, None, None), (2.58, 0.95, 1.06)),
    "2k + 8k, 4 x 32k": ((4.89, 0.81, 1.20), (5.18, None, None), (5.16, 0.93, 1.14)),
    "400 + 900, 8 x 16k": ((35.1, 0.70, 1.37), (42.2, None, None), (45.6, 0.97, 1.03)),
}


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

    def extra(self, group, prompt, completions):
        """Tokens and pairs that samples of a group add."""
        tokens = sum(completions)
        more = sum(pairs(prompt + n) - pairs(prompt) for n in completions)
        return (tokens, more) if group in self.groups else (tokens + prompt, more + pairs(prompt))

    def add(self, group, prompt, completions):
        tokens, more = self.extra(group, prompt, completions)
        self.tokens += tokens
        self.pairs += more
        self.trained += sum(completions)
        self.groups.add(group)

    def cost(self):
        return COST.token * self.tokens + COST.pair * self.pairs


def greedy(load: Workload, groups, spill: bool) -> list[list[SketchRow]]:
    batches, rows = [], [SketchRow() for _ in range(load.ranks)]
    for group, (prompt, completions) in enumerate(groups):
        for completion in completions:
            row = greedy_row(rows, load.budget, (group, prompt, [completion]), spill)
            if row is None:
                batches.append(rows)
                rows = [SketchRow() for _ in range(load.ranks)]
                row = rows[0]
            row.add(group, prompt, [completion])
    return batches


def greedy_row(rows, budget, sample, spill: bool):
    """The row for a sample, None to close the micro-batch."""
    home = [row for row in rows if sample[0] in row.groups]
    for row in home:
        if row.tokens + row.extra(*sample)[0] <= budget:
            return row
    least = min(rows, key=lambda row: row.pairs)
    tokens, more = least.extra(*sample)
    if least.tokens + tokens > budget:
        return None
    may = not home or least.tokens == 0 or spill and least.pairs + more <= max(row.pairs for row in rows)
    return least if may else None


def simple(load: Workload, groups) -> list[list[SketchRow]]:
    batches, held, stream = [], {}, iter(enumerate(groups))  # held: group -> (prompt, completions)
    while True:
        while (
            sum(prompt + sum(completions) for prompt, completions in held.values()) < load.budget * load.ranks
        ):
            if (entry := next(stream, None)) is None:
                return batches
            held[entry[0]] = entry[1]
        pieces = [(g, p, c) for g, (p, all_of) in held.items() for c in first_fit(p, all_of, load.budget)]
        alone = SketchRow()
        work = [COST.token * tokens + COST.pair * more for tokens, more in (alone.extra(*x) for x in pieces)]
        order = sorted(range(len(pieces)), key=lambda k: (k > 0, -work[k]))
        rows = [SketchRow() for _ in range(load.ranks)]
        rest = [pieces[k] for k in order if not put(rows, load.budget, pieces[k])]
        singles = [(g, p, [n]) for g, p, c in sorted(rest) for n in sorted(c, reverse=True)]
        held = {}
        for g, p, c in singles:
            if not put(rows, load.budget, (g, p, c)):
                held.setdefault(g, (p, []))[1].extend(c)
        batches.append(rows)


def first_fit(prompt, completions, budget) -> list[list[int]]:
    pieces = []
    for n in sorted(completions, reverse=True):
        room = [piece for piece in pieces if prompt + sum(piece) + n <= budget]
        (room[0] if room else pieces.append([]) or pieces[-1]).append(n)
    return pieces


def put(rows, budget, piece) -> bool:
    """Add a piece to the row that it leaves cheapest; False if it fits none."""
    extra = [row.extra(*piece) for row in rows]
    costs = [
        row.cost() + COST.token * tokens + COST.pair * more if row.tokens + tokens <= budget else math.inf
        for row, (tokens, more) in zip(rows, extra, strict=True)
    ]
    least = min(costs)
    if least < math.inf:
        rows[costs.index(least)].add(*piece)
    return least < math.inf


def planned(load: Workload, groups, seed: int, figures: dict) -> list[list[SketchRow]]:
    """Our rows, measured with the same ruler; the planner's times and the longest wait go to `figures`."""
    rng = np.random.default_rng(seed + 100)
    planner, batches, added, emitted = Planner(load.ranks, load.budget, COST), [], {}, {}
    for group, (prompt, completions) in enumerate(groups):
        start = rng.integers(0, 150000, prompt)
        samples = [make(np.append(start, rng.integers(0, 150000, n)), prompt, group) for n in completions]
        begin = time.process_time()
        for sample in samples:
            planner.add(sample)
        figures["add_ms"].append(1e3 * (time.process_time() - begin))
        added |= {id(s): len(batches) for s in samples}
        while True:
            begin = time.process_time()
            rows = planner.pop()
            if rows is None:
                break
            figures["pop_ms"].append(1e3 * (time.process_time() - begin))
            emitted |= {id(s): len(batches) for row in rows for s in row}
            batches.append([measured(row) for row in rows])
            figures["kept"].extend(s for row in rows for s in row)  # ids stay unique while samples live
    figures["waits"] = max(figures.get("waits", 0), max(emitted[i] - added[i] for i in emitted))
    figures["kept"].clear()
    return batches


def measured(samples) -> SketchRow:
    row = SketchRow()
    for s in samples:
        trained = int(np.count_nonzero(s.trained))
        row.add(s.group_id, len(s) - trained, [trained])
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
        own = {"add_ms": [], "pop_ms": [], "kept": []}
        results = {"greedy": [], "spill": [], "simple": [], "ours": []}
        for seed in range(1 if quick else 3):
            groups = lengths(load, seed)
            results["greedy"].append(figures_of(load, greedy(load, groups, spill=False)))
            results["spill"].append(figures_of(load, greedy(load, groups, spill=True)))
            results["simple"].append(figures_of(load, simple(load, groups)))
            results["ours"].append(figures_of(load, planned(load, groups, seed, own)))
        simulated = dict(zip(results, SIMULATED[load.name], strict=False))
        entry = {"workload": load.name, "simulated": simulated}
        for planner, runs in results.items():
            entry[planner] = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        entry["ours"] |= {
            "pop_ms_median": float(np.median(own["pop_ms"])),
            "pop_ms_max": float(max(own["pop_ms"])),
            "add_ms_per_group": float(np.mean(own["add_ms"])),
            "most_micro_batches_waited": own["waits"],
        }
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
        add, plan, packing = 1e3 * np.median(times[2:], axis=0)
        count, raw, fill, imbalance = np.mean(figures[2:], axis=0).tolist()
        table.append(
            {
                "case": name,
                "samples": int(count),
                "raw_tokens": int(raw),
                "fill": fill,
                "imbalance": imbalance,
                "add_ms": add,
                "plan_ms": plan,
                "pack_ms": packing,
            }
        )
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


def show(results: dict) -> None:
    print("pack, one core                      raw tokens        ms   M tokens/s   dict trie   times")
    for r in results["pack"]:
        speed, trie = r["raw_tokens"] / r["ms"] / 1e3, r["raw_tokens"] / r["trie_ms"] / 1e3
        figures = f"{r['raw_tokens']:11,} {r['ms']:9.2f} {speed:12.1f} {trie:11.2f} {speed / trie:7.0f}"
        print(f"{r['case']:34} {figures}")
    print("\nplanner: throughput (fill, imbalance), in brackets the simulation's")
    for r in results["planner"]:
        print(r["workload"])
        for name in ("greedy", "spill", "simple", "ours"):
            f, simulated = r[name], ", ".join(str(x) for x in r["simulated"].get(name, ()) if x)
            figures = f"{f['throughput']:6.2f} ({f['fill']:.3f}, {f['imbalance']:.3f})"
            print(f"    {name:7} {figures}" + (f"   [{simulated}]" if simulated else ""))
        f = r["ours"]
        print(
            f"    pop {f['pop_ms_median']:.1f} ms (at most {f['pop_ms_max']:.1f}), add "
            f"{f['add_ms_per_group']:.2f} ms a group, no sample waited more than "
            f"{f['most_micro_batches_waited']} micro-batches"
        )
    print(
        "\na step of 8 rows x 32k    samples  raw tokens    fill  imbalance   add ms  plan ms  pack ms    sum"
    )
    for r in results["step"]:
        total = r["add_ms"] + r["plan_ms"] + r["pack_ms"]
        print(
            f"{r['case']:23} {r['samples']:9} {r['raw_tokens']:11,} {r['fill']:7.3f} {r['imbalance']:10.3f} "
            f"{r['add_ms']:8.1f} {r['plan_ms']:8.1f} {r['pack_ms']:8.1f} {total:6.1f}"
        )
    print(
        "\nqueue, 256k tokens, K = 8   bytes/token (as arrays)   bytes/sample   put to get ms   put to row ms"
    )
    for r in results["queue"]:
        print(
            f"{r['case']:27} {r['bytes_per_token']:11.1f} ({r['array_bytes_per_token']:.1f}) "
            f"{r['bytes_per_sample']:18,.0f} {r['queue_ms']:15.1f} {r['put_to_pack_ms']:15.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one seed")
    args = parser.parse_args()
    results = {
        "pack": pack_table(args.quick),
        "planner": planner_table(args.quick),
        "step": step_times(args.quick),
        "queue": queue_times(args.quick),
    }
    show(results)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
