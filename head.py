"""The fused linear head: log-probabilities at a few ids a term, and their gradients, without [M, V] logits.

A *term* is one (position, target) pair of a packed row; several may stand at one position. Only the positions
that carry a term are projected, a chunk of them at a time with the whole vocabulary:

    hidden [R, E] -> y = h W' [R, V] -> lse, entropy, log pi at each term's ids -> loss, d loss / d log pi
                                     -> dy, in y's memory -> d hidden, d weight, d bias  (next chunk)

so the gradient is formed in the forward pass and the backward pass only scales it (as Liger's fused
cross-entropy does, arXiv 2410.10989): 6 U V E floating point operations, nothing computed twice. With k a
term's d loss / d log pi and g their sum over ids that are normalised over the whole vocabulary,

    d loss / d z_j = sum of k where the id is j  -  (sum of g over the position's terms) pi_j
                     - sum over terms with a candidate set C of (their other k) pi_C(j)

that is: ONE number per position times the softmax, and corrections at the ids that were named. Hence several
terms on a position, several ids on a term and restricted candidate sets add nothing to the matrix products,
and a candidate set costs its own logits only.

The products are the library's. The passes over y are Triton kernels on a GPU (head_triton.py), plain PyTorch
elsewhere, and float32 whatever the operands. This file knows nothing of objectives, ranks or files, and never
waits for a device.

Letters in shape comments: N tokens of a row, M terms, U positions that carry a term, R of them in a chunk, m
terms in a chunk, J ids wanted per term, V vocabulary, E hidden size, C candidates of all terms together, c
those of a chunk.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 896 << 20}  # of the one block y [R, V] that is alive at a time
TILE = 128  # rows: a product of whole tiles wastes nothing


@dataclass(frozen=True)
class Head:
    """The last linear layer and what the model does to its output: z = softcap(scale * (h W^T + b)) /
    temperature, with softcap(y) = softcap * tanh(y / softcap). V may exceed the tokenizer's size (padded
    vocabularies)."""

    weight: torch.Tensor  # [V, E]
    bias: torch.Tensor | None = None  # [V]
    logit_scale: float = 1.0
    softcap: float | None = None
    values: torch.Tensor | None = None  # [V, E], read in place of weight, which only gets the gradient then


SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# names with "logit" or "lm_head" in them that do not touch the output of the head
HARMLESS = re.compile(
    r"attn|attention|router|keep|init|max_|lm_head_bias|chunk_size|freeze|auxiliary|temperature|lsd_"
)


def head_of(model) -> Head:
    """The Head of a transformers causal language model, read from its configuration by name.

    Under FSDP its weight and bias are shards, for the caller to replace. Raises ValueError where the head is
    not a plain linear layer or the configuration names a transformation of the logits that is not known here:
    an ignored one would make every ratio wrong.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, torch.nn.Linear):
        raise ValueError(
            f"the output head of {type(model).__name__} is {type(linear).__name__}; it must be a Linear"
        )
    config = model.config.get_text_config()
    scale, softcap = 1.0, None
    for name, value in config.to_dict().items():
        if value in (None, False):
            continue
        if name in SOFTCAPS:
            softcap = float(value)
        elif name in SCALES and isinstance(value, (int, float)):
            divides = name == "logits_scaling" and config.model_type != "hyperclovax"  # Granite's habit
            scale *= 1 / value if divides else value
        elif re.search(r"logit|lm_head", name) and not HARMLESS.search(name):
            raise ValueError(
                f"{type(config).__name__}.{name} = {value!r} changes the logits in an unknown way"
            )
    return Head(linear.weight, linear.bias, scale, softcap)


# ------------------------------------------------------------------------------------------------------------
# The operator


@dataclass(frozen=True)
class Support:
    """Candidate sets of a row's terms, one after the other, ids distinct within a set."""

    ids: torch.Tensor  # int64 [C]
    term: torch.Tensor  # int64 [C], ascending
    offsets: torch.Tensor  # int64 [M + 1]
    restricted: torch.Tensor  # bool [M, J]: this id's softmax runs over the term's set, else over everything


@dataclass(frozen=True)
class Chunk:
    """Positions of a row that are projected together, with their terms and the candidates of those."""

    positions: slice
    terms: slice
    candidates: slice


# (slice of the terms, log pi at their ids [m, J]) -> loss [m], d loss / d log pi [m, J], {statistic: [m]}
Score = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def fused_head(hidden, head: Head, row, ids, support: Support | None, temperature: float, score: Score):
    """Scores log-probabilities at a few ids per term; differentiates the sum by hidden, weight and bias.

    hidden [N, E]; row: `position` int64 [M], ascending, and `host`, the same row in numpy, from which chunks
    are planned; ids int64 [M, J] in [0, V) (a slot without an id holds any valid one and gets coefficient 0
    from `score`). `score` is called once per chunk without autograd. Returns the sum of the losses (a scalar)
    and the statistics of all terms [M], with `entropy` (of the whole temperature-scaled softmax at the term's
    position, whatever its support) added. Nothing of the gradient is computed for what does not require it.
    """
    asked = [
        torch.is_grad_enabled() and x is not None and x.requires_grad
        for x in (hidden, head.weight, head.bias)
    ]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        total, stats, gradients = _all_chunks(hidden, head, row, ids, support, temperature, score, asked)
    return ScaleOnly.apply(hidden, head.weight, head.bias, total, gradients), stats


class ScaleOnly(torch.autograd.Function):
    """Ties a total to gradients that are already known: backward scales them, in their own memory."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, total, gradients):
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a second backward through a fused head: the first one used up its gradients")
        for gradient in gradients:
            if gradient is not None:
                passes_for(gradient).scale(gradient, scale)
        kinds = zip(gradients, ctx.dtypes, strict=True)
        return *(None if x is None else x.to(dtype) for x, dtype in kinds), None, None


def statistics_dtype(hidden: torch.Tensor) -> torch.dtype:
    """float64 stays (tests); everything else has float32 log-probabilities, coefficients and sums."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def operand_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What the matrix products read: bfloat16 on a GPU, which writes float32 from it. Elsewhere, and for
    float16, whose range a gradient leaves, the operands are raised to the statistics' type."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.bfloat16
    return statistics_dtype(hidden)


def plan_chunks(host, rows: int) -> tuple[int, list[Chunk]]:
    """How many positions of a numpy row carry a term, and chunks of at most `rows` of them: whole tiles, as
    many in one as in another but for the last."""
    first = np.flatnonzero(np.diff(host.position, prepend=-1))  # [U], the first term of each
    count = max(1, -(-len(first) // rows))  # no term at all: one empty chunk, and nothing is a special case
    size = min(rows, -(-len(first) // (count * TILE)) * TILE)
    edges = np.minimum(size * np.arange(count + 1), len(first))
    terms = np.append(first, len(host.position))[edges]
    candidates = 0 * terms if host.candidate_offsets is None else host.candidate_offsets[terms]
    slices = [
        [slice(*ends) for ends in zip(e, e[1:], strict=False)]
        for e in (edges.tolist(), terms.tolist(), candidates.tolist())
    ]
    return len(first), [Chunk(*chunk) for chunk in zip(*slices, strict=True)]


def passes_for(x: torch.Tensor):
    """Who makes the passes over large tensors: Triton on a GPU and in its interpreter, else PyTorch here."""
    if x.dtype == torch.float64 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return sys.modules[__name__]
    import head_triton

    return head_triton


@dataclass(frozen=True)
class Request:
    """What a call of `fused_head` asks for, and where its terms stand."""

    head: Head
    temperature: float
    ids: torch.Tensor  # int64 [M, J]
    support: Support | None
    score: Score
    position: torch.Tensor  # int64 [U], the positions that carry a term
    slot: torch.Tensor  # int64 [M], which of them each term's is
    first: torch.Tensor  # int64 [U + 1], the first term of each
    key: torch.Tensor  # int64 [M J + C], slot * V + id of all ids and candidates, sorted
    order: torch.Tensor  # int64 [M J + C], where each of them stands among ids, then candidates


def _all_chunks(hidden, head: Head, row, ids, support, temperature, score: Score, asked):
    dtype, operand = statistics_dtype(hidden), operand_dtype(hidden)
    vocabulary = len(head.weight)
    weight = head.weight if head.values is None else head.values
    weight = weight.to(hidden.dtype).to(operand)  # [V, E], rounded as any model rounds it
    bias = None if head.bias is None else head.bias.to(hidden.dtype)  # [V]
    padded = -(-vocabulary // 16) * 16  # rows that begin at multiples of 16 bytes: the products want them
    rows = CHUNK_BYTES[hidden.device.type] // (padded * dtype.itemsize)
    scored, chunks = plan_chunks(row.host, max(1, rows - rows % TILE if rows > TILE else rows))
    slot = (row.position.diff(prepend=row.position.new_full((1,), -1)) != 0).cumsum(0) - 1  # [M]
    position = slot.new_empty(scored).scatter_(0, slot, row.position)  # [U]
    first = torch.searchsorted(slot, torch.arange(scored + 1, device=slot.device))  # [U + 1]
    key = (slot[:, None] * vocabulary + ids).view(-1)  # [M J]
    if support is not None:
        key = torch.cat([key, slot[support.term] * vocabulary + support.ids])  # [M J + C]
    head = replace(head, bias=bias)
    named = key.sort(stable=True)
    request = Request(head, temperature, ids, support, score, position, slot, first, *named)

    block = hidden.new_empty(max(c.positions.stop - c.positions.start for c in chunks), padded, dtype=dtype)
    d_hidden = hidden.new_zeros(hidden.shape) if asked[0] else None  # [N, E]
    # in bfloat16 only where that is the gradient's own type: bench/loss.py has the error that costs
    sums = operand if operand == head.weight.dtype else dtype
    d_weight = hidden.new_empty(weight.shape, dtype=sums) if asked[1] else None  # [V, E]
    d_bias = hidden.new_zeros(vocabulary, dtype=dtype) if asked[2] else None  # [V]
    collected = []
    for chunk in chunks:
        h = hidden[position[chunk.positions]].to(operand)  # [R, E]
        y = block[: len(h), :vocabulary]  # [R, V]
        product(h, weight.T, y)
        stats, dy = _score_chunk(y, chunk, request, operand if any(asked) else None)
        collected.append(stats)
        if d_bias is not None:
            d_bias += dy.sum(0, dtype=dtype)
        if d_weight is not None:
            product(dy.T, h, d_weight, add=chunk is not chunks[0])
        if d_hidden is not None:
            part = h.new_empty(h.shape, dtype=dtype)  # [R, E]
            d_hidden[position[chunk.positions]] = product(dy, weight, part).to(d_hidden.dtype)
    stats = {name: torch.cat([chunk[name] for chunk in collected]) for name in collected[0]}
    stats["entropy"] = stats["entropy"][slot]  # [M] each
    return stats.pop("loss").sum(), stats, (d_hidden, d_weight, d_bias)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """out = a @ b, or out += a @ b, in out's type and not rounded to the operands' type first."""
    kind = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    return torch.addmm(out, a, b, out=out, **kind) if add else torch.mm(a, b, out=out, **kind)


def _score_chunk(y, chunk: Chunk, asked: Request, operand: torch.dtype | None):
    """Statistics [m] of a chunk's terms, loss among them, and entropy [R]; dy [R, V] of type `operand` in y's
    memory, None without."""
    passes = passes_for(y)
    lse, entropy = passes.row_statistics(y, asked.head, asked.temperature)  # [R] each
    slot = asked.slot[chunk.terms] - chunk.positions.start  # int64 [m]
    z = picked(y, slot[:, None], asked.ids[chunk.terms], asked)  # [m, J]
    normaliser, logit = lse[slot][:, None], z.view(-1)  # [m, 1], [m J]
    if support := asked.support:
        bounds = support.offsets[chunk.terms.start : chunk.terms.stop + 1] - chunk.candidates.start  # [m + 1]
        term, restricted = support.term[chunk.candidates] - chunk.terms.start, support.restricted[chunk.terms]
        z_set = picked(y, slot[term], support.ids[chunk.candidates], asked)  # [c]
        lse_set, p_set = segment_softmax(z_set, term, bounds)  # [m], [c]
        normaliser = torch.where(restricted, lse_set[:, None], normaliser)  # [m, J]
        logit = torch.cat([logit, z_set])  # [m J + c]
    loss, k, stats = asked.score(chunk.terms, z - normaliser)  # [m], [m, J]
    stats |= {"loss": loss, "entropy": entropy}
    if operand is None:
        return stats, None

    value, whole = k.reshape(-1), k  # [m J], [m, J]
    if support:
        value = torch.cat([value, -p_set * torch.where(restricted, k, 0.0).sum(1)[term]])  # [m J + c]
        whole = torch.where(restricted, 0.0, k)
    bounds = asked.first[chunk.positions.start : chunk.positions.stop + 1] - chunk.terms.start  # [R + 1]
    share = segment_sum(whole.sum(1), bounds)  # [R]
    named = (*named_in(chunk, asked, y.shape[1]), value, logit)
    return stats, passes.logit_gradient(y, asked.head, asked.temperature, lse, share, named, operand)


def named_in(chunk: Chunk, asked: Request, vocabulary: int):
    """The sorted keys of a chunk, row * V + id, and where they stand among its ids, then its candidates."""
    width, ids = asked.ids.shape[1], asked.ids.numel()
    terms, candidates = chunk.terms, chunk.candidates
    entries = slice(terms.start * width + candidates.start, terms.stop * width + candidates.stop)
    order = asked.order[entries]  # int64 [m J + c]
    shift = ids + candidates.start - (terms.stop - terms.start) * width  # of candidates
    place = order - terms.start * width
    if candidates.stop > candidates.start:
        place = torch.where(order < ids, place, order - shift)
    return asked.key[entries] - chunk.positions.start * vocabulary, place


def picked(y, row, ids, asked: Request) -> torch.Tensor:
    """z at (row, id) pairs of the products y"""
    head = asked.head
    return transformed(y[row, ids], None if head.bias is None else head.bias[ids], head, asked.temperature)


def segment_sum(values, bounds):
    """Sums over values[bounds[i] : bounds[i + 1]], always in the same order, unlike atomic additions."""
    return torch.segment_reduce(values, "sum", offsets=bounds, initial=0, unsafe=True)


def segment_softmax(z, term, bounds):
    """lse of each term's candidates [m], -inf without any, and the softmax over them [c]"""
    top = torch.segment_reduce(z, "max", offsets=bounds, initial=-math.inf, unsafe=True)  # [m]
    e = (z - top[term]).exp()  # [c]
    total = segment_sum(e, bounds)  # [m]
    return top + total.log(), e / total[term]


# ------------------------------------------------------------------------------------------------------------
# The passes over large tensors in plain PyTorch; head_triton.py has the same three functions


def transformed(y, bias, head: Head, temperature: float) -> torch.Tensor:
    """z of products y, in the statistics' type"""
    y = y if bias is None else y + bias.to(y.dtype)
    if head.softcap is None:
        return y * (head.logit_scale / temperature)
    return torch.tanh(y * (head.logit_scale / head.softcap)) * (head.softcap / temperature)


def row_statistics(y, head: Head, temperature: float):
    """lse and entropy of the softmax of each row, [R] each"""
    z = transformed(y, head.bias, head, temperature)  # [R, V]
    top = z.amax(1)  # [R]
    z -= top[:, None]
    e = z.exp()  # [R, V]
    total = e.sum(1)  # [R]
    moment = torch.linalg.vecdot(e, z.clamp_(min=-1e30))  # [R]; 0 times -inf is no number
    return top + total.log(), total.log() - moment / total


def logit_gradient(y, head: Head, temperature: float, lse, share, named, operand: torch.dtype):
    """dy = (sum of value at each key - share pi) dz / dy   [R, V]

    lse, share [R]; named: key int64 [q], row * V + id, sorted, with repeats; for each of them its place in
    value and in logit, z there, all [q].
    """
    key, place, value, _ = named
    z = transformed(y, head.bias, head, temperature)  # [R, V]
    dz = (z - lse[:, None]).exp_().mul_(-share[:, None])  # [R, V]
    dz.view(-1).index_add_(0, key, value[place])
    if head.softcap is not None:
        dz.mul_(z.mul_(temperature / head.softcap).square_().neg_().add_(1))  # 1 - tanh^2
    return dz.mul_(head.logit_scale / temperature).to(operand)


def scale(gradient, factor) -> None:
    """gradient *= factor, a scalar tensor"""
    gradient.mul_(factor)
