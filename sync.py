"""Weights from the trainer to the servers: one packed byte stream per server, while its requests wait in
place.

    every rank   gather p1 | gather p2 | gather p3 ...            FSDP shards -> full tensors, in one order
    rank 0             pack: bytes of one chunk | broadcast       the next chunk is packed meanwhile
    server       pause .. start .. update (receives, loads) .. finish .. resume

The routes and the byte stream are vLLM's (0.26 and later, or serve.py). The stream is a pure function of
(names, dtypes, shapes, buffer size), so it carries no headers: both ends cut it with `packed_chunks`. What
differs between servers is the communicator: NCCL between GPUs (nccl.py), gloo between CPUs and wherever
trainer and server share a GPU, which NCCL refuses. At most two chunks exist at a time, of 256 MiB and a
tensor each; the first two are made before anything is paused.

An update that fails leaves one server in one of these states. The error names it:

    step             the server holds              what to do
    the rendezvous   what it held                  mend what the text says, start the run again
    the pause        what it held, maybe paused    start the run again: it sends everything, then resumes
    the start        what it held, paused          the same
    the update       half an update, paused        the same, and never resume it by hand: that kills vLLM.
                                                   After a wrong shape it takes no update: restart it
    the finish       perhaps half an update        as for the update
    the resume       the new version, paused       POST /resume, or start the run again

With several servers the run goes on without one that failed: its requests go to the others (rollout.py), and
once it answers again it joins a new group and is part of the next update. The run stops when none is left,
when the first update fails, or when the failed one lives but tells nobody which weights it holds.

Never: resume after a failed update; block the main thread in a broadcast; let a collective of the ranks and
one of the senders wait for each other; send a part of the parameters that a server has fused into one.
"""

from __future__ import annotations

import base64
import math
import os
import queue
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from transformers.core_model_loading import WeightRenaming

import nccl
from client import Notice, ServerError
from lora import adapted_layers, is_adapter, merging

BUFFER_BYTES = 256 << 20  # a chunk is closed once it has passed this size
LAST_WORDS_S = 5.0  # seconds for the server's answer once the stream to it has broken
LOOK_S, HEALTH_S = 2.0, 10.0  # between two looks at the health of a server that is waited for; for its answer
RETRY_S = 2.0  # seconds between two looks at a server that was lost
OLDEST, PACKED_AT_INIT, UNIQUE_ID = (0, 26), (0, 28), (0, 30)  # vLLM's releases since when each is so
OF_ONE_END = (
    "NCCL_DEBUG",
    "NCCL_VERSION",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
)  # may differ between two machines
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
    """What goes to a server, in order, under the names of the checkpoint: all that training can change, once
    (a tied head is the embedding).

    What is frozen goes along where something beside it is trained: a server that fuses q, k and v takes all
    three or none (tests/test_sync.py::test_a_frozen_part_of_a_trained_block_goes_along). Under adapters the
    whole language model goes: a server need not hold the weights they were made for.
    """
    parameters = [(checkpoint_name(name), p) for name, p in model.named_parameters()]
    trained = {block(name) for name, p in parameters if p.requires_grad}
    if adapted_layers(model):
        language = {
            id(p) for m in (model.get_decoder(), model.get_output_embeddings()) for p in m.parameters()
        }
        trained |= {block(name) for name, p in parameters if id(p) in language}
    parameters = [(name, p) for name, p in parameters if not is_adapter(name)]
    renamings = [
        conversion.reverse_transform() for conversion in getattr(model, "_weight_conversions", None) or ()
    ]
    renamings = [renaming for renaming in renamings[::-1] if isinstance(renaming, WeightRenaming)]
    sent = []
    for name, parameter in parameters:
        if block(name) in trained:
            for renaming in renamings:  # what from_pretrained renamed gets back its name
                name, _ = renaming.rename_source_key(name)
            sent.append((name, parameter))
    return sent


def block(name: str) -> str:
    """The module that owns a parameter's layer: model.layers.0.self_attn of ...self_attn.q_proj.weight."""
    return name.rsplit(".", 2)[0]


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
        """Rank 0's uint8 bytes into everyone's tensor, in place; a sender's may lie on a GPU."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([chunk.cpu()], options).wait()

    def close(self) -> None:
        """Leave. A broadcast that is stuck holds the group until its timeout; nobody waits for that."""
        held = [self.group, self.store]
        self.group = self.store = None
        leaving = threading.Thread(target=held.clear, daemon=True)
        leaving.start()
        leaving.join(1.0)


def host_store(world_size: int, timeout_s: float) -> dist.TCPStore:
    """The meeting point of a group, on a free port of this machine; does not wait for the others."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore("0.0.0.0", 0, world_size, True, timeout, wait_for_workers=False, use_libuv=False)


def local_address(host: str, port: int) -> str:
    """The address of this machine on the interface that leads to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 80))
        return probe.getsockname()[0]


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
        packing = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES}
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
        while (item := self.chunks.get()) is not None:
            chunk, packed = item
            if packed is not None:
                packed.synchronize()  # the main thread has packed it on its own stream
            self.group.broadcast(chunk)
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
    variables = dict(re.findall(r"^(NCCL_\w+)=(.*)$", system.get("env_vars") or "", re.MULTILINE))
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


RUN_AGAIN = "start this run again (every weight goes out before the first prompt, then it is resumed)"
HALF = f"It is paused and may hold half an update: do not resume it; {RUN_AGAIN}, or restart the server."
ADVICE = {  # by the step that failed: what the server holds, and what to do
    "the rendezvous": "It holds what it held; mend that and start this run again.",
    "the pause": f"It holds what it held; {RUN_AGAIN}.",
    "the start": f"It is paused and holds what it held; {RUN_AGAIN}.",
    "the update": HALF,
    "the finish": HALF,
    "the resume": f"It is paused and holds the new weights: POST /resume to it, or {RUN_AGAIN}.",
}


class WeightSync:
    """What train() calls `sync`: init, then prepare, pause, send, resume for each version, close at the end.

    Every rank has one; only rank 0's has servers. `init`, `prepare` and `send` are called by all ranks.
    """

    def __init__(self, servers, timeout_s: float, device: torch.device = torch.device("cpu")):  # noqa: B008
        self.timeout_s = timeout_s
        self.device = device
        self.links = [Link(server, timeout_s, device) for server in servers]
        self.dtype_name = "float32"
        self.version: int | None = None  # that every server in use holds
        self.update = None  # names, shapes and chunks of the one that is prepared
        self.packed = []  # its chunks that are ready, at most two
        self.returned: queue.SimpleQueue = queue.SimpleQueue()  # links to servers that were lost
        self.closed = False

    def in_use(self) -> list[Link]:
        return [link for link in self.links if not link.lost]

    def init(self) -> None:
        for link in self.links:
            if link.server.is_paused():
                print(
                    f"{link.server.url} was left paused; it gets every weight before it is resumed",
                    flush=True,
                )
        self.each("the rendezvous", Link.init)
        names = {link.dtype_name for link in self.links} or {self.dtype_name}
        if len(names) > 1:
            raise SyncError(
                f"the servers hold different dtypes ({sorted(names)}); start them all with one --dtype"
            )
        told = [names.pop()]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        self.dtype_name = told[0]

    @torch.no_grad()
    def prepare(self, model) -> None:
        """What can be done while the servers still generate: the next update's first chunks."""
        while not self.returned.empty():
            link = self.returned.get()
            self.links[[old.server for old in self.links].index(link.server)] = link
        if self.version is not None:
            self.each("the rendezvous", self.greet)
        parameters = sent_parameters(model)
        names = [name for name, _ in parameters]
        shapes = [list(p.shape) for _, p in parameters]
        chunks = packed_chunks(names, [self.dtype_name] * len(names), shapes, BUFFER_BYTES)
        dtype = getattr(torch, self.dtype_name)
        merged = merging(model)
        self.gathered = (full_tensor(merged(p).detach().to(dtype)) for _, p in parameters)
        self.update = names, shapes, chunks
        self.packed = [self.pack(chunk) for chunk in chunks[:2]]

    def greet(self, link: Link) -> None:
        """A server that was restarted since the last update needs a new group."""
        if link.labels and link.version() != str(self.version):
            print(f"{link.server.url} was restarted: it gets every weight again", flush=True)
            link.close()
            link.chunks = queue.SimpleQueue()
            link.init()

    def pack(self, chunk: list[TensorSpec]):
        """Gather the tensors of a chunk, on all ranks, and copy them into its bytes (None without servers).

        With them comes what tells that they are complete: an event of the GPU, None on the CPU.
        """
        data, start = None, 0
        for spec, tensor in zip(chunk, self.gathered):  # noqa: B905 - the generator goes on in the next chunk
            if data is None and self.links:
                data = torch.empty(sum(s.nbytes for s in chunk), dtype=torch.uint8, device=tensor.device)
            if self.links:
                part = data[start : start + spec.nbytes]
                part.view(spec.dtype).view(spec.shape).copy_(tensor)
                start += spec.nbytes
        complete = None
        if data is not None and data.is_cuda:
            complete = torch.cuda.Event()
            complete.record()
        return data, complete

    def pause(self) -> None:
        """Stop generation in place: requests in flight stay open and are read again under the new weights."""
        self.each("the pause", lambda link: link.server.pause())

    @torch.no_grad()
    def send(self, model, version: int) -> None:
        """One complete update to every server, labelled `version`. All ranks gather, in the same order."""
        if self.update is None:
            self.prepare(model)
        names, shapes, chunks = self.update
        self.update = None
        self.each("the start", lambda link: link.begin(names, shapes))
        for number, chunk in enumerate(chunks):
            if not self.packed:
                for link in self.in_use():
                    if link.sent < number - 1:
                        self.attempt("the update", link, lambda link: link.until_sent(number - 1))  # noqa: B023
                self.packed.append(self.pack(chunk))
            item = self.packed.pop(0)
            for link in self.in_use():
                link.chunks.put(item)
        self.each("the update", Link.complete)
        self.each("the finish", lambda link: link.server.finish_update(str(version)))
        self.version = version

    def resume(self) -> list[str]:
        """Let requests go on; the URLs of the servers that hold the new weights."""
        self.each("the resume", lambda link: link.server.resume())
        return [link.server.url for link in self.in_use()]

    def close(self) -> None:
        self.closed = True
        for link in self.links:
            link.close()

    # ---- servers that fail

    def each(self, step: str, call) -> None:
        """call(link) for every server in use, side by side."""
        links = self.in_use()
        if len(links) == 1:
            return self.attempt(step, links[0], call)
        with ThreadPoolExecutor(max(len(links), 1)) as pool:
            failures = list(pool.map(lambda link: failure(call, link), links))
        for link, error in zip(links, failures, strict=True):
            self.settle(step, link, error)

    def attempt(self, step: str, link: Link, call) -> None:
        self.settle(step, link, failure(call, link))

    def settle(self, step: str, link: Link, error: Exception | None) -> None:
        """Leave out a server that has failed; SyncError where the run cannot go on without it."""
        if error is None:
            return
        link.close()
        link.lost = True
        text = f"weights to {link.server.url}: {step} failed: {explain(error)}"
        if self.version is None or not self.in_use() or (not link.labels and alive(link.server)):
            raise SyncError(f"{text}. {ADVICE[step]}") from error
        print(f"{text}; the run goes on without it, and takes it back once it answers", flush=True)
        threading.Thread(target=self.take_back, args=(link,), daemon=True).start()

    def take_back(self, lost: Link) -> None:
        """On a thread: wait until a server answers again, and form a new group with it."""
        said = None
        while not self.closed:
            time.sleep(RETRY_S)
            if not alive(lost.server):
                continue
            link = Link(lost.server, self.timeout_s, self.device)
            error = failure(Link.init, link)
            if error is None and link.dtype_name != self.dtype_name:
                error = SyncError(f"it holds {link.dtype_name}, the others {self.dtype_name}")
            if error is None:
                print(f"{link.server.url} is back, and gets the next update", flush=True)
                return self.returned.put(link)
            link.close()
            if str(error) != said:
                said = str(error)
                print(f"{link.server.url} answers, but cannot be taken back: {said}", flush=True)


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
