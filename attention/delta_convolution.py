"""The short convolution of delta.py in Triton: one pass over the row forward, one backward, no state kept.

    z_t = bias + sum_d w_d x_anc(t, d) ;  y_t = silu(z_t)        anc(t, d): d tokens back on the path of t
    dz_t = dy_t silu'(z_t) ;  dw_d = sum_t dz_t x_anc(t, d) ;  dx_a = sum of w_d dz_t where anc(t, d) = a

Only a token less than W in front of a branch has descendants that do not lie right behind it in the row. The
pass over the row takes what is right behind, from its own tile: the last W - 1 tokens of a tile are there for
the ones in front, and belong to the next. A second pass then makes dx of those few tokens whole, from a list
of all their descendants, so that nothing is added up by atomics or rounded twice.

Letters: N tokens, E channels, W width, T tokens of a tile, B channels of a block, F tokens with a fork ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE, BLOCK, WARPS = 64, 64, 4  # tokens, channels and warps of a program


class Convolve(torch.autograd.Function):
    """`x` [N, E], `weight` [E, W], `bias` [E] or None; `back` [W-1, N] int32: anc(t, d), -1 = none. -> [N, E]

    `forks`: the tokens [F], where the list of each starts [F+1], descendants and their distance, int32.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, silu: bool, back, forks):
        x, weight = x.contiguous(), weight.mT.contiguous()  # [W, E]
        sizes = dict(N=len(x), E=x.shape[1], W=len(weight), SILU=silu)
        sizes |= dict(TILE=TILE, BLOCK=BLOCK, num_warps=WARPS)
        y = torch.empty_like(x)
        _forward[_grid(x, TILE)](x, weight, bias, back, y, **sizes)
        ctx.save_for_backward(x, weight, bias)
        ctx.rest = sizes, back, forks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        sizes, back, (tokens, *lists) = ctx.rest
        dx, (width, channels) = torch.empty_like(x), weight.shape
        tiles, blocks = _grid(x, TILE - width + 1)
        shares = x.new_empty(tiles, width + 1, channels, dtype=torch.float32)  # of dw, and of dbias behind it
        given = x, weight, bias, back, dy.contiguous(), dx
        _backward[tiles, blocks](*given, shares, **sizes)
        if len(tokens):
            _backward_forks[len(tokens), blocks](*given, tokens, *lists, **sizes)
        total = shares.sum(0)  # [W+1, E]
        dbias = None if bias is None else total[-1].to(bias)
        return dx, total[:-1].mT.to(weight), dbias, None, None, None


def _grid(x, tokens: int) -> tuple[int, int]:
    return triton.cdiv(len(x), tokens), triton.cdiv(x.shape[1], BLOCK)


@triton.jit
def _ancestors(X, BACK, tokens, at, known, N, E, d: tl.constexpr):
    """Inputs d tokens back on the paths [T, B]; nothing past the root."""
    if d > 0:
        tokens = tl.load(BACK + (d - 1) * N + tokens, known, -1)
    known = (known & (tokens >= 0))[:, None] & (at < E)[None, :]
    return tl.load(X + tokens.to(tl.int64)[:, None] * E + at[None, :], known, 0.0).to(tl.float32)


@triton.jit
def _weighted(X, WEIGHT, BIAS, BACK, tokens, at, known, N, E, W: tl.constexpr):
    """z [T, B]"""
    z = tl.zeros((tokens.shape[0], at.shape[0]), tl.float32)
    if BIAS is not None:
        z += tl.load(BIAS + at, at < E, 0.0).to(tl.float32)[None, :]
    for d in tl.static_range(W):
        weight = tl.load(WEIGHT + (W - 1 - d) * E + at, at < E, 0.0).to(tl.float32)
        z += weight[None, :] * _ancestors(X, BACK, tokens, at, known, N, E, d)
    return z


@triton.jit
def _slope(X, WEIGHT, BIAS, BACK, DY, tokens, at, known, N, E, W: tl.constexpr, SILU: tl.constexpr):
    """dz [T, B]"""
    here = known[:, None] & (at < E)[None, :]
    dz = tl.load(DY + tokens.to(tl.int64)[:, None] * E + at[None, :], here, 0.0).to(tl.float32)
    if SILU:
        z = _weighted(X, WEIGHT, BIAS, BACK, tokens, at, known, N, E, W)
        share = tl.sigmoid(z)
        dz *= share * (1 + z * (1 - share))
    return dz


@triton.jit(do_not_specialize=["N"])
def _forward(X, WEIGHT, BIAS, BACK, Y, N, E: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
             TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [T]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [B]
    z = _weighted(X, WEIGHT, BIAS, BACK, tokens, at, tokens < N, N, E, W)
    y = z * tl.sigmoid(z) if SILU else z
    here = (tokens < N)[:, None] & (at < E)[None, :]
    tl.store(Y + tokens.to(tl.int64)[:, None] * E + at[None, :], y.to(Y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["N"])
def _backward(X, WEIGHT, BIAS, BACK, DY, DX, SHARES, N, E: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
              TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    tile, row = tl.program_id(0), tl.arange(0, TILE)
    tokens = tile * (TILE - W + 1) + row  # [T], the last of them for what descends from the others
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [B]
    shares = SHARES + tile * ((W + 1) * E) + at
    dz = _slope(X, WEIGHT, BIAS, BACK, DY, tokens, at, tokens < N, N, E, W, SILU)
    own = row < TILE - W + 1
    owned = tl.where(own[:, None], dz, 0.0)
    for d in tl.static_range(W):
        x = _ancestors(X, BACK, tokens, at, own & (tokens < N), N, E, d)
        tl.store(shares + (W - 1 - d) * E, tl.sum(owned * x, 0), at < E)
    if BIAS is not None:
        tl.store(shares + W * E, tl.sum(owned, 0), at < E)
    dx = dz * tl.load(WEIGHT + (W - 1) * E + at, at < E, 0.0).to(tl.float32)[None, :]
    for d in tl.static_range(1, W):
        follows = own & (tl.load(BACK + (d - 1) * N + tokens + d, own & (tokens + d < N), -1) == tokens)
        weight = tl.load(WEIGHT + (W - 1 - d) * E + at, at < E, 0.0).to(tl.float32)
        index = tl.broadcast_to(tl.minimum(row + d, TILE - 1)[:, None], (TILE, BLOCK))
        dx += tl.where(follows[:, None], weight[None, :] * tl.gather(dz, index, 0), 0.0)
    here = (own & (tokens < N))[:, None] & (at < E)[None, :]
    tl.store(DX + tokens.to(tl.int64)[:, None] * E + at[None, :], dx.to(DX.dtype.element_ty), here)


@triton.jit(do_not_specialize=["N"])
def _backward_forks(X, WEIGHT, BIAS, BACK, DY, DX, TOKENS, STARTS, BELOW, DISTANCE, N, E: tl.constexpr,
                    W: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
                    ):  # fmt: skip
    fork = tl.program_id(0)
    token = tl.load(TOKENS + fork).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [B]
    end = tl.load(STARTS + fork + 1)
    dx = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(STARTS + fork), end, TILE):
        entries = start + tl.arange(0, TILE)  # [T]
        listed = entries < end
        below, distance = tl.load(BELOW + entries, listed, 0), tl.load(DISTANCE + entries, listed, 0)
        weight = tl.load(WEIGHT + (W - 1 - distance)[:, None] * E + at[None, :], (at < E)[None, :], 0.0)
        dz = _slope(X, WEIGHT, BIAS, BACK, DY, below, at, listed, N, E, W, SILU)
        dx += tl.sum(weight.to(tl.float32) * dz, 0)
    tl.store(DX + token * E + at, dx.to(DX.dtype.element_ty), at < E)
