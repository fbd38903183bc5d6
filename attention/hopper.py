"""The kernels of tree.py for Hopper (H100, H200), in Gluon, the language below Triton that ships with it.

The same three kernels and the same lists of which tile meets which block, warp-specialised: one warp copies
tiles to shared memory (TMA), two groups of four warps compute 64 rows of the result each and never wait for
each other.

    warp group     0: rows 0..63            1: rows 64..127      loader
    forward        s = q k'                 the same             q, then k and v of each block
    dQ             s = q k', dp = do v'     the same             q, o and do, then k and v of each block
    dK, dV         s' = k q', dp' = v do'   the same             k and v, then q, do, lse, delta of each tile

    loader --full--> group 0, group 1 --empty--> loader          barriers of a ring of STAGES buffers

dK and dV work on the transposed scores, so that p' and ds' leave the tensor cores in the registers from which
the next product takes its left operand: in all three kernels nothing but inputs goes through shared memory.
The dQ kernel also makes what dK and dV need of every row: delta and the lse to base 2, by fold.
Backward does seven products where a kernel with atomics does five, and is deterministic.

No product whose left operand is in registers may be in flight where a loop jumps back: the assembler then
runs all products one by one (warning C7512).

Heads: FOLD of the H / G query heads of a K/V head, the greatest power of two that divides them (at most 16),
are folded into the rows of a tile: row r of fold f is token r // FOLD, head f FOLD + r % FOLD. Head sizes
below 64 or 128 are filled up with zeros by TMA. Letters as in tree.py; F = H / FOLD folds, R = N FOLD rows of
a fold, T rows of a tile, B keys of a block.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.meetings import Meetings, meetings

TILE = 128  # rows of a tile (of dQ and the forward), keys of a block (of dK and dV): 64 for each warp group
FORWARD_BLOCK, FORWARD_STAGES = 128, 2
QUERY_BLOCK, QUERY_STAGES = 64, 3
KEY_TILE, KEY_STAGES = 64, 2
# Triton 3.9 renamed what 3.6 has.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_put = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
LOG2E = gl.constexpr(1.4426950408889634)


def fits(query, value) -> bool:
    """Whether these kernels take it: 16 bits, head sizes up to 128 in steps of 8."""
    sizes = query.shape[2], value.shape[2]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return narrow and max(sizes) <= 128 and not any(size % 8 for size in sizes)


def fold(query, key) -> int:
    """Query heads of a K/V head that share a tile."""
    repeat = query.shape[1] // key.shape[1]
    return min(repeat & -repeat, 16)


def forward(query, key, value, output, lse, sinks, plan, scale, window, softcap) -> None:
    """Fills `output` [N, H, Dv] and `lse` [N, H]. `query` [N, H, D], `key` and `value` [N, G, D or Dv]."""
    folded, size = fold(query, key), _padded(query, value)
    tiles = meetings(plan, "tile", query.shape[1] // folded, TILE, FORWARD_BLOCK, folded, window)
    _forward[(len(tiles.work),)](
        *_tiles(size, folded, query), *_tiles(size, 1, key, value, rows=FORWARD_BLOCK),
        *_tiles(size, folded, output), lse, lse if sinks is None else sinks,
        *_rule(plan, tiles, window), *_factors(scale, softcap),
        SINKS_GIVEN=sinks is not None, HEADS=query.shape[1], BLOCK=FORWARD_BLOCK, STAGES=FORWARD_STAGES,
        **_constants(query, key, size, folded, window, softcap),
    )  # fmt: skip


def backward(
    query, key, value, output, doutput, lse, dlse, dquery, dkey, dvalue, plan, scale, window, softcap
) -> tuple:  # fmt: skip
    """Fills the gradients of q, k and v, alike them. Returns the lse to base 2 and delta, by fold."""
    folded, size = fold(query, key), _padded(query, value)
    folds = query.shape[1] // folded
    factors, constants = _factors(scale, softcap), _constants(query, key, size, folded, window, softcap)
    tiles = meetings(plan, "tile", folds, TILE, QUERY_BLOCK, folded, window)
    rows = -(-len(query) * folded // TILE) * TILE
    folded_lse, delta = lse.new_empty(2, folds, rows)  # [F, R padded] each
    _backward_query[(len(tiles.work),)](
        *_tiles(size, folded, query), *_tiles(size, 1, key, value, rows=QUERY_BLOCK),
        *_tiles(size, folded, output, doutput, dquery), lse, dlse, folded_lse, delta,
        *_rule(plan, tiles, window), rows, *factors, scale,
        HEADS=query.shape[1], BLOCK=QUERY_BLOCK, STAGES=QUERY_STAGES, **constants,
    )  # fmt: skip
    blocks = meetings(plan, "block", key.shape[1], KEY_TILE, TILE, folded, window)
    _backward_key[(len(blocks.work),)](
        *_tiles(size, folded, query), *_tiles(size, 1, key, value),
        *_tiles(size, folded, doutput), *_tiles(size, 1, dkey, dvalue), _line(folded_lse), _line(delta),
        *_rule(plan, blocks, window), *factors, scale,
        STAGES=KEY_STAGES, **constants,
    )  # fmt: skip
    return folded_lse, delta


def _padded(query, value) -> int:
    return 64 if max(query.shape[2], value.shape[2]) <= 64 else 128


def _tiles(size: int, heads: int, *tensors, rows: int = 64) -> list[TensorDescriptor]:
    """Tiles of `rows` rows, `heads` a token, of [N, heads, head size]: zero outside, never written there."""
    block = [rows // heads, heads, size]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return [TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout) for x in tensors]


def _line(tensor) -> TensorDescriptor:
    """Of [F, R padded] float32, KEY_TILE values of one fold."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, KEY_TILE], layout)


def _rule(plan, lists: Meetings, window) -> tuple:
    """What every kernel knows about visibility: END, DEPTH, WORK, OTHER, N, window."""
    return plan.subtree_end, plan.depth, lists.work, lists.other, len(plan.subtree_end), window or 0


def _factors(scale, softcap) -> tuple:
    """What makes a score one to base 2, and under a soft-cap: what makes it the exponent of its tanh."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return softcap * LOG2E.value, 2 * scale / softcap * LOG2E.value


def _constants(query, key, size: int, folded: int, window, softcap) -> dict:
    # 168 registers for 3 x 128 threads at the start; then 240 for each computing group, 24 for the loader.
    return dict(
        FOLD=folded,
        FOLDS=query.shape[1] // key.shape[1] // folded,
        SIZE=size,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=4,
        maxnreg=168,
    )


# ---- parts of all three kernels


@gluon.jit
def _ring(STAGES: gl.constexpr, count: gl.constexpr):
    """STAGES barriers of `count` arrivals each."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=count)
    return bars


@gluon.jit
def _span(WORK):
    """Of this program: begin, middle, stop, and the first block (or tile) it meets."""
    at = WORK + gl.program_id(0) * 8
    return gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def _keys(block, rule, BLOCK: gl.constexpr, WINDOWED: gl.constexpr, LAYOUT: gl.constexpr):
    """Keys j of a block, their subtree_end and depth, [B] each: asked for before a wait, used after it."""
    END, DEPTH, OTHER, N, window = rule
    j = block * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    end = gl.load(END + j, mask=j < N, other=0)
    return j, end, gl.load(DEPTH + j, mask=j < N, other=0) if WINDOWED else end


@gluon.jit
def _queries(tokens, rule, WINDOWED: gl.constexpr):
    """Queries i and their depth."""
    END, DEPTH, OTHER, N, window = rule
    return tokens, gl.load(DEPTH + tokens, mask=tokens < N, other=0) if WINDOWED else tokens


@gluon.jit
def _seen(queries, keys, rule, i_axis: gl.constexpr, WINDOWED: gl.constexpr):
    """The rule: a matrix with the queries on `i_axis`, the keys on the other."""
    END, DEPTH, OTHER, N, window = rule
    i, depth_i = queries
    j, end_j, depth_j = keys
    i, depth_i = gl.expand_dims(i, 1 - i_axis), gl.expand_dims(depth_i, 1 - i_axis)
    seen = (gl.expand_dims(j, i_axis) <= i) & (i < gl.expand_dims(end_j, i_axis))
    if WINDOWED:
        seen = seen & (depth_i - gl.expand_dims(depth_j, i_axis) < window)
    return seen


@gluon.jit
def _capped(s, squeeze, CAPPED: gl.constexpr):
    """tanh(scale s / cap) under a soft-cap."""
    if CAPPED:
        s = 1.0 - 2.0 / (1.0 + gl.exp2(s * squeeze))
    return s


@gluon.jit
def _product(a, b, LAYOUT: gl.constexpr):
    """a b' of two matrices in shared memory, [64, size] and [B, size] -> [64, B], in flight."""
    COLUMNS: gl.constexpr = b.shape[0]
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _operand(x, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """An accumulator, rounded, as left operand of a product with layout LAYOUT: stays in its registers."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


# ---- forward


@gluon.jit
def _weights(s, most, total, factor):
    """s [64, B] -> p [64, B], the new maximum, the new total, and how much the old sums shrink, [64] each."""
    now = gl.maximum(most, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - gl.expand_dims(now, 1))
    shrink = gl.exp2(most - now)
    return p, now, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _forward_step(
    block, n, count, q, k_s, v_s, bars, o, p, most, total, queries, rule, factors,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_O: gl.constexpr,
):  # fmt: skip
    """Scores of block n while block n - 1 is added to the output."""
    k_full, v_full, k_empty, v_empty = bars
    BLOCK: gl.constexpr = k_s.shape[1]
    SIZE: gl.constexpr = k_s.shape[3]
    now, last = n % STAGES, (n - 1) % STAGES
    s = _product(q, k_s.index(now).reshape([BLOCK, SIZE]), LAYOUT)  # [64, B]
    mbarrier.wait(v_full.index(last), ((n - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_s.index(last).reshape([BLOCK, SIZE]), o, is_async=True)  # [64, Dv]
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(now), count=1)
    factor, squeeze = factors
    s = _capped(s, squeeze, CAPPED)
    if MASKED:
        keys = _keys(block, rule, BLOCK, WINDOWED, gl.SliceLayout(0, LAYOUT))
        s = gl.where(_seen(queries, keys, rule, 0, WINDOWED), s, float("-inf"))
    x, most, total, shrink = _weights(s, most, total, factor)
    following = _operand(x, k_s.dtype, LAYOUT_O)  # [64, B]
    # The next keys are waited for here, since this is a branch: else the assembler moves the exponentials,
    # which shall run beside the product, behind its end.
    mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=n + 1 < count)
    o, p, following = warpgroup_mma_wait(0, deps=[o, p, following])
    mbarrier.arrive(v_empty.index(last), count=1)
    o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT_O)), 1)
    return o, following, most, total


@gluon.jit
def _forward_group(
    WHO: gl.constexpr, given, HEADS: gl.constexpr, FOLD: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, SINKS_GIVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    o_desc, buffers, q_full, bars, LSE, SINKS, WORK, rule, factors, tile, fold = given
    q_s, k_s, v_s = buffers
    k_full, v_full, k_empty, v_empty = bars
    END, DEPTH, OTHER, N, window = rule
    BLOCK: gl.constexpr = k_s.shape[1]
    SIZE: gl.constexpr = k_s.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])  # of s
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])  # of o
    begin, middle, stop, block = _span(WORK)
    rows = tile * 128 + WHO * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))  # [64]
    tokens = rows // FOLD  # [64]
    queries = _queries(tokens, rule, WINDOWED)  # [64] each
    keys = _keys(block, rule, BLOCK, WINDOWED, gl.SliceLayout(0, LAYOUT))
    block = gl.load(OTHER + begin + 1)
    # Finite, so that a row whose first block is all masked multiplies by exp2(0) and not by a NaN.
    most = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    o = gl.zeros([64, SIZE], gl.float32, LAYOUT_O)
    q = q_s.index(WHO).reshape([64, SIZE])
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_product(q, k_s.index(0).reshape([BLOCK, SIZE]), LAYOUT)])  # [64, B]
    mbarrier.arrive(k_empty.index(0), count=1)
    factor, squeeze = factors
    # The first block takes the mask in any case.
    s = gl.where(_seen(queries, keys, rule, 0, WINDOWED), _capped(s, squeeze, CAPPED), float("-inf"))
    x, most, total, _ = _weights(s, most, total, factor)
    p = _operand(x, k_s.dtype, LAYOUT_O)  # [64, B]
    mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=begin + 1 < stop)
    for at in range(begin + 1, middle):
        following = gl.load(OTHER + at + 1)
        o, p, most, total = _forward_step(
            block, at - begin, stop - begin, q, k_s, v_s, bars, o, p, most, total, queries, rule, factors,
            True, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_O,
        )  # fmt: skip
        block = following
    for at in range(gl.maximum(begin + 1, middle), stop):
        o, p, most, total = _forward_step(
            0, at - begin, stop - begin, q, k_s, v_s, bars, o, p, most, total, queries, rule, factors,
            False, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_O,
        )  # fmt: skip
    n = stop - begin - 1
    mbarrier.wait(v_full.index(n % STAGES), (n // STAGES) & 1)
    o = warpgroup_mma(p, v_s.index(n % STAGES).reshape([BLOCK, SIZE]), o, is_async=True)
    heads = fold * FOLD + rows % FOLD  # [64]
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    if SINKS_GIVEN:
        sink = gl.load(SINKS + heads).to(gl.float32) * LOG2E  # [64]
        now = gl.maximum(most, sink)
        shrink = gl.exp2(most - now)
        total = total * shrink + gl.exp2(sink - now)
        o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT_O)), 1)
        most = now
    o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, LAYOUT_O)), 1)
    q.store(o.to(k_s.dtype))
    fence_async_shared()
    _put(o_desc, [(tile * 128 + WHO * 64) // FOLD, fold * FOLD, 0], q_s.index(WHO))
    gl.store(LSE + tokens * HEADS + heads, (most + gl.log2(total)) / LOG2E, mask=tokens < N)
    tma.store_wait(0)


@gluon.jit
def _forward_loader(
    descs, buffers, q_full, bars, WORK, OTHER, tile, fold,
    FOLD: gl.constexpr, FOLDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s = buffers
    k_full, v_full, k_empty, v_empty = bars
    BLOCK: gl.constexpr = k_s.shape[1]
    begin, _, stop, block = _span(WORK)
    mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
    for who in gl.static_range(2):
        token = (tile * 128 + who * 64) // FOLD
        _fetch(q_desc, [token, fold * FOLD, 0], q_full.index(0), q_s.index(who))
    for at in range(begin, stop):
        n = at - begin
        now, phase = n % STAGES, ((n // STAGES) & 1) ^ 1
        j = block * BLOCK
        block = gl.load(OTHER + at + 1)
        mbarrier.wait(k_empty.index(now), phase)
        mbarrier.expect(k_full.index(now), k_desc.block_type.nbytes)
        _fetch(k_desc, [j, fold // FOLDS, 0], k_full.index(now), k_s.index(now))
        mbarrier.wait(v_empty.index(now), phase)
        mbarrier.expect(v_full.index(now), v_desc.block_type.nbytes)
        _fetch(v_desc, [j, fold // FOLDS, 0], v_full.index(now), v_s.index(now))


@gluon.jit(do_not_specialize=["N", "window"])
def _forward(
    q_desc, k_desc, v_desc, o_desc, LSE, SINKS, END, DEPTH, WORK, OTHER, N, window, factor, squeeze,
    HEADS: gl.constexpr, FOLD: gl.constexpr, FOLDS: gl.constexpr, SIZE: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, SINKS_GIVEN: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tile, fold = gl.load(WORK + gl.program_id(0) * 8), gl.load(WORK + gl.program_id(0) * 8 + 1)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64 // FOLD, FOLD, SIZE], q_desc.layout)
    k_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, 1, SIZE], k_desc.layout)
    v_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, 1, SIZE], v_desc.layout)
    buffers = (q_s, k_s, v_s)
    q_full = _ring(1, 1)
    bars = (_ring(STAGES, 1), _ring(STAGES, 1), _ring(STAGES, 2), _ring(STAGES, 2))
    fence_async_shared()
    rule = (END, DEPTH, OTHER, N, window)
    factors = (factor, squeeze)
    given = (o_desc, buffers, q_full, bars, LSE, SINKS, WORK, rule, factors, tile, fold)
    descs = (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (_forward_group, (0, given, HEADS, FOLD, WINDOWED, CAPPED, SINKS_GIVEN, STAGES)),
            (_forward_group, (1, given, HEADS, FOLD, WINDOWED, CAPPED, SINKS_GIVEN, STAGES)),
            (_forward_loader, (descs, buffers, q_full, bars, WORK, OTHER, tile, fold, FOLD, FOLDS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- backward, dQ


@gluon.jit
def _query_step(
    block, n, count, q, do, k_s, v_s, bars, dq, lse, delta, queries, rule, factors,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_DQ: gl.constexpr,
):  # fmt: skip
    k_full, v_full, empty = bars
    BLOCK: gl.constexpr = k_s.shape[1]
    SIZE: gl.constexpr = k_s.shape[3]
    now, phase = n % STAGES, (n // STAGES) & 1
    k = k_s.index(now).reshape([BLOCK, SIZE])
    if MASKED:
        keys = _keys(block, rule, BLOCK, WINDOWED, gl.SliceLayout(0, LAYOUT))
    s = _product(q, k, LAYOUT)  # [64, B]
    mbarrier.wait(v_full.index(now), phase)
    dp = _product(do, v_s.index(now).reshape([BLOCK, SIZE]), LAYOUT)  # [64, B]
    s = warpgroup_mma_wait(1, deps=[s])
    factor, squeeze = factors
    s = _capped(s, squeeze, CAPPED)
    p = gl.exp2(s * factor - gl.expand_dims(lse, 1))  # [64, B]
    if MASKED:
        p = gl.where(_seen(queries, keys, rule, 0, WINDOWED), p, 0.0)
    if CAPPED:
        p = p * (1.0 - s * s)
    # Here for the same reason as in the forward.
    mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=n + 1 < count)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = _operand(p * (dp - gl.expand_dims(delta, 1)), k_s.dtype, LAYOUT_DQ)  # [64, B]
    dq = warpgroup_mma(ds, k, dq, is_async=True)  # [64, D]
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    mbarrier.arrive(empty.index(now), count=1)
    return dq


@gluon.jit
def _query_group(
    WHO: gl.constexpr, given, HEADS: gl.constexpr,
    FOLD: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dq_desc, buffers, q_full, bars, by_row, WORK, rule, padded, factors, scale, tile, fold = given
    q_s, o_s, do_s, k_s, v_s = buffers
    LSE, DLSE, FOLDED_LSE, DELTA = by_row
    BLOCK: gl.constexpr = k_s.shape[1]
    SIZE: gl.constexpr = k_s.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])  # of s and dp
    LAYOUT_DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])  # of dq
    rows = tile * 128 + WHO * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))  # [64]
    k_full, v_full, empty = bars
    END, DEPTH, OTHER, N, window = rule
    at_row = rows // FOLD * HEADS + fold * FOLD + rows % FOLD  # [64], of [N, H]
    exist = rows < N * FOLD  # [64]
    lse = gl.load(LSE + at_row, mask=exist, other=0.0) * LOG2E  # [64]
    dlse = gl.load(DLSE + at_row, mask=exist, other=0.0)  # [64]
    queries = _queries(rows // FOLD, rule, WINDOWED)  # [64] each
    dq = gl.zeros([64, SIZE], gl.float32, LAYOUT_DQ)
    begin, middle, stop, block = _span(WORK)
    q = q_s.index(WHO).reshape([64, SIZE])
    do = do_s.index(WHO).reshape([64, SIZE])
    mbarrier.wait(q_full.index(0), 0)
    o = o_s.index(WHO).reshape([64, SIZE]).load(LAYOUT_DQ).to(gl.float32)  # [64, Dv]
    delta = gl.sum(o * do.load(LAYOUT_DQ).to(gl.float32), 1)  # [64]
    delta = gl.convert_layout(delta, gl.SliceLayout(1, LAYOUT)) - dlse
    gl.store(FOLDED_LSE + fold * padded + rows, lse)
    gl.store(DELTA + fold * padded + rows, delta)
    mbarrier.wait(k_full.index(0), 0)
    for at in range(begin, middle):
        following = gl.load(OTHER + at + 1)
        dq = _query_step(
            block, at - begin, stop - begin, q, do, k_s, v_s, bars, dq, lse, delta, queries, rule, factors,
            True, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_DQ,
        )  # fmt: skip
        block = following
    for at in range(middle, stop):
        dq = _query_step(
            0, at - begin, stop - begin, q, do, k_s, v_s, bars, dq, lse, delta, queries, rule, factors,
            False, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_DQ,
        )  # fmt: skip
    q.store((dq * scale).to(k_s.dtype))
    fence_async_shared()
    _put(dq_desc, [(tile * 128 + WHO * 64) // FOLD, fold * FOLD, 0], q_s.index(WHO))
    tma.store_wait(0)


@gluon.jit
def _query_loader(
    descs, buffers, q_full, bars, WORK, OTHER, tile, fold,
    FOLD: gl.constexpr, FOLDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, o_desc, do_desc, k_desc, v_desc = descs
    q_s, o_s, do_s, k_s, v_s = buffers
    k_full, v_full, empty = bars
    BLOCK: gl.constexpr = k_s.shape[1]
    begin, _, stop, block = _span(WORK)
    mbarrier.expect(q_full.index(0), 6 * q_desc.block_type.nbytes)
    for who in gl.static_range(2):
        token = (tile * 128 + who * 64) // FOLD
        _fetch(q_desc, [token, fold * FOLD, 0], q_full.index(0), q_s.index(who))
        _fetch(o_desc, [token, fold * FOLD, 0], q_full.index(0), o_s.index(who))
        _fetch(do_desc, [token, fold * FOLD, 0], q_full.index(0), do_s.index(who))
    for at in range(begin, stop):
        n = at - begin
        now = n % STAGES
        j = block * BLOCK
        block = gl.load(OTHER + at + 1)
        mbarrier.wait(empty.index(now), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(now), k_desc.block_type.nbytes)
        _fetch(k_desc, [j, fold // FOLDS, 0], k_full.index(now), k_s.index(now))
        mbarrier.expect(v_full.index(now), v_desc.block_type.nbytes)
        _fetch(v_desc, [j, fold // FOLDS, 0], v_full.index(now), v_s.index(now))


@gluon.jit(do_not_specialize=["N", "window", "padded"])
def _backward_query(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, LSE, DLSE, FOLDED_LSE, DELTA, END, DEPTH, WORK, OTHER,
    N, window, padded, factor, squeeze, scale,
    HEADS: gl.constexpr, FOLD: gl.constexpr, FOLDS: gl.constexpr, SIZE: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tile, fold = gl.load(WORK + gl.program_id(0) * 8), gl.load(WORK + gl.program_id(0) * 8 + 1)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64 // FOLD, FOLD, SIZE], q_desc.layout)
    o_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64 // FOLD, FOLD, SIZE], o_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64 // FOLD, FOLD, SIZE], do_desc.layout)
    k_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, 1, SIZE], k_desc.layout)
    v_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, 1, SIZE], v_desc.layout)
    buffers = (q_s, o_s, do_s, k_s, v_s)
    q_full = _ring(1, 1)
    bars = (_ring(STAGES, 1), _ring(STAGES, 1), _ring(STAGES, 2))
    fence_async_shared()
    rule = (END, DEPTH, OTHER, N, window)
    factors = (factor, squeeze)
    by_row = (LSE, DLSE, FOLDED_LSE, DELTA)
    given = (dq_desc, buffers, q_full, bars, by_row, WORK, rule, padded, factors, scale, tile, fold)
    descs = (q_desc, o_desc, do_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (_query_group, (0, given, HEADS, FOLD, WINDOWED, CAPPED, STAGES)),
            (_query_group, (1, given, HEADS, FOLD, WINDOWED, CAPPED, STAGES)),
            (_query_loader, (descs, buffers, q_full, bars, WORK, OTHER, tile, fold, FOLD, FOLDS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- backward, dK and dV


@gluon.jit
def _key_step(
    tile, n, k, v, buffers, bars, dk, dv, keys, rule, factors,
    MASKED: gl.constexpr, FOLD: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, LAYOUT_DK: gl.constexpr,
):  # fmt: skip
    k_s, v_s, q_s, do_s, lse_s, delta_s = buffers
    q_full, do_full, empty = bars
    SIZE: gl.constexpr = k_s.shape[3]
    now, phase = n % STAGES, (n // STAGES) & 1
    q = q_s.index(now).reshape([64, SIZE])
    do = do_s.index(now).reshape([64, SIZE])
    if MASKED:
        i = (tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))) // FOLD  # [T]
        queries = _queries(i, rule, WINDOWED)  # [T] each
    mbarrier.wait(q_full.index(now), phase)
    s = _product(k, q, LAYOUT)  # [64 keys, T]
    mbarrier.wait(do_full.index(now), phase)
    dp = _product(v, do, LAYOUT)  # [64, T]
    lse = lse_s.index(now).reshape([64]).load(gl.SliceLayout(0, LAYOUT))  # [T]
    s = warpgroup_mma_wait(1, deps=[s])
    factor, squeeze = factors
    s = _capped(s, squeeze, CAPPED)
    p = gl.exp2(s * factor - gl.expand_dims(lse, 0))  # [64, T]
    if MASKED:
        p = gl.where(_seen(queries, keys, rule, 1, WINDOWED), p, 0.0)
    rounded = _operand(p, k_s.dtype, LAYOUT_DK)  # [64, T]
    if CAPPED:
        p = p * (1.0 - s * s)
    dv = warpgroup_mma(rounded, do, dv, is_async=True)  # [64, Dv]
    delta = delta_s.index(now).reshape([64]).load(gl.SliceLayout(0, LAYOUT))  # [T]
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = _operand(p * (dp - gl.expand_dims(delta, 0)), k_s.dtype, LAYOUT_DK)  # [64, T]
    dk = warpgroup_mma(ds, q, dk, is_async=True)  # [64, D]
    dk, ds, dv, rounded = warpgroup_mma_wait(0, deps=[dk, ds, dv, rounded])
    mbarrier.arrive(empty.index(now), count=1)
    return dk, dv


@gluon.jit
def _key_group(
    WHO: gl.constexpr, given,
    FOLD: gl.constexpr, FOLDS: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, buffers, k_full, bars, WORK, rule, factors, scale, block, group = given
    k_s, v_s, q_s, do_s, lse_s, delta_s = buffers
    q_full, do_full, empty = bars
    END, DEPTH, OTHER, N, window = rule
    SIZE: gl.constexpr = k_s.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # of s' and dp'
    LAYOUT_DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])  # of dk and dv
    begin, middle, stop, first = _span(WORK)
    keys = _keys(block * 2 + WHO, rule, 64, WINDOWED, gl.SliceLayout(1, LAYOUT))
    dk = gl.zeros([64, SIZE], gl.float32, LAYOUT_DK)
    dv = gl.zeros([64, SIZE], gl.float32, LAYOUT_DK)
    k = k_s.index(WHO).reshape([64, SIZE])
    v = v_s.index(WHO).reshape([64, SIZE])
    mbarrier.wait(k_full.index(0), 0)
    for number in range(FOLDS):
        zero = begin - number * (stop - begin)
        tile = first
        for at in range(begin, middle):
            following = gl.load(OTHER + at + 1)
            if (tile * 64 + 63) // FOLD >= block * 128 + WHO * 64:
                dk, dv = _key_step(
                    tile, at - zero, k, v, buffers, bars, dk, dv, keys, rule, factors,
                    True, FOLD, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_DK,
                )  # fmt: skip
            else:  # all its queries come before the keys of this group
                n = at - zero
                mbarrier.wait(q_full.index(n % STAGES), (n // STAGES) & 1)
                mbarrier.arrive(empty.index(n % STAGES), count=1)
            tile = following
        for at in range(middle, stop):
            dk, dv = _key_step(
                0, at - zero, k, v, buffers, bars, dk, dv, keys, rule, factors,
                False, FOLD, WINDOWED, CAPPED, STAGES, LAYOUT, LAYOUT_DK,
            )  # fmt: skip
    k.store((dk * scale).to(k_s.dtype))
    v.store(dv.to(k_s.dtype))
    fence_async_shared()
    _put(dk_desc, [block * 128 + WHO * 64, group, 0], k_s.index(WHO))
    _put(dv_desc, [block * 128 + WHO * 64, group, 0], v_s.index(WHO))
    tma.store_wait(0)


@gluon.jit
def _key_loader(
    descs, buffers, k_full, bars, WORK, OTHER, block, group,
    FOLD: gl.constexpr, FOLDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    k_s, v_s, q_s, do_s, lse_s, delta_s = buffers
    q_full, do_full, empty = bars
    begin, _, stop, first = _span(WORK)
    mbarrier.expect(k_full.index(0), 4 * k_desc.block_type.nbytes)
    for who in gl.static_range(2):
        j = block * 128 + who * 64
        _fetch(k_desc, [j, group, 0], k_full.index(0), k_s.index(who))
        _fetch(v_desc, [j, group, 0], k_full.index(0), v_s.index(who))
    for number in range(FOLDS):
        fold = group * FOLDS + number
        zero = begin - number * (stop - begin)
        tile = first
        for at in range(begin, stop):
            n = at - zero
            now = n % STAGES
            row = tile * 64
            tile = gl.load(OTHER + at + 1)
            token = row // FOLD
            mbarrier.wait(empty.index(now), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(now), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            _fetch(q_desc, [token, fold * FOLD, 0], q_full.index(now), q_s.index(now))
            _fetch(lse_desc, [fold, row], q_full.index(now), lse_s.index(now))
            mbarrier.expect(do_full.index(now), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            _fetch(do_desc, [token, fold * FOLD, 0], do_full.index(now), do_s.index(now))
            _fetch(delta_desc, [fold, row], do_full.index(now), delta_s.index(now))


@gluon.jit(do_not_specialize=["N", "window"])
def _backward_key(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_desc, delta_desc, END, DEPTH, WORK, OTHER, N,
    window, factor, squeeze, scale, FOLD: gl.constexpr, FOLDS: gl.constexpr, SIZE: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    block, group = gl.load(WORK + gl.program_id(0) * 8), gl.load(WORK + gl.program_id(0) * 8 + 1)
    k_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 1, SIZE], k_desc.layout)
    v_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 1, SIZE], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64 // FOLD, FOLD, SIZE], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64 // FOLD, FOLD, SIZE], do_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], delta_desc.layout)
    buffers = (k_s, v_s, q_s, do_s, lse_s, delta_s)
    k_full = _ring(1, 1)
    bars = (_ring(STAGES, 1), _ring(STAGES, 1), _ring(STAGES, 2))
    fence_async_shared()
    rule = (END, DEPTH, OTHER, N, window)
    factors = (factor, squeeze)
    given = (dk_desc, dv_desc, buffers, k_full, bars, WORK, rule, factors, scale, block, group)
    descs = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    gl.warp_specialize(
        [
            (_key_group, (0, given, FOLD, FOLDS, WINDOWED, CAPPED, STAGES)),
            (_key_group, (1, given, FOLD, FOLDS, WINDOWED, CAPPED, STAGES)),
            (_key_loader, (descs, buffers, k_full, bars, WORK, OTHER, block, group, FOLD, FOLDS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
