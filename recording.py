"""Recordings: every group that was generated in a file, and training from that file without a server.

    rollout process -> Recording -> FILE        --record FILE: beside training, in the order of the queue
    FILE -> Replay -> train()                   --replay FILE: the `rollouts` end, with NoServers as `sync`

A line of JSON per message. Arrays are the base64 of their bytes, so a replay under the recorded run's options
trains on the same numbers in the same order, and its losses are equal bit for bit
(tests/test_loop.py::test_replayed_losses_are_equal_bit_for_bit).

Never: pickle. A recording travels with a bug report, and reading one must not run anything.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import mmap
import os
import queue
import re
import threading
from pathlib import Path

import numpy as np

from conversation import RolloutError
from packing import Sample
from rollout import EndMessage, GroupMessage

AHEAD = 64  # groups that are read before they are asked for
GROUP = re.compile(r'\{"group_id": (\d+).*\}\n')  # a whole line of a recording


class Recording:
    """Writes groups to a file; `go_on` appends to what a run before its resume has written."""

    def __init__(self, path: str, go_on: bool):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if go_on and Path(path).is_file():
            drop_cut_line(path)
        self._file = open(path, "a" if go_on else "w")

    def write(self, message: GroupMessage) -> None:
        samples = [{name: encoded(v) for name, v in vars(sample).items()} for sample in message.samples]
        try:
            self._file.write(json.dumps({**vars(message), "samples": samples}) + "\n")
            self._file.flush()  # a run that is killed has written all that it was given
        except OSError as error:  # a full disk does not end a run that trains
            print(f"--record {self._file.name}: {error}; nothing more is written to it", flush=True)
            self._file = open(os.devnull, "w")


def drop_cut_line(path: str) -> None:
    """Shorten a file to its last whole line: a run that was killed may have left half of one more."""
    with open(path, "rb+") as file:
        if file.seek(0, os.SEEK_END):
            with mmap.mmap(file.fileno(), 0) as text:
                end = text.rfind(b"\n") + 1
            file.truncate(end)


def encoded(value):
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": str(value.dtype), "shape": value.shape, "data": data}
    if isinstance(value, tuple):
        return {"tuple": [encoded(member) for member in value]}
    return value


def decoded(value):
    if isinstance(value, dict) and "tuple" in value:
        return tuple(decoded(member) for member in value["tuple"])
    if isinstance(value, dict) and "dtype" in value:
        array = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        return array.reshape(value["shape"]).copy()
    return value


def read(line: str, where: str) -> GroupMessage:
    """One line of a recording; ValueError says which line is none."""
    try:
        values = json.loads(line)
        known = {f.name for f in dataclasses.fields(Sample)}
        samples = [
            Sample(**{name: decoded(value) for name, value in sample.items() if name in known})
            for sample in values.pop("samples")
        ]
        return GroupMessage(samples=samples, **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is no recorded group: {error}") from error


class Replay:
    """What train() calls `rollouts`: the groups of a recording, in order. One pass over it is one epoch.

    A group that was sampled again, for being too old or after a resume, counts as it was the last time.
    """

    held = False

    def __init__(self, path: str):
        self.path = path
        self.queue: queue.Queue = queue.Queue(AHEAD)
        with open(path, errors="replace") as file:
            found = list(map(GROUP.match, file))
        if not found or not all(found):
            bad = next((i for i, match in enumerate(found) if not match), 0)
            raise ValueError(
                f"{path} is no recording: line {bad + 1} is no whole group (cut off? then delete it)"
            )
        self.last = {int(match[1]): number for number, match in enumerate(found, start=1)}
        self.size = len(self.last)
        self._read_all = False
        self._error: Exception | None = None
        self._over = threading.Event()

    def start(self, position: int, finished: set[int], version: int) -> None:
        """Groups that a resumed run has trained already are left out."""
        self._thread = threading.Thread(target=self._fill, args=(position, set(finished)), daemon=True)
        self._thread.start()

    def _fill(self, position: int, finished: set[int]) -> None:
        try:
            with open(self.path) as file:
                for number, line in enumerate(file, start=1):
                    group = int(GROUP.match(line)[1])
                    if number == self.last[group] and group >= position and group not in finished:
                        message = read(line, f"line {number} of {self.path}")
                        message.dataset_size = self.size
                        self._put(message)
            self._put(EndMessage(self.size))
        except Exception as error:
            self._error = error
        self._read_all = True

    def _put(self, message) -> None:
        while not self._over.is_set():
            try:
                return self.queue.put(message, timeout=0.5)
            except queue.Full:
                pass

    def check(self) -> None:
        """Called while the queue is empty: RolloutError when nothing more will come."""
        if self._error is not None:
            raise RolloutError(f"the replay failed: {self._error}") from self._error
        if self._read_all and self.queue.empty():
            raise RolloutError(
                f"{self.path} is used up after {self.size} groups. Lower --max_steps, or raise "
                "--max_staleness if samples were dropped as too old: a replay cannot sample prompts again"
            )

    def publish(self, version: int, allowance: int, again=(), servers=None) -> None:
        pass

    def status(self) -> str:
        return f"replays {self.path}"

    def stop(self) -> None:
        self._over.set()


class NoServers:
    """What train() calls `sync`, where nobody samples: weights go nowhere."""

    def nothing(self, *_) -> None:
        pass

    init = prepare = pause = send = resume = close = nothing
