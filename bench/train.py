"""A whole row through a model: the trie beside its samples one after another, on one GPU.

    python bench/train.py [--shapes 0.6B] [--rows grpo] [--compile false] [--json FILE]
    python bench/train.py --loop 1,2 [--shapes 0.6B]

Random weights, sharded, compiled and called by the trainer's own functions; float32 master weights, bf16
compute, and the optimizer's moments in memory. The rows are those of bench/attention.py. `body` is forward +
backward without the output head, as in the reference's numbers below; `whole` is the trainer's
forward_backward with head and loss. The samples one after another are packed side by side into rows of about
as many tokens as the trie. `recompute` is `whole` with gradient checkpointing of all layers. Times are
medians.

--loop runs train() itself on so many GPUs, one after another: packing, whole optimizer steps with their
collectives, metrics, the last checkpoint; ready-made groups in place of servers. Each rank has a row of up to
32768 tokens a step, so what it gains is tokens/s; the first steps, which compile, are left out. The last of
those runs under the profiler, which names what the host waited for.

The work ratio is the model FLOPs of the samples over those of the trie (flops.row_cost_from_config): the
most that sharing can save. MFU counts the FLOPs of the trie, recomputed ones not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path = [str(ROOT), str(ROOT / "tests"), *sys.path[1:]]  # this script has the module's name

from replay import ListRollouts, waits_of_a_step  # noqa: E402

import attention  # noqa: E402
import train as trainer  # noqa: E402
from bench.attention import ROWS, groups  # noqa: E402
from flops import row_cost_from_config  # noqa: E402
from loss import Objective  # noqa: E402
from memory import QWEN3, Memory, qwen3  # noqa: E402
from metrics import peak_flops, read_lines  # noqa: E402
from options import Options  # noqa: E402
from packing import Sample, pack  # noqa: E402
from recording import NoServers  # noqa: E402
from start import checkpoint_layers, compile_layers, join_ranks, shard  # noqa: E402

# Unique tokens/s of a trie with gathered K/V through flash-attn-4, eager and with gradient checkpointing:
# body of 0.6B, H200.
GATHERED = {"grpo": 43.6e3, "ratio3.4": 37.7e3, "long_prompt": 27.4e3, "agent": 35.1e3}


def samples_of(segments: list, vocabulary: int, seed: int = 0) -> list[Sample]:
    """A sample for each leaf of the forest; a token below the roots is trained in the first that holds it."""
    random = np.random.default_rng(seed)
    ids = [random.integers(0, vocabulary, length).astype(np.int32) for _, length in segments]
    parents = {parent for parent, _ in segments}
    seen, samples = set(), []
    for leaf in range(len(segments)):
        if leaf in parents:
            continue
        path, at = [], leaf
        while at >= 0:
            path.insert(0, at)
            at = segments[at][0]
        trained = np.concatenate([np.full(len(ids[s]), s not in seen and segments[s][0] >= 0) for s in path])
        seen.update(path)
        tokens = np.concatenate([ids[s] for s in path])
        sample = Sample(tokens, trained, np.full(len(tokens), -12, np.float32), 1.0, path[0], 0, leaf, 0)
        sample.topk_ids = random.integers(0, vocabulary, (len(tokens), 8)).astype(np.int32)
        sample.topk_logp = np.full((len(tokens), 8), -12, np.float32)
        samples.append(sample)
    return samples


def side_by_side(samples: list[Sample], tokens: int) -> list:
    """The samples in rows of at most `tokens`, nothing shared."""
    parts, room = [[]], tokens
    for sample in samples:
        if parts[-1] and len(sample) > room:
            parts.append([])
            room = tokens
        parts[-1].append(sample)
        room -= len(sample)
    return [pack(part, share=False) for part in parts]


def build(shape: str, options: argparse.Namespace):
    """The model of a shape with random weights on the device, as start.load_model leaves it."""
    config = qwen3(shape)
    attention.register()
    with torch.device(options.ranks.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="tree")
    shard(model, options.run, options.ranks)
    if options.compile:
        compile_layers(model)
    moments = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]
    return model.train(), config, moments


def body(model, row, run: Options) -> None:
    """Forward and backward without the output head."""
    index = attention.index(row, run.attention)
    hidden = trainer.backbone_output(model, row, **index).last_hidden_state
    hidden.float().square().mean().backward()


def whole(model, row, run: Options) -> None:
    trainer.forward_backward(model, row, row.terms, Objective(), run)


def measure(call, model, rows: list, options: argparse.Namespace) -> tuple[float, float]:
    """Median milliseconds of `call` over all `rows`, and the peak of allocated memory in GiB."""

    def once():
        for row in rows:
            for parameter in model.parameters():  # else the gradients of the row before take memory
                parameter.grad = None
            call(model, row, options.run)

    if options.ranks.device.type == "cpu":
        once()
        return float("nan"), float("nan")
    once()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        once()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def prepare(model, config, tokens: int, compiled: bool, all_recompute: bool = False) -> tuple[int, float]:
    """Gradient checkpointing of all layers, or of as few as a row of so many tokens asks for: how many those
    are, and the peak in GiB by the formula."""
    layers = model.get_decoder().layers
    parameters = sum(parameter.numel() for parameter in model.parameters())
    needs = Memory(config, parameters, 1, compiled, accumulates=False)
    count = len(layers)
    if not all_recompute and torch.cuda.is_available():
        count = needs.recomputing(tokens, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    for layer in layers:
        layer.whole_forward = getattr(layer, "whole_forward", layer.forward)
        layer.forward = layer.whole_forward
    checkpoint_layers(model, count)
    return count, needs.peak(tokens, count) / 2**30


def measure_row(model, config, name: str, segments: list, options: argparse.Namespace) -> dict:
    samples = samples_of(segments, config.vocab_size)
    device = options.ranks.device
    trie = pack(samples).to(device)
    recomputing, formula = prepare(model, config, trie.unique_tokens, options.compile)
    separate = [row.to(device) for row in side_by_side(samples, trie.unique_tokens)]
    cost = row_cost_from_config(config)
    bare = replace(cost, term=0.0)
    result = {
        "unique_tokens": trie.unique_tokens,
        "layers_that_recompute": recomputing,
        "token_ratio": trie.raw_tokens / trie.unique_tokens,
        "work_ratio": sum(map(bare.row, separate)) / bare.row(trie),
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else float("nan")
    result["body_ms"], result["body_gib"] = measure(body, model, [trie], options)
    result["body_tokens_per_s"] = 1e3 * trie.unique_tokens / result["body_ms"]
    result["body_mfu"] = 1e3 * bare.row(trie) / result["body_ms"] / peak
    if name in GATHERED:
        result["times_gathered_FA4_at_0.6B"] = result["body_tokens_per_s"] / GATHERED[name]
    if options.separate:
        result["separate_ms"], _ = measure(body, model, separate, options)
        result["speed_up"] = result["separate_ms"] / result["body_ms"]
        result["share_of_work_ratio"] = result["speed_up"] / result["work_ratio"]
    for kind in ("whole", "recompute"):
        if kind == "recompute":
            _, formula = prepare(model, config, trie.unique_tokens, options.compile, all_recompute=True)
        result[f"{kind}_ms"], result[f"{kind}_gib"] = measure(whole, model, [trie], options)
        result[f"{kind}_mfu"] = 1e3 * cost.row(trie) / result[f"{kind}_ms"] / peak
        result[f"{kind}_formula_over_measured_gib"] = formula / result[f"{kind}_gib"]
    return result


def measure_rows(shape: str, options: argparse.Namespace) -> dict:
    options.run = Options(model="random weights", bf16=torch.cuda.is_available())
    options.ranks = join_ranks(options.run)
    model, config, moments = build(shape, options)
    results = {}
    for name in options.rows.split(","):
        results[f"{shape} {name}"] = result = measure_row(model, config, name, ROWS[name], options)
        say(f"{shape} {name}", result)
    results["compiled graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    say(shape, {"compiled graphs": results["compiled graphs"]})
    torch.distributed.destroy_process_group()
    return results


def say(what: str, values: dict) -> None:
    print(what, *(f"{name} {value:.4g}" for name, value in values.items()), flush=True)


# ---- train() itself, on several GPUs

WARM_UP = 4  # steps


def write_model(shape: str, folder: str) -> None:
    """A model of the shape with random weights, and the tokenizer that ships with the project."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(qwen3(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tiny").save_pretrained(folder)


def measure_loop(shape: str, options: argparse.Namespace) -> dict:
    """name -> figure, of each number of ranks after the steps of warm-up."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, folder)
        for ranks in map(int, options.loop.split(",")):
            out = Path(folder) / f"of-{ranks}"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            rank = [__file__, "--train", folder, str(out), "--steps", str(options.steps)]
            subprocess.run([*launch, str(ranks), *rank], check=True)
            records = [json.loads(line) for line in read_lines(out / "metrics.jsonl")]
            results[f"{shape} on {ranks}"] = result = of_steps(records[WARM_UP:])
            result["times_the_first"] = result["tokens_per_s"] / next(iter(results.values()))["tokens_per_s"]
            say(f"{shape} on {ranks}", result)
    return results


def of_steps(records: list[dict]) -> dict:
    seconds = sum(record["perf/step_s"] for record in records)
    tokens = sum(record["batch/forwarded_tokens_per_step"] for record in records)
    names = ("step_s", "fwd_bwd_s", "fwd_s", "optimizer_s", "rollout_wait_s", "fwd_bwd_mfu", "wall_clock_mfu")
    names = [f"perf/{name}" for name in names] + ["batch/row_imbalance", "batch/row_fill_frac"]
    medians = {name: statistics.median(record[name] or np.nan for record in records) for name in names}
    return {"tokens_per_s": tokens / seconds} | medians


def train_rank(folder: str, out: str, steps: int) -> None:
    """One rank of a run: as many ready-made groups as the steps take."""
    options = Options(
        model=folder,
        bf16=torch.cuda.is_available(),
        token_budget=32768,
        max_staleness=steps,
        max_steps=steps,
        save_steps=0,
        save_only_model=True,
        output_dir=out,
    )
    rank, ranks, ready = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    if rank == 0:
        samples = samples_of(groups(1024, 8, 1024, 4 * (steps + 2) * ranks), qwen3("0.6B").vocab_size)
        for number, prompt in enumerate(sorted({sample.group_id for sample in samples})):
            ready.append([replace(s, group_id=number) for s in samples if s.group_id == prompt])
    waits = waits_of_a_step(trainer, WARM_UP - 1)
    trainer.train(options, rollouts=ListRollouts(ready), sync=NoServers())
    if rank == 0:
        print("the host waited in", waits, flush=True)
        print("compiled graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], flush=True)


def main() -> None:
    def yes(word: str) -> bool:
        return word == "true"

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="0.6B,4B", help=", ".join(QWEN3))
    parser.add_argument("--rows", default=",".join(GATHERED), help=", ".join(ROWS))
    parser.add_argument("--compile", type=yes, default=True)
    parser.add_argument(
        "--separate", type=yes, default=True, help="measure the samples one after another too"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop", help="numbers of GPUs to run train() on, one after another")
    parser.add_argument("--steps", type=int, default=20, help="of a loop")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)  # one rank of a loop
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    if options.train:
        return train_rank(*options.train, options.steps)
    results = {}
    for shape in options.shapes.split(","):
        results |= measure_loop(shape, options) if options.loop else measure_rows(shape, options)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
