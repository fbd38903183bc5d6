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
delta_kernels.py runs the kernels of flash-linear-attention, where it is installed, on 16-bit CUDA tensors.
The convolution is plain PyTorch too, and delta_convolution.py on CUDA tensors of 16 or 32 bits.

`hook` puts both into the modelling code of transformers by replacing the two functions that its layers call.
It must never let a layer run as if the row were one sequence: what it cannot do on a trie raises ValueError.

Letters: N tokens of the row, S segments, P chunks, C tokens of a chunk, W width of the convolution, E its
channels, G query/key heads, H value heads (H / G neighbours share one of those), K and V their sizes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from attention import delta_kernels
from attention.reference import Plan

CHUNK = 64  # tokens, of the PyTorch engine
CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # names in the modelling modules


# ---- the row's plan


@dataclass(eq=False)
class Segments:
    start: np.ndarray  # [S+1]
    parent: np.ndarray  # [S], -1 = root
    level: np.ndarray  # [S], branches above


def _segments(plan: Plan) -> Segments:
    """Cuts the row where a token does not follow, as an only child, the one before it."""
    subtree_end, depth = plan.subtree_end.cpu().numpy(), plan.depth.cpu().numpy()  # [N], [N]
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
    back = plan(_ancestors, weight.shape[1])
    triton = x.is_cuda and x.dtype != torch.float64 and find_spec("triton") and not plan.plain
    if triton and activation in ("silu", "swish", None):
        from attention.delta_convolution import Convolve

        return Convolve.apply(x, weight, bias, activation is not None, back, plan(_forks, weight.shape[1]))
    exact = torch.promote_types(x.dtype, torch.float32)
    taken, weight = F.pad(x.to(exact), (0, 0, 0, 1)), weight.to(exact).mT.flip(0)  # [N+1, E], [W, E]
    y = weight[0] * taken[:-1] + (0 if bias is None else bias.to(exact))  # [N, E]
    for tap, tokens in zip(weight[1:], back, strict=True):
        y = y + tap * taken[tokens]  # the row behind the last where there is no such ancestor: -1
    return (ACT2FN[activation](y) if activation else y).to(x.dtype)


def _ancestors(plan: Plan, width: int) -> torch.Tensor:
    return torch.from_numpy(plan(_paths, width)).to(plan.depth.device)


def _paths(plan: Plan, width: int) -> np.ndarray:
    """[W-1, N] int32: the tokens 1, 2, ... back on every token's path, -1 past the root."""
    segments = plan(_segments)
    parent = np.arange(-1, segments.start[-1] - 1, dtype=np.int32)  # [N]
    parent[segments.start[:-1]] = np.where(segments.parent < 0, -1, segments.start[segments.parent + 1] - 1)
    back = [parent]
    for _ in range(width - 2):
        back.append(np.where(back[-1] < 0, -1, parent[back[-1]]))
    return np.stack(back)


def _forks(plan: Plan, width: int) -> tuple:
    """Tokens less than W in front of a branch, and all descendants that see them (Convolve's `forks`)."""
    back = plan(_paths, width)
    tokens = np.arange(back.shape[1], dtype=np.int32)
    above = np.concatenate([tokens, *back])  # of (distance, token)
    below, distance = np.tile(tokens, width), np.repeat(np.arange(width, dtype=np.int32), len(tokens))
    forks = np.unique(above[(above >= 0) & (above != below - distance)])
    forked = np.zeros(len(tokens) + 1, bool)  # the last for -1
    forked[forks] = True
    listed = np.flatnonzero(forked[above])
    listed = listed[np.argsort(above[listed], kind="stable")]
    starts = np.searchsorted(above[listed], np.append(forks, len(tokens))).astype(np.int32)
    arrays = forks, starts, below[listed], distance[listed]
    return tuple(torch.from_numpy(array).to(plan.depth.device) for array in arrays)


# ---- the rule, plain PyTorch


def _chunks(plan: Plan) -> SimpleNamespace:
    """Every segment cut into chunks; they are ordered by step, their depth in chunks."""
    segments = plan(_segments)
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
    on = lambda array: torch.from_numpy(array).to(plan.depth.device)  # noqa: E731
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


# ---- the layers


def recur(q, k, v, g, beta, normalise: bool, plan: Plan):
    """The rule on a row: q, k [N, G, K], v [N, H, V], log-decay g and beta [N, H] -> [N, H, V] like v.

    q is scaled by K^-1/2, after q and k are divided by their length where `normalise` asks for it.
    """
    if normalise and not plan.plain and delta_kernels.usable(v) and q.shape[2] <= 256:
        return delta_kernels.recur(q, k, v, g, beta, plan(delta_kernels.layout_of, plan(_segments)))
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
# squeeze, not [0]: the gradient of that is zeros and a copy, here in a layout that makes the products behind
# it slow (tests/test_delta.py::test_gradients_keep_the_layout_of_what_they_are_of).
@torch.compiler.disable
def _convolve_row(tree, others: dict, x, weight, bias, activation):
    """`x` [1, E, N] -> [1, E, N]."""
    _require(tree, x.shape[0], x.shape[2], others)
    return convolve(x.squeeze(0).mT, weight, bias, activation, tree.plan).mT[None]


@torch.compiler.disable
def _recur_row(tree, others: dict, query, key, value, g, beta, normalise: bool):
    """`query`, `key` [1, N, G, K], `value` [1, N, H, V], `g`, `beta` [1, N, H] -> [1, N, H, V]."""
    _require(tree, value.shape[0], value.shape[1], others)
    rows = (x.squeeze(0) for x in (query, key, value, g, beta))
    return recur(*rows, normalise, tree.plan)[None]


def _require(tree, batch: int, length: int, others: dict) -> None:
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "initial_state", "output_final_state"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"a recurrent layer on a tree takes no {name}: give one row, use_cache=False")
    if batch != 1 or length != tree.length:
        raise ValueError(
            f"a recurrent layer got {batch} x {length} tokens, but its index is of one row of {tree.length}"
        )
