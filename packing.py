r"""Samples -> rows: `pack` folds samples into one prefix trie, `Planner` decides which samples share a row.

The rollouts of a group repeat their prompt, and every turn repeats the conversation so far. A row holds
each distinct prefix once, depth first, so the model runs on unique tokens only while every sample still
sees exactly its own history. Three samples, 13 raw tokens (trained ones marked '), become a row of 7:

    0:  5 6 7 1' 2'            5 6 --+-- 7 1 --+-- 2         segments: 0 = [5 6]   1 = [7 1]   2 = [2]
    1:  5 6 7 1' 3'                  |         +-- 3                   3 = [3]     4 = [8]
    2:  5 6 8'                       +-- 8

    row index         0  1  2  3  4  5  6
    input_ids         5  6  7  1  2  3  8
    position_ids      0  1  2  3  4  4  2       depth in the trie
    subtree_end       7  7  6  6  5  6  7       key j is visible to query i  <=>  j <= i < subtree_end[j]
    segment_start     0     2     4  5  6  7    segment_parent  -1  0  1  1  0

    position          1  2  2  3  3             one term per trained token: the row index whose prediction
    target            8  1  1  2  3             is scored, the token it is scored on, the sample it is from.
    sample            2  0  1  0  1             One position may score several targets, so a shared token is
                                                never stored twice, not even where samples part.

This file never imports torch before a row moves to a device (the rollout process queues Samples without
it), knows nothing of ranks beyond their number, and never loops in Python over tokens.

    python packing.py --show samples.json       draws the trie of a row in the terminal
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# Arrays with a row per token, and what stands in them where nothing was recorded.
WIDE = {
    "topk_ids": (np.int32, -1),
    "topk_logp": (np.float32, -np.inf),
    "teacher_ids": (np.int32, -1),
    "teacher_logp": (np.float32, -np.inf),
}


@dataclass
class Sample:
    """One trained sequence, as the rollout process queues it. L tokens, K listed alternatives per token.

    Pickled, only the trained tokens' rows of the K-wide arrays travel; the others come back as padding.
    """

    input_ids: np.ndarray  # int32 [L]
    trained: np.ndarray  # bool [L], the prediction *of* token t is in the loss; never t = 0
    sampler_logp: np.ndarray  # float32 [L], meaningful where trained
    advantage: float
    group_id: int  # running number of the prompt since the start of the run
    row_index: int  # row of the dataset
    rollout_id: int
    version: int  # oldest version of the weights that made any of its tokens
    candidate_ids: tuple | None = (
        None  # int32 values, int64 offsets [L+1]; an empty set is the whole vocabulary
    )
    topk_ids: np.ndarray | None = None  # int32 [L, K], the sampler's K most likely, -1 = padding
    topk_logp: np.ndarray | None = None  # float32 [L, K], -inf = padding
    teacher_ids: np.ndarray | None = None  # int32 [L, K+1], -1 = padding
    teacher_logp: np.ndarray | None = None  # float32 [L, K+1], -inf = padding
    token_version: np.ndarray | None = None  # int32 [L], the version that made each token
    teacher_id: str | None = None
    enqueued_at: float = 0.0  # time.time()
    metrics: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __reduce__(self):
        at = np.flatnonzero(self.trained)
        sent = {name: value for name, value in vars(self).items() if value is not None}
        for name in WIDE.keys() & sent.keys():
            sent[name] = sent[name].take(at, axis=0)
        return _unpickle, (sent,)


def _unpickle(sent: dict) -> Sample:
    at, tokens = np.flatnonzero(sent["trained"]), len(sent["trained"])
    for name in WIDE.keys() & sent.keys():
        rows = sent[name]  # [trained tokens, K]
        sent[name] = np.full((tokens, rows.shape[1]), WIDE[name][1], rows.dtype)
        sent[name][at] = rows
    return Sample(**sent)


@dataclass
class Row:
    """What one rank forwards: numpy from `pack`, torch after `to`. N unique tokens, S segments, M terms."""

    input_ids: Any  # int64 [N]
    position_ids: Any  # int64 [N], depth
    subtree_end: Any  # int32 [N], key j is visible to query i iff j <= i < subtree_end[j]
    segment_start: Any  # int32 [S+1]
    segment_parent: Any  # int32 [S], -1 = root
    position: Any  # int64 [M], row index whose prediction is scored; terms are sorted by (position, sample)
    target: Any  # int64 [M]
    sampler_logp: Any  # float32 [M]
    advantage: Any  # float32 [M]
    sample: Any  # int64 [M], index into the list given to pack
    candidate_ids: Any = None  # int32 [C], all terms' candidate sets one after another
    candidate_offsets: Any = None  # int64 [M+1], an empty set is the whole vocabulary
    topk_ids: Any = None  # int32 [M, K], -1 = padding
    topk_logp: Any = None  # float32 [M, K], -inf = padding
    teacher_ids: Any = None  # int32 [M, K+1], -1 = padding
    teacher_logp: Any = None  # float32 [M, K+1], -inf = padding
    sample_count: int = 0
    raw_tokens: int = 0  # tokens of all samples, before sharing
    attention_pairs: int = 0  # sum over unique tokens of depth + 1
    max_depth: int = 0  # tokens of the longest sample
    host: Any = None  # the numpy row that torch tensors came from: what is read there waits for no device

    @property
    def unique_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def terms(self) -> int:
        return len(self.position)

    def arrays(self) -> dict[str, Any]:
        """The arrays by name, absent ones left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if hasattr(value, "dtype")}

    def to(self, device) -> Row:
        """The same row as torch tensors: on a CPU views, for CUDA through one pinned buffer and one copy."""
        import torch

        device = torch.device(device)
        arrays = self.arrays()
        if device.type == "cpu":
            return replace(
                self, host=self, **{name: torch.from_numpy(array) for name, array in arrays.items()}
            )
        starts = np.cumsum(
            [0] + [-(-a.nbytes // 16) * 16 for a in arrays.values()]
        ).tolist()  # for vector loads
        staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        for start, array in zip(starts, arrays.values(), strict=False):
            staging.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        moved = staging.to(device, non_blocking=True)
        tensors = {}
        for start, (name, array) in zip(starts, arrays.items(), strict=False):
            part = moved[start : start + array.nbytes]
            tensors[name] = part.view(getattr(torch, str(array.dtype))).view(array.shape)
        return replace(self, host=self, **tensors)


# pack: samples to one row


def pack(samples: list[Sample], share: bool = True) -> Row:
    """Fold samples into one row (the picture above). share=False lays them side by side, each its own root.

    Sorted samples have those that share a prefix next to each other, so the common prefixes of neighbours
    tell the whole trie: a sample adds its tokens from depth `shared` on, and they are one contiguous run of
    the row. Raises ValueError for an empty list, an empty sample, arrays that differ in length, a trained
    first token.
    """
    lengths = _check(samples)
    starts = np.append(0, np.cumsum(lengths))  # [samples+1] of each sample among the tokens of all
    keys = [s.input_ids.tobytes() for s in samples] if share else range(len(samples))
    # By the bytes of the ids, one memcmp a comparison. Bytes do not sort as numbers do, but any total order
    # of tokens makes prefixes adjacent (test_row_is_the_trie_of_its_samples).
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared = [0] * len(samples)  # tokens that each shares with the one before it, in trie order
    if share:
        shared[1:] = [common_prefix(samples[a].input_ids, samples[b].input_ids) for a, b in pairwise(order)]
    length, shared = np.array(lengths)[order], np.array(shared)
    row_start = np.append(0, np.cumsum(length - shared))  # [samples+1] row index of each one's own tokens

    trained = np.concatenate([s.trained for s in samples])
    if trained[starts[:-1]].any():
        raise ValueError("a sample trains its first token, which nothing predicts")
    token = np.flatnonzero(trained)  # [M] trained tokens, sample by sample, among the tokens of all
    term_start = np.searchsorted(token, starts)  # [samples+1]
    sample = np.repeat(np.arange(len(samples)), np.diff(term_start))  # [M]
    at = token - starts.take(sample)  # [M] index in the sample
    depth, position, parent = _walk(order, length, shared, row_start, at, term_start)
    segment_start, segment_parent = _segments(row_start, parent)

    # Stable, so terms of one position stay in the order of their samples. numpy sorts 16-bit keys by radix.
    by_position = np.argsort(position.astype(np.min_scalar_type(row_start[-1])), kind="stable")  # [M]
    token, sample = token.take(by_position), sample.take(by_position)
    own = [samples[i].input_ids[first:] for i, first in zip(order, shared.tolist(), strict=True)]
    return Row(
        input_ids=np.concatenate(own, dtype=np.int64),
        position_ids=depth,
        subtree_end=_subtree_ends(length, shared, row_start),
        segment_start=segment_start,
        segment_parent=segment_parent,
        position=position.take(by_position),
        target=np.concatenate([s.input_ids for s in samples]).take(token).astype(np.int64),
        sampler_logp=np.concatenate([s.sampler_logp for s in samples], dtype=np.float32).take(token),
        advantage=np.array([s.advantage for s in samples], np.float32).take(sample),
        sample=sample,
        **_candidates(samples, token),
        **_wide_lists(samples, at, term_start, by_position),
        sample_count=len(samples),
        raw_tokens=int(starts[-1]),
        attention_pairs=int(_pairs(length).sum() - _pairs(shared).sum()),
        max_depth=int(length.max()),
    )


def common_prefix(a, b) -> int:
    """Number of leading tokens that two arrays or lists of ids share."""
    n = min(len(a), len(b))
    differ = np.not_equal(a[:n], b[:n])
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _pairs(tokens):
    """Attention pairs of so many tokens in a line: 1 + 2 + ... + tokens."""
    return tokens * (tokens + 1) // 2


def _check(samples: list[Sample]) -> list[int]:
    """Lengths of the samples, or ValueError."""
    if not samples:
        raise ValueError("pack needs at least one sample: a rank never forwards an empty row")
    lengths = [len(s.input_ids) for s in samples]
    for s, length in zip(samples, lengths, strict=True):
        if not length:
            raise ValueError(f"rollout {s.rollout_id} of group {s.group_id} has a sample without tokens")
        if not length == len(s.trained) == len(s.sampler_logp):
            raise ValueError(
                f"rollout {s.rollout_id} of group {s.group_id}: input_ids, trained and sampler_logp have "
                f"{length}, {len(s.trained)} and {len(s.sampler_logp)} entries"
            )
    return lengths


def _walk(order, length, shared, row_start, at, term_start):
    """Follow the samples in trie order, keeping the row index of every token of the current one.

    Returns depth [N] of the row's tokens, position [M] of the terms (in the order of `at`) and, for each
    sample in trie order, the row index that its own tokens hang from (-1: none, a root).
    """
    ramp = np.arange(max(row_start[-1], length.max()))
    path = np.empty(length.max(), np.int64)
    position = np.empty(len(at), np.int64)
    predictor = at - 1  # [M] depth of the token before
    parent, depth = [], []
    columns = length.tolist(), shared.tolist(), row_start.tolist()
    begin = term_start.tolist()
    for i, end, first, row in zip(order, *columns, strict=False):
        parent.append(path[first - 1] if first else -1)
        path[first:end] = ramp[row : row + end - first]
        depth.append(ramp[first:end])
        position[begin[i] : begin[i + 1]] = path.take(predictor[begin[i] : begin[i + 1]])
    return np.concatenate(depth), position, np.array(parent)


def _subtree_ends(length, shared, row_start):
    """int32 [N]. Backwards, keeping for each depth of the current path where its subtree ends."""
    path_end = np.empty(length.max(), np.int32)
    ends = np.empty(row_start[-1], np.int32)
    columns = length.tolist(), shared.tolist(), row_start.tolist(), row_start[1:].tolist()
    below = 0  # depth to which the next sample runs along this one: those ends are known
    for end, first, row, row_end in reversed(list(zip(*columns, strict=False))):
        path_end[below:end] = row_end
        ends[row:row_end] = path_end[first:end]
        below = first
    return ends


def _segments(row_start, parent):
    """Cut the row at roots and branches: int32 segment_start [S+1] and segment_parent [S].

    A sample's own tokens hang from `parent`. If something else hangs there too, each child starts a
    segment; the first child is the token right after the parent, since the layout is depth first.
    """
    own = np.diff(row_start) > 0  # a duplicate or a strict prefix adds nothing
    start, parent = row_start[:-1][own], parent[own]
    hook, count = np.unique(parent, return_counts=True)
    count += ~np.isin(hook + 1, start)  # the first child, where it is the same sample going on
    branching = hook[(hook >= 0) & (count > 1)]
    cut = np.isin(parent, branching) | (parent < 0)
    starts, first = np.unique(np.append(start[cut], branching + 1), return_index=True)
    above = np.append(parent[cut], branching)[first]
    segment_parent = np.searchsorted(starts, above, side="right") - 1
    return np.append(starts, row_start[-1]).astype(np.int32), segment_parent.astype(np.int32)


def _wide_lists(samples, at, term_start, by_position):
    """The K-wide arrays at the terms, [M, K]; samples without one, or with a narrower one, get padding."""
    lists = {}
    for name, (dtype, padding) in WIDE.items():
        values = [getattr(s, name) for s in samples]
        width = max((v.shape[1] for v in values if v is not None), default=0)
        if not width:
            continue
        rows = np.full((len(at), width), padding, dtype)  # [M, K] sample by sample
        for value, begin, end in zip(values, term_start.tolist(), term_start[1:].tolist(), strict=False):
            if value is not None:
                rows[begin:end, : value.shape[1]] = value.take(at[begin:end], axis=0)
        lists[name] = rows.take(by_position, axis=0)
    return lists


def _candidates(samples, token):
    """Candidate sets at the terms: values one after another, offsets [M+1]. Empty where none was recorded."""
    if all(s.candidate_ids is None for s in samples):
        return {}
    values, begin, size, seen = [], [], [], 0
    for s in samples:
        ids, offsets = s.candidate_ids or (np.empty(0, np.int32), np.zeros(len(s) + 1, np.int64))
        values.append(ids)
        begin.append(offsets[:-1] + seen)
        size.append(np.diff(offsets))
        seen += len(ids)
    begin = np.concatenate(begin).take(token)  # [M] of each term's set among all values
    offsets = np.append(0, np.cumsum(np.concatenate(size).take(token)))  # [M+1]
    index = np.repeat(begin - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])  # [C]
    return {
        "candidate_ids": np.concatenate(values, dtype=np.int32).take(index),
        "candidate_offsets": offsets.astype(np.int64),
    }


# planner: which samples share a row


@dataclass(frozen=True)
class RowCost:
    """FLOPs of one forward and backward of a row: token * N + pair * P + window_pair * P_window + term * U.

    N unique tokens, P attention pairs of full layers, P_window those within `window` tokens of sliding
    layers, U positions that score a term. The planner takes the number of terms for U, an upper bound.
    """

    token: float
    pair: float
    term: float = 0.0
    window_pair: float = 0.0
    window: int = 0
    known: bool = True  # else only good to balance rows by: no FLOPs, so no MFU

    def path(self, tokens):
        """Cost of so many tokens in a line from a root (a number or an array), terms left out."""
        inside = np.minimum(tokens, self.window)
        in_window = _pairs(inside) + (tokens - inside) * self.window
        return self.token * tokens + self.pair * _pairs(tokens) + self.window_pair * in_window

    def row(self, row: Row) -> float:
        """FLOPs of a packed row: what model FLOPs utilisation counts, and what rows are balanced by."""
        windowed = (row.position_ids + 1).clip(max=self.window).sum()
        scored = int((row.position[1:] != row.position[:-1]).sum()) + min(row.terms, 1)
        full = self.token * row.unique_tokens + self.pair * row.attention_pairs
        return float(full + self.window_pair * windowed + self.term * scored)


KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")  # of layers
# model types whose MLP is two matrices, which no field of a config says
UNGATED = set(
    "apertus arcee biogpt gpt2 gpt_neox jais2 nanochat nemotron opt persimmon phi starcoder2".split()
)


def row_cost_from_config(config) -> RowCost:
    """RowCost of a transformers configuration; a multiply-add is 2 FLOPs, the backward twice the forward.

    Forward, per unique token and layer: projections 2 E D (2 H + 2 G), H more heads where the output is
    gated; MLP 6 E I (4 E I without a gate), or the active experts' and their router; Gated DeltaNet layers
    have their projections, convolution and recurrence instead. Attention is 4 H D a pair, the head 2 V E a
    term. A missing field counts as its usual default; what is no such model has an estimate that is not
    `known`.
    """
    try:
        return _row_cost(config)
    except (TypeError, ValueError, ZeroDivisionError):  # a list of sizes, say, one for each layer
        return RowCost(token=1.0, pair=1 / 4000, known=False)


def _row_cost(config) -> RowCost:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def read(*names, default=0):
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    layers = read("num_hidden_layers", default=1)
    hidden = read("hidden_size", default=1)
    heads = read("num_attention_heads", default=1)
    kv_heads = read("num_key_value_heads", default=heads)
    head_dim = read("head_dim", default=hidden // heads)
    window = read("sliding_window", "attention_chunk_size")
    kinds = read("layer_types", default=["sliding_attention" if window else "full_attention"] * layers)
    linear = sum("linear" in kind for kind in kinds)
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds) if window else 0
    family = str(read("model_type", default=""))  # these gate their output whether or not the file says so
    gated = bool(read("attn_output_gate", default=family.startswith(("qwen3_next", "qwen3_5"))))
    attention = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads + gated * heads)

    dense = (4 if family in UNGATED else 6) * hidden * read("intermediate_size", default=4 * hidden)
    experts = read("num_experts", "num_local_experts", "n_routed_experts")
    width = read("moe_intermediate_size", "intermediate_size", default=4 * hidden)
    shared = read("shared_expert_intermediate_size", default=read("n_shared_experts") * width)
    gate = bool(read("shared_expert_intermediate_size"))  # of the shared expert
    sparse = 6 * hidden * (read("num_experts_per_tok", default=1) * width + shared)
    sparse += 2 * hidden * (experts + gate)
    step, first = read("decoder_sparse_step", default=1), read("first_k_dense_replace")
    skipped = read("mlp_only_layers", default=[])
    sparse_layers = [n for n in range(first, layers) if n not in skipped and (n + 1) % step == 0]
    moe = len(sparse_layers) if experts else 0

    key, value = read("linear_key_head_dim"), read("linear_value_head_dim")
    key_heads, value_heads = read("linear_num_key_heads"), read("linear_num_value_heads")
    mixed = 2 * key_heads * key + value_heads * value  # width of q, k and v together
    delta = 2 * hidden * (mixed + value_heads * value + 2 * value_heads) + 2 * value_heads * value * hidden
    delta += 2 * read("linear_conv_kernel_dim") * mixed + 7 * value_heads * key * value

    named = all(map(read, ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")))
    other = [kind for kind in kinds if kind not in KINDS] or read("kv_lora_rank")  # latent attention
    token = (layers - linear) * attention + linear * delta + moe * sparse + (layers - moe) * dense
    pair = 3 * 4 * heads * head_dim
    return RowCost(
        token=3.0 * token,
        pair=float(pair * (layers - linear - windowed)),
        term=6.0 * read("vocab_size") * hidden,
        window_pair=float(pair * windowed),
        window=window if windowed else 0,
        known=named and not other and bool(read("intermediate_size", "moe_intermediate_size")),
    )


MOST_WAITS = 2  # micro-batches a sample may see leave without it; then it goes first


class Planner:
    """Deals samples into micro-batches: one list of samples per rank, each a row within the token budget.

    Holds about one micro-batch, because full and equally expensive rows are found among many samples, not
    in the order they arrive in. Groups stay whole where they fit, since their prompt is then forwarded
    once; rows are filled up to `token_budget` unique tokens and as many terms; and the most expensive row,
    which all ranks wait for, is kept close to the mean. With nothing shared, or share=False, this is bin
    packing by length.

    Add all samples of a group, then `pop` until it says None (wants more). `flush` deals out whatever is
    held, one micro-batch a call, until None (nothing held): at the end of a run, and when the caller has
    waited long enough for an empty queue. That time limit is the caller's, as is counting `held_tokens` in
    the staleness allowance: the planner knows no clock and no weight versions.

    Never: an empty row (with fewer samples than ranks, spare ranks repeat the shortest row with nothing
    trained); a row of more unique tokens or terms than the budget; a sample that younger ones overtake in
    more than two micro-batches (tests/test_packing.py::test_planner_invariants).

    ranks             rows of a micro-batch
    token_budget      unique tokens of a row, and its terms; <= 0: samples_per_rank * ranks samples at a time
    cost              RowCost that rows are balanced by
    samples_per_rank  used when token_budget <= 0
    share             False: plan for rows of samples side by side
    lookahead         deal when this many micro-batches of unique tokens (or terms) are held, at least 1
    """

    def __init__(
        self,
        ranks: int,
        token_budget: int,
        cost: RowCost,
        samples_per_rank: int = 8,
        share: bool = True,
        lookahead: float = 1.0,
    ):
        self.ranks = ranks
        self.token_budget = token_budget if token_budget > 0 else float("inf")
        self.cost = cost
        self.batch_samples = samples_per_rank * ranks if token_budget <= 0 else None
        self.share = share
        self.lookahead = lookahead
        self.held_tokens = 0  # raw tokens of the samples held
        self._held: list[_Held] = []  # sorted: the order of the trie of all of them
        self._arrivals, self._unique, self._terms = 0, 0, 0  # of the samples held: unique tokens, terms

    def add(self, sample: Sample) -> bool:
        """Hold a sample. False if it is longer than any row may be: it is not held then."""
        if len(sample) > self.token_budget:
            return False
        self._arrivals += 1
        new = _Held((sample.input_ids.tobytes() if self.share else b"", self._arrivals), sample)
        at = bisect_left(self._held, new)
        if self.share and at > 0:
            new.shared = common_prefix(self._held[at - 1].sample.input_ids, sample.input_ids)
        if self.share and at < len(self._held):
            after = self._held[at]
            self._unique += after.shared
            after.shared = common_prefix(sample.input_ids, after.sample.input_ids)
            self._unique -= after.shared
        self._held.insert(at, new)
        self.held_tokens += len(sample)
        self._unique += len(sample) - new.shared
        self._terms += new.terms
        return True

    @property
    def held_samples(self) -> int:
        return len(self._held)

    def held_groups(self) -> set[int]:
        return {h.sample.group_id for h in self._held}

    def evict(self, unwanted) -> list[Sample]:
        """Give back the samples for which `unwanted(sample)`; the others are held on."""
        gone = [h.sample for h in self._held if unwanted(h.sample)]
        if gone:
            self._keep([h for h in self._held if not unwanted(h.sample)])
        return gone

    def _keep(self, kept: list[_Held]) -> None:
        for h, shared in zip(kept, _shared_within(self._held, kept), strict=True):
            h.shared = shared
        self._held = kept
        self.held_tokens = sum(len(h.sample) for h in kept)
        self._unique = self.held_tokens - sum(h.shared for h in kept)
        self._terms = sum(h.terms for h in kept)

    def pop(self) -> list[list[Sample]] | None:
        """A micro-batch, one list of samples per rank, or None as long as more samples are wanted."""
        if self.batch_samples:
            return self._deal() if len(self._held) >= self.batch_samples else None
        enough = self.lookahead * self.ranks * self.token_budget
        return self._deal() if max(self._unique, self._terms) >= enough else None

    def flush(self) -> list[list[Sample]] | None:
        """A micro-batch from whatever is held, None when nothing is."""
        return self._deal() if self._held else None

    def _deal(self) -> list[list[Sample]]:
        window = self._window()
        rows = _Plan(window, _shared_within(self._held, window), self).rows()
        dealt = {window[k].arrival for row in rows for k in row}
        kept = [h for h in self._held if h.arrival not in dealt]
        newest = max(h.arrival for h in window)
        for h in kept:
            h.waited += h.arrival <= newest
        self._keep(kept)
        lists = [[window[k].sample for k in row] for row in rows]
        shortest = min((row for row in lists if row), key=lambda row: sum(map(len, row)))
        spare = [replace(s, trained=np.zeros_like(s.trained)) for s in shortest]
        return [row or spare for row in lists]

    def _window(self) -> list[_Held]:
        """The oldest samples, about two micro-batches, in trie order: a backlog is dealt out in turn."""
        by_age = sorted(self._held, key=lambda h: h.arrival)
        if self.batch_samples:
            count = self.batch_samples
        else:
            unique = np.cumsum([len(h.sample) - h.shared for h in by_age])
            count = int(np.searchsorted(unique, 2 * self.ranks * self.token_budget)) + 1
        newest = by_age[:count][-1].arrival
        return [h for h in self._held if h.arrival <= newest]


@dataclass
class _Held:
    key: tuple[bytes, int]  # bytes of the ids, then arrival
    sample: Sample
    shared: int = 0  # tokens shared with the one before it
    waited: int = 0  # micro-batches that it was a candidate for and that left without it

    def __post_init__(self):
        self.arrival = self.key[1]
        self.terms = int(np.count_nonzero(self.sample.trained))

    def __lt__(self, other: _Held) -> bool:
        return self.key < other.key


def _shared_within(held: list[_Held], part: list[_Held]) -> list[int]:
    """Prefix that each of `part` shares with the one before it: the least one between them in `held`."""
    chosen = {h.arrival for h in part}
    shared, least = [], 0
    for h in held:
        least = min(least, h.shared)
        if h.arrival in chosen:
            shared.append(least)
            least = len(h.sample)
    return shared


POOL = -1
MOST_EXCHANGES = 120  # attempts to improve one micro-batch, about 0.1 ms each
MOST_BLOCKS = 128  # blocks of a row or of the pool that one attempt looks at


class _Plan:
    """One micro-batch in the making. Samples are known by their place in the trie order of all candidates,
    0 .. S-1; `owner` [S] says which row has each, or that it is still in the pool. Places in an array
    always ascend.

    place      whole groups, the most expensive first, each into the row that it leaves cheapest
    exchange   swap a sample or a group's part of a row with one of the pool, to fill the row up
    lower_peak trim the most expensive row and fill the others again, as long as that is worth it
    """

    def __init__(self, held: list[_Held], shared: list[int], planner: Planner):
        self.row_count, self.budget, self.path = planner.ranks, planner.token_budget, planner.cost.path
        self.sample_tokens = np.array([len(h.sample) for h in held])  # [S]
        self.sample_terms = np.array([h.terms for h in held])  # [S]
        self.sample_cost = self.path(self.sample_tokens) + planner.cost.term * self.sample_terms  # [S]
        self.arrival = np.array([h.arrival for h in held])  # [S]
        self.group = np.array([h.sample.group_id for h in held])  # [S]
        if not planner.share:
            self.group = np.arange(len(held))  # nothing is gained by keeping a group together
        self.overdue = np.array([h.waited >= MOST_WAITS for h in held])  # [S]
        self._index_prefixes(np.array([0, *shared, 0]))
        self.empty_rows()
        self.total = self.measure(np.arange(len(held)))[2]
        self.exchanges = 0

    # What a set of samples costs, from the common prefixes of neighbours alone.

    def _index_prefixes(self, shared) -> None:
        """Sparse table of range minima. Entry p + 1: what places p - 1 and p share, 0 at the ends."""
        levels = [shared]
        while 2 ** len(levels) <= len(shared):
            half, last = 2 ** (len(levels) - 1), levels[-1]
            levels.append(np.concatenate([np.minimum(last[:-half], last[half:]), last[-half:]]))
        self.minima = np.stack(levels)  # [levels, S+2]
        self.level = np.array([max(n.bit_length() - 1, 0) for n in range(len(shared))])

    def common(self, a, b):
        """Tokens that the samples at places a < b share, elementwise; places -1 and S share nothing."""
        level = self.level[b - a]
        return np.minimum(self.minima[level, a + 2], self.minima[level, b + 2 - (1 << level)])

    def measure(self, places) -> tuple[int, int, float]:
        """Unique tokens, terms and cost of a row of these samples."""
        shared = self.common(places[:-1], places[1:])
        tokens = self.sample_tokens[places].sum() - shared.sum()
        cost = self.sample_cost[places].sum() - self.path(shared).sum()
        return int(tokens), int(self.sample_terms[places].sum()), float(cost)

    def known_depth(self, places, first, last):
        """Depth to which the rest of `places` has the path of each block of neighbours first .. last."""
        fence = np.concatenate([[-1], places, [len(self.owner)]])
        before = np.searchsorted(places, first)
        after = np.searchsorted(places, last, side="right") + 1
        return np.maximum(self.common(fence[before], first), self.common(last, fence[after]))

    # The rows.

    def members(self, row: int):
        return np.flatnonzero(self.owner == row)

    def give(self, places, row: int) -> None:
        self.owner[places] = row
        self.tokens[row], self.terms[row], self.cost[row] = self.measure(self.members(row))

    def empty_rows(self) -> None:
        self.owner = np.full(len(self.sample_tokens), POOL)
        self.tokens = np.zeros(self.row_count, int)
        self.terms = np.zeros(self.row_count, int)
        self.cost = np.zeros(self.row_count)

    def rows(self) -> list[list[int]]:
        """Places of each row. Rows are empty only where there are fewer samples than rows."""
        overdue = np.flatnonzero(self.overdue)
        self.place(self.pieces(overdue), oldest_first=True)
        self.place(self.left(overdue)[:, None], oldest_first=True)
        if len(self.left(overdue)):
            self.place_in_turn()
        else:
            self.place(self.pieces(self.members(POOL)))
            self.fill(self.cost.max())
            self.lower_peak()
        self.spread()
        return [self.members(row).tolist() for row in range(self.row_count)]

    def left(self, places):
        """Those of `places` that are still in the pool."""
        return places[self.owner[places] == POOL]

    def pieces(self, places):
        """Samples as blocks to place: groups, cut where they fit no row or exceed a row's share of work."""
        pieces = []
        share = 1.1 * self.total / self.row_count
        by_group = places[np.argsort(self.group[places], kind="stable")]
        for group in np.split(by_group, np.flatnonzero(np.diff(self.group[by_group])) + 1):
            if len(group):
                pieces += self.cut(group, share)
        return pieces

    def cut(self, group, share: float):
        """The group if within budget and share, else pieces that are: first fit, the longest sample first."""

        def fits(piece):
            tokens, terms, cost = self.measure(piece)
            return max(tokens, terms) <= self.budget and cost <= share

        if len(group) == 1 or fits(group):
            return [group]
        pieces = []
        for place in sorted(group, key=lambda r: -self.sample_tokens[r]):
            for k, piece in enumerate(pieces):
                larger = np.sort(np.append(piece, place))
                if fits(larger):
                    pieces[k] = larger
                    break
            else:
                pieces.append(np.array([place]))
        return pieces

    def place(self, pieces, oldest_first: bool = False) -> None:
        """Each piece into the row that it leaves cheapest: the one with the oldest sample, then the most
        expensive first, or all by age. What fits no row stays in the pool."""
        if not len(pieces):
            return
        first, last = np.array([p[0] for p in pieces]), np.array([p[-1] for p in pieces])
        tokens, terms, cost = np.transpose([self.measure(p) for p in pieces])
        age = np.array([self.arrival[p].min() for p in pieces])
        order = np.argsort(age if oldest_first else np.where(age == age.min(), -np.inf, -cost))
        known = np.stack([self.known_depth(self.members(w), first, last) for w in range(self.row_count)])
        for k in order:  # known [rows, pieces]
            fits = self.tokens + tokens[k] - known[:, k] <= self.budget
            fits &= self.terms + terms[k] <= self.budget
            total = np.where(fits, self.cost + cost[k] - self.path(known[:, k]), np.inf)
            row = int(total.argmin())
            if fits[row]:
                self.give(pieces[k], row)
                known[row] = self.known_depth(self.members(row), first, last)

    def place_in_turn(self) -> None:
        """One by one as they came, up to the first that fits no row: nobody is overtaken. A last resort."""
        self.empty_rows()
        for place in np.argsort(self.arrival):
            self.place([np.array([place])])
            if self.owner[place] == POOL:
                return

    def blocks(self, here, there):
        """What of `here` can be moved `there`: each sample, each group's part, and nothing (the last).

        Returns start, end (a block is here[start:end]), terms, the tokens and the cost that `here` is rid
        of without it, and those that it adds `there`. Each [blocks].
        """
        n = len(here)
        cuts = np.flatnonzero(np.diff(self.group[here])) + 1
        start = np.concatenate([np.arange(n), np.append(0, cuts)])
        end = np.concatenate([np.arange(n) + 1, np.append(cuts, n)])
        keep = np.append(np.ones(n, bool), end[n:] - start[n:] > 1)
        start, end = start[keep], end[keep]
        if len(start) > MOST_BLOCKS:
            some = np.linspace(0, len(start) - 1, MOST_BLOCKS).astype(int)
            start, end = start[some], end[some]
        shared = np.zeros(n + 1, int)
        shared[1:n] = self.common(here[:-1], here[1:])

        def size(of_samples, of_shared):  # less what each sample shares with the one before it in its block
            before, inner = np.append(0, np.cumsum(of_samples)), np.append(0, np.cumsum(of_shared))
            return before[end] - before[start] - (inner[end] - inner[start + 1])

        tokens = size(self.sample_tokens[here], shared[:n])
        cost = size(self.sample_cost[here], self.path(shared[:n]))
        terms = size(self.sample_terms[here], 0 * shared[:n])
        first, last = here[start], here[end - 1]
        at_home, away = self.known_depth(here, first, last), self.known_depth(there, first, last)
        leaving = tokens - at_home, cost - self.path(at_home)
        joining = tokens - away, cost - self.path(away)
        return [np.append(column, 0) for column in (start, end, terms, *leaving, *joining)]

    def exchange(self, row: int, cap: float, least_gain: float) -> bool:
        """Swap a block of the row for one of the pool, either of which may be nothing, so that the row takes
        the most work off the pool, within budget and cap. False if nothing gains more than `least_gain`."""
        self.exchanges += 1
        mine, pool = self.members(row), self.members(POOL)
        if not len(pool) and least_gain > -np.inf:
            return False
        start, end, terms_out, tokens_out, cost_out, _, back = self.blocks(mine, pool)
        enter, stop, terms_in, _, taken, tokens_in, cost_in = self.blocks(pool, mine)
        cost = self.cost[row] + cost_in - cost_out[:, None]  # [blocks of the row, blocks of the pool]
        fits = cost <= cap
        fits &= self.tokens[row] + tokens_in - tokens_out[:, None] <= self.budget
        fits &= self.terms[row] + terms_in - terms_out[:, None] <= self.budget
        overdue = np.append(0, np.cumsum(self.overdue[mine]))
        fits &= (overdue[end] == overdue[start])[:, None]  # who has waited long stays
        fits[:, -1] &= end - start < len(mine)  # a row never runs empty
        gain = np.where(fits, taken - back[:, None], -np.inf)
        for _ in range(3):  # blocks of one group share in ways not counted here: measure before believing
            out, into = divmod(int(gain.argmax()), gain.shape[1])
            if not gain[out, into] > least_gain:
                return False
            before = self.owner.copy()
            self.owner[mine[start[out] : end[out]]] = POOL
            self.owner[pool[enter[into] : stop[into]]] = row
            size = self.measure(self.members(row))
            if max(size[:2]) <= self.budget and size[2] <= cap:
                self.tokens[row], self.terms[row], self.cost[row] = size
                return True
            self.owner = before
            gain[out, into] = -np.inf
        return False

    def fill(self, cap: float) -> None:
        """Fill every row with what is left, the cheapest row first, none above the cap."""
        for row in np.argsort(self.cost):
            if self.exchange(int(row), cap, 1e-9 * cap):  # it may bring a prompt: room for a sibling now?
                self.exchange(int(row), cap, 1e-9 * cap)

    def worth(self) -> float:
        """Work taken off the pool per time of the micro-batch, which is that of its most expensive row, and a
        quarter of a row's share for what any micro-batch costs, whatever is in it."""
        work = self.total - self.measure(self.members(POOL))[2]
        return work / (self.cost.max() + 0.25 * self.total / self.row_count)

    def lower_peak(self) -> None:
        """Trim the most expensive rows by 1% and fill the others again, as long as it is worth it."""
        nothing_left = not len(self.members(POOL))
        while self.exchanges < MOST_EXCHANGES:
            before = self.owner.copy(), self.tokens.copy(), self.terms.copy(), self.cost.copy()
            worth, cap = self.worth(), 0.99 * self.cost.max()
            trimmed = all([self.exchange(int(row), cap, -np.inf) for row in np.flatnonzero(self.cost > cap)])
            if trimmed:
                self.fill(cap)
            if not trimmed or self.worth() <= worth or nothing_left and len(self.members(POOL)):
                self.owner, self.tokens, self.terms, self.cost = before
                return

    def spread(self) -> None:
        """Leave no row empty while another has samples to give away."""
        while not self.tokens.all():
            several = np.bincount(self.owner[self.owner != POOL], minlength=self.row_count) > 1
            if not several.any():
                return
            donor = int(np.where(several, self.cost, 0).argmax())
            places, empty = self.members(donor), int(self.tokens.argmin())
            self.give(places[len(places) // 2 :], empty)
            self.give(places[: len(places) // 2], donor)


# show: the trie of a row as text


def draw(samples: list[Sample]) -> str:
    """The trie of a row as text: segments, their tokens, and the samples that run through each."""
    row = pack(samples)
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(row.segment_parent):
        children.setdefault(int(parent), []).append(segment)
    through: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        at, depth = -1, 0
        while depth < len(sample):
            starts = {int(row.input_ids[row.segment_start[c]]): c for c in children[at]}
            at = starts[int(sample.input_ids[depth])]
            through.setdefault(at, []).append(i)
            depth += int(row.segment_start[at + 1] - row.segment_start[at])
    ratio = row.raw_tokens / row.unique_tokens
    lines = [
        f"{row.sample_count} samples, {row.raw_tokens} tokens -> {row.unique_tokens} unique (ratio "
        f"{ratio:.2f}), {len(row.segment_parent)} segments, {row.terms} terms, {row.attention_pairs} pairs"
    ]

    def visit(segment: int, indent: str, is_last: bool) -> None:
        start, end = int(row.segment_start[segment]), int(row.segment_start[segment + 1])
        ids = [str(t) for t in row.input_ids[start:end]]
        shown = " ".join(ids if len(ids) <= 8 else [*ids[:4], "...", *ids[-3:]])
        who = ",".join(map(str, through[segment]))
        branch = "└─" if is_last else "├─"
        lines.append(f"{indent}{branch} {end - start} tokens [{start}:{end})  samples {who}:  {shown}")
        below = children.get(segment, [])
        for child in below:
            visit(child, indent + ("   " if is_last else "│  "), child == below[-1])

    for root in children[-1]:
        visit(root, "", root == children[-1][-1])
    return "\n".join(lines)


def read_samples(path: str) -> list[Sample]:
    """Samples of a JSON list: token id lists, or objects with input_ids and perhaps trained, group_id."""
    samples = []
    for i, entry in enumerate(json.loads(Path(path).read_text())):
        entry = entry if isinstance(entry, dict) else {"input_ids": entry}
        ids = np.array(entry["input_ids"], np.int32)
        trained = np.array(entry.get("trained", np.zeros(len(ids))), bool)
        logp = np.zeros(len(ids), np.float32)
        samples.append(Sample(ids, trained, logp, 0.0, entry.get("group_id", 0), 0, i, 0))
    return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the prefix trie of a row.")
    parser.add_argument("--show", metavar="samples.json", required=True, help=read_samples.__doc__)
    print(draw(read_samples(parser.parse_args().show)))
