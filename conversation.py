"""A rollout's conversation, between messages and tokens: what was sampled becomes samples to train on.

turn 1   prompt 1 ............ output 1
turn 2   prompt 1 ............ output 1  new context  output 2      starts with all that is held: same sample
turn 3   prompt 3 (rewritten) ....................... output 3      anything else: a fork, a new sample
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packing import Sample


class RolloutError(RuntimeError):
    """The rollout process cannot go on; the text says why."""


@dataclass
class Turn:
    """One sampling request and its answer."""

    prompt_ids: list[int]  # the whole prompt that was sent
    output_ids: list[int]
    output_logp: np.ndarray  # the sampler's, one per output token
    output_mask: list[int] | None = None  # 1 = trained, 0 = context only; None = all 1
    candidate_ids: list[list[int]] | tuple | None = (
        None  # per token, or (values, offsets); None = whole vocabulary
    )
    topk: list[dict] | tuple | None = (
        None  # per token id -> logp, or (ids [n, K], logp [n, K]), most likely first
    )
    versions: np.ndarray | None = None  # version that made each token; None = the group's


@dataclass
class Rollout:
    """One conversation."""

    completion: list[dict]  # messages after the prompt
    completion_ids: list[int]
    turns: list[Turn]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None  # None = no reward from this source
    rollout_id: int = -1


# ------------------------------------------------------------------------------------------ turns -> samples


def samples_of(
    rollout: Rollout, group_id: int, row_index: int, version: int
) -> tuple[list[Sample], list[int]]:
    """A rollout's samples, advantage 0 for now, and the tokens rendered anew at every change of turn.

    A turn whose prompt starts with exactly the tokens held so far continues the sample, its new prompt part
    being context; any other turn starts a new sample. Tokens without a version of their own were made by
    `version`.
    """
    runs, drift = reconcile(rollout.turns)
    samples = [sample_of(run, rollout.rollout_id, group_id, row_index, version) for run in runs]
    return [s for s in samples if s.trained.any()], drift


def reconcile(turns: list[Turn]) -> tuple[list[list[tuple[list[int], Turn]]], list[int]]:
    """Turns -> runs of (context ids, turn), one run per sample, and the drift of every change of turn.

    Drift is how many held tokens the next prompt does not repeat: 0 continues the sample, more forks it.
    There is no tolerance: the sampler never saw any other tokens than its prompt's.
    """
    runs, drift, held = [], [], None
    for turn in turns:
        prompt = list(turn.prompt_ids)
        if held is not None and prompt[: len(held)] == held:
            runs[-1].append((prompt[len(held) :], turn))
            drift.append(0)
        else:
            runs.append([(prompt, turn)])
            if held is not None:
                drift.append(len(held) - common_prefix(held, prompt))
        held = prompt + list(turn.output_ids)
    return runs, drift


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def sample_of(run, rollout_id: int, group_id: int, row_index: int, version: int) -> Sample:
    """One run of (context ids, turn) as a sample of L tokens."""
    length = sum(len(context) + len(turn.output_ids) for context, turn in run)
    input_ids = np.empty(length, dtype=np.int32)
    trained = np.zeros(length, dtype=bool)
    logp = np.zeros(length, dtype=np.float32)
    versions = np.full(length, version, dtype=np.int32)
    generated = []  # versions of generated tokens only
    pieces = []  # (slice of the output, turn)
    start = 0
    for context, turn in run:
        out = slice(start + len(context), start + len(context) + len(turn.output_ids))
        made, scored = len(turn.output_ids), len(turn.output_logp)
        if made != scored:
            raise RolloutError(f"rollout {rollout_id}: {made} tokens but {scored} log-probabilities")
        input_ids[start : out.start] = context
        input_ids[out] = turn.output_ids
        trained[out] = True if turn.output_mask is None else np.asarray(turn.output_mask, dtype=bool)
        logp[out] = turn.output_logp
        if turn.versions is not None:
            versions[out] = turn.versions
        generated.append(versions[out])
        pieces.append((out, turn))
        start = out.stop
    trained[:1] = False  # nothing predicts the first token
    topk_ids, topk_logp = topk_table(pieces, length)
    return Sample(
        input_ids=input_ids,
        trained=trained,
        sampler_logp=logp,
        advantage=0.0,
        group_id=group_id,
        row_index=row_index,
        rollout_id=rollout_id,
        version=int(np.concatenate(generated).min(initial=np.iinfo(np.int32).max)),
        candidate_ids=candidate_lists(pieces, length),
        topk_ids=topk_ids,
        topk_logp=topk_logp,
        token_version=versions,
    )


def candidate_lists(pieces: list[tuple[slice, Turn]], length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Candidate sets of a sample as (int32 values, int64 offsets [L+1]); context has empty lists."""
    if all(turn.candidate_ids is None for _, turn in pieces):
        return None
    counts = np.zeros(length, dtype=np.int64)
    values = []
    for out, turn in pieces:
        sets = turn.candidate_ids
        if isinstance(sets, tuple):
            counts[out] = np.diff(sets[1])
            values.append(np.asarray(sets[0], dtype=np.int32))
        elif sets is not None:
            counts[out] = [len(ids) for ids in sets]
            values.append(np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int32))
    return np.concatenate(values), np.concatenate([[0], np.cumsum(counts)])


def topk_table(
    pieces: list[tuple[slice, Turn]], length: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The sampler's most likely tokens, int32 [L, K] and float32 [L, K]; -1 and -inf where there are none."""
    tables = [(out, topk_arrays(turn.topk)) for out, turn in pieces if turn.topk is not None]
    if not tables:
        return None, None
    width = max(ids.shape[1] for _, (ids, _) in tables)
    topk_ids = np.full((length, width), -1, dtype=np.int32)
    topk_logp = np.full((length, width), -np.inf, dtype=np.float32)
    for out, (ids, logp) in tables:
        topk_ids[out, : ids.shape[1]] = ids
        topk_logp[out, : ids.shape[1]] = logp
    return topk_ids, topk_logp


def topk_arrays(topk) -> tuple[np.ndarray, np.ndarray]:
    """Turn.topk as arrays [n, K]; a list of id -> logp is laid out by falling probability."""
    if isinstance(topk, tuple):
        return topk
    width = max(map(len, topk), default=0)
    ids = np.full((len(topk), width), -1, dtype=np.int32)
    logp = np.full((len(topk), width), -np.inf, dtype=np.float32)
    for i, entries in enumerate(topk):
        for j, (token, value) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1])):
            ids[i, j], logp[i, j] = token, value
    return ids, logp


# ------------------------------------------------------------------------------------------------- templates


def read_template(chat_template: str) -> str:
    """A chat template, from a file or as a text."""
    if "{" in chat_template:
        return chat_template
    if not Path(chat_template).is_file():
        raise ValueError(f"there is no file {chat_template}, and it is no template text either")
    return Path(chat_template).read_text()
