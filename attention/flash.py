"""Tree attention by flash-attn-4 (`pip install flash-attn-4`), where the other kernels are slower.

It takes a mask and lists of blocks. The mask is the interval rule, read from `subtree_end`; the lists are
those of tree.py, with a column for every entry, since flash-attn-4 knows no offsets. So K and V are neither
copied nor gathered, and nothing is compiled per row, only per head size, group size and kind of options.

    forward        tiles of 128 tokens, each with the keys it meets      blocks of 128 keys, 64 of large heads
    backward       the same blocks, each with the tiles that meet it     tiles of 64 or 128 tokens

Its backward adds up dQ in the order in which blocks finish: two runs differ in the last bits. Letters as in
tree.py.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from attention import tree
from attention.meetings import Meetings, meetings

TILE = 128  # tokens of a forward tile; the end of a row is filled up to a multiple of it
SIZES = (64, 128, 256)  # of heads; at 80, with 16 query heads to a K/V head, its gradients were wrong


def attend(query, key, value, plan, scale, window=None, softcap=None, sinks=None, with_lse=False):
    """As tree.attend, for bfloat16 and float16. ValueError for what flash-attn-4 cannot do."""
    reason = refusal(query, key, value, scale, window)
    if reason:
        raise ValueError(f"the flash attention backend {reason}: choose another")
    from flash_attn.cute import flash_attn_func

    window = plan.effective(window)
    rule = _rule(window is not None)
    size = query.shape[2]
    block, tile = 128 if size <= 128 else 64, 128 if size <= 64 else 64  # of keys; of the backward
    output, lse = flash_attn_func(
        query[None], key[None], value[None],
        softmax_scale=scale, softcap=softcap or 0.0, learnable_sink=sinks, return_lse=with_lse,
        mask_mod=rule, aux_tensors=plan(_facts, window),
        block_sparse_tensors=plan(_lists, "tile", TILE, block, window),
        block_sparse_tensors_bwd=plan(_lists, "block", tile, block, window),
    )  # fmt: skip
    return (output[0], lse[0].T) if with_lse else output[0]


def refusal(query, key, value, scale, window) -> str | None:
    """Why these inputs are not for this backend, or None."""
    if missing():
        return missing()
    if not query.is_cuda:
        return "runs on Hopper GPUs"
    if query.dtype not in (torch.bfloat16, torch.float16) or not query.dtype == key.dtype == value.dtype:
        return f"takes bfloat16 or float16, all alike, not {query.dtype}, {key.dtype}, {value.dtype}"
    size = query.shape[2]
    if size != value.shape[2] or size not in SIZES:
        return f"takes head sizes {SIZES}, not {size} with {value.shape[2]}"
    return tree.refusal(query, key, value, scale, window)


@cache
def missing() -> str | None:
    """What this machine lacks for the backend, or None."""
    if not find_spec("flash_attn") or not find_spec("flash_attn.cute"):
        return "needs the package flash-attn-4"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "runs on Hopper GPUs"  # elsewhere its tiles are others, and not tried
    return None


@cache
def _rule(windowed: bool):
    """The mask, as flash-attn-4 compiles it: aux holds _facts."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def ancestor(batch, head, i, j, lengths, aux):
        return (j <= i) & (i < scalar_to_ssa(aux[0][j[0]], cutlass.Int32))

    @cute.jit
    def near_ancestor(batch, head, i, j, lengths, aux):
        seen = (j <= i) & (i < scalar_to_ssa(aux[0][j[0]], cutlass.Int32))
        depth, reach = scalar_to_ssa(aux[1][i[0]], cutlass.Int32), scalar_to_ssa(aux[2][j[0]], cutlass.Int32)
        return seen & (depth < reach)

    return near_ancestor if windowed else ancestor


def _facts(plan, window) -> list:
    """[subtree_end] or [subtree_end, depth, depth + window], int32 and 0 up to the end of the last tile."""
    facts = [plan.subtree_end] + ([] if window is None else [plan.depth, plan.depth + window])
    return [F.pad(fact, (0, -len(plan.depth) % TILE)) for fact in facts]


def _lists(plan, owner, tile, block, window):
    """What meets what, as flash-attn-4 takes it."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    columns = _columns(meetings(plan, owner, 1, tile, block, 1, window))
    return BlockSparseTensorsTorch(*columns, block_size=(tile, block))


def _columns(lists: Meetings) -> list:
    """Counts [1, 1, owners], indices [1, 1, owners, most] of what takes the mask, then of the rest; int32."""
    work = lists.work[lists.work[:, 0].argsort()]  # [owners, 8]
    begin, middle, stop = work[:, 2], work[:, 3], work[:, 4]
    columns = []
    for start, count in ((begin, middle - begin), (middle, stop - middle)):
        column = torch.arange(max(1, int(count.max())), device=count.device)
        at = (start[:, None] + column).clamp(max=len(lists.other) - 1)  # [owners, most]
        columns += [count[None, None].contiguous(), lists.other[at][None, None]]
    return columns
