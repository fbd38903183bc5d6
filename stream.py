"""The packed byte stream of a weight update, as both ends know it, and the groups it travels in.

    tensors in order  |  q 8 MB  |  k 2 MB  |  v 2 MB  | ...       chunk: one broadcast from rank 0, no header
                      +-------- a chunk is closed once it has passed the buffer size --------+

    GlooGroup    over TCP, through a store that rank 0 hosts
    NcclGroup    by ctypes, from an id that rank 0 makes: over HTTP, or in a TCP store, to the workers

vLLM's stream, byte for byte: a pure function of names, dtypes, shapes and buffer size. sync.py sends it, and
engine.py takes it. A group is rank 0, the trainer and only sender, and the workers of one server, which are
other programs; it begins with an all-reduce of one float32, as vLLM's does. torch.distributed has no NCCL
group that a stranger can join and leave: its shutdown waits for the other end, and a watchdog of its own may
end the process. The library is the one that torch has loaded.

No call of NCCL has a time limit. Callers run them on a thread and call `close` from another one to get out;
only a rendezvous that the other end never enters keeps its thread, which dies with the process.

Never: ncclCommDestroy or ncclCommFinalize, which wait for the other end as long as it lives.
"""

from __future__ import annotations

import ctypes
import functools
import math
import socket
import threading
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers.core_model_loading import WeightRenaming

BUFFER_BYTES = 256 << 20  # a trainer's chunk is closed once it has passed this size
ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
STORE_KEY = "broadcast_from/0/0"  # where vLLM's workers look for the id
# a pickle of vLLM's ctypes structure, protocol 3, without vLLM: _unpickle(ncclUniqueId, ({}, bytes))
PICKLED_ID = (
    b"\x80\x03c_ctypes\n_unpickle\n"
    b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    b"}C" + bytes([ID_BYTES]) + b"%b\x86\x86R."
)


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


def renaming(model):
    """A function from a parameter's name in the model to its name in the checkpoint: what from_pretrained
    renamed gets back its name, which is the one that vLLM knows.
    """
    rules = [rule.reverse_transform() for rule in reversed(getattr(model, "_weight_conversions", None) or ())]
    rules = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return lambda name: functools.reduce(lambda name, rule: rule.rename_source_key(name)[0], rules, name)


# ---- gloo


class GlooGroup:
    """The constructor blocks until every member has come.

    `store` is given on rank 0, which hosts it (`host_store`); the others reach it at address:port. Every
    call ends within `timeout_s` with an error from torch when another member is gone.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float, store=None):
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(address, port, world_size, False, timeout, use_libuv=False)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(address))]
        self.store = store  # the group reads it for as long as it lives
        self.group = dist.ProcessGroupGloo(store, rank, world_size, options)
        self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, chunk: torch.Tensor, complete=None) -> None:
        """Rank 0's uint8 bytes into everyone's tensor, in place; a sender's may lie on a GPU, and are there
        once the event `complete` has come.
        """
        if complete is not None:
            complete.synchronize()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([chunk.cpu()], options).wait()

    def wait(self, _) -> None:
        """Nothing: a broadcast is over when it returns."""

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


def local_address(host: str) -> str:
    """The address of this machine on the interface that leads to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


# ---- NCCL


class NcclError(RuntimeError):
    """What NCCL says went wrong."""


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * ID_BYTES)]


@functools.cache
def nccl_library() -> ctypes.CDLL:
    """torch's libnccl. NcclError where there is none: a build of torch without CUDA."""
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclError(f"NCCL is missing ({error}): it comes with the CUDA builds of torch") from None
    found.ncclGetErrorString.restype = found.ncclGetLastError.restype = ctypes.c_char_p
    found.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    return found


def nccl_check(code: int, comm=None) -> None:
    if code:
        reason = nccl_library().ncclGetErrorString(code).decode()
        detail = (nccl_library().ncclGetLastError(comm) or b"").decode().strip()
        raise NcclError(f"NCCL: {reason}{detail and f': {detail}'}")


def nccl_version() -> tuple[int, int, int]:
    number = ctypes.c_int()
    nccl_check(nccl_library().ncclGetVersion(ctypes.byref(number)))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def nccl_id() -> bytes:
    made = UniqueId()
    nccl_check(nccl_library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def publish_nccl_id(store, made: bytes) -> None:
    """Put an id where the workers of a vLLM before 0.30 look for it: into a TCP store that they join."""
    store.set(STORE_KEY, PICKLED_ID % made)


class NcclGroup:
    """The constructor blocks until every member has come; NcclError with the library's reason. `close` may be
    called from another thread, and ends a broadcast that is stuck there.
    """

    def __init__(self, made: bytes, rank: int, world_size: int, device: torch.device):
        self.device = device
        self.comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            identity = UniqueId.from_buffer_copy(made)
            nccl_check(nccl_library().ncclCommInitRank(ctypes.byref(self.comm), world_size, identity, rank))
            one = torch.ones(1, device=device)
            torch.cuda.current_stream().synchronize()
            self.wait(self.run("ncclAllReduce", one, FLOAT32, SUM))

    def run(self, name: str, tensor: torch.Tensor, *how) -> torch.cuda.Event:
        """Queue one collective, in place; the event at its end. NcclError when the group was closed."""
        comm = self.comm
        if comm is None:
            raise NcclError("the group was closed")
        with torch.cuda.device(self.device):
            address = ctypes.c_void_p(tensor.data_ptr())
            stream = ctypes.c_void_p(self.stream.cuda_stream)
            count = ctypes.c_size_t(tensor.numel())
            nccl_check(getattr(nccl_library(), name)(address, address, count, *how, comm, stream), comm)
            return self.stream.record_event()

    def broadcast(self, chunk: torch.Tensor, complete: torch.cuda.Event | None = None):
        """Queue a broadcast of rank 0's uint8 bytes into everyone's tensor, in place, after the event
        `complete`. `wait` takes what this returns; the tensor must live until then.
        """
        if complete is not None:
            self.stream.wait_event(complete)
        return self.run("ncclBroadcast", chunk, UINT8, 0)

    def wait(self, left: torch.cuda.Event) -> None:
        """Until a broadcast is over. NcclError when it has failed or the group was closed meanwhile."""
        left.synchronize()
        comm = self.comm
        if comm is None:
            raise NcclError("the group was closed")
        state = ctypes.c_int()
        nccl_check(nccl_library().ncclCommGetAsyncError(comm, ctypes.byref(state)))
        nccl_check(state.value, comm)

    def close(self) -> None:
        comm, self.comm = self.comm, None
        if comm:
            nccl_library().ncclCommAbort(comm)
