"""Weights from the trainer to the servers: one packed byte stream per server, while its requests wait in
place.

    every rank   gather p1 | gather p2 | gather p3 ...            FSDP shards -> full tensors, in one order
    rank 0             pack: bytes of one chunk | broadcast       the next chunk is packed meanwhile
    server       pause .. start .. update (receives, loads) .. finish .. resume

The routes and the byte stream are vLLM's (0.26 and later, or serve.py). The stream is a pure function of
(names, dtypes, shapes, buffer size), so it carries no headers: both ends cut it with `packed_chunks`. What
differs between servers is the communicator: NCCL between GPUs, gloo between CPUs and to the embedded server.
At most two chunks exist at a time, of 256 MiB and a tensor each; the first two are made before anything is
paused.

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

import math
import queue
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import stream
from link import Link, SyncError, alive, background, failure
from lora import adapted_layers, is_adapter, merging
from stream import TensorSpec, packed_chunks, renaming

ALIVE = 2  # chunks that exist at a time
TOGETHER_BYTES = 32 << 20  # one kernel copies about so much into a chunk
RETRY_S = 2.0  # seconds between two looks at a server that was lost
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what wrappers insert into names


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
    renamed = renaming(model)
    return [(renamed(name), parameter) for name, parameter in parameters if block(name) in trained]


def block(name: str) -> str:
    """The module that owns a parameter's layer: model.layers.0.self_attn of ...self_attn.q_proj.weight."""
    return name.rsplit(".", 2)[0]


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole of a parameter, sharded or not. Sharded ones are gathered, in `dtype`: every rank has to call
    this.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor.to(dtype or tensor.dtype).full_tensor()


SHARED_GPU = (
    " (NCCL takes one rank per GPU of a host, and the server is on this trainer's: give it another by "
    "CUDA_VISIBLE_DEVICES, or each end an NCCL_HOSTID of its own and both NCCL_SOCKET_IFNAME=lo)"
)
RUN_AGAIN = "start this run again (every weight goes out before the first prompt, then it is resumed)"
HALF = f"It is paused and may hold half an update: do not resume it; {RUN_AGAIN}, or restart the server."
ADVICE = {  # by the step that failed: what the server holds, and what to do
    "the loading": "It holds what it held; mend that and start this run again.",
    "the rendezvous": "It holds what it held; mend that and start this run again.",
    "the pause": f"It holds what it held; {RUN_AGAIN}.",
    "the start": f"It is paused and holds what it held; {RUN_AGAIN}.",
    "the update": HALF,
    "the finish": HALF,
    "the resume": f"It is paused and holds the new weights: POST /resume to it, or {RUN_AGAIN}.",
}


class Fleet:
    """The servers that get every version, until they fail. Only rank 0's has any."""

    def __init__(self, servers, timeout_s: float, device="cpu"):
        self.timeout_s = timeout_s
        self.device = device
        self.links = [Link(server, timeout_s, device) for server in servers]  # to those in use
        self.version: int | None = None  # that every server in use holds
        self.returned: queue.SimpleQueue = queue.SimpleQueue()  # links to servers that were lost
        self.closed = False

    def join(self, link: Link) -> None:
        """Make a server that is back ready for the next update; whatever is wrong with it is raised."""
        raise NotImplementedError

    def welcome(self) -> None:
        """Servers that are back are in use again."""
        while not self.returned.empty():
            self.links.append(self.returned.get())

    def resume(self) -> list[str]:
        """Let requests go on; the URLs of the servers that hold the new weights."""
        return [link.server.url for link in self.links]

    def close(self) -> None:
        self.closed = True
        for link in self.links:
            link.close()

    def each(self, step: str, call, links=None) -> None:
        """call(link) for every server in use, side by side."""
        tried = [(link, background(failure, call, link, step)) for link in links or self.links]
        for link, outcome in tried:
            if (error := outcome.result()) is not None:
                self.leave_out(link, step, error)

    def leave_out(self, link: Link, step: str, error: BaseException) -> None:
        """Go on without a server that has failed; SyncError where the run cannot."""
        link.close()
        self.links.remove(link)
        text = f"weights to {link.server.url}: {step} failed: {str(error) or type(error).__name__}"
        if "Duplicate GPU" in text:
            text += SHARED_GPU
        if self.version is None and step == "the update":
            text += " (does it serve the architecture that is trained?)"
        if self.version is None or not self.links or (not link.labels and alive(link.server)):
            raise SyncError(f"{text}. {ADVICE[step]}") from error
        print(f"{text}; the run goes on without it, and takes it back once it answers", flush=True)
        background(self.take_back, link.server)

    def take_back(self, server) -> None:
        """On a thread: wait until a server answers again, and let it join again."""
        said = None
        while not self.closed:
            time.sleep(RETRY_S)
            if not alive(server):
                continue
            link = Link(server, self.timeout_s, self.device)
            error = failure(self.join, link, "the return")
            if error is None:
                print(f"{server.url} is back, and gets the next update", flush=True)
                return self.returned.put(link)
            link.close()
            if str(error) != said:
                said = str(error)
                print(f"{server.url} answers, but cannot be taken back: {said}", flush=True)


class WeightSync(Fleet):
    """What train() calls `sync`: init, then prepare, pause, send, resume for each version, close at the end.

    Every rank has one; only rank 0's has servers. `init`, `prepare` and `send` are called by all ranks.
    """

    dtype_name = "float32"  # of what the servers hold

    def init(self) -> None:
        self.each("the rendezvous", Link.init)
        names = sorted({link.dtype_name for link in self.links})
        if len(names) > 1:
            raise SyncError(f"the servers hold different dtypes ({names}); start them all with one --dtype")
        told = names or [self.dtype_name]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        self.dtype_name = told[0]

    @torch.no_grad()
    def prepare(self, model) -> None:
        """What can be done while the servers still generate: the next update's first chunks."""
        self.welcome()
        if self.version is not None:
            self.each("the rendezvous", self.greet)
        parameters = sent_parameters(model)
        names = [name for name, _ in parameters]
        shapes = [list(p.shape) for _, p in parameters]
        chunks = packed_chunks(names, [self.dtype_name] * len(names), shapes, stream.BUFFER_BYTES)
        dtype = getattr(torch, self.dtype_name)
        merged, self.place = merging(model), parameters[0][1].device
        self.gathered = (full_tensor(merged(p), dtype) for _, p in parameters)
        self.update = names, shapes, chunks
        self.packed = [self.pack(chunk) for chunk in chunks[:ALIVE]]  # those that are ready

    def join(self, link: Link) -> None:
        link.init()
        if link.dtype_name != self.dtype_name:
            raise SyncError(f"it holds {link.dtype_name}, the others {self.dtype_name}")

    def greet(self, link: Link) -> None:
        """A server that was restarted since the last update needs a new group."""
        if link.labels and link.server.weight_version() != str(self.version):
            print(f"{link.server.url} was restarted: it gets every weight again", flush=True)
            link.close()
            link.init()

    def pack(self, chunk: list[TensorSpec]):
        """Gather the tensors of a chunk, on all ranks, and copy them into its bytes (None without servers).

        With them comes what tells that they are complete: an event of the GPU, None on the CPU.
        """
        gathered = zip(chunk, self.gathered)  # noqa: B905 - the generator goes on in the next chunk
        if not self.links:
            for _ in gathered:
                pass
            return None, None
        sizes = [math.prod(spec.shape) for spec in chunk]
        data = torch.empty(sum(sizes), dtype=chunk[0].dtype, device=self.place)
        parts, tensors, held = [], [], 0
        for part, (spec, tensor) in zip(data.split(sizes), gathered, strict=False):
            parts.append(part)
            tensors.append(tensor.reshape(-1))
            held += spec.nbytes
            if held > TOGETHER_BYTES or spec is chunk[-1]:  # many small ones are copied by one kernel
                torch._foreach_copy_(parts, tensors)
                parts, tensors, held = [], [], 0
        complete = torch.cuda.current_stream().record_event() if data.is_cuda else None
        return data.view(torch.uint8), complete

    def pause(self) -> None:
        """Stop generation in place: requests in flight stay open and are read again under the new weights."""
        self.each("the pause", lambda link: link.server.pause())

    @torch.no_grad()
    def send(self, model, version: int) -> None:
        """One complete update to every server, labelled `version`. All ranks gather, in the same order."""
        names, shapes, chunks = self.update
        self.each("the start", lambda link: link.begin(names, shapes))
        for chunk in chunks:
            if not self.packed:
                if waited_for := [link for link in self.links if not link.left.acquire(blocking=False)]:
                    self.each("the update", Link.until_one_has_left, waited_for)
                self.packed.append(self.pack(chunk))
            item = self.packed.pop(0)
            for link in self.links:
                link.chunks.put(item)
        self.each("the update", Link.complete)
        self.each("the finish", lambda link: link.server.finish_update(str(version)))
        self.version = version

    def resume(self) -> list[str]:
        self.each("the resume", lambda link: link.server.resume())
        return super().resume()
