"""Tree attention in plain PyTorch: the definition other backends are tested against, and the CPU path.

A row holds a forest in depth-first order, so the descendants of token j are the packed positions
[j, subtree_end[j]) and one integer per key is the whole mask:

    query i sees key j   iff   j <= i < subtree_end[j]            (j is an ancestor of i, or i itself)
    with a window w      also  depth[i] - depth[j] < w            (self and w - 1 predecessors on the path)

      key      a  b  c  d  e  f             a ── b ── c           subtree_end = 6 3 3 6 6 6
      query a  x                            └─── d ── e ── f
            b  x  x
            c  x  x  x
            d  x        x
            e  x        x  x
            f  x        x  x  x             block of the queries [d, f]: keys a d e f, never b and c

    s_ij = scale q_i k_j ;  s = softcap tanh(s / softcap) ;  lse_i = log(sum_j exp(s_ij) + exp(sink_h))
    o_i  = sum_j exp(s_ij - lse_i) v_j

Queries go through in blocks, each against the keys that at least one of its queries sees. It must never hold
an [N, N] array of anything for a long row, nor read the order of a row where a depth is meant.

Letters: N tokens of the row, H query heads, G K/V heads (query head h reads K/V head h // (H / G)), D head
size, B queries of a block, C keys of a block, T keys of all blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SHORTEST_BLOCK, LONGEST_BLOCK = 64, 512  # queries
KEPT_PAIRS = 2**24  # (query, key) pairs of all blocks: masks and gathered keys of more are not kept


@dataclass(eq=False)
class Block:
    start: int  # first query
    end: int  # one past the last query
    keys: torch.Tensor  # [C] int64, packed positions that some query of the block sees, increasing


@dataclass(eq=False)
class Plan:
    """What all layers of a row share, whatever the backend: made by the first layer that asks for it."""

    subtree_end: torch.Tensor  # [N] int32
    depth: torch.Tensor  # [N] int32
    longest: int  # tokens of the row's longest path
    plain: bool  # plain PyTorch, also where kernels for recurrent layers could run
    made: dict = field(default_factory=dict)

    def __call__(self, make, *arguments):
        """`make(plan, *arguments)`, once per row."""
        key = (make, *arguments)
        if key not in self.made:
            self.made[key] = make(self, *arguments)
        return self.made[key]

    def effective(self, window: int | None) -> int | None:
        """None where no path is longer than the window: such layers share what the full ones have."""
        if window is not None and window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {window}")
        return None if window is None or window >= self.longest else window


def plan(subtree_end: torch.Tensor, depth: torch.Tensor, longest: int = 0, plain: bool = False) -> Plan:
    """The row's plan from `subtree_end` [N] int32 and `depth` [N] int64 (position in the sample).

    `longest`: tokens of the longest path; 0 = read from the device, which the host then waits for.
    """
    # Copies, so that they begin where TMA can read them.
    own = [tensor.to(torch.int32, copy=True).contiguous() for tensor in (subtree_end, depth)]  # [N] each
    return Plan(*own, longest or int(depth.max()) + 1, plain)


def attend(query, key, value, plan: Plan, scale, window=None, softcap=None, sinks=None, with_lse=False):
    """Attention of a row on its tree, differentiable in every tensor, computed in the dtype of the inputs.

    `query` [N, H, D]; `key`, `value` [N, G, D] (a value's head size may differ); `scale` float; `window` int,
    in positions of the sample; `softcap` float; `sinks` [H], a logit per head that takes weight and has no
    value (as in GPT-OSS). Returns the output [N, H, D]; with `with_lse` also the natural log-sum-exp [N, H],
    float32 or better, sink included.
    """
    window = plan.effective(window)
    blocks, seen = plan(_blocks, window)
    options = dict(scale=scale, softcap=softcap, sinks=sinks, with_lse=with_lse)
    if sum((block.end - block.start) * len(block.keys) for block in blocks) > KEPT_PAIRS:
        results = [_recomputed_block(query, key, value, plan, block, window, options) for block in blocks]
    else:
        # One gather for the row: its backward is one scatter, that of a slice per block one per block.
        queries = query.split([block.end - block.start for block in blocks])  # [B, H, D] each
        counts = [len(block.keys) for block in blocks]
        keys = key.index_select(0, seen).split(counts)  # [C, G, D] each
        values = value.index_select(0, seen).split(counts)  # [C, G, D] each
        masks = plan(_masks, window, query.dtype)  # [B, C] each
        parts = zip(queries, keys, values, masks, strict=True)
        results = [_attend_block(*tensors, **options) for tensors in parts]
    output = torch.cat([output for output, _ in results])  # [N, H, D]
    return (output, torch.cat([lse for _, lse in results])) if with_lse else output  # lse [N, H]


def _blocks(plan: Plan, window: int | None) -> tuple[list[Block], torch.Tensor]:
    """Cuts the row's queries into blocks, in numpy, and finds each one's keys; those of all blocks [T]."""
    subtree_end, depth = plan.subtree_end.cpu().numpy(), plan.depth.cpu().numpy()  # [N], [N]
    roots = np.flatnonzero(depth == 0)
    spans, keys, start = [], [], 0
    while start < len(depth):
        # Long paths take long blocks, so that the keys gathered for all of them stay a few times the row.
        length = min(max(int(depth[start]) // 4, SHORTEST_BLOCK), LONGEST_BLOCK)
        end = min(start + length, len(depth))
        # The block sees nothing in front of the tree that its first query is in.
        first = roots[np.searchsorted(roots, start, side="right") - 1]
        seen = subtree_end[first:end] > start  # [end - first]
        if window is not None:
            seen &= depth[first:end] > depth[start:end].min() - window
        keys.append(first + np.flatnonzero(seen))  # [C]
        spans.append((start, end))
        start = end
    together = torch.from_numpy(np.concatenate(keys)).to(plan.depth.device)  # [T] int64
    parts = together.split([len(part) for part in keys])  # [C] each
    return [Block(*span, part) for span, part in zip(spans, parts, strict=True)], together


def _mask(plan: Plan, block: Block, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[B, C] of `dtype`: 0 where the query sees the key, -inf where not."""
    queries = torch.arange(block.start, block.end, device=block.keys.device)[:, None]  # [B, 1]
    visible = (block.keys <= queries) & (queries < plan.subtree_end[block.keys])  # [B, C]
    if window is not None:
        visible &= plan.depth[block.start : block.end, None] - plan.depth[block.keys] < window
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _masks(plan: Plan, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
    # Additive, in the scores' dtype: SDPA would make and keep such a copy of a boolean mask in every layer.
    return [_mask(plan, block, window, dtype) for block in plan(_blocks, window)[0]]


def _recomputed_block(query, key, value, plan, block, window, options):
    """A block of a long row: its mask and its gathered keys live only while it runs, forward and backward."""

    def run(query, key, value):
        key, value = key.index_select(0, block.keys), value.index_select(0, block.keys)  # [C, G, D]
        return _attend_block(query, key, value, _mask(plan, block, window, query.dtype), **options)

    query = query[block.start : block.end]  # [B, H, D]
    return checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=False)


def _attend_block(query, key, value, mask, scale, softcap, sinks, with_lse):
    """`query` [B, H, D], `key`, `value` [C, G, D], `mask` [B, C] -> output [B, H, D], lse [B, H] or None."""
    if softcap is None and sinks is None and not with_lse:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, H or G, B or C, D]
        grouped = q.shape[1] != k.shape[1]
        output = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
        return output[0].transpose(0, 1), None
    # Scores of 16-bit inputs are kept in float32, also under autocast, as the fused kernels keep theirs.
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        groups = key.shape[1]
        q = query.to(exact).transpose(0, 1).unflatten(0, (groups, -1))  # [G, H/G, B, D]
        k = key.to(exact).permute(1, 2, 0)[:, None]  # [G, 1, D, C]
        v = value.to(exact).transpose(0, 1)[:, None]  # [G, 1, C, D]
        scores = q @ k * scale  # [G, H/G, B, C]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask
        lse = scores.logsumexp(-1)  # [G, H/G, B]
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(exact).view(groups, -1, 1))
        output = (scores - lse[..., None]).exp() @ v  # [G, H/G, B, D]
    return output.flatten(0, 1).transpose(0, 1).to(query.dtype), lse.flatten(0, 1).transpose(0, 1)
