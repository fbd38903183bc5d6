"""The rollout process as the trainer sees it: started, told what it may do, listened to, ended.

    trainer   RolloutProcess  -- version, allowance, prompts to sample again -->  child_main: a RolloutLoop
                              <-- messages, a heartbeat, a line of status ------

Never: let the process outlive the trainer (tests/test_process.py::test_the_process_ends_with_its_parent), or
the trainer wait for a process that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass

from conversation import RolloutError
from recording import Recording
from rollout import CLOSE_S, GroupMessage, load_loop


@dataclass
class DeathMessage:
    """The last words of the rollout process."""

    traceback: str


class Link:
    """What trainer and rollout process share: numbers in shared memory, and a pipe each way."""

    def __init__(self, context, servers: int):
        self.version = context.Value("q", 0, lock=False)  # of the weights on the servers
        self.allowance = context.Value("q", 0, lock=False)  # raw tokens sent and in flight since the start
        self.beat = context.Value("d", time.monotonic(), lock=False)
        self.holds = context.Array("b", [1] * servers, lock=False)  # does a server hold that version?
        self.told = context.Value("q", 0, lock=False)  # how often the trainer has said so
        self.held = context.Value("b", 0, lock=False)  # the staleness limit holds generation
        self.finish = context.Value("b", 0, lock=False)  # no new groups; the last weights are evaluated
        self.stop = context.Value("b", 0, lock=False)
        self._line = context.Array("c", 500, lock=False)
        self.again_out, self.again_in = context.Pipe(duplex=False)
        self.messages_out, self.messages_in = context.Pipe(duplex=False)

    def take_again(self) -> list[int]:
        """Groups whose prompt is to be sampled again."""
        ids = []
        while self.again_out.poll():
            ids += self.again_out.recv()
        return ids

    def say(self, line: str) -> None:
        self._line.value = line.encode()[:499]

    def said(self) -> str:
        return self._line.value.decode(errors="replace")


class Sender:
    """Sends messages from a thread, so that the loop never waits for the trainer to read."""

    def __init__(self, connection):  # the writing end of a pipe
        self._connection = connection
        self._messages = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, message) -> None:
        self._messages.put(message)

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until everything is sent."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the trainer is gone
            except Exception:
                self._connection.send(DeathMessage(traceback.format_exc()))


def child_main(options, link: Link, position: int, finished: set[int]) -> None:
    """The rollout process. It ends by os._exit, because request threads may block for minutes yet."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of all processes: the trainer decides when to stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sender = Sender(link.messages_in)
    code = 0
    try:
        loop = load_loop(options.rollout_loop)(options, link, sender.put)
        asyncio.run(loop.run(position, finished))
    except BaseException:
        code = 1
        sender.put(DeathMessage(traceback.format_exc()))
    sender.close(CLOSE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


@contextlib.contextmanager
def bare_child(payload: bytes):
    """Inside, a spawned process gets no GPU and does not import the main script, which would load torch.

    The script is needed after all when `payload`, what the process is handed, refers to something defined in
    it.
    """
    main, hidden = vars(sys.modules["__main__"]), {}
    if b"__main__" not in payload:
        hidden = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        main.update(hidden)
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices


class RolloutProcess:
    """The trainer's handle on the rollout process.

    `queue` (a queue.Queue) holds its messages; a thread empties the pipe, so a long queue never blocks the
    process and a message cut off by its death never blocks the trainer.
    """

    def __init__(self, options):
        self.options = options
        self.queue: queue.Queue = queue.Queue()
        self._context = multiprocessing.get_context("spawn")
        self._link = Link(self._context, len(options.vllm_server_base_url))
        self._process = None
        self._death: str | None = None
        self._recording = None

    def start(self, position: int, finished: set[int], version: int) -> None:
        """Sample from prompt `position` on, without `finished`; nothing starts before the first `publish`.

        Raises TypeError for an option that cannot reach another process.
        """
        for name, value in vars(self.options).items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(f"option {name} cannot be handed to the rollout process: {error}") from error
        if self.options.record:
            self._recording = Recording(self.options.record, go_on=bool(version or position or finished))
        self._link.version.value = version
        self._link.beat.value = time.monotonic()
        self._process = self._context.Process(
            target=child_main,
            args=(self.options, self._link, position, set(finished)),
            name="rollout",
            daemon=True,
        )
        with bare_child(pickle.dumps(self.options)):
            self._process.start()
        self._link.messages_in.close()  # so that the child's death ends the stream
        self._link.again_out.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                message = self._link.messages_out.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, DeathMessage):
                self._death = message.traceback
            if self._recording and isinstance(message, GroupMessage):
                self._recording.write(message)
            self.queue.put(message)

    def publish(self, version: int, allowance: int, again=(), servers=None) -> None:
        """`version` is out; `allowance` raw tokens, since the start, may be sent or in flight.

        The prompts of the groups `again` are to be sampled once more. `servers`: URLs of those that hold
        `version`, the others are asked for nothing until they are named here; None = as it was said last.
        """
        link, urls = self._link, self.options.vllm_server_base_url
        current = link.holds[:] if servers is None else [url.rstrip("/") in servers for url in urls]
        for number, holds in enumerate(current):
            link.holds[number] = holds and link.holds[number]
        link.version.value = version  # before a server that is back may be asked, after one is left out
        link.holds[:] = current
        link.told.value += servers is not None
        link.allowance.value = int(allowance)
        if again:
            with contextlib.suppress(OSError):  # a process that died is check()'s matter
                link.again_in.send(list(again))

    def finish(self) -> None:
        """Start no group any more, and evaluate the weights that the servers hold, unless that was done."""
        self._link.finish.value = 1

    @property
    def held(self) -> bool:
        """Does the staleness limit hold generation right now?"""
        return bool(self._link.held.value)

    def status(self) -> str:
        return self._link.said() or "starting"

    def check(self) -> None:
        """RolloutError with the process's own traceback when it has died, or when its heart has stopped."""
        if self._process is None:
            return
        if not self._process.is_alive():
            self._reader.join(CLOSE_S)  # its last words may still be on their way
        if self._death is not None:
            raise RolloutError(f"the rollout process died:\n{self._death}")
        if not self._process.is_alive():
            raise RolloutError(
                f"the rollout process ended with exit code {self._process.exitcode} (-9: killed, perhaps for "
                f"memory); last it said: {self.status()}"
            )
        silent = time.monotonic() - self._link.beat.value
        if silent > self.options.rollout_worker_timeout:
            raise RolloutError(
                f"no heartbeat of the rollout process for {silent:.0f} s (rollout_worker_timeout): something "
                f"holds its event loop; last it said: {self.status()}"
            )

    def stop(self) -> None:
        """End the process: asked first, then by force. Returns within seconds, and may be called twice."""
        if self._process is None:
            return
        self._link.stop.value = 1
        self._process.join(2 * CLOSE_S + 1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(2.0)
        self._reader.join(2.0)  # the queue holds its last words now
