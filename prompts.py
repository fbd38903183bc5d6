"""Which prompt is next: the dataset's, in its own order, epoch after epoch, and those to be sampled again.

a dataset of size S   prompt n is row n % S of epoch n // S
a stream              row after row; a resume starts at the first one, and only the newest can come again
no dataset            prompt n is the number n: an environment's reset() makes something of it
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

from conversation import RolloutError

STREAMED_ROWS = 4096  # rows of a streaming dataset that can still be sampled again


@dataclass
class Prompt:
    """One prompt of one epoch."""

    group_id: int  # running number of the prompt since the start of the run
    epoch: int
    row_index: int
    row: dict
    attempt: int = 0  # how often it was sampled before


class Prompts:
    """All prompts from `position` on but those in `finished`, for `epochs` (math.inf = no end) epochs."""

    def __init__(self, dataset, epochs: float, position: int, finished: set[int]):
        self.dataset = dataset
        self.epochs = epochs
        self.finished = finished
        self.again: deque[int] = deque()  # group ids
        self.streams = dataset is not None and not hasattr(dataset, "__len__")
        # of the dataset; a stream's is known once its end was seen
        self.size: int | None = None if dataset is None or self.streams else len(dataset)
        self._attempts = Counter()
        self._streamed: OrderedDict[int, Prompt] = OrderedDict()
        self._new = self._stream(position) if self.streams else self._indexed(position)

    def next(self) -> Prompt | None:
        """A prompt that has to be sampled again, else the next new one; None when there are no more.

        Called on a thread: a dataset may take its time.
        """
        if not self.again:
            return next(self._new, None)
        group_id = self.again.popleft()
        if self.streams and group_id not in self._streamed:
            raise RolloutError(f"prompt {group_id} of a stream is too far back to be sampled again")
        self._attempts[group_id] += 1
        prompt = self._streamed[group_id] if self.streams else self._at(group_id)
        return replace(prompt, attempt=self._attempts[group_id])

    def _at(self, group_id: int) -> Prompt:
        if self.dataset is None:
            return Prompt(group_id, 0, group_id, {})
        epoch, row_index = divmod(group_id, self.size)
        return Prompt(group_id, epoch, row_index, self.dataset[row_index])

    def _is_over(self, group_id: int) -> bool:
        return self.size is not None and group_id >= self.epochs * self.size

    def _indexed(self, position: int):
        group_ids = itertools.takewhile(
            lambda group_id: not self._is_over(group_id), itertools.count(position)
        )
        return (self._at(group_id) for group_id in group_ids if group_id not in self.finished)

    def _stream(self, position: int):
        if position:
            print("streaming dataset: sampling restarts from its first prompt", flush=True)
        group_ids = (group_id for group_id in itertools.count(position) if group_id not in self.finished)
        for epoch in itertools.count():
            rows = iter(self.dataset)
            row, row_index = next(rows, None), 0
            if row is None:
                raise RolloutError(f"the dataset gave no row in epoch {epoch}: can it be read only once?")
            while row is not None:
                following = next(rows, None)
                if following is None:  # the size is told with the last prompt, not after it
                    self.size = row_index + 1
                group_id = next(group_ids)
                if self._is_over(group_id):
                    return
                prompt = self._streamed[group_id] = Prompt(group_id, epoch, row_index, row)
                if len(self._streamed) > STREAMED_ROWS:
                    self._streamed.popitem(last=False)
                yield prompt
                row, row_index = following, row_index + 1
