"""One server as the trainer's sender sees it: what it is, the group with its workers, an update's threads.

    look     /version and /server_info: which release, which way of taking weights, which dtype
    init     POST /init_weight_transfer_engine || the group: NCCL by an id or through a TCP store, or gloo
    begin    POST /start_weight_update; then POST /update_weights || broadcasts, each on a thread of its own
    chunks   a queue from the main thread to the broadcasts; `left` counts them on the way back

What the releases of vLLM do differently: before 0.28 the packing is told with every update and no weights are
labelled, before 0.30 NCCL's id comes through a TCP store.

Never: a wait without an end. A broadcast that is stuck ends when the group is closed, a call that gets no
answer when the server's health fails (`failure`).
"""

from __future__ import annotations

import base64
import os
import queue
import re
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from urllib.parse import urlparse

import torch

import stream
from client import Notice, ServerError
from stream import GlooGroup, host_store, local_address

LAST_WORDS_S = 5.0  # seconds for the server's answer once the stream to it has broken
LOOK_S, HEALTH_S = 2.0, 10.0  # between two looks at the health of a server that is waited for; for its answer
OLDEST, PACKED_AT_INIT, UNIQUE_ID = (0, 26), (0, 28), (0, 30)  # vLLM's releases since when each is so
# 0.26 knows its layers by other names under LoRA, and refuses whole weights; 0.32 was seen to take them
TAKES_WEIGHTS_UNDER_LORA = (0, 32)
OF_ONE_END = ("NCCL_DEBUG", "NCCL_VERSION", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID")  # may differ


class SyncError(RuntimeError):
    """An update failed; the text says what the server answered, what state it is in, and what to do."""


def release_of(version: str) -> tuple[int, int]:
    """(0, 32) of vLLM 0.32.0; a build without a release's number (0.1.dev...) counts as the newest."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    return (99, 0) if "dev" in version and release < OLDEST else release


class Link:
    """One server and the one sender that feeds it: HTTP calls that block and broadcasts run on threads.

    The main thread hands chunks over and waits; whatever goes wrong in a thread ends its wait. A link whose
    server has failed is closed and never used again: a new one takes its place.
    """

    def __init__(self, server, timeout_s: float, device):
        self.server = server
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self.group = None
        self.labels = False  # does the server say which version it holds?
        self.dtype_name = "float32"
        self.packing = {}  # the fields of an update that a vLLM before 0.28 wants there
        self.chunks: queue.SimpleQueue = queue.SimpleQueue()

    # ---- the group

    def init(self) -> None:
        """Look at the server, and form a group with all its workers."""
        backend, release = self.look()
        size = self.server.world_size() + 1
        packing = {"packed": True, "packed_buffer_size_bytes": stream.BUFFER_BYTES}
        self.packing = packing if backend == "nccl" and release < PACKED_AT_INIT else {}
        info = {"rank_offset": 1, "world_size": size} | ({} if self.packing else packing)
        made = stream.nccl_id() if backend == "nccl" else None
        store = None
        if backend == "nccl" and release >= UNIQUE_ID:
            info["nccl_unique_id_b64"] = base64.b64encode(made).decode()
        else:
            store = host_store(size, self.timeout_s)
            own = local_address(urlparse(self.server.url).hostname)
            info |= {"master_address": own, "master_port": store.port}
        self.call = background(self.server.init_weight_transfer, info)  # blocks until the group has formed
        self.carrier = background(self.meet, info, store, made)
        self.until_over()
        self.group = self.carrier.result()

    def look(self) -> tuple[str, tuple[int, int]]:
        """The server's way of taking weights, and its release. SyncError for what cannot work."""
        url, version = self.server.url, self.server.version()
        release = release_of(version)
        if release < OLDEST:
            raise SyncError(f"{url} is vLLM {version}; weights can be sent to 0.26 and later")
        info = self.server.server_info()
        config = info["vllm_config"]
        model, backend = config["model_config"], (config.get("weight_transfer_config") or {}).get("backend")
        way = "nccl" if self.device.type == "cuda" else "gloo"
        if backend not in ("gloo", way):
            raise SyncError(
                f"{url} takes weights by {backend!r}; a trainer on this device sends by {way!r}: start it "
                f'with --weight-transfer-config \'{{"backend":"{way}"}}\' (gloo needs the plugin of '
                "tools/vllm_gloo) or use the embedded one."
            )
        if config.get("lora_config") and release < TAKES_WEIGHTS_UNDER_LORA:
            raise SyncError(
                f"{url} is vLLM {version} with --enable-lora, which takes no whole weights: start it without "
                "it, or train with --lora_r and --lora_sync adapter"
            )
        self.dtype_name = model["dtype"].removeprefix("torch.")
        self.labels = self.server.weight_version() is not None
        notes = nccl_differences(info.get("system_env") or {}) if backend == "nccl" else []
        if how := model.get("quantization"):
            notes.append(f"it quantises what it gets ({how}): it samples from other weights")
        if self.server.is_paused():
            notes.append("it was left paused: it gets every weight before it is resumed")
        if not self.labels:
            notes.append("it labels no weights: restarted, it samples from its own until the next update")
        for note in notes:
            print(f"note: {url} (vLLM {version}): {note}", flush=True)
        return backend, release

    def meet(self, info: dict, store, made: bytes | None):
        size = info["world_size"]
        if made is None:
            patience = self.timeout_s + LAST_WORDS_S  # whoever waits gives up first, and says what on
            return GlooGroup(info["master_address"], info["master_port"], 0, size, patience, store)
        if store is not None:
            stream.publish_nccl_id(store, made)
        return stream.NcclGroup(made, 0, size, self.device)

    def close(self) -> None:
        """Leave the group; a broadcast that is stuck in NCCL ends."""
        self.chunks.put(None)
        if self.group is not None:
            self.group.close()

    # ---- an update

    def begin(self, names: list[str], shapes: list[list[int]]) -> None:
        """Open the update on the server and start the two threads that carry it."""
        try:
            self.server.start_update()
        except ServerError as error:  # a trainer that died here left it open: this update fills it
            if "already active" not in str(error):
                raise
        self.chunks, self.left = queue.SimpleQueue(), threading.Semaphore(0)
        info = {"names": names, "dtype_names": [self.dtype_name] * len(names), "shapes": shapes}
        self.call = background(self.server.update_weights, info | self.packing)
        self.carrier = background(self.broadcast_chunks)
        for thread in (self.call, self.carrier):
            thread.add_done_callback(lambda _: self.left.release())  # whoever waits for a chunk looks again

    def broadcast_chunks(self) -> None:
        """Each chunk is queued while the one before it is on its way."""
        on_its_way = None
        while True:
            chunk = self.chunks.get()
            end = None if chunk is None else self.group.broadcast(*chunk)
            if on_its_way is not None:
                self.group.wait(on_its_way[1])
                self.left.release()
            if chunk is None:
                return
            on_its_way = chunk, end  # keeps the chunk alive

    def until_one_has_left(self) -> None:
        if not self.over():  # else what the end has released may be used up, and the other thread stuck
            self.left.acquire()
        if self.over():
            self.until_over()

    def over(self) -> bool:
        """Has one of the two threads ended? With chunks to come that is a failure."""
        return self.call.done() or self.carrier.done()

    def complete(self) -> None:
        """Until the server has loaded everything."""
        self.chunks.put(None)
        self.until_over()

    def until_over(self) -> None:
        """Until the server has answered and the other thread is through; raises what either ran into."""
        wait([self.call, self.carrier], return_when=FIRST_EXCEPTION)
        if self.carrier.done() and self.carrier.exception():  # a broken connection tells little:
            wait([self.call], LAST_WORDS_S)  # the call's answer may still be on its way
        for thread in (self.call, self.carrier):
            if thread.done():
                thread.result()


def background(call, *args) -> Future:
    """call(*args) on a thread that dies with the process, however long it is stuck."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(call(*args))
        except BaseException as error:  # noqa: B036 - raised where the outcome is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def failure(call, link: Link, step: str) -> BaseException | None:
    """What call(link) raises, or what the server's health tells meanwhile; SyncError after `timeout_s`.

    A vLLM whose engine was killed leaves a call without an answer for as long as its connection is open.
    """
    outcome, notice = background(call, link), Notice()
    while not wait([outcome], LOOK_S).done:
        notice.say(f"{step} of {link.server.url}")
        if notice.waited() > link.timeout_s:
            return SyncError(f"{step} took more than {link.timeout_s:.0f} s")
        try:
            link.server.health(HEALTH_S)
        except ServerError as error:
            if not wait([outcome], LAST_WORDS_S).done:
                return error
    return outcome.exception()


def alive(server) -> bool:
    try:
        server.health()
    except ServerError:
        return False
    return True


def nccl_differences(system: dict) -> list[str]:
    """What the server's `system_env` tells of NCCL that is otherwise here, a line each."""
    lines, ours, told = [], stream.nccl_version(), system.get("env_vars") or ""
    theirs = re.search(r"nvidia-nccl-cu\d+==(\d+)\.(\d+)", system.get("pip_packages") or "")
    if theirs and (int(theirs[1]), int(theirs[2])) != ours[:2]:
        both = f"NCCL {theirs[1]}.{theirs[2]}, this trainer {ours[0]}.{ours[1]}"
        lines.append(f"it has {both}: they may not understand each other")
    there = dict(re.findall(r"^(NCCL_\w+)=(.*)$", told, re.MULTILINE))
    here = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    for name in sorted(there.keys() | here.keys()) if told else ():
        if not name.startswith(OF_ONE_END) and there.get(name) != here.get(name):
            lines.append(f"{name} is {there.get(name)} there and {here.get(name)} here: set it alike")
    return lines
