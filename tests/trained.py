"""Train, and write down which samples every step was made of: trained.py OUT STOP_IN --name value ...

One line of OUT a step, a list of [group, row, rollout]. The process ends, as if it had crashed, when step
STOP_IN closes (0 = never). test_faults.py compares an uninterrupted run with one that was resumed.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

import train as trainer  # noqa: E402
from feed import Feed  # noqa: E402


class RecordedFeed(Feed):
    out = Path()
    stop_in = 0
    taken: list | None = None
    closed = 0

    def use(self, plan):
        self.taken = (self.taken or []) + [
            (s.group_id, s.row_index, s.rollout_id) for row in plan for s in row if s.trained.any()
        ]
        return super().use(plan)

    def close_step(self, seconds, microbatches):
        self.closed += 1
        if self.closed == self.stop_in:
            raise RuntimeError("stopped by the test")
        super().close_step(seconds, microbatches)
        with self.out.open("a") as file:
            file.write(json.dumps(self.taken) + "\n")
        self.taken = None


if __name__ == "__main__":
    RecordedFeed.out, RecordedFeed.stop_in = Path(sys.argv[1]), int(sys.argv[2])
    trainer.Feed = RecordedFeed
    del sys.argv[1:3]
    trainer.main()
