"""Train on a fixed list of samples, the same ones in every step on any number of ranks: steps.py --name value

test_train.py compares what runs with other ranks, or with a stop in between, end with.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch.distributed as dist  # noqa: E402
from replay import ListRollouts, NoSync, random_groups  # noqa: E402

import train as trainer  # noqa: E402
from options import parse  # noqa: E402
from packing import Planner  # noqa: E402

OF_A_STEP = 12


class InOrder(Planner):
    """A step's samples are the next ones; how they are dealt out to ranks is up to it."""

    def __init__(self, ranks, budget, cost, samples_per_rank, share):
        super().__init__(ranks, 0, cost, samples_per_rank=OF_A_STEP // ranks, share=share)


def main(*arguments: str) -> None:
    fixed = ["--model", "tiny", "--bf16", "false", "--token_budget", "0", "--max_staleness", "99"]
    for side in ("min", "max"):  # the samples are random: nothing of them may be masked
        fixed += [f"--vllm_importance_sampling_clip_{side}", "none"]
    fixed += ["--score_centering", "false"]
    trainer.Planner = InOrder
    trainer.train(parse([*fixed, *arguments]), rollouts=ListRollouts(random_groups(12)), sync=NoSync())
    assert not dist.is_initialized()


if __name__ == "__main__":
    main(*sys.argv[1:])
