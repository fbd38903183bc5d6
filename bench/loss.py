"""The fused head beside other ways to a loss over a large vocabulary, on one GPU: loss and backward.

    python bench/loss.py [--widths 1024,4096] [--positions 16384] [--vocabulary 151936] [--json FILE]

    fused          head.py with score centering over 8 ids a term, every eighth position with three targets;
                   as train.py has it too: the weight is float32, and so is its gradient, but FSDP has
                   gathered it in bfloat16
    Liger          LigerFusedLinearCrossEntropyLoss: plain cross-entropy, one label a position, no entropy
    full logits    bfloat16 logits of all positions and autograd: what a model's own forward would do
    recompute      chunks of 2048 positions, recomputed in the backward

All but Liger's give the same loss, its statistics and its gradients. Times are medians in milliseconds;
TFLOP/s counts 6 U V E. Extra memory is the peak less what was there before and less the gradients. Errors are
those of the gradients (norm of the difference over the norm) and of log pi (the largest), against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from head import Head  # noqa: E402
from loss import Objective, row_loss, score_centering  # noqa: E402
from packing import Row  # noqa: E402

K = 8
OBJECTIVE = Objective(score_centering, score_centering_tail="drop", clip_min=None, clip_max=None)


def problem(positions: int, vocabulary: int, width: int, device):
    """hidden [U, E], weight [V, E] (entropy about 4, as a language model's) and a row sampled from a policy
    that differs a little."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, width, device=device).bfloat16()
    weight = (torch.randn(vocabulary, width, device=device) * 4 / width**0.5).bfloat16()
    times = torch.where(torch.arange(positions, device=device) % 8 == 0, 3, 1)
    position = torch.arange(positions, device=device).repeat_interleave(times)  # [M]
    columns = []
    for some in position.split(512):
        z = (hidden[some] @ weight.T).float()  # [m, V]
        logp = z.log_softmax(1)
        target = (logp + -torch.log(-torch.log(torch.rand_like(z)))).argmax(1, keepdim=True)  # [m, 1]
        top = logp.topk(K, dim=1)
        noise = 0.1 * torch.randn_like(top.values)
        mu = (logp.gather(1, target) + noise[:, :1]).clamp(max=0)
        columns.append(
            [
                target[:, 0],
                mu[:, 0],
                top.indices,
                (top.values + noise - 0.01).log_softmax(1) + top.values.logsumexp(1, True),
            ]
        )
    target, mu, topk_ids, topk_logp = (torch.cat(c).cpu().numpy() for c in zip(*columns, strict=True))
    advantage = np.random.default_rng(0).standard_normal(len(target)).astype(np.float32)
    row = Row(
        *[None] * 5,
        position=position.cpu().numpy(),
        target=target,
        sampler_logp=mu,
        advantage=advantage,
        sample=None,
        topk_ids=topk_ids.astype(np.int32),
        topk_logp=topk_logp,
    )
    return hidden, weight, row.to(device)


def scored(hidden, weight, row, positions: slice, dtype):
    """Sum of coefficient times log pi by autograd on the logits [R, V] of some positions; log pi, entropy."""
    first, last = np.searchsorted(row.host.position, [positions.start, positions.stop]).tolist()
    terms = slice(first, last)
    z = (hidden[positions] @ weight.T).to(dtype)  # [R, V]
    whole = z.log_softmax(1)
    with torch.no_grad():
        entropy = -(whole.exp() * whole).sum(1)  # [R]
    ids = torch.cat([row.target[terms, None], row.topk_ids[terms].long()], 1)  # [m, 1 + K]
    slot = row.position[terms] - positions.start  # [m]
    logp = whole[slot[:, None], ids]  # [m, 1 + K]
    with torch.no_grad():
        mu = torch.cat([row.sampler_logp[terms, None], row.topk_logp[terms]], 1).to(dtype)
        _, slope, _ = score_centering(logp, mu, row.advantage[terms].to(dtype), OBJECTIVE)
    return (slope * logp).sum(), logp.detach()[:, 0], entropy[slot]


def pieces(positions: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, positions)) for start in range(0, positions, size)]


def fused(hidden, weight, row, values=None):
    total, stats = row_loss(hidden, Head(weight, values=values), row, OBJECTIVE, 1.0)
    total.backward()
    return stats["logp"]


def full_logits(hidden, weight, row):
    total, logp, _ = scored(hidden, weight, row, slice(0, len(hidden)), torch.float32)
    total.backward()
    return logp


def recompute(hidden, weight, row):
    parts = [
        checkpoint(scored, hidden, weight, row, some, torch.float32, use_reentrant=False)
        for some in pieces(len(hidden), 2048)
    ]
    sum(total for total, _, _ in parts).backward()
    return torch.cat([logp for _, logp, _ in parts])


def liger(hidden, weight, row):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    first = np.flatnonzero(np.diff(row.host.position, prepend=-1))
    label = row.target[torch.from_numpy(first).to(weight.device)]  # [U]
    LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, label).backward()


METHODS = {
    "fused": fused,
    "fused, float32 gradient": fused,
    "Liger": liger,
    "full logits": full_logits,
    "recompute": recompute,
}


def exact(hidden, weight, row):
    """log pi and the gradients in float64, a few positions at a time."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logps = []
    for some in pieces(len(hidden), 1024):
        total, logp, _ = scored(hidden, weight, row, some, torch.float64)
        total.backward()
        logps.append(logp)
    return torch.cat(logps), hidden.grad, weight.grad


def measure(name: str, hidden, weight, row, truth, repeats: int) -> dict:
    """Milliseconds, TFLOP/s of 6 U V E, GiB beyond the gradients, errors."""
    given = [weight] if "float32" in name else []
    weight = (weight.float() if given else weight.clone()).requires_grad_()
    hidden = hidden.clone().requires_grad_()
    times = []
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 2):  # the first two compile and fill the allocator
        hidden.grad = weight.grad = logp = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        logp = METHODS[name](hidden, weight, row, *given)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated()
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    ms = statistics.median(times[2:])
    work = 6 * len(hidden) * weight.numel()
    found = {"ms": ms, "tflops": work / ms / 1e9, "extra_gib": (peak - before - gradients) / 2**30}
    if logp is not None:
        for part, ours, true in zip(("hidden", "weight"), (hidden.grad, weight.grad), truth[1:], strict=True):
            found[f"error_{part}"] = ((ours.double() - true).norm() / true.norm()).item()
        found["error_logp"] = (logp.double() - truth[0]).abs().max().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default="1024,4096")
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for width in map(int, arguments.widths.split(",")):
        inputs = problem(arguments.positions, arguments.vocabulary, width, "cuda")
        truth = exact(*inputs)
        for name in arguments.methods.split(";"):
            found = measure(name, *inputs, truth, arguments.repeats)
            results[f"E = {width}, {name}"] = found
            print(f"E = {width}, {name:22}", *(f"{k} {v:.4g} " for k, v in found.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), **results}, indent=1))


if __name__ == "__main__":
    main()
