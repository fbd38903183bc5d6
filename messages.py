"""What the rollout process tells the trainer: one GroupMessage per prompt of an epoch, an EndMessage once the
prompts are used up, MetricsMessage about once a second, and DeathMessage when it fails.

"Nothing yet" is not a message, and an empty queue does not mean that the prompts are used up.
"""

from __future__ import annotations

from dataclasses import dataclass

from packing import Sample

TOO_OLD = "too old"  # why a group is dropped whose prompt is sampled again
EQUAL_REWARDS = "equal rewards"


@dataclass
class GroupMessage:
    """One prompt of an epoch is through: its samples, or why there are none."""

    group_id: int
    samples: list[Sample]
    dropped: str | None
    dataset_size: int | None  # None = streaming, and the end was not seen yet
    generated: dict[str, int]  # samples and tokens that were generated, dropped ones too


@dataclass
class EndMessage:
    """No new prompt is left; a run that is resumed at its end learns the dataset's size from nothing else."""

    dataset_size: int


@dataclass
class MetricsMessage:
    values: dict  # name -> number, list (mean over all of them) or (numerator, denominator)


@dataclass
class DeathMessage:
    traceback: str
