"""Which tiles of a row's queries meet which blocks of its keys, and which of those need a mask.

The least and the greatest subtree_end of a block of keys tell:

    tile    = tokens [q0, q1)         meets the block            iff   k0 < q1 and max(subtree_end) > q0
    block   = tokens [k0, k1)         and every pair is visible  iff   k1 - 1 <= q0 and min(subtree_end) >= q1

                 keys  a a a a | b b b b | c c c c | d d d d
        tile a         \\ . . . |                                  . every pair visible, no mask
        tile b         . . . . | \\ . . . |                        \\ masked
        tile c         . . . . |         | \\ . . .                b ends where c begins: never loaded
        tile d         . . . . |         | . . . . | \\ . . .

Made on the device in four launches. Letters as in tree.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

UNCOUNTED = 2**24  # (tile, block) pairs: rows of up to 370k tokens with two query heads for a K/V head
PROCESSORS = 132  # of an H100 or H200; others are near enough for the order of work


@dataclass(eq=False)
class Meetings:
    """Which blocks a tile meets, or which tiles a block meets: first those with a mask, then the others."""

    # One line per program, in the order of their start, 32 bytes each: owner (the tile or block it computes),
    # head (its fold or K/V head), begin, middle, stop (other[begin:middle] masked, other[middle:stop] not),
    # and other[begin].
    work: torch.Tensor  # [programs, 8] int32
    other: torch.Tensor  # [P + 1 or more] int32, increasing within each part; at least one more than is used


def meetings(plan, owner, heads, tile, block, repeat, window) -> Meetings:
    """What each `owner` ("tile" of `tile` rows, "block" of `block` keys) meets, in the order of their start.

    `heads` is how often every owner runs, `repeat` the rows of a token, `window` in positions or None. Made
    on the device of the plan in O(N + P) memory, once for all layers that ask the same. The host waits for P
    only in rows so long that room for every pair would be more than `UNCOUNTED`.
    """
    return plan(_find_meetings, owner, heads, tile, block, repeat, window)


def _find_meetings(plan, owner, heads, tile, block, repeat, window) -> Meetings:
    length, device = len(plan.subtree_end), plan.subtree_end.device
    tiles, blocks = triton.cdiv(length * repeat, tile), triton.cdiv(length, block)
    owners = tiles if owner == "tile" else blocks
    integers = partial(torch.empty, dtype=torch.int32, device=device)
    extremes, depths = integers(4, blocks), integers(2, tiles)
    known = (plan.subtree_end, plan.depth, extremes, depths, length, tiles, blocks, window or 0)
    constants = dict(TILE=tile, BLOCK=block, REPEAT=repeat, WINDOWED=window is not None)
    _extremes[(max(blocks, tiles) if window else blocks,)](*known, **constants)
    counts, places = integers(2, owners), integers(4, owners)
    constants.update(BY_TILE=owner == "tile")
    _meet[(owners,)](*known[2:], counts, places, counts, counts, owners, heads, FILL=False, **constants)
    _place[(owners,)](counts, places, owners, 2 * PROCESSORS)
    pairs = tiles * blocks
    other = integers((pairs if pairs <= UNCOUNTED else int(places[3, 0])) + 1)  # [P + 1] or more
    work = integers(heads * owners, 8)
    _meet[(owners,)](*known[2:], counts, places, other, work, owners, heads, FILL=True, **constants)
    return Meetings(work, other)


@triton.jit(do_not_specialize=["N", "tiles", "blocks", "window"])
def _extremes(
    END, DEPTH, EXTREMES, DEPTHS, N, tiles, blocks, window,
    TILE: tl.constexpr, BLOCK: tl.constexpr, REPEAT: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of each block the least and the greatest subtree_end and depth, of each tile the depths."""
    own = tl.program_id(0)
    j = own * BLOCK + tl.arange(0, BLOCK)  # [B]
    if own < blocks:
        # Keys past the end of the row end before they begin: a block that holds some is always masked.
        end = tl.load(END + j, j < N, 0)  # [B]
        tl.store(EXTREMES + own, tl.min(end, 0))
        tl.store(EXTREMES + blocks + own, tl.max(end, 0))
        if WINDOWED:
            tl.store(EXTREMES + 2 * blocks + own, tl.min(tl.load(DEPTH + j, j < N, 2**30), 0))
            tl.store(EXTREMES + 3 * blocks + own, tl.max(tl.load(DEPTH + j, j < N, -1), 0))
    if WINDOWED and own < tiles:
        i = (own * TILE + tl.arange(0, TILE)) // REPEAT  # [T]
        tl.store(DEPTHS + own, tl.min(tl.load(DEPTH + i, i < N, 2**30), 0))
        tl.store(DEPTHS + tiles + own, tl.max(tl.load(DEPTH + i, i < N, -1), 0))


@triton.jit(do_not_specialize=["owners", "parts"])
def _place(COUNTS, PLACES, owners, parts):
    """Of each owner: where its others begin and its rank (longest first). Of all: how many are long, and P.

    Programs start head by head, so that what runs at one time reads the K and V of few heads; longest first
    within a head. But what is long, longer than one of `parts` of a head's work, comes before all that, for
    all heads: else the end waits for it.
    """
    own = tl.program_id(0)
    mine = tl.load(COUNTS + own) + tl.load(COUNTS + owners + own)
    begin, rank, total, long = 0, 0, 0, 0
    for first in range(0, owners, 1024):
        each = first + tl.arange(0, 1024)  # [1024]
        work = tl.load(COUNTS + each, each < owners, 0) + tl.load(COUNTS + owners + each, each < owners, 0)
        before = each < own  # [1024]
        begin += tl.sum(tl.where(before, work, 0), 0)
        rank += tl.sum(((work > mine) | ((work == mine) & before)).to(tl.int32), 0)
        total += tl.sum(work, 0)
    for first in range(0, owners, 1024):
        each = first + tl.arange(0, 1024)  # [1024]
        work = tl.load(COUNTS + each, each < owners, 0) + tl.load(COUNTS + owners + each, each < owners, 0)
        long += tl.sum((work * parts > total).to(tl.int32), 0)
    tl.store(PLACES + own, begin)
    tl.store(PLACES + owners + own, rank)
    tl.store(PLACES + 2 * owners + own, long)
    tl.store(PLACES + 3 * owners + own, total)


@triton.jit(do_not_specialize=["N", "tiles", "blocks", "window", "owners", "heads"])
def _meet(
    EXTREMES, DEPTHS, N, tiles, blocks, window, COUNTS, PLACES, OTHER, WORK, owners, heads,
    TILE: tl.constexpr, BLOCK: tl.constexpr, REPEAT: tl.constexpr, WINDOWED: tl.constexpr,
    BY_TILE: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Of one owner: how many it meets, masked and not, or with FILL which, and its lines of Meetings.work."""
    owner = tl.program_id(0)
    begin, middle = 0, 0
    if FILL:
        begin = tl.load(PLACES + owner)
        middle = begin + tl.load(COUNTS + owner)
    masked, unmasked = begin, middle  # so far
    leading = 2**30  # the first of them
    # The tiles of a block are contiguous: from that of its first key to the end of its widest subtree.
    if BY_TILE:
        first, stop = 0, blocks
    else:
        first = owner * BLOCK * REPEAT // TILE
        stop = (tl.load(EXTREMES + blocks + owner) * REPEAT - 1) // TILE + 1
    for other in range(first, stop, 128):
        others = other + tl.arange(0, 128)  # [128]
        same = owner + tl.zeros([128], tl.int32)  # [128]
        tile, block = (same, others) if BY_TILE else (others, same)
        exist = (others < stop) & (tile < tiles)  # [128]
        q0 = tile * TILE // REPEAT
        q1 = tl.minimum((tile * TILE + TILE - 1) // REPEAT + 1, N)
        k0 = block * BLOCK
        low, high = tl.load(EXTREMES + block, exist, 0), tl.load(EXTREMES + blocks + block, exist, 0)
        meet = exist & (k0 < q1) & (high > q0)
        whole = meet & (k0 + BLOCK - 1 <= q0) & (low >= q1)
        if WINDOWED:
            low = tl.load(EXTREMES + 2 * blocks + block, exist, 0)
            high = tl.load(EXTREMES + 3 * blocks + block, exist, 0)
            meet = meet & (tl.load(DEPTHS + tile, exist, 0) - high < window)
            whole = whole & meet & (tl.load(DEPTHS + tiles + tile, exist, 0) - low < window)
        part = (meet & (whole == 0)).to(tl.int32)  # [128]
        whole = whole.to(tl.int32)
        if FILL:
            tl.store(OTHER + masked + tl.cumsum(part, 0) - 1, others, part > 0)
            tl.store(OTHER + unmasked + tl.cumsum(whole, 0) - 1, others, whole > 0)
            listed = tl.where(begin < middle, part, whole) > 0  # [128]
            leading = tl.minimum(leading, tl.min(tl.where(listed, others, 2**30), 0))
        masked += tl.sum(part, 0)
        unmasked += tl.sum(whole, 0)
    if FILL:
        rank, long = tl.load(PLACES + owners + owner), tl.load(PLACES + 2 * owners + owner)
        for number in range(heads):
            line = rank * heads + number
            if rank >= long:
                line = heads * long + number * (owners - long) + rank - long
            tl.store(WORK + line * 8, owner)
            tl.store(WORK + line * 8 + 1, number)
            tl.store(WORK + line * 8 + 2, begin)
            tl.store(WORK + line * 8 + 3, middle)
            tl.store(WORK + line * 8 + 4, unmasked)
            tl.store(WORK + line * 8 + 5, leading)
    else:
        tl.store(COUNTS + owner, masked)
        tl.store(COUNTS + owners + owner, unmasked)
