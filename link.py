"""One server as the trainer's sender sees it: what it is, the group with its workers, an update's threads.

    look     /version and /server_info: which release, which way of taking weights, which dtype
    init     POST /init_weight_transfer_engine || the group: NCCL by an id or through a TCP store, or gloo
    begin    POST /start_weight_update; then POST /update_weights || broadcasts, each on a thread of its own
    chunks   a queue from the main thread to the broadcasts; `sent` counts them on the way back

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
from urllib.parse import urlparse

import torch

import nccl
import stream
from client import Notice, ServerError
from stream import GlooGroup, host_store, local_address

LAST_WORDS_S = 5.0  # seconds for the server's answer once the stream to it has broken
LOOK_S, HEALTH_S = 2.0, 10.0  # between two looks at the health of a server that is waited for; for its answer
OLDEST, PACKED_AT_INIT, UNIQUE_ID = (0, 26), (0, 28), (0, 30)  # vLLM's releases since when each is so
OF_ONE_END = (
    "NCCL_DEBUG",
    "NCCL_VERSION",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
)  # may differ between two machines


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

    def __init__(self, server, timeout_s: float, device: torch.device):
        self.server = server
        self.timeout_s = timeout_s
        self.device = device
        self.group = None
        self.labels = False  # does the server say which version it holds?
        self.dtype_name = "float32"
        self.lost = False
        self.packing = {}  # the fields of an update that a vLLM before 0.28 wants there
        self.error: BaseException | None = None
        self.chunks: queue.SimpleQueue = queue.SimpleQueue()
        self.sent = 0  # chunks of this update that have left
        self.running = 0  # threads
        self.call: threading.Thread | None = None  # the one that waits for the server's answer
        self.moved = threading.Condition()  # told when a thread has got on

    # ---- the group

    def init(self) -> None:
        """Look at the server, and form a group with all its workers."""
        config, release = self.look()
        backend = config["weight_transfer_config"]["backend"]
        self.dtype_name = config["model_config"]["dtype"].removeprefix("torch.")
        size = self.server.world_size() + 1
        packing = {"packed": True, "packed_buffer_size_bytes": stream.BUFFER_BYTES}
        self.packing = packing if backend == "nccl" and release < PACKED_AT_INIT else {}
        info = {"rank_offset": 1, "world_size": size} | ({} if self.packing else packing)
        made = nccl.unique_id() if backend == "nccl" else None
        store = None
        if backend == "nccl" and release >= UNIQUE_ID:
            info["nccl_unique_id_b64"] = base64.b64encode(made).decode()
        else:
            host = urlparse(self.server.url).hostname
            own = "127.0.0.1" if host in ("localhost", "127.0.0.1") else local_address(host, 80)
            store = host_store(size, self.timeout_s)
            info |= {"master_address": own, "master_port": store.port}
        self.call = self.start(self.server.init_weight_transfer, info)  # blocks until the group has formed
        self.start(self.meet, info, store, made)
        self.wait(lambda: self.running == 0, "the rendezvous")

    def look(self) -> tuple[dict, tuple[int, int]]:
        """The server's configuration and release. SyncError for what cannot work."""
        url, version = self.server.url, self.server.version()
        release = release_of(version)
        if release < OLDEST:
            raise SyncError(f"{url} is vLLM {version}; weights can be sent to 0.26 and later")
        info = self.server.server_info()
        config = info["vllm_config"]
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        way = "nccl" if self.device.type == "cuda" else "gloo"
        if backend not in ("gloo", way):
            raise SyncError(
                f"{url} takes weights by {backend!r}; a trainer on this device sends by {way!r}: start it "
                f'with --weight-transfer-config \'{{"backend":"{way}"}}\' (gloo needs the plugin of '
                "tools/vllm_gloo) or use the embedded one."
            )
        quantization = config["model_config"].get("quantization")
        if quantization:
            print(f"note: {url} quantises what it gets ({quantization}): it samples from other weights")
        if backend == "nccl":
            for line in nccl_differences(info.get("system_env") or {}):
                print(f"note: {url}: {line}", flush=True)
        self.labels = self.version() is not None
        if not self.labels:
            print(f"note: {url} (vLLM {version}) does not label weights: after a restart it samples", end=" ")
            print("from those it started with until the next update", flush=True)
        return config, release

    def version(self) -> str | None:
        """The label of the weights the server holds; None where it has none (vLLM before 0.28)."""
        try:
            return self.server.weight_version()
        except ServerError as error:
            if error.status != 404:
                raise
            return None

    def meet(self, info: dict, store, made: bytes | None) -> None:
        size = info["world_size"]
        if made is None:
            address, port = info["master_address"], info["master_port"]
            patience = self.timeout_s + LAST_WORDS_S  # whoever waits gives up first, and says what on
            self.group = GlooGroup(address, port, 0, size, patience, store)
        else:
            if store is not None:
                nccl.publish(store, made)
            self.group = nccl.NcclGroup(made, 0, size, self.device)

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
        self.sent = 0
        info = {"names": names, "dtype_names": [self.dtype_name] * len(names), "shapes": shapes}
        self.call = self.start(self.server.update_weights, info | self.packing)
        self.start(self.broadcast_chunks)

    def broadcast_chunks(self) -> None:
        """Each chunk is queued while the one before it is on its way."""
        leaving = []
        while (item := self.chunks.get()) is not None:
            leaving.append((item, self.group.broadcast(*item)))  # keeps the chunk alive
            if len(leaving) > 1:
                self.has_left(*leaving.pop(0))
        for chunk in leaving:
            self.has_left(*chunk)

    def has_left(self, _, end) -> None:
        self.group.wait(end)
        with self.moved:
            self.sent += 1
            self.moved.notify()

    def until_sent(self, count: int) -> None:
        self.wait(lambda: self.sent >= count, "the update")

    def complete(self) -> None:
        """Until the server has loaded everything."""
        self.chunks.put(None)
        self.wait(lambda: self.running == 0, "the update")

    # ---- threads

    def start(self, call, *args) -> threading.Thread:
        def run():
            try:
                call(*args)
            except BaseException as error:  # noqa: B036 - handed to the main thread, which raises it
                if self.error is None or isinstance(error, ServerError):
                    self.error = error
            with self.moved:
                self.running -= 1
                self.moved.notify()

        thread = threading.Thread(target=run, daemon=True)
        with self.moved:
            self.running += 1
        thread.start()
        return thread

    def wait(self, done, what: str) -> None:
        """Until `done()`. Raises what a thread has run into, and SyncError after `timeout_s`."""
        notice = Notice()
        with self.moved:
            while not done() and self.error is None:
                self.moved.wait(0.2)
                notice.say(f"{what} of {self.server.url}")
                if notice.waited() > self.timeout_s:
                    raise SyncError(f"{what} took more than {self.timeout_s:.0f} s")
        if self.error is not None:
            if not isinstance(self.error, ServerError):  # a broken connection tells little:
                self.call.join(LAST_WORDS_S)  # the call's answer may still be on its way
            raise self.error


def nccl_differences(system: dict) -> list[str]:
    """What the server's `system_env` tells of NCCL that is otherwise here, a line each."""
    lines = []
    installed = re.search(r"nvidia-nccl-cu\d+==(\d+)\.(\d+)", system.get("pip_packages") or "")
    ours = nccl.version()
    if installed and (int(installed[1]), int(installed[2])) != ours[:2]:
        theirs = ".".join(installed.groups())
        lines.append(
            f"it has NCCL {theirs}, this trainer {ours[0]}.{ours[1]}: they may not understand each other"
        )
    if not system.get("env_vars"):
        return lines
    variables = dict(re.findall(r"^(NCCL_\w+)=(.*)$", system["env_vars"], re.MULTILINE))
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    for name in sorted(variables.keys() | own.keys()):
        if not name.startswith(OF_ONE_END) and variables.get(name) != own.get(name):
            lines.append(f"{name} is {variables.get(name)} there and {own.get(name)} here: set it alike")
    return lines


def explain(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if "Duplicate GPU" in text:
        text += (
            " (NCCL takes one rank per GPU, and the server is on this trainer's: give it another by "
            "CUDA_VISIBLE_DEVICES, or start it with the backend gloo, see tools/vllm_gloo)"
        )
    return text


def failure(call, link: Link) -> Exception | None:
    """What call(link) raises, or what the server's health tells meanwhile.

    A vLLM whose engine was killed leaves a call without an answer for as long as its connection is open.
    """
    outcome = []

    def run():
        try:
            call(link)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LOOK_S)
    while thread.is_alive():
        try:
            link.server.health(HEALTH_S)
        except ServerError as error:
            thread.join(LAST_WORDS_S)
            return outcome[0] if outcome else error
        thread.join(LOOK_S)
    return outcome[0]


def alive(server) -> bool:
    try:
        server.health()
    except ServerError:
        return False
    return True
