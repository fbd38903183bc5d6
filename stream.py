"""The packed byte stream of a weight update, as both ends know it, and the group it travels in over gloo.

    tensors in order  |  q 8 MB  |  k 2 MB  |  v 2 MB  | ...       chunk: one broadcast from rank 0, no header
                      +-------- a chunk is closed once it has passed the buffer size --------+

vLLM's stream, byte for byte: a pure function of names, dtypes, shapes and buffer size. sync.py sends it, and
engine.py takes it.
"""

from __future__ import annotations

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
