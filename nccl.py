"""NCCL by ctypes: the communicator of a trainer and the workers of one server, which are other programs.

    unique_id() --- over HTTP, or in a TCP store ---> the workers      rank 0 is the trainer, the only sender
    NcclGroup     ncclCommInitRank, then an all-reduce of one float32, with which vLLM warms up
    broadcast     queued on a stream of its own, so that the GPU goes from one to the next; `wait` for its end
    close         ncclCommAbort

torch.distributed has no group that a stranger can join and leave: its shutdown waits for the other end, and a
watchdog of its own may end the process. The library is the one that torch has loaded.

No call here has a time limit. Callers run them on a thread and call `close` from another one to get out;
only a rendezvous that the other end never enters keeps its thread, which dies with the process.

Never: ncclCommDestroy or ncclCommFinalize, which wait for the other end as long as it lives.
"""

from __future__ import annotations

import ctypes
import functools

import torch

ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
STORE_KEY = "broadcast_from/0/0"  # where vLLM's workers look for the id
# a pickle of vLLM's ctypes structure, protocol 3, without vLLM: _unpickle(ncclUniqueId, ({}, bytes))
PICKLED_ID = (
    b"\x80\x03c_ctypes\n_unpickle\n"
    b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    b"}C" + bytes([ID_BYTES]) + b"%b\x86\x86R."
)


class NcclError(RuntimeError):
    """What NCCL says went wrong."""


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * ID_BYTES)]


@functools.cache
def library() -> ctypes.CDLL:
    """torch's libnccl. NcclError where there is none: a build of torch without CUDA."""
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclError(f"NCCL is missing ({error}): it comes with the CUDA builds of torch") from None
    found.ncclGetErrorString.restype = found.ncclGetLastError.restype = ctypes.c_char_p
    found.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    return found


def check(code: int, comm=None) -> None:
    if code:
        reason = library().ncclGetErrorString(code).decode()
        detail = (library().ncclGetLastError(comm) or b"").decode().strip()
        raise NcclError(f"NCCL: {reason}{detail and f': {detail}'}")


def version() -> tuple[int, int, int]:
    number = ctypes.c_int()
    check(library().ncclGetVersion(ctypes.byref(number)))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def unique_id() -> bytes:
    made = UniqueId()
    check(library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def publish(store, made: bytes) -> None:
    """Put an id where the workers of a vLLM before 0.30 look for it: into a TCP store that they join."""
    store.set(STORE_KEY, PICKLED_ID % made)


class NcclGroup:
    """Rank 0 (a trainer) and the workers of one server. The constructor ends with an all-reduce of one float.

    Blocks until every member has come; NcclError with the library's reason. `close` may be called from
    another thread, and ends a broadcast that is stuck there.
    """

    def __init__(self, made: bytes, rank: int, world_size: int, device: torch.device):
        self.device = device
        self.comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            identity = UniqueId.from_buffer_copy(made)
            check(library().ncclCommInitRank(ctypes.byref(self.comm), world_size, identity, rank))
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
            check(getattr(library(), name)(address, address, count, *how, comm, stream), comm)
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
        check(library().ncclCommGetAsyncError(comm, ctypes.byref(state)))
        check(state.value, comm)

    def close(self) -> None:
        comm, self.comm = self.comm, None
        if comm:
            library().ncclCommAbort(comm)
