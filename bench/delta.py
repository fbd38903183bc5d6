"""A Gated DeltaNet layer on tries beside the other ways to run it, on one GPU with flash-linear-attention.

    python bench/delta.py [--rows ratio3.4,agent] [--methods tree,paths] [--json FILE]

    tree           attention/delta.py, through the hook that the trainer uses
    separate       the samples laid end to end, no token shared, through flash-linear-attention
    paths          projections and convolution on the trie, the recurrence on every root-to-leaf path
    levels         the recurrence in one call of flash-linear-attention per level, on gathered tokens

The layer is transformers' of Qwen3.5 with random weights: hidden size 2560, 16 key and 32 value heads of 128,
bf16. Times are medians in milliseconds, forward and forward + backward. Its work is all per token, so the
work ratio is samples' tokens over unique ones; "share" is the speed-up over separate divided by that. Last,
it compares errors of outputs and gradients of the recurrence on a small row with those of the separate run.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention  # noqa: E402
from attention import delta  # noqa: E402
from bench.attention import ROWS, groups, layout  # noqa: E402

SHARING = [name for name in ROWS if name != "plain"]


def tree_of(row, plain: bool = False) -> dict:
    return {"tree": attention.Index(row.subtree_end, row.depth, "reference" if plain else "auto")}


def fla_rule(starts):
    """flash-linear-attention's own call, over sequences [S+1]."""
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.utils.index import prepare_chunk_indices

    chunk_o.IS_NVIDIA_HOPPER = False  # heads of 128 need no such refusal: delta_kernels._for_wide_heads
    options = dict(cu_seqlens=starts, chunk_indices=prepare_chunk_indices(starts, delta.CHUNK))
    return partial(chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, **options)


def separate(row):
    from fla.modules.causal_conv1d import causal_conv1d

    rule = fla_rule(row.sample_starts)
    where = {name: rule.keywords[name] for name in ("cu_seqlens", "chunk_indices")}

    def convolve(x, weight, bias=None, activation=None, **_):
        return causal_conv1d(x.mT, weight, bias, activation=activation, **where)[0].mT

    return convolve, lambda q, k, v, g, beta, **_: rule(q, k, v, g, beta)


def paths(row):
    rule = fla_rule(row.sample_starts)
    pick = torch.empty(row.length, dtype=torch.long, device="cuda")  # [N]
    pick[row.samples] = torch.arange(len(row.samples), device="cuda")

    def on_paths(q, k, v, g, beta, **_):
        return rule(*(x.index_select(1, row.samples) for x in (q, k, v, g, beta)))[0].index_select(
            1, pick
        ), None

    return None, on_paths


def levels(row):
    segments = delta._segments(row.subtree_end.cpu().numpy(), row.depth.cpu().numpy())
    steps, order, slot = [], [], {}
    for level in range(segments.level.max() + 1):
        members = [s for s in range(len(segments.level)) if segments.level[s] == level]
        tokens = torch.cat([torch.arange(*segments.start[s : s + 2].tolist()) for s in members]).cuda()
        sizes = torch.tensor([0, *(int(segments.start[s + 1] - segments.start[s]) for s in members)])
        parents = [slot[segments.parent[s]] for s in members] if level else None
        slot = {s: number for number, s in enumerate(members)}
        parents = torch.tensor(parents).cuda() if level else None
        steps.append((tokens, fla_rule(sizes.cumsum(0).cuda()), parents))
        order.append(tokens)
    back = torch.cat(order).argsort()

    def by_level(q, k, v, g, beta, **_):
        state, outputs = None, []
        for tokens, rule, parents in steps:
            entry = None if parents is None else state.index_select(0, parents)
            part = (x.index_select(1, tokens) for x in (q, k, v, g, beta))
            output, state = rule(*part, initial_state=entry, output_final_state=True)
            outputs.append(output)
        return torch.cat(outputs, 1).index_select(1, back), None

    return None, by_level


METHODS = {"tree": lambda row: (None, None), "separate": separate, "paths": paths, "levels": levels}


def make_layer(hidden: int = 2560):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(hidden_size=hidden, num_hidden_layers=4)
    torch.manual_seed(0)
    layer = module.Qwen3_5GatedDeltaNet(config, 0).to("cuda", torch.bfloat16)
    delta.hook(layer)
    return layer, module


def measure(method, row, milliseconds: int) -> dict:
    layer, module = make_layer()
    hooked = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule
    functions = [mine or theirs for mine, theirs in zip(METHODS[method](row), hooked, strict=True)]
    module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule = functions
    length = len(row.samples) if method == "separate" else row.length
    kwargs = {} if method == "separate" else tree_of(row)
    x = torch.randn(1, length, layer.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def both():
        x.grad = None
        layer(x, **kwargs).backward(gradient)

    @torch.no_grad()
    def forward():
        layer(x, **kwargs)

    try:
        both()
        torch.cuda.reset_peak_memory_stats()
        both()
        median = partial(do_bench, warmup=milliseconds // 3, rep=milliseconds, return_mode="median")
        times = dict(forward_ms=round(median(forward), 3), both_ms=round(median(both), 3))
        return times | dict(gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))
    finally:
        module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule = hooked


def errors(row, heads=(16, 32, 128)) -> dict:
    """Relative errors against float64 of the recurrence's output and gradients: ours and of separate runs."""
    torch.manual_seed(0)
    groups_, values, size = heads
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (draw(1, row.length, n, size) for n in (groups_, groups_, values))
    g, beta = -torch.rand(1, row.length, values, device="cuda"), draw(1, row.length, values).sigmoid()
    gradient = draw(1, row.length, values, size)
    weight = torch.zeros(row.length, device="cuda").index_add(
        0, row.samples, torch.ones(len(row.samples), device="cuda")
    )

    def gradients(rule, dtype):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v, g, beta)]
        output = rule(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]

    def of_row(plain):
        plan = tree_of(row, plain)["tree"].plan
        return lambda *rows: delta.recur(*(x[0] for x in rows), True, plan)[None]

    def of_samples(*rows):  # every sample's output counts once, so that the gradients are the row's
        outputs = fla_rule(row.sample_starts)(*(x.index_select(1, row.samples) for x in rows))[0]
        total = torch.zeros(1, row.length, *outputs.shape[2:], device="cuda").index_add(
            1, row.samples, outputs.float()
        )
        return total / weight[:, None, None]

    wanted = gradients(of_row(True), torch.float64)
    found = {"tree": gradients(of_row(False), None), "separate": gradients(of_samples, None)}
    distance = lambda a, b: float((a.double() - b).norm() / b.norm())  # noqa: E731
    return {name: [distance(a, b) for a, b in zip(got, wanted, strict=True)] for name, got in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join(SHARING))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--milliseconds", type=int, default=200, help="time spent on each measurement")
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    results = {}
    for name in options.rows.split(","):
        row = layout(ROWS[name])
        ratio = len(row.samples) / row.length
        print(f"{name}: {row.length} tokens, {ratio:.2f} times as many in the samples", flush=True)
        for method in options.methods.split(","):
            result = measure(method, row, options.milliseconds)
            results[f"{name} {method}"] = result
            print(f"    {method:10}", *(f"{key} {value}" for key, value in result.items()), flush=True)
        if f"{name} tree" in results and f"{name} separate" in results:
            share = results[f"{name} separate"]["both_ms"] / results[f"{name} tree"]["both_ms"] / ratio
            results[f"{name} share"] = round(share, 3)
            print(f"    speed-up of tree over separate: {share * ratio:.2f}, {share:.3f} of the work ratio")
    results["errors"] = errors(layout(groups(200, 3, 150, 2)))
    for name, values in results["errors"].items():
        print(f"errors of {name}: out, dq, dk, dv, dg, dbeta", *(f"{value:.2e}" for value in values))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
