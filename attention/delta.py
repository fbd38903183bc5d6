"""Gated DeltaNet on a trie: the layers of hybrid models (Qwen3-Next, Qwen3.5) that carry a state along.

Such a layer sees the past through a short causal convolution and a matrix S per head (arXiv 2412.06464). On a
trie both simply follow the path, t's predecessor being par(t), not the token in front of it in the row:

    y_t = act( sum_d w_d x_anc(t, d) )         anc(t, d): d tokens back on the path, nothing past the root
    S_t = e^g_t S_par(t) + k_t u_t^T           u_t = beta_t ( v_t - e^g_t S_par(t)^T k_t ),   o_t = S_t^T q_t

    segments   0 ──┬── 1 ──┬── 2               the state at the end of a segment is where its children start,
                   │       └── 3               and its gradient is the sum of theirs
                   └── 4                       levels: 0 | 1 4 | 2 3

Two engines compute the rule. `_rule_torch` is plain PyTorch, in float32 or the precision of its inputs: the
chunks of all segments at once (arXiv 2406.06484), and one step per chunk of the longest path for the states.
`_RuleOnTrie` runs flash-linear-attention's kernels for a whole row in one launch each, segments taken as
sequences; only the two that pass states along are launched once per level.

`hook` puts both into the modelling code of transformers by replacing the two functions that its layers call.
It must never let a layer run as if the row were one sequence: what it cannot do on a trie raises ValueError.

Letters: N tokens of the row, S segments, P chunks, C tokens of a chunk, W width of the convolution, E its
channels, G query/key heads, H value heads (H / G neighbours share one of those), K and V their sizes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

CHUNK = 64  # tokens; the kernels of flash-linear-attention are tuned for it
LOG2E = math.log2(math.e)  # and take decays to base 2
CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # names in the modelling modules


# ---- the row's plan


@dataclass(eq=False)
class Plan:
    """What all recurrent layers of a row share; made when the first of them asks."""

    subtree_end: torch.Tensor  # [N] int32
    depth: torch.Tensor  # [N] int64
    plain: bool  # the PyTorch engine, also where kernels could run
    made: dict = field(default_factory=dict)

    def __call__(self, make, *arguments):
        """`make(segments, device, *arguments)`, once per row."""
        if not self.made:
            self.made[None] = _segments(self.subtree_end.cpu().numpy(), self.depth.cpu().numpy())
        key = (make, *arguments)
        if key not in self.made:
            self.made[key] = make(self.made[None], self.depth.device, *arguments)
        return self.made[key]


@dataclass
class Segments:
    start: np.ndarray  # [S+1]
    parent: np.ndarray  # [S], -1 = root
    level: np.ndarray  # [S], branches above


def _segments(subtree_end, depth) -> Segments:
    """Cuts the row (numpy [N], [N]) where a token does not follow, as an only child, the one before it."""
    follows = (depth[1:] == depth[:-1] + 1) & (subtree_end[1:] == subtree_end[:-1])  # [N-1]
    start = np.flatnonzero(np.append(True, ~follows))  # [S]
    bounds = np.append(start, len(depth))  # [S+1]
    parent, level, path = [], [], []
    for segment, (first, last) in enumerate(zip(depth[start], depth[bounds[1:] - 1], strict=True)):
        while path and path[-1][1] >= first:
            path.pop()
        parent.append(path[-1][0] if path else -1)
        level.append(len(path))
        path.append((segment, last))
    return Segments(bounds, np.array(parent), np.array(level))


# ---- the convolution


def convolve(x, weight, bias, activation, plan: Plan):
    """Causal convolution along paths of `x` [N, E] with `weight` [E, W] and `bias` [E] or None -> [N, E]."""
    if _kernels(x, plan) and activation in ("silu", "swish", None):
        return _ConvolveOnTrie.apply(x, weight, bias, activation, *plan(_conv_states, weight.shape[1]))
    exact = torch.promote_types(x.dtype, torch.float32)
    tokens, place = plan(_conv_paths, weight.shape[1])
    taken = F.pad(x.to(exact), (0, 0, 0, 1)).index_select(0, tokens)  # [N + S (W-1), E]
    bias = None if bias is None else bias.to(exact)
    y = F.conv1d(taken.mT[None], weight[:, None].to(exact), bias, groups=x.shape[1])[0].mT
    y = y.index_select(0, place)  # [N, E]
    return (ACT2FN[activation](y) if activation else y).to(x.dtype)


def _before(segments: Segments, count: int) -> np.ndarray:
    """[S, count]: the tokens in front of each segment on its path, the nearest last; -1 past the root."""
    before = np.full((len(segments.parent), count), -1)
    for segment, parent in enumerate(segments.parent):
        if parent >= 0:
            own = np.arange(*segments.start[parent : parent + 2])
            before[segment] = np.append(before[parent], own)[-count:]
    return before


def _conv_paths(segments: Segments, device, width: int) -> tuple:
    """Tokens [N + S (W-1)]: each segment behind the last of its path (N = none). Where outputs are, [N]."""
    length, sizes = segments.start[-1], np.diff(segments.start)
    before = _before(segments, width - 1)
    own = np.split(np.arange(length), segments.start[1:-1])
    tokens = np.concatenate([part for pair in zip(before, own, strict=True) for part in pair])
    place = np.arange(length) + np.repeat(np.arange(len(sizes)), sizes) * (width - 1)
    tokens[tokens < 0] = length
    return torch.from_numpy(tokens).to(device), torch.from_numpy(place).to(device)


def _conv_states(segments: Segments, device, width: int) -> tuple:
    """The distinct tokens [T] in front of segments; which of them fill each state [S, W] (0 = none, 1 = the
    first); the row's layout."""
    before = np.pad(_before(segments, width - 1), ((0, 0), (1, 0)), constant_values=-1)  # [S, W]
    tokens, state = np.unique(before, return_inverse=True)  # -1 is always there, as the first
    state = torch.from_numpy(state.reshape(before.shape)).to(device)
    return torch.from_numpy(tokens[1:]).to(device), state, _layout(segments, device)


# ---- the rule, plain PyTorch


def _chunks(segments: Segments, device) -> SimpleNamespace:
    """Every segment cut into chunks; they are ordered by step, their depth in chunks."""
    sizes = np.diff(segments.start)  # [S]
    length = min(CHUNK, sizes.max())  # C
    parts = -(-sizes // length)  # [S]
    first = np.append(0, np.cumsum(parts))  # [S+1]
    parent = np.arange(first[-1]) - 1  # [P]
    parent[first[:-1]] = np.where(segments.parent < 0, -1, first[segments.parent + 1] - 1)
    step = np.zeros(first[-1], int)  # [P]
    for begin, end in zip(first, first[1:], strict=False):
        above = step[parent[begin]] if parent[begin] >= 0 else -1
        step[begin:end] = above + 1 + np.arange(end - begin)
    segment = np.repeat(np.arange(len(parts)), parts)  # [P]
    tokens = segments.start[segment] + (np.arange(first[-1]) - first[segment]) * length
    tokens = tokens[:, None] + np.arange(length)  # [P, C]
    tokens[tokens >= segments.start[segment + 1][:, None]] = segments.start[-1]  # N = none
    order = np.argsort(step, kind="stable")  # [P]
    place, counts = np.argsort(order), np.bincount(step)
    starts = np.append(0, np.cumsum(counts))
    entry = [place[parent[order[a:b]]] - z for z, a, b in zip(starts, starts[1:], starts[2:], strict=False)]
    back = np.argsort(tokens[order], axis=None, kind="stable")[: segments.start[-1]]  # [N]
    on = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    return SimpleNamespace(
        tokens=on(tokens[order]),  # [P, C]
        counts=counts.tolist(),  # chunks of each step
        entry=[on(index) for index in entry],  # from the second step on: which chunk of the last it follows
        back=on(back),  # [N], where a token's output is in [P * C]
    )


def _rule_torch(q, k, v, g, beta, plan: Plan):
    """In every chunk, with b_i = the sum of g up to i (the rest as in `recur`):

    T = (I + tril(beta k k^T e^(b_i - b_j), -1))^-1 ;  U = T (beta v) ;  X = T (beta k e^b) ;  R = U - X S
    O = (q e^b) S + tril(q k^T e^(b_i - b_j)) R ;  S' = e^b_C S + (k e^(b_C - b))^T R
    """
    chunks = plan(_chunks)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))  # [N, H, K]
    q, k, v, g, beta = (
        F.pad(x, (0, 0, 0, 0, 0, 1))[chunks.tokens].transpose(1, 2)
        for x in (q, k, v, g[..., None], beta[..., None])
    )  # [P, H, C, K or V or 1], nothing in the rest of a segment's last chunk
    b = g.cumsum(2)  # [P, H, C, 1]
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    decay = (b - b.mT).masked_fill(later, -torch.inf).exp()  # [P, H, C, C]
    within = beta * k @ k.mT * decay  # [P, H, C, C]; the solver reads what is below the diagonal
    right = torch.cat([beta * v, beta * k * b.exp()], -1)  # [P, H, C, V+K]
    solved = torch.linalg.solve_triangular(within, right, upper=False, unitriangular=True)
    total = b[:, :, -1:]  # [P, H, 1, 1]
    parts = *solved.split([v.shape[-1], k.shape[-1]], -1), k * (total - b).exp(), total.exp()
    steps = zip(*(part.split(chunks.counts) for part in parts), strict=True)
    state = q.new_zeros(chunks.counts[0], q.shape[1], k.shape[-1], v.shape[-1])  # [n, H, K, V], n of a step
    states, rests = [], []
    for (u, x, k_left, fade), entry in zip(steps, [*chunks.entry, None], strict=True):
        rest = u - x @ state  # [n, H, C, V]
        states.append(state)
        rests.append(rest)
        if entry is not None:
            state = (fade * state + k_left.mT @ rest).index_select(0, entry)
    output = (q * b.exp()) @ torch.cat(states) + (q @ k.mT * decay) @ torch.cat(rests)  # [P, H, C, V]
    return output.transpose(1, 2).flatten(0, 1).index_select(0, chunks.back)


# ---- the rule, by the kernels of flash-linear-attention


# What is used of the package, by its names of version 0.6.
FLA = {
    "convolve": "fla.modules.causal_conv1d.causal_conv1d_fwd",
    "convolve_back": "fla.modules.causal_conv1d.causal_conv1d_bwd",
    "norm": "fla.modules.norm.l2norm.l2norm_fwd",
    "norm_back": "fla.modules.norm.l2norm.l2norm_bwd",
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
    """The functions of FLA, or None where the package is not installed."""
    if not find_spec("fla"):
        return None
    try:
        places = {name: place.rpartition(".") for name, place in FLA.items()}
        return SimpleNamespace(**{n: getattr(import_module(m), f) for n, (m, _, f) in places.items()})
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"attention/delta.py needs flash-linear-attention 0.6 and cannot use the installed one: {error}"
        ) from error


@cache
def _for_wide_heads(function):
    """`chunk_bwd_dqkwg` without its refusal of Hopper cards under Triton 3.4 to 3.7.0.

    What is compiled wrongly there is a tile of 64, and heads of more than 64 take tiles of 128
    (tests/test_delta.py::test_kernels_are_as_close_to_float64_as_the_package_on_each_path).
    """
    function = unwrap(function)
    scope = function.__globals__ | {"IS_NVIDIA_HOPPER": False}
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


def _kernels(x, plan: Plan) -> bool:
    """Whether flash-linear-attention is installed and made for the tensor."""
    return not plan.plain and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _fla() is not None


def _layout(segments: Segments, device) -> SimpleNamespace:
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
    parts_ = torch.from_numpy(np.concatenate(padded)).to(device).split([array.size for array in padded])
    start, chunks, *rest = (part[: array.size] for part, array in zip(parts_, arrays, strict=True))
    levels = [
        SimpleNamespace(bounds=bounds, chunk=chunk, parent=parent, children=children)
        for bounds, chunk, parent, children in zip(*(rest[i::4] for i in range(4)), strict=True)
    ]
    return SimpleNamespace(start=start, chunks=chunks.view(-1, 2), levels=levels)


class _ConvolveOnTrie(torch.autograd.Function):
    """`convolve` by kernels."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, before, state, layout):
        options = dict(activation=activation, cu_seqlens=layout.start, chunk_indices=layout.chunks)
        ctx.rest = before, state, options
        ctx.save_for_backward(x, weight, bias)
        taken = F.pad(x.index_select(0, before).float(), (0, 0, 1, 0))  # [1+T, E]
        options["initial_state"] = taken[state].mT.contiguous()  # [S, E, W]
        return _fla().convolve(x=x[None], weight=weight, bias=bias, residual=None, **options)[0][0]

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        before, state, options = ctx.rest
        dx, dweight, dbias, _, dstate = _fla().convolve_back(
            x=x[None], dy=dy[None].contiguous(), dht=None, weight=weight, bias=bias, residual=None, **options
        )
        # What children send back to a token they share is summed in float32, and without atomics.
        dtaken = dstate.new_zeros(len(before) + 1, x.shape[1])  # [1+T, E]
        dtaken.index_put_((state,), dstate.mT, accumulate=True)
        dx = dx[0].index_add_(0, before, dtaken[1:].to(dx))
        return dx, dweight, dbias, None, None, None, None


class _RuleOnTrie(torch.autograd.Function):
    """`recur` by kernels. q, k [1, N, G, K], v [1, N, H, V], g, beta [1, N, H]."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, layout):
        fla = _fla()
        where = dict(cu_seqlens=layout.start, chunk_indices=layout.chunks)
        ctx.scale = q.shape[-1] ** -0.5
        (q, q_size), (k, k_size) = fla.norm(q), fla.norm(k)
        g = fla.cumsum(g, chunk_size=CHUNK, scale=LOG2E, **where)
        w, u, inverse = fla.solve(k=k, v=v, g=g, beta=beta, **where)
        h, rest = _states(k, w, u, g, layout)
        output = fla.output(q=q, k=k, v=rest, h=h, g=g, scale=ctx.scale, **where)
        ctx.layout = layout
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
        output_back = _for_wide_heads(fla.output_back) if q.shape[3] > 64 else fla.output_back
        dq, dk, dw, dg = output_back(
            q=q, k=k, v=rest, w=w, g=g, h=h, dv=drest, do=doutput, dh=dh, scale=ctx.scale, **where
        )
        dk_solve, dv, dbeta, dg_solve = fla.solve_back(
            k=k, v=v, beta=beta, g=g, A=inverse, dw=dw, du=drest, **where
        )
        dg = fla.cumsum(dg.add_(dg_solve), chunk_size=CHUNK, reverse=True, **where)
        dq, dk = fla.norm_back(q, q_size, dq), fla.norm_back(k, k_size, dk.add_(dk_solve))
        return dq.to(q), dk.to(k), dv.to(v), dg, dbeta.to(beta), None


def _sizes(k, v) -> dict:
    length, groups, size = k.shape[1:]
    return dict(T=length, H=groups, HV=v.shape[2], K=size, V=v.shape[3], BT=CHUNK, STATE_V_FIRST=False)


def _states(k, w, u, g, layout) -> tuple:
    """The state in front of every chunk [1, P, H, K, V], and what remains of the values [1, N, H, V]."""
    import triton

    sizes = _sizes(k, u)
    heads, shape = u.shape[2], (u.shape[2], k.shape[3], u.shape[3])  # H, (H, K, V)
    h, rest, end = k.new_empty(1, len(layout.chunks), *shape), torch.empty_like(u), None
    for level in layout.levels:
        count = len(level.chunk)
        entry = None if end is None else end.index_select(0, level.parent)  # [n, H, K, V]
        last = level is layout.levels[-1]
        end = None if last else torch.empty(count, *shape, dtype=torch.float32, device=k.device)
        _fla().states[lambda meta: (triton.cdiv(sizes["V"], meta["BV"]) * count * heads,)](  # noqa: B023
            k=k, v=u, w=w, v_new=rest, g=g, gk=None, h=h, h0=entry, ht=end,
            cu_seqlens=level.bounds, chunk_offsets=level.chunk, **sizes,
        )  # fmt: skip
    return h, rest


def _states_back(q, k, w, g, doutput, drest, scale, layout) -> tuple:
    """Gradients of the states [1, P, H, K, V] and, added to `drest`, of the values' rest [1, N, H, V]."""
    import triton

    sizes = _sizes(k, doutput)
    heads, shape = doutput.shape[2], (doutput.shape[2], k.shape[3], doutput.shape[3])
    dh, total, dend = k.new_empty(1, len(layout.chunks), *shape), torch.empty_like(drest), None
    for level in reversed(layout.levels):
        count = len(level.chunk)
        root = level is layout.levels[0]
        dentry = None if root else torch.empty(count, *shape, dtype=torch.float32, device=k.device)
        _fla().states_back[lambda meta: (triton.cdiv(sizes["V"], meta["BV"]) * count * heads,)](  # noqa: B023
            q=q, k=k, w=w, g=g, gk=None, dht=dend, dh0=dentry, do=doutput, dh=dh, dv=drest, dv2=total,
            cu_seqlens=level.bounds, chunk_offsets=level.chunk, scale=scale, **sizes,
        )  # fmt: skip
        if not root:  # children of one are neighbours in the list; summed without atomics, so in one order
            dend = torch.segment_reduce(dentry, "sum", lengths=level.children, unsafe=True)
    return dh, total


# ---- the layers


def recur(q, k, v, g, beta, normalise: bool, plan: Plan):
    """The rule on a row: q, k [N, G, K], v [N, H, V], log-decay g and beta [N, H] -> [N, H, V] like v.

    q is scaled by K^-1/2, after q and k are divided by their length where `normalise` asks for it.
    """
    if normalise and _kernels(v, plan) and max(q.shape[2], v.shape[2]) <= 256:
        rows = (x[None].contiguous() for x in (q.to(v), k.to(v), v, g.float(), beta))
        return _RuleOnTrie.apply(*rows, plan(_layout)).squeeze(0)
    exact = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        q, k, v_exact, g, beta = (x.to(exact) for x in (q, k, v, g, beta))
        if normalise:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        return _rule_torch(q * q.shape[-1] ** -0.5, k, v_exact, g, beta, plan).to(v.dtype)


def hook(model: torch.nn.Module) -> None:
    """Makes the recurrent layers of `model` follow the tree that reaches them; without one they are as ever.

    Their forward looks up two functions in its module when it runs and hands them its keyword arguments, so
    replacing those is all it takes. ValueError where the module has them no more.
    """
    for layer in model.modules():
        if "DeltaNet" not in type(layer).__name__:
            continue
        module = sys.modules[type(layer).__module__]
        for name, wrap in ((CONVOLUTION, _convolution_of), (RULE, _rule_of)):
            function = getattr(module, name, None)
            if function is None:
                raise ValueError(
                    f"{type(layer).__name__} has no {name} in this transformers ({module.__name__}): "
                    "attention/delta.py cannot show it the tree"
                )
            if not hasattr(function, "on_trie"):
                setattr(module, name, wrap(function))


def _convolution_of(function):
    @wraps(function)
    def convolution(x, weight, bias=None, activation=None, tree=None, **others):
        if tree is None:
            return function(x, weight, bias, activation=activation, **others)
        return _convolve_row(tree, others, x, weight, bias, activation)

    convolution.on_trie = True
    return convolution


def _rule_of(function):
    @wraps(function)
    def rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, tree=None, **others):
        if tree is None:
            others |= dict(g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
            return function(query, key, value, **others)
        return _recur_row(tree, others, query, key, value, g, beta, use_qk_l2norm_in_kernel), None

    rule.on_trie = True
    return rule


# Compiled layers break here: the plan is made in numpy, and one row's must not become part of the graph.
# squeeze, not [0]: the gradient of that is zeros and a copy, here in a layout that slows what follows.
@torch.compiler.disable
def _convolve_row(tree, others: dict, x, weight, bias, activation):
    """`x` [1, E, N] -> [1, E, N]."""
    _require(tree, x.shape[0], x.shape[2], others)
    return convolve(x.squeeze(0).mT, weight, bias, activation, tree.recurrence).mT[None]


@torch.compiler.disable
def _recur_row(tree, others: dict, query, key, value, g, beta, normalise: bool):
    """`query`, `key` [1, N, G, K], `value` [1, N, H, V], `g`, `beta` [1, N, H] -> [1, N, H, V]."""
    _require(tree, value.shape[0], value.shape[1], others)
    rows = (x.squeeze(0) for x in (query, key, value, g, beta))
    return recur(*rows, normalise, tree.recurrence)[None]


def _require(tree, batch: int, length: int, others: dict) -> None:
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "initial_state", "output_final_state"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"a recurrent layer on a tree takes no {name}: give one row, use_cache=False")
    if batch != 1 or length != tree.length:
        raise ValueError(
            f"a recurrent layer got {batch} x {length} tokens, but its index is of one row of {tree.length}"
        )
