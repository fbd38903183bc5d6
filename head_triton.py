"""The passes of the fused head over a block of logits y [R, V], each of which touches every logit once.

    row_statistics   y -> lse, entropy of z = transform(y)          one read
    dense_gradient   y -> dy = -s pi transform'(y)                  one read, one write, in y's own memory
    sparse_gradient  dy at the ids that terms name, in float32 before it is rounded

A block may hold float32 logits whose gradient is bfloat16: row r of dy then lies in the first half of row r
of y, and a barrier keeps a write from overtaking a read (tests/test_head.py, bit for bit against two blocks
of memory). No sum here is atomic: two runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # of a pass: fastest of those tried with 152 thousand logits a row
NEVER = tl.constexpr(-1.0e30)  # stands for -inf where a difference of two of them must stay a number


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _logits(y, bias, columns, inside, scale, cap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """z of raw products y, at least NEVER"""
    y = y.to(tl.float32)
    if BIAS:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    z = cap * _tanh(y * scale) if SOFTCAP else y * scale
    return tl.where(inside, tl.maximum(z, NEVER), NEVER)


@triton.jit
def _statistics(
    y,
    bias,
    lse,
    entropy,
    V,
    stride,
    scale,
    cap,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every lane keeps its own maximum, sum and sum of e (z - maximum), merged at the end: no exchange
    between lanes, and one exponential a logit (online softmax, arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], NEVER, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + lanes
        inside = columns < V
        block = tl.load(y + row * stride + columns, mask=inside, other=0.0)
        z = _logits(block, bias, columns, inside, scale, cap, BIAS, SOFTCAP)
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
def _dense(
    y,
    dy,
    bias,
    lse,
    share,
    V,
    stride,
    dstride,
    scale,
    cap,
    slope,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    row_lse = tl.load(lse + row)
    factor = -tl.load(share + row) * slope
    for start in range(0, V, BLOCK):
        columns = start + lanes
        inside = columns < V
        block = tl.load(y + row * stride + columns, mask=inside, other=0.0)
        if BARRIER:
            tl.debug_barrier()
        z = _logits(block, bias, columns, inside, scale, cap, BIAS, SOFTCAP)
        gradient = factor * tl.exp(z - row_lse)
        if SOFTCAP:
            gradient *= 1 - (z / cap) * (z / cap)
        tl.store(dy + row * dstride + columns, gradient.to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _sparse(
    dy,
    key,
    order,
    value,
    logit,
    lse,
    share,
    count,
    V,
    dstride,
    cap,
    slope,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    here = tl.load(key + entry, mask=inside, other=-1)
    before = tl.load(key + entry - 1, mask=inside & (entry > 0), other=-1)
    first = inside & (here != before)
    total = tl.zeros([BLOCK], tl.float32)
    same = first
    ahead = entry
    while tl.max(same.to(tl.int32), 0) > 0:
        total += tl.load(value + tl.load(order + ahead, mask=same, other=0), mask=same, other=0.0)
        ahead += 1
        same = same & (ahead < count)
        same = same & (tl.load(key + ahead, mask=same, other=-1) == here)
    row = here // V
    z = tl.load(logit + tl.load(order + entry, mask=first, other=0), mask=first, other=0.0)
    p = tl.exp(z - tl.load(lse + row, mask=first, other=0.0))
    gradient = slope * (total - tl.load(share + row, mask=first, other=0.0) * p)
    if SOFTCAP:
        gradient *= 1 - (z / cap) * (z / cap)
    tl.store(dy + row * dstride + here % V, gradient.to(dy.dtype.element_ty), mask=first)


def constants(head, temperature):
    """scale, cap, slope: z = cap tanh(scale y) or scale y, dz / dy = slope (1 - (z / cap)^2) or slope"""
    slope = head.logit_scale / temperature
    if head.softcap is None:
        return slope, 1.0, slope
    return head.logit_scale / head.softcap, head.softcap / temperature, slope


def row_statistics(y, head, temperature):
    """See head.row_statistics. y float32 [R, V], rows at any stride."""
    lse, entropy = torch.empty(2, len(y), device=y.device)  # [R] each
    scale, cap, _ = constants(head, temperature)
    kinds = {"BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}
    if len(y):
        _statistics[(len(y),)](
            y,
            head.bias,
            lse,
            entropy,
            y.shape[1],
            y.stride(0),
            scale,
            cap,
            **kinds,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return lse, entropy


def logit_gradient(y, head, temperature, lse, share, named, operand):
    """See head.logit_gradient. dy [R, V] of type `operand` lies in y's memory."""
    key, value, logit = named
    key, order = key.sort(stable=True)  # [q]
    vocabulary = y.shape[1]
    dy = y.view(operand)[:, :vocabulary] if y.dtype != operand else y  # [R, V]
    scale, cap, slope = constants(head, temperature)
    softcap = head.softcap is not None
    if len(y):
        _dense[(len(y),)](
            y,
            dy,
            head.bias,
            lse,
            share,
            vocabulary,
            y.stride(0),
            dy.stride(0),
            scale,
            cap,
            slope,
            BIAS=head.bias is not None,
            SOFTCAP=softcap,
            BARRIER=dy is not y,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    if len(key):
        _sparse[(triton.cdiv(len(key), 256),)](
            dy,
            key,
            order,
            value,
            logit,
            lse,
            share,
            len(key),
            vocabulary,
            dy.stride(0),
            cap,
            slope,
            SOFTCAP=softcap,
            BLOCK=256,
        )
    return dy
