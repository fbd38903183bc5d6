"""Weights from the trainer to the servers: one packed byte stream per server, while its requests wait in
place.

    every rank   gather p1 | gather p2 | gather p3 ...           FSDP shards -> full tensors, in one order
    rank 0                  cast -> chunk of bytes -> broadcast  one sender per server, never two
    server       pause .. start .. update (receives, loads) .. finish .. resume

The routes and the byte stream are vLLM's. The stream is a pure function of (names, dtypes, shapes, buffer
size), so it carries no headers: both ends cut it with `packed_chunks`. What differs between servers is the
communicator: gloo here, between CPUs, or where trainer and embedded server share a device.

An update has four phases, which train.py times: pause (requests in flight stay open), barrier over the
ranks, send, resume. Failures:

    the server answers an error, or dies       SyncError with the server's own text; the server stays paused
    the broadcast gets stuck                   its group has a deadline; the HTTP call has one too
    a rank of the trainer dies                 torchrun ends the others; the server stays paused

Never: resume after a failed update (the server holds half an update; only one complete update makes it
safe), block the main thread in a broadcast, or let a collective of the ranks and one of the senders wait
for each other.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from client import Notice, ServerError

BUFFER_BYTES = 256 << 20  # a chunk is closed once it has passed this size
LAST_WORDS_S = 5.0  # seconds for the server's answer once the stream to it has broken
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what wrappers insert into names


class SyncError(RuntimeError):
    """An update failed; the text says what the server answered, what state it is in, and what to do."""


class TensorSpec(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def packed_chunks(names, dtype_names, shapes, buffer_bytes: int) -> list[list[TensorSpec]]:
    """Cut a list of tensors into the chunks of vLLM's packed stream; sender and receiver must derive the
    same cuts.

    A chunk is closed by the tensor that takes it past `buffer_bytes` (that tensor is inside). Tensors are
    never split, nothing is padded. Raises ValueError for a tensor that would start at an address its dtype
    cannot be read from.
    """
    chunks, current, size = [], [], 0
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        if size % dtype.itemsize:
            raise ValueError(
                f"{name} ({dtype_name}) would start at byte {size} of its chunk; send one dtype per update"
            )
        spec = TensorSpec(name, dtype, tuple(shape), math.prod(shape) * dtype.itemsize)
        current.append(spec)
        size += spec.nbytes
        if size > buffer_bytes:
            chunks.append(current)
            current, size = [], 0
    return chunks + [current] if current else chunks


def checkpoint_name(name: str) -> str:
    """The name a parameter has in the checkpoint: what wrappers put into it is taken out again."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def sent_parameters(model) -> list[tuple[str, torch.nn.Parameter]]:
    """What goes to a server, in order: all that training can change, once (a tied head is the embedding)."""
    return [(checkpoint_name(name), p) for name, p in model.named_parameters() if p.requires_grad]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter, sharded or not. Sharded ones are gathered: every rank has to call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GlooGroup:
    """Rank 0 (a trainer) and the workers of one server, over TCP. The constructor ends with an all-reduce
    of one float.

    `store` is given on rank 0, which hosts it (`host_store`); the others reach it at address:port. Every
    call ends within `timeout_s` with an error from torch when another member is gone.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float, store=None):
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(address, port, world_size, False, timeout, use_libuv=False)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        loopback = address == "localhost" or address.startswith("127.")
        own = "127.0.0.1" if loopback else local_address(address, port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        self.store = store  # the group reads it for as long as it lives
        self.group = dist.ProcessGroupGloo(store, rank, world_size, options)
        self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, chunk: torch.Tensor) -> None:
        """Rank 0's uint8 bytes into everyone's tensor, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([chunk], options).wait()

    def close(self) -> None:
        self.group = self.store = None


def host_store(world_size: int, timeout_s: float) -> dist.TCPStore:
    """The meeting point of a group, on a free port of this machine; does not wait for the others."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore("0.0.0.0", 0, world_size, True, timeout, wait_for_workers=False, use_libuv=False)


def local_address(host: str, port: int) -> str:
    """The address of this machine on the interface that leads to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 80))
        return probe.getsockname()[0]


class Link:
    """One server and the one sender that feeds it: the update call and the broadcasts run on threads of
    their own.

    The main thread hands chunks over and looks at `error`; whatever goes wrong in either thread ends up
    there.
    """

    def __init__(self, server, timeout_s: float):
        self.server = server
        self.timeout_s = timeout_s
        self.group = None
        self.dtype_name = "float32"
        self.error: BaseException | None = None
        self.chunks: queue.Queue = queue.Queue(maxsize=1)  # the next chunk is gathered while this one is sent
        self.threads: list[threading.Thread] = []

    def init(self) -> None:
        config = self.server.server_info()["vllm_config"]
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend != "gloo":
            raise SyncError(
                f"{self.server.url} takes weights by {backend!r}; this trainer sends by 'gloo': start it "
                """with --weight-transfer-config '{"backend":"gloo"}' or use the embedded one."""
            )
        self.dtype_name = config["model_config"]["dtype"].removeprefix("torch.")
        world_size = self.server.world_size() + 1
        host = urlparse(self.server.url).hostname
        store = host_store(world_size, self.timeout_s)
        info = {
            "master_address": "127.0.0.1" if host in ("localhost", "127.0.0.1") else local_address(host, 80),
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
        }
        self.start(self.server.init_weight_transfer, info)  # blocks in the server until the group has formed
        self.start(self.meet, info, store)
        self.join("the rendezvous")

    def meet(self, info: dict, store) -> None:
        address, port, size = info["master_address"], info["master_port"], info["world_size"]
        patience = self.timeout_s + LAST_WORDS_S  # whoever joins this thread gives up first, and says what on
        self.group = GlooGroup(address, port, 0, size, patience, store)

    def start(self, call, *args) -> None:
        def run():
            try:
                call(*args)
            except BaseException as error:  # noqa: B036 - handed to the main thread, which raises it
                if self.error is None or isinstance(error, ServerError):
                    self.error = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def begin(self, update_info: dict) -> None:
        """Open the update on the server and start the two threads that carry it."""
        self.server.start_update()
        self.start(self.server.update_weights, update_info)
        self.start(self.broadcast_chunks)

    def broadcast_chunks(self) -> None:
        while (chunk := self.chunks.get()) is not None:
            self.group.broadcast(chunk)

    def put(self, chunk: torch.Tensor | None) -> None:
        """Hand a chunk to the sender (None ends the stream); raises what either thread has run into."""
        notice = Notice()
        while True:
            self.raise_error("the update")
            try:
                return self.chunks.put(chunk, timeout=0.2)
            except queue.Full:
                notice.say(f"{self.server.url} to take a chunk of weights")
                if notice.waited() > self.timeout_s:
                    raise SyncError(self.describe(f"no chunk was taken for {self.timeout_s:.0f} s")) from None

    def join(self, what: str) -> None:
        notice = Notice()
        while any(thread.is_alive() for thread in self.threads):
            self.raise_error(what)
            notice.say(f"{what} of {self.server.url}")
            if notice.waited() > self.timeout_s:
                raise SyncError(self.describe(f"{what} took more than {self.timeout_s:.0f} s"))
            time.sleep(0.005)
        self.threads.clear()
        self.raise_error(what)

    def raise_error(self, what: str) -> None:
        if self.error is not None:
            if not isinstance(self.error, ServerError) and self.threads:  # a broken connection tells little:
                self.threads[0].join(LAST_WORDS_S)  # the call's answer may still be on its way
            raise SyncError(self.describe(f"{what} failed: {self.error}")) from self.error

    def describe(self, problem: str) -> str:
        return (
            f"weights to {self.server.url}: {problem}. If the server still runs, it is paused and may hold "
            "half an update: do not resume it. Start this run again (every weight goes out before the first "
            "prompt), or restart the server."
        )


class WeightSync:
    """What train() calls `sync`: init, then pause / send / resume for each version, close at the end.

    Every rank has one; only rank 0's has servers. `send` has to be called by all ranks.
    """

    def __init__(self, servers, timeout_s: float):
        self.links = [Link(server, timeout_s) for server in servers]

    def init(self) -> None:
        for link in self.links:
            if link.server.is_paused():
                print(
                    f"{link.server.url} was left paused; it gets every weight before it is resumed",
                    flush=True,
                )
            link.init()

    def pause(self) -> None:
        """Stop generation in place: requests in flight stay open and are read again under the new weights."""
        for link in self.links:
            link.server.pause()

    @torch.no_grad()
    def send(self, model, version: int) -> None:
        """One complete update to every server, labelled `version`. All ranks gather, in the same order."""
        parameters = sent_parameters(model)
        dtype_names = {link.dtype_name for link in self.links} or {"float32"}
        if len(dtype_names) > 1:
            raise SyncError(
                f"the servers hold different dtypes ({sorted(dtype_names)}); start them all with one --dtype"
            )
        dtype_name = dtype_names.pop()
        names = [name for name, _ in parameters]
        shapes = [list(p.shape) for _, p in parameters]
        chunks = packed_chunks(names, [dtype_name] * len(names), shapes, BUFFER_BYTES)
        for link in self.links:
            link.begin({"names": names, "dtype_names": [dtype_name] * len(names), "shapes": shapes})
        gathered = (full_tensor(p) for _, p in parameters)
        for chunk in chunks:
            tensors = [next(gathered) for _ in chunk]  # a collective of the ranks, on the main thread of each
            if self.links:
                packed = torch.cat(
                    [t.to("cpu", spec.dtype).reshape(-1) for t, spec in zip(tensors, chunk, strict=True)]
                )
                for link in self.links:
                    link.put(packed.view(torch.uint8))
        for link in self.links:
            link.put(None)
        for link in self.links:
            link.join("the update")
            link.server.finish_update(str(version))

    def resume(self) -> None:
        for link in self.links:
            link.server.resume()

    def close(self) -> None:
        for link in self.links:
            if link.group is not None:
                link.group.close()
