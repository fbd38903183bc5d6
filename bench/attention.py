"""Tree attention beside every prebuilt way to do it, on one GPU.

    python bench/attention.py [--rows grpo,plain] [--heads 16/8] [--methods "tree,gather FA2"] [--json FILE]

    tree, flash    the backends "triton" and "flash", through the interface that the trainer uses
    unshared       varlen flash attention over the samples laid end to end: no token is shared
    gather         varlen flash attention over K and V gathered along the path of every segment
    flex           FlexAttention compiled with the mask j <= i < subtree_end[j], with its own kernels or
                   (FLASH) those of flash-attn-4; both compile anew for every row

FA2 is the one that comes with torch; FA4, FLASH and flash need flash-attn-4. Times are medians in
milliseconds, forward and forward + backward. TFLOP/s counts what the tree needs (4 H D a visible pair, 2.5
times that backward), for "unshared" what the samples need. Then, per head shape: errors against float64, the
memory of the default backend (asserted below 5 % at head sizes up to 128) and the time to make a row's lists.

Compiling takes longer than measuring. So processes compile side by side, some for one method and head shape,
some for one row, and then measure one at a time, row by row; what fails is named and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention  # noqa: E402
from attention import reference  # noqa: E402
from attention.meetings import meetings  # noqa: E402

# Query heads, K/V heads, head size: of Qwen3 0.6B and 8B, and of Gemma 3 4B.
HEADS = {"16/8": (16, 8, 128), "32/8": (32, 8, 128), "8/4x256": (8, 4, 256)}
PATIENCE = 150  # seconds for everything to compile


def groups(prompt: int, group: int, completion: int, count: int, jitter: float = 0.5) -> list:
    """Segments (parent, length) of `count` prompts with `group` completions each."""
    random = torch.Generator().manual_seed(0)
    low, high = int(completion * (1 - jitter)), int(completion * (1 + jitter))
    segments = []
    for _ in range(count):
        root = len(segments)
        segments.append((-1, prompt))
        for _ in range(group):
            segments.append((root, int(torch.randint(low, high + 1, (1,), generator=random))))
    return segments


def agents(prompt: int, group: int, turns: int, turn: int, count: int) -> list:
    """Chains of turns; beside each turn a leaf of half its length, as histories rendered anew leave them."""
    random = torch.Generator().manual_seed(0)
    segments = []
    for _ in range(count):
        root = len(segments)
        segments.append((-1, prompt))
        for _ in range(group):
            parent = root
            for _ in range(turns):
                length = int(torch.randint(turn // 2, turn * 3 // 2, (1,), generator=random))
                segments += [(parent, length // 2), (parent, length)]
                parent = len(segments) - 1
    return segments


ROWS = {
    "grpo": groups(1024, 8, 1024, 3),
    "ratio3.4": groups(3072, 8, 768, 3),
    "long_prompt": groups(8192, 16, 1024, 1),
    "agent": agents(1024, 4, 6, 512, 2),
    "plain": groups(2, 1, 2046, 16, jitter=0.3),
}


def layout(segments: list) -> SimpleNamespace:
    """A row of segments in depth-first order, with the indices that the other methods need."""
    lengths = np.array([length for _, length in segments])
    starts = np.cumsum([0, *lengths])  # [S + 1]
    ends, paths = starts[1:].copy(), []  # where the subtree of each segment ends; its tokens from the root
    for (parent, _), start, end in zip(segments, starts, starts[1:], strict=False):
        above = [paths[parent]] if parent >= 0 else []
        paths.append(np.concatenate([*above, np.arange(start, end)]))
    for index in reversed(range(len(segments))):
        if (parent := segments[index][0]) >= 0:
            ends[parent] = max(ends[parent], ends[index])
    parents = {parent for parent, _ in segments}
    samples = [path for index, path in enumerate(paths) if index not in parents]
    sample_lengths = np.array(list(map(len, samples)))
    depth = np.concatenate([np.arange(len(path))[-n:] for path, n in zip(paths, lengths, strict=True)])
    tensor = partial(torch.tensor, device="cuda")
    return SimpleNamespace(
        length=len(depth),
        subtree_end=tensor(np.repeat(ends, lengths), dtype=torch.int32),  # [N]
        depth=tensor(depth),  # [N]
        keys=tensor(np.concatenate(paths)),  # the path of each segment, one after the other
        query_starts=tensor(starts, dtype=torch.int32),  # [S + 1]
        key_starts=tensor(np.cumsum([0, *map(len, paths)]), dtype=torch.int32),  # [S + 1]
        longest_segment=int(lengths.max()),
        longest=int(depth.max()) + 1,
        samples=tensor(np.concatenate(samples)),  # the tokens of each sample, one after the other
        sample_starts=tensor(np.cumsum([0, *sample_lengths]), dtype=torch.int32),
        pairs=int((depth + 1).sum()),
        sample_pairs=int((sample_lengths * (sample_lengths + 1) // 2).sum()),
    )


# ---- methods: (row, scale) -> a function of q [N, H, D], k, v [N, G, D]


class FA2(torch.autograd.Function):
    """The varlen flash attention of torch, causal and aligned at the end."""

    @staticmethod
    def forward(ctx, q, k, v, q_starts, k_starts, q_longest, k_longest, scale):
        ctx.longest = (q_longest, k_longest)
        ctx.scale = scale
        call = torch.ops.aten._flash_attention_forward
        output, lse, state, unused, _ = call(
            q, k, v, q_starts, k_starts, q_longest, k_longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, output, lse, q_starts, k_starts, state, unused)
        return output

    @staticmethod
    def backward(ctx, doutput):
        q, k, v, output, lse, q_starts, k_starts, state, unused = ctx.saved_tensors
        call = torch.ops.aten._flash_attention_backward
        rest = (*ctx.longest, 0.0, True, state, unused)
        gradients = call(
            doutput.contiguous(), q, k, v, output, lse, q_starts, k_starts, *rest, scale=ctx.scale
        )
        return *gradients, None, None, None, None, None


def fa2(q, k, v, starts, scale):
    return FA2.apply(q, k, v, *starts, scale)


def fa4(q, k, v, starts, scale):
    from flash_attn.cute import flash_attn_varlen_func

    q_starts, k_starts, q_longest, k_longest = starts
    output = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, max_seqlen_q=q_longest, max_seqlen_k=k_longest,
        softmax_scale=scale, causal=True,
    )  # fmt: skip
    return output[0] if isinstance(output, tuple) else output


def unshared(flash, row, scale):
    starts = (row.sample_starts, row.sample_starts, row.longest, row.longest)
    return lambda q, k, v: flash(q, k, v, starts, scale)


def gather(flash, row, scale):
    starts = (row.query_starts, row.key_starts, row.longest_segment, row.longest)
    return lambda q, k, v: flash(q, k.index_select(0, row.keys), v.index_select(0, row.keys), starts, scale)


def flex(options, row, scale):
    import torch._inductor.config as inductor
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inductor.compile_threads = 1  # main's processes use all cores

    def rule(_batch, _head, i, j):
        return (j <= i) & (i < row.subtree_end[j])

    mask = torch.compile(create_block_mask)(rule, None, None, row.length, row.length, device="cuda")
    call = torch.compile(flex_attention, dynamic=False)

    def run(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H or G, N, D]
        return call(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)[
            0
        ].transpose(0, 1)

    return run


def tree(backend, row, scale):
    index = attention.Index(row.subtree_end, row.depth, backend)
    return lambda q, k, v: index.attend(q, k, v, scale)


METHODS = {
    "tree": partial(tree, "triton"),
    "flash": partial(tree, "flash"),
    "unshared FA2": partial(unshared, fa2),
    "gather FA2": partial(gather, fa2),
    "unshared FA4": partial(unshared, fa4),
    "gather FA4": partial(gather, fa4),
    "flex": partial(flex, None),
    "flex FLASH": partial(flex, {"BACKEND": "FLASH"}),
}


# ---- measurements


def inputs(row, heads, method="tree") -> list:
    """q [N, H, D], k, v [N, G, D], bfloat16, with a gradient; of all the samples' tokens for "unshared"."""
    query_heads, groups_, size = heads
    length = len(row.samples) if method.startswith("unshared") else row.length
    shapes = [(length, query_heads, size), (length, groups_, size), (length, groups_, size)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(True) for shape in shapes]


@cache
def prepared(name: str, method: str, size: int) -> tuple:
    """A row and the method made ready for it; in a process of its own for what compiles per row."""
    row = layout(ROWS[name])
    return row, METHODS[method](row, size**-0.5)


def measure(heads: str, name: str, method: str, milliseconds: int) -> dict:
    query_heads, _, size = HEADS[heads]
    torch.cuda.empty_cache()  # many processes share the memory
    row, run = prepared(name, method, size)
    tensors = inputs(row, HEADS[heads], method)
    gradient = torch.randn_like(run(*tensors))

    def both():
        for tensor in tensors:
            tensor.grad = None
        run(*tensors).backward(gradient)

    both()
    detached = [tensor.detach() for tensor in tensors]
    median = partial(do_bench, warmup=milliseconds // 3, rep=milliseconds, return_mode="median")
    forward, total = median(lambda: run(*detached)), median(both)
    pairs = row.sample_pairs if method.startswith("unshared") else row.pairs
    work = 4 * query_heads * size * pairs / 1e9
    return dict(
        forward_ms=round(forward, 3),
        both_ms=round(total, 3),
        forward_tflops=round(work / forward, 1),
        backward_tflops=round(2.5 * work / (total - forward), 1),
    )


def errors(heads) -> dict:
    """Relative errors against float64 of out, dq, dk, dv on a small row: ours and flash attention's."""
    row = layout(groups(256, 8, 256, 1))
    tensors, scale = inputs(row, heads), heads[2] ** -0.5
    gradient = torch.randn_like(tensors[0])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = reference.attend(*exact, reference.plan(row.subtree_end, row.depth), scale)
    wanted = [output.detach(), *torch.autograd.grad(output, exact, gradient.double())]
    found = {}
    for method in ("tree", "gather FA2"):
        output = METHODS[method](row, scale)(*tensors)
        got = [output.detach(), *torch.autograd.grad(output, tensors, gradient)]
        found[method] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
    return found


def memory(heads) -> float:
    """What the default backend takes at its peak beyond q, k, v, o, lse and gradients, as a part of those."""
    row = layout(ROWS["ratio3.4"])
    tensors, run = inputs(row, heads), tree("auto", row, heads[2] ** -0.5)
    gradient = torch.randn_like(tensors[0])
    run(*tensors).backward(gradient)  # compiles, and makes the row's lists
    for tensor in tensors:
        tensor.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*tensors).backward(gradient)
    given = sum(tensor.nbytes for tensor in [*tensors, gradient])
    made = given + 4 * heads[0] * row.length  # o and the gradients; lse
    return (torch.cuda.max_memory_allocated() - before - made) / (given + made)


def lists(heads) -> float:
    """Milliseconds of the host from a row's two arrays to the lists of its forward and backward."""
    row = layout(ROWS["plain"])
    index, tensors = attention.Index(row.subtree_end, row.depth, "triton"), inputs(row, heads)
    index.attend(*tensors, 1.0).sum().backward()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan = reference.plan(row.subtree_end, row.depth)
        for _, *name in index.plan.made:
            meetings(plan, *name)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[10]


def numbers(heads: str) -> dict:
    """Of our kernels with these heads: errors over those of FA2, extra memory, milliseconds of the lists."""
    found = errors(HEADS[heads])
    ratios = [round(a / b, 2) for a, b in zip(found["tree"], found["gather FA2"], strict=True)]
    extra, made_in = memory(HEADS[heads]), lists(HEADS[heads])
    return dict(errors=found, errors_over_fa2=ratios, extra_memory=extra, lists_ms=made_in)


# ---- one process a lane


def lane(heads: str, name: str, method: str) -> tuple:
    """Cases of one lane share a process, and what is compiled there."""
    return heads, method.split()[-1], name if method.startswith("flex") else None


def ask(process, function, *arguments) -> dict:
    """The result; what cannot run, or has ended its process, must not hide the rest."""
    try:
        return process.submit(function, *arguments).result(PATIENCE)
    except Exception as error:
        return dict(failed=f"{type(error).__name__}: {str(error)[:200]}")


def table(results: dict, heads: str, names: list, methods: list) -> None:
    """Markdown: forward / forward + backward ms (forward, backward TFLOP/s)."""
    print("", "row", *methods, "", sep="|")
    print("|---" * (1 + len(methods)), "|", sep="")
    for name in names:
        cells = []
        for method in methods:
            result = list(results[f"{heads} {name} {method}"].values())
            cells.append("{} / {} ({:.0f}, {:.0f})".format(*result) if len(result) == 4 else "failed")
        print("", f"{heads} {name}", *cells, "", sep="|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--heads", default="16/8,32/8")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--milliseconds", type=int, default=200, help="time spent on each measurement")
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    shapes, names, methods = (x.split(",") for x in (options.heads, options.rows, options.methods))
    cases = [(heads, name, method) for heads in shapes for name in names for method in methods]
    spawn = multiprocessing.get_context("spawn")
    keys = [lane(*case) for case in cases] + [(heads, "tree", None) for heads in shapes]
    processes = {key: ProcessPoolExecutor(1, spawn) for key in set(keys)}
    started = time.perf_counter()
    wait([processes[lane(*case)].submit(measure, *case, 1) for case in cases], PATIENCE)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, end=": ")
    print(f"compiled by {len(processes)} processes in {time.perf_counter() - started:.0f} s", flush=True)
    results = {}
    for heads, name, method in cases:
        result = ask(processes[lane(heads, name, method)], measure, heads, name, method, options.milliseconds)
        results[f"{heads} {name} {method}"] = result
        print(f"{heads} {name} {method}:", *(f"{key} {value}" for key, value in result.items()), flush=True)
    for heads in shapes:
        results[heads] = ask(processes[heads, "tree", None], numbers, heads)
        print(f"{heads}:", *(f"{key} {value}" for key, value in results[heads].items()), flush=True)
        table(results, heads, names, methods)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    for process in processes.values():
        process.shutdown(wait=False)
    for heads in shapes:
        if HEADS[heads][2] <= 128:
            assert results[heads]["extra_memory"] < 0.05, "the default backend takes too much memory"


if __name__ == "__main__":
    main()
