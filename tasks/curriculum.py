"""A curriculum: sort strings of 3 to 8 letters, and sample no prompt again that the policy has solved.

    python train.py --task tasks/curriculum.py --rollout_loop tasks/curriculum.py:Curriculum ...

A prompt that is always answered rightly teaches nothing, however often it is sampled. The loop remembers the
share of right answers of every prompt and refuses those that reach `solved`, a setting of the task. Shares
are those of the last time a prompt was sampled, and start anew with a resumed run. Once every prompt is
solved the run ends with an error that says so: there is nothing left to learn from them.
"""

import datasets
import numpy as np

from rollout import RolloutLoop
from tasks import sort

rewards = sort.rewards


def dataset(size: int = 512, seed: int = 0, solved: float = 0.9) -> datasets.Dataset:
    """`size` prompts of each length from 3 to 8; `solved` is read by the loop."""
    if not 0 < solved <= 1:
        raise ValueError(f"task_kwargs of curriculum: solved is {solved}; it must be in (0, 1]")
    lengths = [sort.dataset(size, seed, length) for length in range(3, 9)]
    return datasets.concatenate_datasets(lengths).shuffle(seed=seed)


class Curriculum(RolloutLoop):
    async def setup(self) -> None:
        self.solved = self.options.task_kwargs.get("solved", 0.9)
        self.right: dict[int, float] = {}  # row -> share of its rollouts with a reward, the last time

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        return self.right.get(row_index, 0.0) < self.solved

    def compute_advantages(self, group) -> np.ndarray:
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            right = self.right[group.row_index] = float(np.mean(scored > 0))
            self.metrics.record("curriculum/solved_frac", (int(right >= self.solved), 1))
        return super().compute_advantages(group)
