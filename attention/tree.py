"""Tree attention in Triton, forward and backward: nothing copied, nothing N x N, nothing compiled per row.

A row holds a forest in depth-first order, so one integer per key is the whole mask:

    query i sees key j   iff   j <= i < subtree_end[j]            (j is an ancestor of i, or i itself)
    with a window w      also  depth[i] - depth[j] < w            (self and w - 1 predecessors on the path)

The H / G query heads that share a K/V head are folded into the rows of one matrix: row r of group g is token
r // (H / G), head g (H / G) + r % (H / G). Rows are cut into tiles, keys into blocks, and meetings.py lists
which tiles meet which blocks, and which of them can do without a mask:

    forward, per tile:    s = scale q k' ;  p = exp2(s log2(e) - running maximum) ;  o = sum(p v) / sum(p)
    dQ, per tile:         p = exp(s - lse) ;  ds = p (do v' - delta) ;  dq = scale sum(ds k)
    dK and dV, per block: dv = sum(p' do) ;  dk = scale sum(ds' q)          delta = do . o - dlse

Every sum has one owner and one order, so two runs agree bit for bit. It must never add atomically, never let
the order of a row stand for a depth, and never take a shape of the row as a compile-time constant.

Flash attention (arXiv 2205.14135, 2307.08691) with the interval rule in place of the causal one. On Hopper
the same three kernels run from hopper.py. Letters: N tokens, H query heads, G K/V heads, D and Dv head sizes
of q, k and of v, R = N H / G rows of a group, T rows of a tile, B keys of a block, P (tile, block) pairs that
meet, F folds: sets of query heads whose rows are one matrix (G of them here).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.meetings import meetings

LARGEST_HEAD = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_TILE = 128  # rows; every other tile divides it


def attend(query, key, value, plan, scale, window=None, softcap=None, sinks=None, with_lse=False):
    """Attention of a row on its tree, differentiable in every tensor, float32 inside, deterministic.

    `query` [N, H, D]; `key` [N, G, D]; `value` [N, G, Dv], all of one dtype: bfloat16, float16 or float32;
    `scale` float; `window` int, in positions of the sample; `softcap` float; `sinks` [H], a logit per head
    that takes weight and has no value. Returns the output [N, H, Dv]; with `with_lse` also the natural
    log-sum-exp [N, H] float32, sink included. ValueError for what the kernels cannot do.
    """
    reason = refusal(query, key, value, scale, window)
    if reason:
        raise ValueError(f"the triton attention backend {reason}: choose the reference backend")
    rows = [_dense(tensor) for tensor in (query, key, value)]
    with torch.cuda.device_of(query):
        output, lse = _Attention.apply(*rows, sinks, plan, float(scale), plan.effective(window), softcap)
    return (output, lse) if with_lse else output


def refusal(query, key, value, scale, window) -> str | None:
    """Why these inputs are not for this backend, or None."""
    if not query.is_cuda and isinstance(_forward, triton.JITFunction):
        return "runs on CUDA devices"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"takes bfloat16, float16 or float32, all alike, not {query.dtype}, {key.dtype}, {value.dtype}"
    if max(query.shape[-1], value.shape[-1]) > LARGEST_HEAD:
        return f"takes head sizes up to {LARGEST_HEAD}, not {max(query.shape[-1], value.shape[-1])}"
    if query.shape[1] % key.shape[1]:
        return f"takes query heads in equal groups, not {query.shape[1]} for {key.shape[1]} K/V heads"
    if scale <= 0:
        return f"takes a scale above 0, not {scale}"
    if window is not None and window < 1:
        return f"takes a sliding_window of at least 1, not {window}"
    return None


# ---- autograd


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, plan, scale, window, softcap):
        output = query.new_empty(*query.shape[:2], value.shape[2])  # [N, H, Dv]
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N, H]
        ctx.options = (plan, scale, window, softcap)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        fast = _hopper(query, value)
        if fast:
            fast.forward(query, key, value, output, lse, sinks, *ctx.options)
        else:
            _launch("forward", _forward, ctx.options, (query, key, value), (output, lse, sinks))
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        query, key, value, sinks, output, lse = ctx.saved_tensors
        rest = (output, lse, *ctx.options, sinks, dlse)
        return *gradients(doutput, query, key, value, *rest), None, None, None, None


def gradients(
    doutput, query, key, value, output, lse, plan, scale, window=None, softcap=None, sinks=None, dlse=None
):
    """The backward of `attend` from what it returned: d query, d key, d value, d sinks (None without)."""
    doutput, query, key, value = (_dense(tensor) for tensor in (doutput, query, key, value))
    options = (plan, scale, plan.effective(window), softcap)
    dquery, dkey, dvalue = (torch.empty_like(tensor) for tensor in (query, key, value))
    dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
    fast = _hopper(query, value)
    with torch.cuda.device_of(query):
        if fast:
            given, found = (query, key, value, output, doutput, lse, dlse), (dquery, dkey, dvalue)
            lse, delta = fast.backward(*given, *found, *options)
        else:
            padded = _padded(len(query) * query.shape[1] // key.shape[1])
            folded = lse.new_zeros(2, key.shape[1], padded).unbind()
            strided = (query, key, value, doutput)
            _launch("dq", _backward_query, options, (*strided, dquery), (output, lse, dlse, *folded))
            _launch("dkv", _backward_key, options, (*strided, dkey, dvalue), folded)
            lse, delta = folded  # to base 2; [F, R padded] each
    dsinks = None
    if sinks is not None:
        sink = sinks.float().view(len(lse), 1, -1) * LOG2E.value  # [F, 1, H / F]
        weight = (sink - _unfolded(lse, query)).exp2()  # [F, N, H / F]
        dsinks = -(weight * _unfolded(delta, query)).sum(1).flatten().to(sinks.dtype)  # [H]
    return dquery, dkey, dvalue, dsinks


def _hopper(query, value):
    """The module with the kernels of Hopper where they can take the call, else None."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) != (9, 0):
        return None
    try:
        from attention import hopper
    except ImportError:  # Gluon is experimental: other versions of Triton may lack a part
        return None
    return hopper if hopper.fits(query, value) else None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [N, heads, size], or a copy of it where its rows cannot be read 16 bytes at a time."""
    step = 16 // tensor.element_size()
    strided = tensor.stride(2) == 1 and tensor.stride(0) % step == 0 and tensor.stride(1) % step == 0
    return tensor if strided and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


def _padded(rows: int) -> int:
    return triton.cdiv(rows, LARGEST_TILE) * LARGEST_TILE


def _launch(kind: str, kernel, options: tuple, strided: tuple, plain: tuple) -> None:
    """Runs a kernel: a program per tile ("dkv": block) and K/V head. `strided` tensors: [N, heads, size]."""
    plan, scale, window, softcap = options
    query, key, value = strided[:3]
    length, heads, size = query.shape
    groups, value_size = key.shape[1], value.shape[2]
    tile, block, warps, stages = sizes(kind, query, max(size, value_size))
    owner = "block" if kind == "dkv" else "tile"
    lists = meetings(plan, owner, groups, tile, block, heads // groups, window)
    kernel[(len(lists.work),)](
        *strided, *plain, plan.subtree_end, plan.depth, lists.work, lists.other, length,
        _padded(length * heads // groups), scale, window or 0,
        1.0 if softcap is None else softcap,
        *(stride for tensor in strided for stride in tensor.stride()[:2]),
        HEADS=heads, REPEAT=heads // groups, SIZE=size, VALUE_SIZE=value_size,
        SIZE_PADDED=max(16, triton.next_power_of_2(size)),
        VALUE_PADDED=max(16, triton.next_power_of_2(value_size)),
        TILE=tile, BLOCK=block, WINDOWED=window is not None, CAPPED=softcap is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def sizes(kind: str, query: torch.Tensor, head: int) -> tuple[int, int, int, int]:
    """(rows of a tile, keys of a block, warps, pipeline stages) of a kernel, by measurement."""
    large = query.is_cuda and torch.cuda.get_device_capability(query.device) == (9, 0)
    if query.dtype == torch.float32 or head > 128 or not large:
        bytes_of_a_row = triton.next_power_of_2(head) * query.element_size()
        if bytes_of_a_row > 512:
            return 32, 32, 4, 1
        return (64, 32, 4, 1) if bytes_of_a_row > 256 else (64, 64, 4, 2)
    if kind == "forward":
        return (128, 128, 8, 2) if head > 64 else (128, 128, 8, 3)
    return (128, 64, 8, 2) if kind == "dq" else (64, 128, 8, 2)


# ---- kernels. Q, K, V, DO and gradients are [N, heads, size] with two strides, OUT [N, H, Dv], LSE [N, H].
# The dQ kernel makes what dK and dV need of every row: the lse to base 2 and delta, [F, R padded].


@triton.jit
def _work(WORK):
    """owner, head, begin, middle, stop of this program."""
    at = WORK + tl.program_id(0) * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _rows(tile, group, N, HEADS: tl.constexpr, REPEAT: tl.constexpr, TILE: tl.constexpr):
    """Tokens [T], heads [T] of a tile's rows, and which of them exist."""
    rows = tile * TILE + tl.arange(0, TILE)  # [T]
    tokens = rows // REPEAT  # [T]
    return tokens, group * REPEAT + rows % REPEAT, tokens < N


@triton.jit
def _load(X, tokens, heads, exist, stride_n, stride_h, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[len(tokens), PADDED] of X: zero where the token does not exist and past the head size."""
    columns = tl.arange(0, PADDED)  # [PADDED]
    at = X + (tokens.to(tl.int64) * stride_n + heads * stride_h)[:, None] + columns[None, :]
    if SIZE == PADDED:
        return tl.load(at, exist[:, None], 0.0)
    return tl.load(at, exist[:, None] & (columns < SIZE)[None, :], 0.0)


@triton.jit
def _store(X, values, tokens, heads, exist, stride_n, stride_h, SIZE: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)  # [PADDED]
    at = X + (tokens.to(tl.int64) * stride_n + heads * stride_h)[:, None] + columns[None, :]
    tl.store(at, values.to(X.dtype.element_ty), exist[:, None] & (columns < SIZE)[None, :])


@triton.jit
def _dot(a, b, acc=None):
    """a b + acc in float32; float32 inputs pass the tensor cores in three parts, exact to about 1e-6."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _seen(i, depth_i, j, end_j, depth_j, window, AXIS: tl.constexpr, WINDOWED: tl.constexpr):
    """The rule: a matrix with the queries on AXIS, the keys on the other."""
    i, depth_i = tl.expand_dims(i, 1 - AXIS), tl.expand_dims(depth_i, 1 - AXIS)
    seen = (tl.expand_dims(j, AXIS) <= i) & (i < tl.expand_dims(end_j, AXIS))
    if WINDOWED:
        seen &= depth_i - tl.expand_dims(depth_j, AXIS) < window
    return seen


@triton.jit
def _capped(scores, scale, cap, CAPPED: tl.constexpr):
    """Scores before the scale -> (what to exponentiate, its factor, its derivative by the scaled score)."""
    if CAPPED:
        tanh = 2 * tl.sigmoid(scores * (2 * scale / cap)) - 1
        return tanh, cap * LOG2E, 1 - tanh * tanh
    else:
        return scores, scale * LOG2E, 1.0


@triton.jit(do_not_specialize=["N", "padded", "window"])
def _forward(
    Q, K, V, OUT, LSE, SINKS, END, DEPTH, WORK, OTHER, N, padded, scale, window, cap,
    q_n, q_h, k_n, k_h, v_n, v_h,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    tile, group, begin, middle, stop = _work(WORK)
    tokens, heads, exist = _rows(tile, group, N, HEADS, REPEAT, TILE)  # [T] each
    q = _load(Q, tokens, heads, exist, q_n, q_h, SIZE, SIZE_PADDED)  # [T, D]
    depth_i = tl.load(DEPTH + tokens, exist, 0) if WINDOWED else tokens  # [T]
    acc = tl.zeros([TILE, VALUE_PADDED], tl.float32)  # [T, Dv]
    total = tl.zeros([TILE], tl.float32)  # [T]
    # Finite, so that a row whose first block is all masked multiplies by exp2(0) and not by a NaN.
    most = tl.full([TILE], -1.0e30, tl.float32)  # [T]
    for whole in tl.static_range(2):
        for at in range(middle if whole else begin, stop if whole else middle):
            j = tl.load(OTHER + at) * BLOCK + tl.arange(0, BLOCK)  # [B]
            k = _load(K, j, group, j < N, k_n, k_h, SIZE, SIZE_PADDED)  # [B, D]
            s = _dot(q, tl.trans(k))  # [T, B]
            s, factor, _ = _capped(s, scale, cap, CAPPED)
            if not whole:
                end_j = tl.load(END + j, j < N, 0)  # [B]
                depth_j = tl.load(DEPTH + j, j < N, 0) if WINDOWED else j  # [B]
                seen = _seen(tokens, depth_i, j, end_j, depth_j, window, 0, WINDOWED)  # [T, B]
                s = tl.where(seen, s, float("-inf"))
            now = tl.maximum(most, tl.max(s, 1) * factor)  # [T]
            p = tl.exp2(s * factor - now[:, None])  # [T, B]
            shrink = tl.exp2(most - now)  # [T]
            total = total * shrink + tl.sum(p, 1)
            v = _load(V, j, group, j < N, v_n, v_h, VALUE_SIZE, VALUE_PADDED)  # [B, Dv]
            acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
            most = now
    if SINKS is not None:
        sink = tl.load(SINKS + heads).to(tl.float32) * LOG2E  # [T]
        now = tl.maximum(most, sink)
        shrink = tl.exp2(most - now)
        total = total * shrink + tl.exp2(sink - now)
        acc = acc * shrink[:, None]
        most = now
    acc = acc / total[:, None]
    _store(OUT, acc, tokens, heads, exist, HEADS * VALUE_SIZE, VALUE_SIZE, VALUE_SIZE, VALUE_PADDED)
    tl.store(LSE + tokens * HEADS + heads, (most + tl.log2(total)) / LOG2E, exist)


@triton.jit(do_not_specialize=["N", "padded", "window"])
def _backward_query(
    Q, K, V, DO, DQ, OUT, LSE, DLSE, FOLDED_LSE, DELTA, END, DEPTH, WORK, OTHER, N, padded,
    scale, window, cap,
    q_n, q_h, k_n, k_h, v_n, v_h, do_n, do_h, dq_n, dq_h,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    tile, group, begin, middle, stop = _work(WORK)
    tokens, heads, exist = _rows(tile, group, N, HEADS, REPEAT, TILE)  # [T] each
    q = _load(Q, tokens, heads, exist, q_n, q_h, SIZE, SIZE_PADDED)  # [T, D]
    do = _load(DO, tokens, heads, exist, do_n, do_h, VALUE_SIZE, VALUE_PADDED)  # [T, Dv]
    depth_i = tl.load(DEPTH + tokens, exist, 0) if WINDOWED else tokens  # [T]
    o = _load(OUT, tokens, heads, exist, HEADS * VALUE_SIZE, VALUE_SIZE, VALUE_SIZE, VALUE_PADDED)  # [T, Dv]
    lse = tl.load(LSE + tokens * HEADS + heads, exist, 0.0) * LOG2E  # [T]
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [T]
    delta -= tl.load(DLSE + tokens * HEADS + heads, exist, 0.0)
    at_rows = group * padded + tile * TILE + tl.arange(0, TILE)  # [T]
    tl.store(FOLDED_LSE + at_rows, lse)
    tl.store(DELTA + at_rows, delta)
    lse, delta = lse[:, None], delta[:, None]  # [T, 1] each
    dq = tl.zeros([TILE, SIZE_PADDED], tl.float32)  # [T, D]
    for whole in tl.static_range(2):
        for at in range(middle if whole else begin, stop if whole else middle):
            j = tl.load(OTHER + at) * BLOCK + tl.arange(0, BLOCK)  # [B]
            k = _load(K, j, group, j < N, k_n, k_h, SIZE, SIZE_PADDED)  # [B, D]
            v = _load(V, j, group, j < N, v_n, v_h, VALUE_SIZE, VALUE_PADDED)  # [B, Dv]
            s = _dot(q, tl.trans(k))  # [T, B]
            s, factor, slope = _capped(s, scale, cap, CAPPED)
            p = tl.exp2(s * factor - lse)  # [T, B]
            if not whole:
                end_j = tl.load(END + j, j < N, 0)  # [B]
                depth_j = tl.load(DEPTH + j, j < N, 0) if WINDOWED else j  # [B]
                seen = _seen(tokens, depth_i, j, end_j, depth_j, window, 0, WINDOWED)  # [T, B]
                p = tl.where(seen, p, 0.0)
            dp = _dot(do, tl.trans(v))  # [T, B]
            ds = p * (dp - delta) * slope  # [T, B]
            dq = _dot(ds.to(k.dtype), k, dq)
    _store(DQ, dq * scale, tokens, heads, exist, dq_n, dq_h, SIZE, SIZE_PADDED)


@triton.jit(do_not_specialize=["N", "padded", "window"])
def _backward_key(
    Q, K, V, DO, DK, DV, LSE, DELTA, END, DEPTH, WORK, OTHER, N, padded, scale, window, cap,
    q_n, q_h, k_n, k_h, v_n, v_h, do_n, do_h, dk_n, dk_h, dv_n, dv_h,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    block, group, begin, middle, stop = _work(WORK)
    j = block * BLOCK + tl.arange(0, BLOCK)  # [B]
    k = _load(K, j, group, j < N, k_n, k_h, SIZE, SIZE_PADDED)  # [B, D]
    v = _load(V, j, group, j < N, v_n, v_h, VALUE_SIZE, VALUE_PADDED)  # [B, Dv]
    end_j = tl.load(END + j, j < N, 0)  # [B]
    depth_j = tl.load(DEPTH + j, j < N, 0) if WINDOWED else j  # [B]
    dk = tl.zeros([BLOCK, SIZE_PADDED], tl.float32)  # [B, D]
    dv = tl.zeros([BLOCK, VALUE_PADDED], tl.float32)  # [B, Dv]
    for whole in tl.static_range(2):
        for at in range(middle if whole else begin, stop if whole else middle):
            tile = tl.load(OTHER + at)
            tokens, heads, exist = _rows(tile, group, N, HEADS, REPEAT, TILE)  # [T] each
            q = _load(Q, tokens, heads, exist, q_n, q_h, SIZE, SIZE_PADDED)  # [T, D]
            do = _load(DO, tokens, heads, exist, do_n, do_h, VALUE_SIZE, VALUE_PADDED)  # [T, Dv]
            at_rows = group * padded + tile * TILE + tl.arange(0, TILE)  # [T]
            lse, delta = tl.load(LSE + at_rows)[None, :], tl.load(DELTA + at_rows)[None, :]  # [1, T] each
            s = _dot(k, tl.trans(q))  # [B, T]
            s, factor, slope = _capped(s, scale, cap, CAPPED)
            p = tl.exp2(s * factor - lse)  # [B, T]
            if not whole:
                depth_i = tl.load(DEPTH + tokens, exist, 0) if WINDOWED else tokens  # [T]
                seen = _seen(tokens, depth_i, j, end_j, depth_j, window, 1, WINDOWED)  # [B, T]
                p = tl.where(seen, p, 0.0)
            dv = _dot(p.to(do.dtype), do, dv)
            dp = _dot(v, tl.trans(do))  # [B, T]
            ds = p * (dp - delta) * slope  # [B, T]
            dk = _dot(ds.to(q.dtype), q, dk)
    _store(DK, dk * scale, j, group, j < N, dk_n, dk_h, SIZE, SIZE_PADDED)
    _store(DV, dv, j, group, j < N, dv_n, dv_h, VALUE_SIZE, VALUE_PADDED)


def _unfolded(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[F, R padded] -> [F, N, H / F]"""
    length, heads = query.shape[:2]
    return rows[:, : length * heads // len(rows)].view(len(rows), length, -1)
