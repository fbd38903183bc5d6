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
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from flops import RowCost, pairs

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
    candidate_ids: tuple | None = None  # int32 values, int64 offsets [L+1]; an empty set is all there are
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
            return replace(self, host=self, **{name: torch.from_numpy(a) for name, a in arrays.items()})
        # each at a multiple of 16 bytes, for vector loads
        starts = np.cumsum([0] + [-(-a.nbytes // 16) * 16 for a in arrays.values()]).tolist()
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
    _check(samples)
    lengths = np.array([len(s.input_ids) for s in samples])
    starts = np.append(0, np.cumsum(lengths))  # [samples+1] of each sample among the tokens of all
    keys = [s.input_ids.tobytes() for s in samples] if share else range(len(samples))
    # By the bytes of the ids, one memcmp a comparison. Bytes do not sort as numbers do, but any total order
    # of tokens makes prefixes adjacent (test_row_is_the_trie_of_its_samples).
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared = np.zeros(len(samples), int)  # tokens that each shares with the one before it, in trie order
    if share:
        shared[1:] = [common_prefix(samples[a].input_ids, samples[b].input_ids) for a, b in pairwise(order)]
    own = [samples[i].input_ids[first:] for i, first in zip(order, shared.tolist(), strict=True)]
    own_length = np.array([len(ids) for ids in own])
    row_start = np.append(0, np.cumsum(own_length))  # [samples+1] row index of each one's own tokens

    trained = np.concatenate([s.trained for s in samples])
    if trained[starts[:-1]].any():
        raise ValueError("a sample trains its first token, which nothing predicts")
    token = np.flatnonzero(trained)  # [M] trained tokens, sample by sample, among the tokens of all
    term_start = np.searchsorted(token, starts)  # [samples+1]
    sample = np.repeat(np.arange(len(samples)), np.diff(term_start))  # [M]
    at = token - starts.take(sample)  # [M] index in the sample
    position, own_parent = np.empty(len(token), int), np.empty(len(samples), int)  # [M], [samples]
    row_index = np.arange(row_start[-1])  # [N]
    # The root, then the row index of each token of a sample: its own continue what the one before it shares.
    path = np.full(lengths.max() + 1, -1)
    sample_ends, term_ends = lengths.tolist(), term_start.tolist()
    runs = zip(order, shared.tolist(), pairwise(row_start.tolist()), strict=True)
    for place, (i, depth, (start, end)) in enumerate(runs):
        own_parent[place] = path[depth]  # what its own tokens hang from
        path[depth + 1 : sample_ends[i] + 1] = row_index[start:end]
        terms = slice(term_ends[i], term_ends[i + 1])
        path.take(at[terms], out=position[terms], mode="clip")  # the token in front of each target
    segment_start, segment_parent, segment_end = _segments(row_start, own_parent)

    # Stable, so terms of one position stay in the order of their samples. numpy sorts 16-bit keys by radix.
    by_position = np.argsort(position.astype(np.min_scalar_type(row_start[-1])), kind="stable")  # [M]
    token, sample = token.take(by_position), sample.take(by_position)
    return Row(
        input_ids=np.concatenate(own, dtype=np.int64),
        position_ids=row_index - np.repeat(row_start[:-1] - shared, own_length),
        subtree_end=np.repeat(segment_end, np.diff(segment_start)),
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
        attention_pairs=int(pairs(lengths).sum() - pairs(shared).sum()),
        max_depth=int(lengths.max()),
    )


def common_prefix(a, b) -> int:
    """Number of leading tokens that two arrays or lists of ids share."""
    n = min(len(a), len(b))
    first = np.not_equal(a[:n], b[:n]).tobytes().find(1)
    return n if first < 0 else first


def _check(samples: list[Sample]) -> None:
    if not samples:
        raise ValueError("pack needs at least one sample: a rank never forwards an empty row")
    for s in samples:
        if not 0 < len(s.input_ids) == len(s.trained) == len(s.sampler_logp):
            sizes = f"have {len(s.input_ids)}, {len(s.trained)} and {len(s.sampler_logp)} entries"
            raise ValueError(
                f"rollout {s.rollout_id} of group {s.group_id}: input_ids, trained and sampler_logp {sizes}; "
                "they need one for each token, and a sample without tokens has no place in a row"
            )


def _segments(row_start, own_parent):
    """Cut the row at roots and branches: int32 segment_start [S+1], segment_parent [S], and where the last
    segment below each one ends [S].

    A token hangs from the one before it in the row, but the first own token of a sample from `own_parent`.
    """
    parent = np.arange(-1, row_start[-1] - 1)  # [N]
    own = np.diff(row_start) > 0  # a duplicate or a strict prefix adds nothing
    parent[row_start[:-1][own]] = own_parent[own]
    children = np.bincount(parent + 1)  # of the root, then of each token
    start = np.flatnonzero((children[parent + 1] > 1) | (parent < 0))
    segment_parent = np.searchsorted(start, parent[start], side="right") - 1
    start = np.append(start, row_start[-1])
    ends = start[1:].tolist()
    for segment, above in reversed(list(enumerate(segment_parent.tolist()))):  # children before their parents
        if above >= 0:
            ends[above] = max(ends[above], ends[segment])
    return start.astype(np.int32), segment_parent.astype(np.int32), np.array(ends, np.int32)


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
    the staleness allowance: the planner knows no clock and no weight versions, and a replay plans as its
    run did.

    Never: an empty row (with fewer samples than ranks, spare ranks repeat the shortest row with nothing
    trained); a row of more unique tokens or terms than the budget; a sample that younger ones overtake in
    more than two micro-batches (tests/test_packing.py::test_planner_invariants).

    ranks             rows of a micro-batch
    token_budget      unique tokens of a row, and its terms; <= 0: samples_per_rank * ranks samples at a time
    cost              RowCost that rows are balanced by
    samples_per_rank  used when token_budget <= 0
    share             False: plan for rows of samples side by side
    """

    def __init__(
        self, ranks: int, token_budget: int, cost: RowCost, samples_per_rank: int = 8, share: bool = True
    ):
        self.ranks = ranks
        self.token_budget = token_budget if token_budget > 0 else float("inf")
        self.cost = cost
        self.batch_samples = samples_per_rank * ranks if token_budget <= 0 else None
        self.share = share
        self.held_tokens = 0  # raw tokens of the samples held
        self._held: list[_Held] = []  # in the order of the trie of all of them
        self._arrivals, self._unique, self._terms = 0, 0, 0  # of the samples held: unique tokens, terms

    def add(self, sample: Sample) -> bool:
        """Hold a sample. False if it is longer than any row may be: it is not held then."""
        ids = sample.input_ids
        if len(ids) > self.token_budget:
            return False
        self._arrivals += 1
        key = (ids.tobytes() if self.share else b"", self._arrivals)
        new = _Held(key, sample, len(ids), int(np.count_nonzero(sample.trained)))
        at = bisect_left(self._held, key, key=attrgetter("key"))
        if self.share and at > 0:
            new.shared = common_prefix(self._held[at - 1].sample.input_ids, ids)
        if self.share and at < len(self._held):
            after = self._held[at]
            self._unique += after.shared
            if new.shared <= after.shared:  # else the two neighbours part before this one leaves the first
                after.shared = common_prefix(ids, after.sample.input_ids)
            self._unique -= after.shared
        self._held.insert(at, new)
        self.held_tokens += len(ids)
        self._unique += len(ids) - new.shared
        self._terms += new.terms
        return True

    @property
    def held_samples(self) -> int:
        return len(self._held)

    def held_groups(self) -> set[int]:
        return {h.sample.group_id for h in self._held}

    def evict(self, unwanted) -> list[Sample]:
        """Give back the samples for which `unwanted(sample)`; the others are held on."""
        gone = np.array([unwanted(h.sample) for h in self._held], bool)
        return self._let_go(gone) if gone.any() else []

    def pop(self) -> list[list[Sample]] | None:
        """A micro-batch, one list of samples per rank, or None as long as more samples are wanted."""
        if self.batch_samples:
            return self._deal() if len(self._held) >= self.batch_samples else None
        enough = max(self._unique, self._terms) >= self.ranks * self.token_budget
        return self._deal() if enough else None

    def flush(self) -> list[list[Sample]] | None:
        """A micro-batch from whatever is held, None when nothing is."""
        return self._deal() if self._held else None

    def _deal(self) -> list[list[Sample]]:
        by_age = np.argsort([h.key[1] for h in self._held])
        count = self.batch_samples
        if count is None:  # about two micro-batches: a backlog is dealt out in turn
            unique = np.array([h.tokens - h.shared for h in self._held])[by_age].cumsum()
            count = int(np.searchsorted(unique, 2 * self.ranks * self.token_budget)) + 1
        candidates = np.sort(by_age[:count])
        held = [self._held[k] for k in candidates]
        rows = _Plan(held, self._shared_within(candidates), self).rows()
        lists = [[held[k].sample for k in row] for row in rows]
        for h in held:
            h.waited += 1
        gone = np.zeros(len(by_age), bool)
        gone[candidates[np.concatenate(rows)]] = True
        self._let_go(gone)
        shortest = min((row for row in lists if row), key=lambda row: sum(map(len, row)))
        spare = [replace(s, trained=np.zeros_like(s.trained)) for s in shortest]
        return [row or spare for row in lists]

    def _shared_within(self, some):
        """Prefix that each of `some` of the held shares with the one before it: the least one in between."""
        shared = np.array([h.shared for h in self._held], int)
        return np.minimum.reduceat(shared[: some[-1] + 1], np.append(0, some[:-1] + 1)) if len(some) else some

    def _let_go(self, gone) -> list[Sample]:
        """Hold on to the others. `gone` [held samples]"""
        samples = [self._held[k].sample for k in np.flatnonzero(gone)]
        kept = np.flatnonzero(~gone)
        shared = self._shared_within(kept).tolist()
        self._held = [self._held[k] for k in kept]
        for h, depth in zip(self._held, shared, strict=True):
            h.shared = depth
        self.held_tokens -= sum(map(len, samples))
        self._unique = self.held_tokens - sum(shared)
        self._terms = sum(h.terms for h in self._held)
        return samples


@dataclass(slots=True)
class _Held:
    key: tuple[bytes, int]  # bytes of the ids, then a running number
    sample: Sample
    tokens: int
    terms: int
    shared: int = 0  # tokens shared with the one before it
    waited: int = 0  # micro-batches that it was a candidate for and that left without it


POOL = -1
MOST_WAITS = 2  # micro-batches a sample may see leave without it; then it goes first
FULL = 0.98  # of the budget: more is worth nothing
FULLNESS = 1.25  # what a token is worth by which a row gets fuller, in costs of an average token
MOST_EXCHANGES = 80  # attempts to improve one micro-batch, about 0.2 ms each
MOST_BLOCKS = 128  # blocks of a row or of the pool that one attempt looks at


class _Plan:
    """One micro-batch in the making. Samples are known by their place in the trie order of all candidates,
    0 .. S-1; `owner` [S] says which row has each, or that it is still in the pool. Places in an array
    always ascend; a run of neighbours in it is given by its start and end. A size is [3, ...]: unique
    tokens, terms and cost.

    place      whole groups, the most expensive first, each into the row that it leaves cheapest
    fill       swap blocks (samples, parts of groups, nothing) of a row and the pool, to fill the row up
    lower_peak trim the most expensive row and fill the others again, as long as that is worth it
    """

    def __init__(self, held: list[_Held], shared, planner: Planner):
        self.row_count, self.budget, self.path = planner.ranks, planner.token_budget, planner.cost.path
        tokens, terms = np.array([h.tokens for h in held]), np.array([h.terms for h in held])
        self.alone = np.stack([tokens, terms, self.path(tokens) + planner.cost.term * terms])  # [3, S]
        self.arrival = np.array([h.key[1] for h in held])  # [S]
        self.waited = np.array([h.waited for h in held])  # [S]
        self.group = np.array([h.sample.group_id for h in held])  # [S]
        if not planner.share:
            self.group = np.arange(len(held))  # nothing is gained by keeping a group together
        self._index_prefixes(np.concatenate([[0], shared, [0]]))
        self.empty_rows()
        tokens, terms, self.work = self.measure(np.arange(len(held)))
        self.full = min(FULL * self.budget, max(tokens, terms) / self.row_count)
        self.fullness = FULLNESS * self.work / tokens
        self.exchanges = 0

    # What a set of samples costs, from the common prefixes of neighbours alone.

    def _index_prefixes(self, shared) -> None:
        """Sparse table of range minima. Entry p + 1: what places p - 1 and p share, 0 at the ends."""
        levels = [shared]
        while 2 ** len(levels) <= len(shared):
            half, last = 2 ** (len(levels) - 1), levels[-1]
            levels.append(np.concatenate([np.minimum(last[:-half], last[half:]), last[-half:]]))
        self.minima = np.stack(levels)  # [levels, S+2]
        self.level = np.frexp(np.arange(len(shared)).clip(1))[1] - 1  # [S+2] logarithm of a distance

    def common(self, a, b):
        """Tokens that the samples at places a < b share, elementwise; places -1 and S share nothing."""
        level = self.level[b - a]
        return np.minimum(self.minima[level, a + 2], self.minima[level, b + 2 - (1 << level)])

    def prefix(self, depth):
        """Size of a prefix without terms."""
        return np.stack([depth, np.zeros_like(depth), self.path(depth)])

    def measure(self, places, start=0, end=None):
        """Size of a row of all `places`, or of each run places[start:end]."""
        end = len(places) if end is None else end
        shared = np.append(0, self.common(places[:-1], places[1:]))
        before = np.cumsum(np.pad(self.alone[:, places], ((0, 0), (1, 0))), axis=1)
        known = np.cumsum(self.prefix(shared), axis=1)  # each one's prefix that the one before it has
        return before[:, end] - before[:, start] - (known[:, end - 1] - known[:, start])

    def known_depth(self, places, first, last):
        """Depth to which the rest of `places` has the path of each run of neighbours first .. last."""
        fence = np.concatenate([[-1], places, [len(self.owner)]])
        before = np.searchsorted(places, first)
        after = np.searchsorted(places, last, side="right") + 1
        return np.maximum(self.common(fence[before], first), self.common(last, fence[after]))

    # The rows.

    def rows(self) -> list:
        """Places of each row. Rows are empty only where there are fewer samples than rows."""
        overdue = np.flatnonzero(self.waited >= MOST_WAITS)
        self.place(overdue, self.pieces(overdue, 1 / 8))
        if (self.owner[overdue] == POOL).any():
            self.place_in_turn()
        else:
            for share in 1 / 8, 1 / 64:
                pool = self.members(POOL)
                self.place(pool, self.pieces(pool, share))
            self.fill(np.inf)
            self.lower_peak()
        self.spread()
        return [self.members(row) for row in range(self.row_count)]

    def members(self, row: int):
        return np.flatnonzero(self.owner == row)

    def empty_rows(self) -> None:
        self.owner = np.full(self.alone.shape[1], POOL)
        self.size = np.zeros((3, self.row_count))
        self.cost = self.size[2]

    def group_starts(self, places):
        """Where the runs of samples of one group begin."""
        return np.flatnonzero(np.append(True, np.diff(self.group[places]) != 0)[: len(places)])

    def pieces(self, places, share: float):
        """Where to cut `places` into runs that rows can take: groups, or several up to a share of a row's
        work, or equal parts of one that fits no row or would make it more expensive than others."""
        start = self.group_starts(places)
        end = np.append(start[1:], len(places))
        size, work = self.measure(places, start, end), self.work / self.row_count
        parts = np.ceil(np.maximum(size[:2].max(axis=0) / self.budget, size[2] / (1.1 * work)))
        columns = start, end - start, np.minimum(parts, end - start).astype(int), size[2]
        cuts, piece = [], np.inf
        for first, count, parts, cost in zip(*(column.tolist() for column in columns), strict=True):
            if parts > 1 or piece + cost > share * work:
                cuts += [first + count * part // parts for part in range(parts)]
                piece = 0.0 if parts == 1 else np.inf
            piece += cost
        return np.array(cuts, int)

    def place(self, places, start) -> None:
        """Each run of `places` into the row that it leaves cheapest, those that have waited and then the
        most expensive first. What fits no row stays in the pool."""
        if not len(places):
            return
        end = np.append(start[1:], len(places))
        first, last = places[start], places[end - 1]
        size = self.measure(places, start, end)  # [3, runs]
        waited = np.maximum.reduceat(self.waited[places], start)
        known = np.stack([self.known_depth(self.members(w), first, last) for w in range(self.row_count)])
        for k in np.lexsort((-size[2], -waited)):  # known [rows, runs]
            larger = self.size + size[:, k, None] - self.prefix(known[:, k])  # [3, rows]
            fits = larger[:2].max(axis=0) <= self.budget
            row = int(np.where(fits, larger[2], np.inf).argmin())
            if fits[row]:
                self.owner[places[start[k] : end[k]]] = row
                self.size[:, row] = larger[:, row]
                earlier = np.minimum(last, last[k])
                later = np.maximum(np.maximum(first, first[k]), earlier)  # no less, for the run itself
                known[row] = np.maximum(known[row], self.common(earlier, later))

    def place_in_turn(self) -> None:
        """One by one as they came, up to the first that fits no row: nobody is overtaken. A last resort."""
        self.empty_rows()
        for place in np.argsort(self.arrival):
            self.place(np.array([place]), np.array([0]))
            if self.owner[place] == POOL:
                return

    def blocks(self, here, there):
        """What of `here` can be moved `there`: each sample, each group's first few, nothing (the last).

        Start and end (a block is here[start:end]), and by how much `here` shrinks and `there` grows.
        """
        at, group = np.arange(len(here)), self.group_starts(here)
        group = np.repeat(group, np.diff(np.append(group, len(here))))  # where that of each sample begins
        start, end = np.append(at, group[at > group]), np.append(at, at[at > group]) + 1
        if len(start) > MOST_BLOCKS:
            some = np.linspace(0, len(start) - 1, MOST_BLOCKS).astype(int)
            start, end = start[some], end[some]
        size, first, last = self.measure(here, start, end), here[start], here[end - 1]
        shrinks = size - self.prefix(self.known_depth(here, first, last))
        grows = size - self.prefix(self.known_depth(there, first, last))
        nothing = np.zeros((3, 1))
        return (
            np.append(start, 0),
            np.append(end, 0),
            np.hstack([shrinks, nothing]),
            np.hstack([grows, nothing]),
        )

    def exchange(self, row: int, cap: float, least_gain: float) -> bool:
        """Swap the best blocks of the row and the pool, within budget and cap. A swap gains the work that it
        takes off the pool, and something for making the row fuller. False if none gains `least_gain`."""
        self.exchanges += 1
        mine, pool = self.members(row), self.members(POOL)
        start, end, given, back = self.blocks(mine, pool)
        enter, stop, taken, added = self.blocks(pool, mine)
        size = self.size[:, row, None, None] + added[:, None] - given[:, :, None]  # [3, row's, pool's blocks]
        gain = taken[2] - back[2, :, None] + self.fullness * (self.filled(size) - self.filled(self.size)[row])
        gain[(size[:2].max(axis=0) > self.budget) | (size[2] > cap)] = -np.inf
        overdue = np.append(0, np.cumsum(self.waited[mine] >= MOST_WAITS))
        gain[overdue[end] > overdue[start]] = -np.inf  # who has waited long stays
        gain[end - start == len(mine), -1] = -np.inf  # a row never runs empty
        for _ in range(3):  # blocks of one group share in ways not counted here: measure before believing
            out, into = divmod(int(gain.argmax()), gain.shape[1])
            if not gain[out, into] > least_gain:
                return False
            before = self.owner.copy()
            self.owner[mine[start[out] : end[out]]] = POOL
            self.owner[pool[enter[into] : stop[into]]] = row
            size = self.measure(self.members(row))
            if max(size[:2]) <= self.budget and size[2] <= cap:
                self.size[:, row] = size
                return True
            self.owner = before
            gain[out, into] = -np.inf
        return False

    def filled(self, size):
        """Tokens, or terms where they are more, as far as they are worth anything."""
        return np.minimum(size[:2].max(axis=0), self.full)

    def fill(self, cap: float) -> None:
        """Fill rows that are not full with what is left, the cheapest first, none above the cap."""
        for row in np.argsort(self.cost):
            if self.filled(self.size)[row] < self.full:
                self.exchange(int(row), cap, 1e-4 * self.work)

    def worth(self) -> float:
        """Work taken off the pool per time of the micro-batch, that of its most expensive row, and by how
        full rows are: whatever is in it, a micro-batch has costs of its own."""
        work = self.work - self.measure(self.members(POOL))[2]
        return work * self.filled(self.size).mean() / self.cost.max()

    def lower_peak(self) -> None:
        """Trim the most expensive row by 1% and fill the others again, until it is within 1% of the mean or
        that was not worth it three times."""
        nothing_left = not len(self.members(POOL))
        best, owner, size, failures = self.worth(), self.owner.copy(), self.size.copy(), 0
        while failures < 3 and self.cost.max() > 1.01 * self.cost.mean() and self.exchanges < MOST_EXCHANGES:
            if not self.exchange(int(self.cost.argmax()), 0.99 * self.cost.max(), -np.inf):
                break
            self.fill(self.cost.max())
            failures += 1
            if self.worth() > best and not (nothing_left and len(self.members(POOL))):
                best, owner, size, failures = self.worth(), self.owner.copy(), self.size.copy(), 0
        self.owner, self.size[:] = owner, size

    def spread(self) -> None:
        """Leave no row empty while another has samples to give away."""
        while len(empty := np.flatnonzero(self.size[0] == 0)):
            several = np.bincount(self.owner[self.owner != POOL], minlength=self.row_count) > 1
            if not several.any():
                return
            donor = int(np.where(several, self.cost, 0).argmax())
            places = self.members(donor)
            self.owner[places[len(places) // 2 :]] = empty[0]
            for row in donor, empty[0]:
                self.size[:, row] = self.measure(self.members(row))


# show: the trie of a row as text


def draw(samples: list[Sample]) -> str:
    """The trie of a row as text: segments, their tokens, and the samples that run through each."""
    row = pack(samples)
    lines = [
        f"{row.sample_count} samples, {row.raw_tokens} tokens -> {row.unique_tokens} unique (ratio "
        f"{row.raw_tokens / row.unique_tokens:.2f}), {len(row.segment_parent)} segments, {row.terms} terms, "
        f"{row.attention_pairs} pairs"
    ]

    def visit(parent: int, indent: str, through, depth: int) -> None:
        below = np.flatnonzero(row.segment_parent == parent)
        for segment in below:
            start, end = row.segment_start[segment : segment + 2].tolist()
            ids = row.input_ids[start:end].tolist()
            who = [i for i in through if samples[i].input_ids[depth : depth + 1].tolist() == ids[:1]]
            shown = map(str, ids if len(ids) <= 8 else [*ids[:4], "...", *ids[-3:]])
            branch, below_it = ("└─", "   ") if segment == below[-1] else ("├─", "│  ")
            names = ",".join(map(str, who))
            lines.append(
                f"{indent}{branch} {end - start} tokens [{start}:{end})  samples {names}:  {' '.join(shown)}"
            )
            visit(segment, indent + below_it, who, depth + end - start)

    visit(-1, "", range(len(samples)), 0)
    return "\n".join(lines)


def read_samples(path: str) -> list[Sample]:
    """Samples of a JSON list: token id lists, or objects with input_ids and perhaps trained, group_id."""
    samples = []
    for i, entry in enumerate(json.loads(Path(path).read_text())):
        entry = entry if isinstance(entry, dict) else {"input_ids": entry}
        if "input_ids" not in entry:
            raise SystemExit(f"{path}: sample {i} needs input_ids, a list of token ids; it has {list(entry)}")
        ids = np.array(entry["input_ids"], np.int32)
        trained = np.array(entry.get("trained", np.zeros(len(ids))), bool)
        logp = np.zeros(len(ids), np.float32)
        samples.append(Sample(ids, trained, logp, 0.0, entry.get("group_id", 0), 0, i, 0))
    return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the prefix trie of a row.")
    parser.add_argument("--show", metavar="samples.json", required=True, help=read_samples.__doc__)
    print(draw(read_samples(parser.parse_args().show)))
