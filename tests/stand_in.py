"""Servers for the tests of sync.py and link.py, which join the group and hold what they receive."""

import base64
import queue
import threading
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from client import ServerError
from stream import GlooGroup, packed_chunks
from sync import WeightSync, sent_parameters

GPU = torch.device("cuda")  # no tensor is put there: it only says that the trainer has NCCL


class FakeNccl:
    """NcclGroup inside one process: members meet under an id, rank 0's bytes go through queues."""

    rooms: dict = defaultdict(dict)

    def __init__(self, made: bytes, rank: int, world_size: int, device):
        self.room, self.rank = self.rooms[made], rank
        self.room[rank] = queue.SimpleQueue()
        deadline = time.monotonic() + 30  # looking up the name of a store may take seconds
        while len(self.room) < world_size:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def broadcast(self, chunk, complete=None):
        if self.rank:
            chunk.copy_(self.room[self.rank].get(timeout=30))
        for rank in self.room:
            if self.rank == 0 != rank:
                self.room[rank].put(chunk.clone())

    def wait(self, _):
        pass

    def close(self):
        pass


class StandIn:
    """A server whose workers join the group and load what they receive. `calls` is what it was asked.

    `faults` maps a call to what it raises; an update's is raised after the first chunk.
    """

    def __init__(
        self, dtype="float32", release="0.32.0", backend="gloo", workers=1, number=1, lora=None, **faults
    ):
        self.url = f"http://127.0.0.1:{number}"
        self.dtype, self.release, self.backend, self.workers = dtype, release, backend, workers
        self.faults, self.calls, self.weights, self.groups = faults, [], {}, []
        self.lora = lora
        self.label, self.dead, self.loads_slowly = "default", False, threading.Event()
        self.loads_slowly.set()

    def ask(self, call):
        self.calls.append(call)
        if self.dead:
            raise ServerError("connection refused")
        if call in self.faults:
            raise self.faults[call]

    def health(self, timeout=None):
        if self.dead:
            raise ServerError("connection refused")

    def version(self):
        return self.release

    def is_paused(self):
        return "pause" in self.calls[-1:]

    def weight_version(self):
        self.health()
        return self.label

    def server_info(self):
        model, transfer = {"dtype": f"torch.{self.dtype}"}, {"backend": self.backend}
        config = {"model_config": model, "weight_transfer_config": transfer, "lora_config": self.lora}
        return {"vllm_config": config}

    def world_size(self):
        return self.workers

    def init_weight_transfer(self, info):
        self.ask("init")
        self.info, size = info, info["world_size"]
        self.buffer = info.get("packed_buffer_size_bytes")
        if self.backend == "gloo":
            join = lambda rank: GlooGroup(info["master_address"], info["master_port"], rank, size, 30)  # noqa: E731
        else:
            made = self.shared_id(info)
            join = lambda rank: FakeNccl(made, rank, size, None)  # noqa: E731
        self.groups = [None] * self.workers
        self.on_each_worker(
            lambda worker: self.groups.__setitem__(worker, join(info["rank_offset"] + worker))
        )

    def shared_id(self, info) -> bytes:
        """As vLLM's workers learn the id: from the call, or from the store that the trainer hosts."""
        if "nccl_unique_id_b64" in info:
            return base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], False)
        return store.get("broadcast_from/0/0")[-128 - 4 : -4]

    def on_each_worker(self, run):
        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def pause(self):
        self.ask("pause")

    def resume(self):
        self.ask("resume")

    def start_update(self):
        self.ask("start_update")

    def update_weights(self, info):
        self.calls.append("update")
        self.update_info = info
        buffer = info.get("packed_buffer_size_bytes", self.buffer)
        chunks = packed_chunks(info["names"], info["dtype_names"], info["shapes"], buffer)
        self.received = [{} for _ in range(self.workers)]
        self.on_each_worker(lambda worker: self.receive(chunks, worker))
        if "update" in self.faults:
            raise self.faults["update"]
        self.weights = self.received[-1]

    def receive(self, chunks, worker):
        for number, chunk in enumerate(chunks):
            if "update" in self.faults and number == 1:
                return
            self.loads_slowly.wait(30)
            data = torch.empty(sum(spec.nbytes for spec in chunk), dtype=torch.uint8)
            self.groups[worker].broadcast(data)
            for spec, part in zip(chunk, data.split([spec.nbytes for spec in chunk]), strict=True):
                self.received[worker][spec.name] = part.clone().view(spec.dtype).view(spec.shape)

    def finish_update(self, version):
        self.ask("finish_update")
        self.label = None if self.label is None else version


def toy(tied=True):
    """The parameters of case A17, by their names in the trainer."""
    shapes = {
        "module.model.embed_tokens.weight": (8, 4),
        "module.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight": (4, 4),
        "module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight": (6, 4),
        "module.model.visual.patch_embed.weight": (3, 3),
        "module.model.norm.weight": (4,),
    }
    model = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(torch.randn(shape), "visual" not in name))
    head = torch.nn.Module()
    model.module.add_module("lm_head", head)
    embedding = model.module.model.embed_tokens.weight
    head.register_parameter("weight", embedding if tied else torch.nn.Parameter(torch.randn(8, 4)))
    return model


def connected(*servers, timeout=20, device="cpu"):
    link = WeightSync(servers, timeout, device)
    link.init()
    return link


def update(link, model, version=1):
    link.prepare(model)
    link.pause()
    link.send(model, version)
    link.resume()


def holds(server, model) -> bool:
    """Does the server hold the model, in its own dtype, and nothing else?"""
    sent = sent_parameters(model)
    same = (torch.equal(server.weights[name], p.to(getattr(torch, server.dtype))) for name, p in sent)
    return list(server.weights) == [name for name, _ in sent] and all(same)
