"""A whole row through a model: the trie beside its samples one after another, on one GPU.

    python bench/train.py [--shapes 0.6B] [--rows grpo] [--compile false] [--checkpoint all] [--json FILE]

Random weights, sharded, compiled and called by the trainer's own functions; float32 master weights, bf16
compute, and the optimizer's moments in memory. The rows are those of bench/attention.py. `body` is forward +
backward without the output head, as in the reference's numbers below; `whole` is the trainer's
forward_backward with head and loss. The samples one after another are packed side by side into rows of about
as many tokens as the trie. Times are medians.

The work ratio is the model FLOPs of the samples over those of the trie (packing.row_cost_from_config): the
most that sharing can save. MFU counts the FLOPs of the trie, recomputed ones not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # before this folder, whose train.py is another

import attention  # noqa: E402
from loss import Objective  # noqa: E402
from memory import QWEN3, memory_of, qwen3  # noqa: E402
from metrics import peak_flops  # noqa: E402
from options import Options  # noqa: E402
from packing import Sample, pack, row_cost_from_config  # noqa: E402
from start import checkpoint_layers, compile_layers, join_ranks, shard  # noqa: E402


def module(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


trainer = module("trainer", ROOT / "train.py")

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
        for parameter in model.parameters():
            parameter.grad = None
        for row in rows:
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


def prepare(model, config, tokens: int, options: argparse.Namespace) -> tuple[int, float]:
    """Gradient checkpointing for a row of so many tokens: layers that recompute, GiB by the formula."""
    layers = model.get_decoder().layers
    parameters = sum(parameter.numel() for parameter in model.parameters())
    needs = memory_of(config, parameters, 1, options.compile, accumulates=False)
    if options.checkpoint == "auto":
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        count = needs.recomputing(tokens, free)
    else:
        count = len(layers) if options.checkpoint == "all" else int(options.checkpoint)
    for layer in layers:
        layer.whole_forward = getattr(layer, "whole_forward", layer.forward)
        layer.forward = layer.whole_forward
    checkpoint_layers(model, count)
    return count, needs.peak(tokens, count) / 2**30


def measure_row(model, config, name: str, segments: list, options: argparse.Namespace) -> dict:
    samples = samples_of(segments, config.vocab_size)
    device = options.ranks.device
    trie = pack(samples).to(device)
    recomputing, formula = prepare(model, config, trie.unique_tokens, options)
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
    if options.whole:
        result["whole_ms"], result["whole_gib"] = measure(whole, model, [trie], options)
        result["whole_mfu"] = 1e3 * cost.row(trie) / result["whole_ms"] / peak
        result["formula_over_measured_gib"] = formula / result["whole_gib"]
    if options.separate:
        result["separate_ms"], _ = measure(body, model, separate, options)
        result["speed_up"] = result["separate_ms"] / result["body_ms"]
        result["share_of_work_ratio"] = result["speed_up"] / result["work_ratio"]
    return result


def main() -> None:
    def yes(word: str) -> bool:
        return word == "true"

    rows = module("rows", ROOT / "bench/attention.py").ROWS
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="0.6B,4B", help=", ".join(QWEN3))
    parser.add_argument("--rows", default=",".join(GATHERED), help=", ".join(rows))
    parser.add_argument("--compile", type=yes, default=True)
    parser.add_argument(
        "--checkpoint", default="auto", help="layers that recompute activations, or all, auto"
    )
    parser.add_argument("--whole", type=yes, default=True, help="measure with the head too")
    parser.add_argument(
        "--separate", type=yes, default=True, help="measure the samples one after another too"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    options.run = Options(model="random weights", bf16=torch.cuda.is_available())
    options.ranks = join_ranks(options.run)
    results = {}
    for shape in options.shapes.split(","):
        model, config, moments = build(shape, options)
        for name in options.rows.split(","):
            results[f"{shape} {name}"] = result = measure_row(model, config, name, rows[name], options)
            print(f"{shape} {name}", *(f"{key} {value:.4g}" for key, value in result.items()), flush=True)
        del model, moments
    results["compiled graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print("compiled graphs", results["compiled graphs"])
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
