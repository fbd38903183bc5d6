"""The passes of the fused head over a block of float32 products y [R, V], with one program a row.

    row_statistics   y -> lse and entropy of z = transform(y)               one read
    logit_gradient   y -> dy = (named values - share pi) dz / dy            one read, one write in y's memory,
                     and dy at the named ids once more: there the difference is taken before it is rounded

dy may be bfloat16: row r of dy then lies in the first half of row r of y. A program goes through its row from
left to right, so a write stays behind the reads, and a barrier keeps its warps together where the two are
close. No sum is atomic: two runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4  # of a pass: fastest of those tried with 152 thousand logits a row
STAGES = tl.constexpr(3)  # blocks that are under way from memory at a time
NAMED_BLOCK = 256
NEVER = tl.constexpr(-1.0e30)  # stands for -inf where a difference of two of them must stay a number


@triton.jit
def _logits(y, bias, columns, inside, scale, cap):
    """z = cap tanh(scale (y + bias)), or scale (y + bias) without a cap; NEVER for -inf and outside."""
    if bias is not None:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    z = y * scale if cap is None else cap * (2 * tl.sigmoid(2 * scale * y) - 1)
    return tl.where(inside, tl.maximum(z, NEVER), NEVER)


@triton.jit
def _statistics(y, bias, lse, entropy, V, stride, scale, cap, BLOCK: tl.constexpr):
    """Every lane has its own maximum, sum of e and sum of e (z - maximum), merged at the end: no exchange
    between lanes, and one exponential a logit (online softmax, arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], NEVER, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        block = tl.load(y + row * stride + columns, mask=inside, other=0.0)
        z = _logits(block, bias, columns, inside, scale, cap)
        step = z - top
        e = tl.exp(-tl.abs(step))
        higher = step > 0
        moment = tl.where(higher, e * (moment - total * step), moment + e * step)
        total = tl.where(higher, total * e + 1, total + e)
        top = tl.maximum(top, z)
    peak = tl.max(top, 0)
    weight = tl.exp(top - peak)
    moment = tl.sum(weight * (moment + total * (top - peak)), 0)
    total = tl.sum(weight * total, 0)
    tl.store(lse + row, peak + tl.log(total))
    tl.store(entropy + row, tl.log(total) - moment / total)


@triton.jit
def _slope(z, cap, slope):
    return slope if cap is None else slope * (1 - (z / cap) * (z / cap))


@triton.jit
def _dense(y, dy, bias, lse, share, V, stride, dy_stride, scale, cap, slope, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_lse, row_share = tl.load(lse + row), tl.load(share + row)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        block = tl.load(y + row * stride + columns, mask=inside, other=0.0)
        tl.debug_barrier()  # no warp writes while another has yet to read this block
        z = _logits(block, bias, columns, inside, scale, cap)
        gradient = -row_share * tl.exp(z - row_lse) * _slope(z, cap, slope)
        tl.store(dy + row * dy_stride + columns, gradient.to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _named(dy, key, place, value, logit, lse, share, Q, V, dy_stride, cap, slope, BLOCK: tl.constexpr):
    """Sorted keys: the first of equal ones adds up the values of all, in their order."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(key + entry, mask=entry < Q, other=-1)
    first = (entry < Q) & (here != tl.load(key + entry - 1, mask=(entry < Q) & (entry > 0), other=-1))
    total = tl.zeros([BLOCK], tl.float32)
    ahead, same = entry, first
    while tl.max(same.to(tl.int32), 0) > 0:
        total += tl.load(value + tl.load(place + ahead, mask=same, other=0), mask=same, other=0.0)
        ahead += 1
        same = same & (ahead < Q)
        same = same & (tl.load(key + ahead, mask=same, other=-1) == here)
    row = here // V
    z = tl.load(logit + tl.load(place + entry, mask=first, other=0), mask=first, other=0.0)
    p = tl.exp(z - tl.load(lse + row, mask=first, other=0.0))
    gradient = (total - tl.load(share + row, mask=first, other=0.0) * p) * _slope(z, cap, slope)
    tl.store(dy + row * dy_stride + here % V, gradient.to(dy.dtype.element_ty), mask=first)


@triton.jit
def _scale(x, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * by
        tl.store(x + at, values.to(x.dtype.element_ty), mask=at < size)


def constants(head, temperature):
    """scale, cap, slope: z = cap tanh(scale y), dz / dy = slope (1 - (z / cap)^2); scale y and slope."""
    slope = head.logit_scale / temperature
    if head.softcap is None:
        return slope, None, slope
    return head.logit_scale / head.softcap, head.softcap / temperature, slope


def row_statistics(y, head, temperature):
    """See head.row_statistics. y float32 [R, V], rows at any stride."""
    lse, entropy = torch.empty(2, len(y), device=y.device)  # [R] each
    sizes = (y.shape[1], y.stride(0), *constants(head, temperature)[:2])
    if len(y):
        _statistics[(len(y),)](y, head.bias, lse, entropy, *sizes, BLOCK=BLOCK, num_warps=WARPS)
    return lse, entropy


def logit_gradient(y, head, temperature, lse, share, named, operand):
    """See head.logit_gradient. dy [R, V] of type `operand` lies in y's memory."""
    key, place, value, logit = named
    vocabulary = y.shape[1]
    dy = y.view(operand)[:, :vocabulary]  # [R, V]
    scale, cap, slope = constants(head, temperature)
    if len(y):
        sizes = (vocabulary, y.stride(0), dy.stride(0), scale, cap, slope)
        _dense[(len(y),)](y, dy, head.bias, lse, share, *sizes, BLOCK=BLOCK, num_warps=WARPS)
    if len(key):
        sizes = (len(key), vocabulary, dy.stride(0), cap, slope)
        grid = (triton.cdiv(len(key), NAMED_BLOCK),)
        _named[grid](dy, key, place, value, logit, lse, share, *sizes, BLOCK=NAMED_BLOCK)
    return dy


def scale(gradient, factor) -> None:
    """gradient *= factor, a scalar tensor; nothing is read where that is 1, as under step normalisation."""
    if gradient.numel():
        _scale[(triton.cdiv(gradient.numel(), 8192),)](gradient, factor, gradient.numel(), BLOCK=8192)
