"""The recurrence of delta.py by the kernels of flash-linear-attention, a whole trie in one launch of each.

What a kernel does inside chunks of a sequence is right on a trie once every segment is a sequence of its own.
Two hand states from chunk to chunk: they are launched once per level, and children start from what their
parent left.

    forward    norms, decay, the triangular solve │ states: level 0, 1, ... │ output
    backward   the solve, states: level 0, 1, ... │ their gradients: ..., 1, 0 │ everything else

The package is optional and imported where it is first used. What is taken from it are the functions below its
public one, which has no parent for a sequence, and which would gather and launch all of them for each level.

Letters as in delta.py: N tokens, S segments, P chunks, G query/key heads, H value heads, K and V their sizes;
n listed segments of a level.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

CHUNK = 64  # tokens, what the kernels are tuned for
SHORTEST = 256  # tokens of a row; the check at start has rows of 16
LOG2E = math.log2(math.e)  # they take decays to base 2

# What is used of the package, by its names of version 0.6.
FLA = {
    "norm": "fla.modules.norm.l2norm.l2norm_fwd_kernel",
    "norm_back": "fla.modules.norm.l2norm.l2norm_bwd_kernel",
    "cumsum": "fla.ops.utils.chunk_local_cumsum",
    "solve": "fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_intra",
    "solved": "fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd",
    "solve_back": "fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd",
    "states": "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "states_back": "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "output": "fla.ops.common.chunk_o.chunk_fwd_o",
    "rest_back": "fla.ops.common.chunk_o.chunk_bwd_dv_local",
    "output_back": "fla.ops.common.chunk_o.chunk_bwd_dqkwg",
}


@cache
def _fla() -> SimpleNamespace | None:
    """The functions of FLA, or None, with one warning, where the package is not installed."""
    if not find_spec("fla"):
        warnings.warn(
            "recurrent layers run in plain PyTorch, many times slower than by the kernels of "
            "flash-linear-attention: pip install flash-linear-attention",
            stacklevel=2,
        )
        return None
    try:
        places = {name: place.rpartition(".") for name, place in FLA.items()}
        return SimpleNamespace(**{n: getattr(import_module(m), f) for n, (m, _, f) in places.items()})
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"hybrid models take flash-linear-attention 0.6 (or none), not the one that is installed: {error}"
        ) from error


@cache
def _for_wide_heads(function):
    """`chunk_bwd_dqkwg` without its refusal of Hopper cards under Triton 3.4 to 3.7.0.

    What is compiled wrongly there is a tile of 64. Key heads of more take tiles of 128, and narrower ones are
    widened (tests/test_delta.py::test_kernels_are_as_close_to_float64_as_the_package_on_each_path).
    """
    function = unwrap(function)
    scope = function.__globals__ | {"IS_NVIDIA_HOPPER": False}
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


def usable(x) -> bool:
    """Whether the package is installed and made for `x` [N, H, V].

    Its kernels time their configurations when they first run and stay with what won: no short row may decide.
    """
    made_for = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[2] <= 256
    return made_for and _fla() is not None and len(x) >= SHORTEST


def layout_of(plan, segments) -> SimpleNamespace:
    """The row as the kernels take it: segments are sequences of their own, and levels say what follows what.

    The kernels that pass states along read the start and the end of sequence i at [i] and [i+1], so those of
    a level must be neighbours. They are made so: its runs of neighbours are listed from last to first, and
    from the end of one to the start of the next is a sequence of negative length, which the kernels skip
    (they hand its state on, which nobody reads; tests/test_delta.py::test_levels_list_every_segment_once).
    """
    sizes = np.diff(segments.start)
    parts = -(-sizes // CHUNK)  # [S] chunks
    first = np.append(0, np.cumsum(parts))  # [S+1]
    of = np.repeat(np.arange(len(parts)), parts)  # [P]
    arrays = [segments.start, np.stack([of, np.arange(first[-1]) - first[of]], 1)]
    slot = np.empty(len(parts), int)  # where a segment is in the list of its level
    slots = 0
    for level in range(segments.level.max() + 1):
        members = np.flatnonzero(segments.level == level)
        cuts = np.flatnonzero(segments.start[members[1:]] != segments.start[members[:-1] + 1]) + 1
        bounds, listed = [], []
        for run in np.split(members, cuts)[::-1]:
            bounds += [*segments.start[run], segments.start[run[-1] + 1]]
            listed += [*run, run[-1]]  # the last again for the gap
        bounds, listed = np.array(bounds), np.array(listed[:-1])
        parent = slot[segments.parent[listed]] if level else np.zeros(0, int)
        arrays += [bounds, first[listed], parent, np.bincount(parent, minlength=slots)]
        slots = len(listed)
        slot[listed[::-1]] = np.arange(slots)[::-1]  # the segment itself, not the gap behind it
    # One copy to the device. Each array starts at a multiple of 16 bytes: kernels are compiled per alignment.
    padded = [np.pad(array.ravel(), (0, array.size % 2)) for array in arrays]
    moved = torch.from_numpy(np.concatenate(padded)).to(plan.depth.device)
    moved = zip(moved.split([array.size for array in padded]), arrays, strict=True)
    start, chunks, *rest = (part[: array.size] for part, array in moved)
    names = "bounds", "chunk", "parent", "children"
    levels = [
        SimpleNamespace(**dict(zip(names, rest[i : i + 4], strict=True))) for i in range(0, len(rest), 4)
    ]
    return SimpleNamespace(start=start, chunks=chunks.view(-1, 2), levels=levels)


def recur(q, k, v, g, beta, layout):
    """delta.recur on rows of 16 bits, q and k normalised."""
    scale = q.shape[2] ** -0.5
    if q.shape[2] <= 64:  # zeros change neither norms nor products
        q, k = (F.pad(x, (0, 128 - x.shape[2])) for x in (q, k))
    rows = (x[None].contiguous() for x in (q.to(v), k.to(v), v, g.float(), beta))
    return Recur.apply(*rows, scale, layout).squeeze(0)


class Recur(torch.autograd.Function):
    """q, k [1, N, G, K], v [1, N, H, V], g, beta [1, N, H] -> [1, N, H, V]."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, layout):
        fla = _fla()
        where = dict(cu_seqlens=layout.start, chunk_indices=layout.chunks)
        (q, q_size), (k, k_size) = _norm(q), _norm(k)
        g = fla.cumsum(g, chunk_size=CHUNK, scale=LOG2E, **where)
        w, u, inverse = fla.solve(k=k, v=v, g=g, beta=beta, **where)
        h, rest = _states(k, w, u, g, layout)
        output = fla.output(q=q, k=k, v=rest, h=h, g=g, scale=scale, **where)
        ctx.scale, ctx.layout = scale, layout
        ctx.save_for_backward(q, q_size, k, k_size, v, g, beta, inverse)
        return output

    @staticmethod
    def backward(ctx, doutput):
        fla, layout = _fla(), ctx.layout
        q, q_size, k, k_size, v, g, beta, inverse = ctx.saved_tensors
        doutput = doutput.contiguous()
        where = dict(cu_seqlens=layout.start, chunk_indices=layout.chunks)
        w, u = fla.solved(k=k, v=v, beta=beta, A=inverse, g=g, **where)
        h, rest = _states(k, w, u, g, layout)
        drest = fla.rest_back(q=q, k=k, g=g, do=doutput, scale=ctx.scale, **where)
        dh, drest = _states_back(q, k, w, g, doutput, drest, ctx.scale, layout)
        dq, dk, dw, dg = _for_wide_heads(fla.output_back)(
            q=q, k=k, v=rest, w=w, g=g, h=h, dv=drest, do=doutput, dh=dh, scale=ctx.scale, **where
        )
        dk_solve, dv, dbeta, dg_solve = fla.solve_back(
            k=k, v=v, beta=beta, g=g, A=inverse, dw=dw, du=drest, **where
        )
        dg = fla.cumsum(dg.add_(dg_solve), chunk_size=CHUNK, reverse=True, **where)
        dq, dk = _norm_back(q, q_size, dq), _norm_back(k, k_size, dk.add_(dk_solve))
        return dq, dk, dv.to(v), dg, dbeta.to(beta), None, None


def _norm(x) -> tuple:
    """`x` over its lengths, and 1 / lengths."""
    y, size = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _launch_norm(_fla().norm, size, x=x, y=y)
    return y, size


def _norm_back(y, size, dy):
    dx = torch.empty_like(y)
    _launch_norm(_fla().norm_back, size, y=y, dy=dy, dx=dx)
    return dx


def _launch_norm(kernel, size, **rows) -> None:
    """Without the package's own NB, which has the kernels tuned anew for every 2,048 tokens more of a row."""
    width, count = rows["y"].shape[-1], size.numel()
    sizes = dict(T=count, D=width, BD=1 << (width - 1).bit_length(), NB=1)
    kernel[lambda meta: (-(-count // meta["BT"]),)](**rows, rstd=size, eps=1e-6, **sizes)


def _sizes(k, v) -> dict:
    length, groups, size = k.shape[1:]
    return dict(T=length, H=groups, HV=v.shape[2], K=size, V=v.shape[3], BT=CHUNK, STATE_V_FIRST=False)


def _states(k, w, u, g, layout) -> tuple:
    """The state in front of every chunk [1, P, H, K, V], and what remains of the values [1, N, H, V]."""
    sizes = _sizes(k, u)
    heads, shape = u.shape[2], (u.shape[2], k.shape[3], u.shape[3])  # H, (H, K, V)
    h, rest, end = k.new_empty(1, len(layout.chunks), *shape), torch.empty_like(u), None
    for level in layout.levels:
        count = len(level.chunk)
        entry = None if end is None else end.index_select(0, level.parent)  # [n, H, K, V]
        last = level is layout.levels[-1]
        end = None if last else torch.empty(count, *shape, dtype=torch.float32, device=k.device)
        _fla().states[lambda meta: (-(-sizes["V"] // meta["BV"]) * count * heads,)](  # noqa: B023
            k=k, v=u, w=w, v_new=rest, g=g, gk=None, h=h, h0=entry, ht=end,
            cu_seqlens=level.bounds, chunk_offsets=level.chunk, **sizes,
        )  # fmt: skip
    return h, rest


def _states_back(q, k, w, g, doutput, drest, scale, layout) -> tuple:
    """Gradients of the states [1, P, H, K, V] and, added to `drest`, of the values' rest [1, N, H, V]."""
    sizes = _sizes(k, doutput)
    heads, shape = doutput.shape[2], (doutput.shape[2], k.shape[3], doutput.shape[3])
    dh, total, dend = k.new_empty(1, len(layout.chunks), *shape), torch.empty_like(drest), None
    for level in reversed(layout.levels):
        count = len(level.chunk)
        root = level is layout.levels[0]
        dentry = None if root else torch.empty(count, *shape, dtype=torch.float32, device=k.device)
        _fla().states_back[lambda meta: (-(-sizes["V"] // meta["BV"]) * count * heads,)](  # noqa: B023
            q=q, k=k, w=w, g=g, gk=None, dht=dend, dh0=dentry, do=doutput, dh=dh, dv=drest, dv2=total,
            cu_seqlens=level.bounds, chunk_offsets=level.chunk, scale=scale, **sizes,
        )  # fmt: skip
        if not root:  # children of one are neighbours in the list; summed without atomics, so in one order
            dend = torch.segment_reduce(dentry, "sum", lengths=level.children, unsafe=True)
    return dh, total
