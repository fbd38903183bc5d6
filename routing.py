"""Which server a rollout asks, how many rollouts a server gets, and what becomes of those of a dead one.

    group -> the least loaded server that is up      all its rollouts go there: they share a prompt
    cap of a server: cache tokens / max_model_len, then by its /metrics every 5 s (`next_cap`)
    a server is up while the trainer says that it holds the current weights, and its requests do not fail

Where servers hold adapters (adapters.py), every request names that of the version its rollout began with. One
that a server does not know is too old, or else the server was restarted and is down.

A rollout whose server dies sends the very same request to another one. A server that was down is asked again
once the trainer names it as holding the current version, or its own label is that version.

Never: send a request to a server that the trainer has not given the current weights
(tests/test_rollout.py::test_server_without_the_current_weights_is_asked_nothing).
"""

from __future__ import annotations

import asyncio
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from client import Completion, Server, ServerError
from conversation import RolloutError

POLL_S = 5.0  # between two looks at a server's /metrics


class TooOld(Exception):
    """The adapter a rollout began with was unloaded: nothing it samples will be trained on."""


@dataclass
class Load:
    """A server and what this process has asked of it."""

    server: Server
    number: int
    cap: int  # most rollouts at once
    lost_at: int | None = None  # what the trainer had said of the servers when this one was found dead
    is_up: bool = True  # as it was last reported
    context: int | None = None  # longest sequence, in tokens
    running: int = 0
    finished: int = 0  # rollouts since the cap was last raised
    measured: bool = False  # the cap follows the server's /metrics
    preemptions: float | None = None
    retries: int = 0


def next_cap(cap: int, running: int, finished: int, kv_usage: float, waiting: float) -> int:
    """The live cap on a server's rollouts after one look at its load.

    Raised by a quarter while the cache is under 60 % and nothing waits, at most once per `cap` finished
    rollouts; lowered by 30 % above 80 %, but not again while more than the cap are still running: the last
    cut has not taken effect yet.
    """
    if kv_usage > 0.8 and running <= cap:
        return max(1, int(cap * 0.7))
    if kv_usage < 0.6 and waiting == 0 and finished >= cap:
        return math.ceil(cap * 1.25)
    return cap


class Routing:
    """The servers of a run, as the rollout loop uses them. `link` says which hold the current weights."""

    def __init__(self, options, link, metrics):
        self.options = options
        self.link = link
        self.metrics = metrics  # scoring.MetricsBuffer
        self.adapters = options.lora_sync == "adapter"  # a version is a name there
        most = options.max_concurrent_rollouts
        self.loads = [
            Load(Server(url, options.vllm_server_timeout, connections=most), number, cap=most)
            for number, url in enumerate(options.vllm_server_base_url)
        ]
        self.requests = ThreadPoolExecutor(most, thread_name_prefix="request")
        self._helpers = ThreadPoolExecutor(4, thread_name_prefix="look")

    def close(self) -> None:
        for threads in (self.requests, self._helpers):
            threads.shutdown(wait=False, cancel_futures=True)

    # ---- which one

    def up(self, load: Load) -> bool:
        return bool(self.link.holds[load.number]) and load.lost_at != self.link.told.value

    def others(self, load: Load) -> list[Load]:
        return [other for other in self.loads if other is not load and self.up(other)]

    def free(self, load: Load) -> bool:
        return self.up(load) and load.running < load.cap

    def least_loaded(self, loads) -> Load:
        return min(loads, key=lambda load: load.running / load.cap)

    def home(self, flight) -> Load:
        """The server that a group stays on, or the one that takes over; itself while there is none."""
        if not self.up(flight.load) and (others := self.others(flight.load)):
            flight.load = self.least_loaded(others)
        return flight.load

    def cap(self) -> int:
        caps = sum(load.cap for load in self.loads if self.up(load))
        return min(caps, self.options.max_concurrent_rollouts)

    def down(self) -> list[str]:
        return [load.server.url for load in self.loads if not self.up(load)]

    # ---- requests

    async def ask(self, place, request: dict) -> Completion:
        """The answer of the server at place.load, or of another one, which place.load then is."""
        while True:
            load = place.load
            give_up = functools.partial(self._lost, load)
            ask = functools.partial(load.server.complete, give_up=give_up, **request)
            try:
                answer = await asyncio.get_running_loop().run_in_executor(self.requests, ask)
            except ServerError as error:
                if self.adapters and error.status == 404:
                    if place.version < self.link.version.value - self.options.max_staleness:
                        raise TooOld from None
                    error = lost_weights(load.server.url, f"lacks the adapter {request['model']}")
                elif not error.given_up:
                    raise
                elif not self.others(load):
                    continue  # they went down meanwhile: it is the last one now
                self.set_down(load, str(error))
            else:
                if self.options.rollout_only:  # whatever weights the servers hold are the right ones
                    answer.versions = None
                if self.adapters:  # labels are those of the base weights
                    answer.versions = np.full(len(answer.token_ids), place.version, dtype=np.int32)
                if answer.versions is None or (answer.versions >= 0).all():
                    return answer
                self.set_down(load, lost_weights(load.server.url))
            load.running -= 1
            place.load = self.least_loaded(self.others(load))
            place.load.running += 1

    def _lost(self, load: Load) -> bool:
        """Is a server dead while another one is up? Called on threads, after a request has failed."""
        if not self.others(load):
            return False  # the last one is tried on, until vllm_server_timeout
        if not self.up(load):
            return True
        try:
            load.server.health()
            return False
        except ServerError:
            return True

    def set_down(self, load: Load, why: str) -> None:
        """Ask a server for nothing more. RolloutError when it is the last one."""
        if not self.others(load):
            raise RolloutError(why)
        if self.up(load):
            print(f"{load.server.url} is down, the other servers take over its rollouts: {why}", flush=True)
        load.lost_at, load.is_up = self.link.told.value, False

    def report_changes(self) -> None:
        """Say which servers are asked again, or no more; what set_down found it has said itself."""
        for load in self.loads:
            was_up, load.is_up = load.is_up, self.up(load)
            if load.is_up and not was_up:
                print(f"{load.server.url} is up again, with the current weights", flush=True)
            elif was_up and not load.is_up:
                print(f"{load.server.url} lacks the current weights and is asked for nothing", flush=True)
                self._helpers.submit(load.server.abort_all)  # paused for good, it would hold its requests

    # ---- their load

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Adapt every server's cap to its load, and record the load: of each one, and of all together."""
        call = asyncio.get_running_loop().run_in_executor
        looks = await asyncio.gather(*(call(self._helpers, self._look_at, load) for load in self.loads))
        for load, (label, _) in zip(self.loads, looks, strict=True):
            if label and not label.isdecimal() and not self.options.rollout_only:
                self.set_down(load, lost_weights(load.server.url))
            elif label == str(self.link.version.value):
                load.lost_at = None  # it was out of reach, and has lost nothing
        looks = [self._measured(load, values) for load, (_, values) in zip(self.loads, looks, strict=True)]
        for number, values in enumerate(looks if len(looks) > 1 else ()):
            for name, value in values.items():
                self.metrics.record(f"server/{number}/rollout/{name}", value)
        for name in dict.fromkeys(name for values in looks for name in values):
            values = [values[name] for values in looks if name in values]
            self.metrics.record(f"rollout/{name}", max(values) if name.endswith("_frac") else sum(values))

    def _look_at(self, load: Load) -> tuple[str | None, dict[str, float] | None]:
        """A server's label of its weights and its /metrics; None for what it has not. On a thread."""

        def told(read):
            try:
                return read()
            except ServerError:
                return None  # no such route, or it is down: its requests are retried

        if load.context is None:
            load.context = told(lambda: load.server.models()[0]["max_model_len"])
        return None if self.adapters else told(load.server.weight_version), told(load.server.metrics)

    def _measured(self, load: Load, values: dict[str, float] | None) -> dict[str, float]:
        """Adapt a server's cap, which without /metrics stays what it is; what is recorded of it."""
        retries, load.retries = load.retries, load.server.retry_count
        looked = {"vllm_retry_count": load.retries - retries}
        if values is None:
            return looked
        room = values.get("kv_cache_size_tokens", math.nan) / (load.context or math.nan)
        if not load.measured and room > 0:
            load.cap, load.measured = max(1, int(room)), True
        usage, waiting = values.get("kv_cache_usage_perc", math.nan), values.get("num_requests_waiting", 0.0)
        if load.measured:
            cap = next_cap(load.cap, load.running, load.finished, usage, waiting)
            load.finished = 0 if cap > load.cap else load.finished
            load.cap = min(cap, self.options.max_concurrent_rollouts)
        preempted, load.preemptions = load.preemptions, values.get("num_preemptions_total", 0.0)
        return looked | {
            "vllm_kv_cache_usage_frac": usage,
            "vllm_running_requests": values.get("num_requests_running", math.nan),
            "vllm_queued_requests": waiting,
            "vllm_preemption_count": 0.0 if preempted is None else max(load.preemptions - preempted, 0.0),
        }


def lost_weights(url: str, how: str = "samples with weights that this run has not sent") -> str:
    return (
        f"{url} {how}: it was restarted, and holds what it started with. Resume the run from its last "
        "checkpoint: all that is trained goes out before the first prompt"
    )
