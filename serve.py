"""The embedded sampler: a small server with vLLM's endpoints, for machines without vLLM.

    python serve.py --model tiny --port 8000

    HTTP threads   parse, check, wait, format              one thread per connection
         |  commands (a queue)         ^  finished requests
         v                             |
    engine thread  commands . forward . sample . commands . forward . sample ...

    slot 0  |prompt a......|answer......|            one forward is one row of tokens: the newest token of
    slot 1  |prompt b..|answer....|                  every decoding slot, then runs of prompts still to be
    slot 2  |prompt c.........~~~~~~~ (prefilling)   read. Each token's key and value go to (slot, position).
    slot 3  free

Decoding requests hold slots 0 .. decoding-1 and prefilling ones the slots after them, so a decode step
attends over views of the cache. A request leaves by the last one moving into its hole.

transformers' own continuous batching is not used: it draws a whole batch from one random generator (a
request's tokens would depend on its company), returns the log-probability of the sampled token alone (no
top-k lists, no scores of a prompt), and its pause keeps the keys and values of the old weights, where an
update here needs every prefix read again.

Must never: run a forward while weights are being loaded, or after an update that failed half-way
(tests/test_serve.py::test_after_a_failed_update_only_a_complete_one_makes_resume_safe); keep a key of an old
policy (::test_a_request_over_an_update_is_old_policy_then_new_policy); return a log-probability of another
distribution than the one sampled from (::test_logprobs_are_those_of_the_distribution_sampled_from); let a
setting it does not implement pass (::test_a_setting_the_server_does_not_have_is_refused_by_name).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import errno
import functools
import json
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from client import Notice
from sync import GlooGroup, packed_chunks

VERSION = "0.32.0+embedded"  # the vLLM whose answers these are
FILTERED = -9999.0  # how a log-probability of -inf is written in JSON
STEP_TOKENS = 2048  # tokens of one forward: bounds the activations of a prefill
STEP_LOGITS = 1 << 27  # float32 logits of prompt scoring in one forward (512 MiB)
GREEDY = 1e-5  # temperatures below this are greedy


def option(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    model: str = option("", "directory (or hub name) of the model to serve")
    host: str = option("127.0.0.1", "address to listen on; the server has no authentication")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    max_model_len: int = option(0, "longest prompt + completion in tokens; 0 = the model's own limit")
    max_num_seqs: int = option(64, "requests decoded at once; each owns max_model_len tokens of KV cache")
    max_logprobs: int = option(64, "most log-probabilities per token a request may ask for; -1 = no limit")
    dtype: str = option("auto", "auto (the checkpoint's), float32 or bfloat16")
    device: str = option("auto", "auto, cpu, cuda or cuda:<index>")
    seed: int = option(0, "seeds the requests that bring no seed")
    served_model_name: str = option("", "name of the model in requests and answers; default: --model")
    transfer_timeout: float = option(300.0, "longest wait for the trainer in a weight transfer, in seconds")
    exit_with_parent: bool = option(False, "end when standard input is closed")

    def __post_init__(self):
        if not self.model:
            raise ValueError("--model is needed: the directory of the model to serve")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"--dtype {self.dtype}: choose auto, float32 or bfloat16")
        if self.max_num_seqs < 1 or self.max_model_len < 0 or self.max_logprobs < -1:
            raise ValueError("--max_num_seqs starts at 1, --max_model_len at 0 and --max_logprobs at -1")


class ApiError(Exception):
    """An answer other than 200; the fields of vLLM's error object."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class ClientGone(Exception):
    """The client closed its connection while its request was running."""


# ------------------------------------------------------------------------------------------ attention
@dataclass
class Step:
    """Where the tokens of one forward live: one token of each decoding slot, then runs of prompts."""

    address: torch.Tensor  # [N] int64, slot * T + position
    position: torch.Tensor  # [N] int64
    decoding: int  # the first tokens of the row are the newest ones of slots 0 .. decoding-1
    longest: int  # keys of the longest decoding slot
    runs: list[tuple[int, int, int, int]]  # (slot, its first token in the row, start, end position)
    masks: dict = field(default_factory=dict)  # sliding window -> [decoding, 1, 1, longest] bool

    def visible(self, window: int | None) -> torch.Tensor:
        """[decoding, 1, 1, longest]: the keys each decoding slot's newest token may see."""
        if window not in self.masks:
            position = self.position[: self.decoding]
            seen = causal(position, self.longest, window)
            self.masks[window] = seen[:, None, None]
        return self.masks[window]


def causal(position: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: key index <= position of the query, and inside the sliding window."""
    index = torch.arange(keys, device=position.device)
    seen = index <= position[:, None]
    return seen if window is None else seen & (index > position[:, None] - window)


class SlotCache:
    """Keys and values of every layer, [slots, T, G, D] each; a layer's are allocated when it first runs."""

    def __init__(self, slots: int, length: int):
        self.slots = slots
        self.length = length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.step: Step | None = None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor):
        """Store key and value [1, G, N, D] of the step's tokens; returns the layer's buffers."""
        if layer not in self.layers:
            self.layers[layer] = tuple(self.allocate(x) for x in (key, value))
        for buffer, new in zip(self.layers[layer], (key, value), strict=True):
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, self.step.address, new[0].transpose(0, 1))
        return self.layers[layer]

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slots, self.length, like.shape[1], like.shape[3])
        try:
            # zeros: attention gives unwritten positions weight 0, and 0 times a NaN of old memory is NaN
            return like.new_zeros(shape)
        except RuntimeError as error:
            size = 2 * math.prod(shape) * like.itemsize / 2**30
            raise RuntimeError(
                f"no memory for the KV cache ({size:.1f} GiB a layer): "
                f"lower --max_num_seqs ({self.slots}) or --max_model_len ({self.length})"
            ) from error

    def move(self, source: int, target: int, length: int) -> None:
        for buffers in self.layers.values():
            for buffer in buffers:
                buffer[target, :length] = buffer[source, :length]


# What may arrive at an attention function without changing what it has to compute.
HARMLESS = {"position_ids", "position_embeddings", "use_cache", "cache", "cache_position", "is_causal"}


def check_attention(module, kwargs: dict) -> None:
    """Refuse by name what `slot_attention` does not compute; runs on the warm-up at load, so at start."""
    extra = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in HARMLESS)
    if hasattr(module, "sinks"):
        extra.append("sinks")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        extra.append("bidirectional attention")
    if extra:
        raise NotImplementedError(
            f"{type(module).__name__} uses {', '.join(extra)}, which the embedded sampler does not honour; "
            "serve this model with vLLM"
        )


def slot_attention(
    module,
    query: torch.Tensor,  # [1, H, N, D]
    key: torch.Tensor,  # [1, G, N, D]
    value: torch.Tensor,  # [1, G, N, D]
    attention_mask,  # always None: a name without a mask function gets none from transformers
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slots: SlotCache | None = None,
    **kwargs,
):
    """Attention over the slot cache, as an attention function of transformers; returns [1, N, H, D]."""
    check_attention(module, kwargs)
    step = slots.step
    keys, values = slots.write(module.layer_idx, key, value)  # [slots, T, G, D]
    heads, groups, width = query.shape[1], key.shape[1], value.shape[3]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    out = query.new_empty(query.shape[2], heads, width)  # [N, H, D]
    if count := step.decoding:
        q = query[0, :, :count].transpose(0, 1).reshape(count, groups, heads // groups, -1)
        k = keys[:count, : step.longest].transpose(1, 2)  # [count, G, T, D]
        v = values[:count, : step.longest].transpose(1, 2)
        attended = attend(q, k, v, step.visible(sliding_window), scaling, softcap)  # [count, G, H/G, D]
        out[:count] = attended.reshape(count, heads, width)
    for slot, first, start, end in step.runs:
        last = first + end - start
        q = query[0, :, first:last].reshape(groups, heads // groups, last - first, -1)
        k = keys[slot, :end].transpose(0, 1)[:, None].expand(-1, heads // groups, -1, -1)
        v = values[slot, :end].transpose(0, 1)[:, None].expand(-1, heads // groups, -1, -1)
        plain = start == 0 and softcap is None and (sliding_window is None or end <= sliding_window)
        seen = None if plain else causal(step.position[first:last], end, sliding_window)
        attended = attend(q, k, v, seen, scaling, softcap)  # [G, H/G, n, D]
        out[first:last] = attended.flatten(0, 1).transpose(0, 1)
    return out[None], None


def attend(query, key, value, visible, scaling: float, softcap: float | None) -> torch.Tensor:
    """softmax(scaling * query key^T) value where `visible`; None means causal and square."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling
        )
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scaling / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


# ------------------------------------------------------------------------------------------- sampling
def sample(logits: torch.Tensor, temperature, top_k, top_p, min_p, uniform):
    """One token per row, and the log-probabilities of exactly the distribution it was drawn from.

    logits [R, V] float32; the rest CPU tensors [R] (float64; top_k <= 0 and top_p = 1 are off). Returns
    tokens [R] int64 and log-probabilities [R, V] float32, -inf where filtered. The order is temperature,
    top-k, top-p, min-p, and what survives is normalised again. The token is the first whose cumulative
    probability passes the row's `uniform`: one number in [0, 1) decides it, whoever shares the batch.
    A row of temperature 0 takes the most likely token; its log-probabilities are those of temperature 1,
    unfiltered, as vLLM reports them.
    """
    greedy = temperature < GREEDY
    temperature = torch.where(greedy, 1.0, temperature)
    top_k, top_p, min_p = torch.where(greedy, 0, top_k), torch.where(greedy, 1.0, top_p), min_p * ~greedy
    logits = logits / temperature.to(logits.device, torch.float32)[:, None]
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        floor = lowest_kept(logits, top_k, top_p, min_p)
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    logp = logits.log_softmax(-1)
    if bool(logp.isnan().any()):
        raise FloatingPointError("the model's logits are NaN: its weights are broken")
    # float64: a float32 sum over a large vocabulary would lose the rare tokens
    cumulative = logp.exp().to(torch.float64).cumsum(-1)
    target = uniform.to(logits.device) * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.where(greedy.to(logits.device), logits.argmax(-1), drawn), logp


def lowest_kept(logits: torch.Tensor, top_k, top_p, min_p) -> torch.Tensor:
    """[R] the smallest logit of each row that top-k, top-p and min-p let through. Ties with it stay.

    top-p keeps a token while the more likely ones (of those top-k left) hold less than p; min-p keeps those
    with at least min_p times the largest probability, a ratio the other two filters do not change.
    """
    size, device = logits.shape[-1], logits.device
    top_k = torch.where(top_k > 0, top_k.clamp(max=size), size).to(torch.int64)
    nucleus = top_p < 1
    sorted_rows = nucleus | (top_k < size)
    largest = logits.amax(-1)
    floor = largest + min_p.to(device, torch.float32).log()
    if bool(sorted_rows.any()):
        width = int(top_k[sorted_rows].max())  # only a top-p row without top-k needs the whole vocabulary
        ordered = logits.topk(width).values  # [R, width], falling
        kept = torch.arange(width, device=device) < top_k.to(device)[:, None]
        share = ordered.masked_fill(~kept, -torch.inf).softmax(-1).to(torch.float64)
        before = share.cumsum(-1) - share
        kept &= (before < top_p.to(device)[:, None]) | ~nucleus.to(device)[:, None]
        lowest = ordered.masked_fill(~kept, torch.inf).amin(-1)
        floor = torch.where(sorted_rows.to(device), torch.maximum(floor, lowest), floor)
    return floor


# ------------------------------------------------------------------------------------------- requests
@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    min_tokens: int
    eos_ids: frozenset[int]  # empty with ignore_eos
    stop_ids: frozenset[int]
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(eq=False)
class Request:
    """One completion: written by the engine's thread until `done`, read by the HTTP thread after it."""

    id: str
    tokens: list[int]  # the prompt, then what was generated
    sampling: Sampling
    uniforms: np.ndarray  # [max_tokens] float64, one per generated token
    prompt_length: int = 0
    computed: int = 0  # leading tokens whose keys and values are in the cache
    logp: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # ids, logp [logprobs] per token
    prompt_scores: list[tuple] = field(default_factory=list)  # entry i is of token i + 1
    marks: list[tuple[int, str]] = field(default_factory=list)  # (first output token, weight version)
    finish_reason: str | None = None
    stop_reason: int | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def append(self, token: int) -> None:
        """Take a sampled token and see whether it is the last."""
        self.tokens.append(token)
        sampling = self.sampling
        if self.generated >= sampling.min_tokens and token in sampling.eos_ids:
            self.finish_reason = "stop"
        elif self.generated >= sampling.min_tokens and token in sampling.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.generated >= sampling.max_tokens:
            self.finish_reason = "length"

    def weight_versions(self) -> list[dict]:
        """Runs of output tokens made by one weight version."""
        ends = [start for start, _ in self.marks[1:]] + [self.generated]
        runs = zip(self.marks, ends, strict=True)
        return [{"version": v, "start": start, "end": end} for (start, v), end in runs if end > start]


# -------------------------------------------------------------------------------------------- weights
class WeightReceiver:
    """The receiving end of a weight update: window, stream, and copies into the model's parameters.

    Names are those of `named_parameters`. `whole` turns false when an update fails inside its window: from
    then on the parameters may be a mixture of two policies, and only a window that brought every one of them
    makes it true again.
    """

    NEEDED = ("master_address", "master_port", "rank_offset", "world_size")
    # packed_num_buffers only overlaps streams on a GPU; it changes no byte
    OPTIONAL = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")

    def __init__(self, model, timeout_s: float):
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.timeout_s = timeout_s
        self.group = None
        self.buffer_bytes = 0
        self.open = False
        self.whole = True
        self.received: set[int] = set()  # ids of parameters: a tied head and its embedding are one

    def init(self, info: dict) -> None:
        """Join the trainer's group; a second call leaves the first group."""
        if unknown := set(info).difference(self.NEEDED, self.OPTIONAL):
            raise ValueError(f"Invalid init_info for gloo weight transfer: unexpected {sorted(unknown)}")
        if missing := [name for name in self.NEEDED if info.get(name) is None]:
            raise ValueError(f"Invalid init_info for gloo weight transfer: missing {missing}")
        self.close()
        self.group = GlooGroup(*(info[name] for name in self.NEEDED), self.timeout_s)
        # a buffer of 0 bytes closes a chunk after every tensor: that is the stream of packed = false
        self.buffer_bytes = info.get("packed_buffer_size_bytes", 1 << 30) if info.get("packed") else 0

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def start(self) -> None:
        if self.open:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.open = True
        self.received.clear()

    def update(self, info: dict) -> None:
        if not self.open:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.receive(info)
        except BaseException:
            self.open = self.whole = False
            raise

    def receive(self, info: dict) -> None:
        """Every chunk is taken from the stream even after a tensor could not be loaded, so that the group
        stays in step with the trainer and the next update can use it."""
        if self.group is None:
            raise RuntimeError("gloo weight transfer not initialized. Call init_transfer_engine() first.")
        first_error = None
        try:
            chunks = packed_chunks(info["names"], info["dtype_names"], info["shapes"], self.buffer_bytes)
            for chunk in chunks:
                buffer = torch.empty(sum(spec.nbytes for spec in chunk), dtype=torch.uint8)
                self.group.broadcast(buffer)
                for spec, data in zip(chunk, buffer.split([spec.nbytes for spec in chunk]), strict=True):
                    first_error = self.load(spec, data) or first_error
        except Exception:
            self.close()  # this end no longer knows where in the stream the trainer is
            raise
        if first_error:
            raise ValueError(first_error)

    def load(self, spec, data: torch.Tensor) -> str | None:
        """Copy one tensor (its bytes) into its parameter, or say why not."""
        parameter = self.parameters.get(spec.name)
        if parameter is None:
            return f"There is no parameter named '{spec.name}' in the served model"
        if parameter.shape != spec.shape:
            return f"{spec.name} has shape {list(parameter.shape)} here, and {list(spec.shape)} was sent"
        parameter.copy_(data.view(spec.dtype).view(spec.shape))
        self.received.add(id(parameter))
        return None

    def finish(self) -> None:
        if not self.open:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.open = False
        missing = [name for name, p in self.parameters.items() if id(p) not in self.received]
        if missing and not self.whole:
            raise RuntimeError(
                f"after a failed update every parameter has to come in one window; {len(missing)} did not, "
                f"{missing[0]} for one"
            )
        self.whole = True


# --------------------------------------------------------------------------------------------- engine
class Engine:
    """Batched decoding on its own thread. Whatever touches its state runs there, between two forwards."""

    def __init__(self, options: Options):
        self.options = options
        self.name = options.served_model_name or options.model
        self.model = load_model(options)
        self.tokenizer = load_tokenizer(options.model)
        config = self.model.config.get_text_config()
        self.vocab_size = self.model.get_input_embeddings().num_embeddings
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"--max_model_len {self.max_model_len}: {options.model} has {limit} positions")
        self.eos_ids = eos_ids(self.model, self.tokenizer)
        self.cache = SlotCache(options.max_num_seqs, self.max_model_len)
        self.weights = WeightReceiver(self.model, options.transfer_timeout)
        self.created = int(time.time())
        self.version = "default"
        self.running: list[Request] = []  # by slot: the decoding ones, then those with tokens to prefill
        self.decoding = 0
        self.waiting: deque[Request] = deque()
        self.paused = False
        self.drained: concurrent.futures.Future | None = None  # pause(wait): set once nothing runs
        self.counters: Counter = Counter()
        self.seeds = np.random.default_rng(options.seed)
        self.piece = functools.lru_cache(maxsize=None)(self.piece)
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.stopping = False
        self.error: BaseException | None = None  # what ended the thread
        self.warm_up(config)
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    @torch.inference_mode()
    def warm_up(self, config) -> None:
        """One forward of one token: allocates the cache, and refuses a model with anything else in it."""
        kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds or getattr(config, "attention_chunk_size", None):
            raise NotImplementedError(
                f"{self.options.model} has {sorted(kinds) or 'chunked attention'} layers; the embedded "
                "sampler does full and sliding-window attention only: serve this model with vLLM"
            )
        self.forward([0], [0], [0], decoding=1, runs=[], rows=[0])
        if len(self.cache.layers) != config.num_hidden_layers:
            raise NotImplementedError(
                f"{len(self.cache.layers)} of the {config.num_hidden_layers} layers of {self.options.model} "
                "went through transformers' attention interface; serve this model with vLLM"
            )

    # -- the thread
    @torch.inference_mode()  # for commands too: they move rows of the cache and load weights
    def run(self) -> None:
        try:
            while not self.stopping:
                self.run_commands()
                if self.runnable():
                    self.step()
        except BaseException as error:
            traceback.print_exc()
            self.error = error

    def run_commands(self) -> None:
        """All that have come; waits for one when there is nothing to compute."""
        while not self.stopping:
            try:
                function, args, result = self.commands.get(block=not self.runnable())
            except queue.Empty:
                return
            try:
                result.set_result(function(*args))
            except Exception as error:
                result.set_exception(error)

    def post(self, function, *args) -> concurrent.futures.Future:
        """Have `function` run on the engine's thread, before its next forward."""
        result = concurrent.futures.Future()
        self.commands.put((function, args, result))
        return result

    def call(self, function, *args):
        return self.wait(self.post(function, *args))

    def wait(self, result: concurrent.futures.Future):
        while not concurrent.futures.wait([result], timeout=1.0).done:
            self.check()
        return result.result()

    def check(self) -> None:
        if self.error is not None or not self.thread.is_alive():
            raise ApiError(500, f"EngineCore encountered an issue: {self.error}", "InternalServerError")

    def stop(self) -> None:
        self.post(setattr, self, "stopping", True)
        self.thread.join(timeout=2.0)

    # -- commands
    def runnable(self) -> bool:
        if self.paused or self.weights.open or not self.weights.whole:
            return False
        return bool(self.running or (self.waiting and not self.drained))

    def submit(self, requests: list[Request]) -> None:
        self.waiting.extend(requests)

    def abort(self, chosen) -> None:
        """End the requests for which `chosen(request)` is true, with the tokens they have."""
        for request in [r for r in self.waiting if chosen(r)]:
            self.waiting.remove(request)
            self.end(request, "abort")
        for request in [r for r in self.running if chosen(r)]:
            self.leave(request)
            self.end(request, "abort")

    def pause(self, mode: str, clear_cache: bool) -> concurrent.futures.Future:
        """The result is done once paused: at once, but for mode `wait`, when nothing runs any more."""
        result = concurrent.futures.Future()
        if mode == "abort":
            self.abort(lambda request: True)
        if mode == "wait" and self.running and not self.paused:
            self.drained = self.drained or result
            return self.drained
        self.paused = True
        if clear_cache:
            self.drop_cache()
        result.set_result(None)
        return result

    def finish_draining(self) -> None:
        self.paused = True
        self.drained.set_result(None)
        self.drained = None

    def resume(self) -> None:
        if self.weights.open:
            raise RuntimeError("a weight update is open: call finish_weight_update before resuming")
        if not self.weights.whole:
            raise RuntimeError(
                "the last weight update failed half-way, so the weights may be a mixture of two policies: "
                "send one complete update (start, every parameter, finish) before resuming, or restart"
            )
        if self.drained:
            self.finish_draining()
        self.paused = False

    def drop_cache(self) -> None:
        """Forget all keys and values: every running request reads its whole prefix again."""
        self.counters["preemptions"] += sum(r.computed > 0 for r in self.running)
        self.decoding = 0
        for request in self.running:
            request.computed = 0
            if not request.generated:
                request.prompt_scores.clear()  # scores of one prompt come from one policy

    def start_update(self) -> None:
        self.weights.start()
        if not self.paused:
            self.drop_cache()  # without a pause nothing else would keep stale keys out of the new policy

    def update(self, info: dict) -> None:
        try:
            self.weights.update(info)
        finally:
            self.paused = self.paused or not self.weights.whole

    def finish_update(self, version: str | None) -> None:
        self.weights.finish()
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        self.version = version
        for request in self.running:
            request.marks.append((request.generated, version))

    def abort_ids(self, ids: list[str] | None) -> int:
        """Abort by engine id, or everything (None); counts the ids given, unknown ones too, as vLLM does."""
        everything = len(self.running) + len(self.waiting)
        self.abort(lambda request: ids is None or request.id in ids)
        return everything if ids is None else len(ids)

    # -- one forward and what follows from it
    def step(self) -> None:
        if not self.drained:
            self.admit()
        ready = self.running[: self.decoding]
        tokens = [r.tokens[-1] for r in ready]
        position = [len(r.tokens) - 1 for r in ready]
        address = [slot * self.max_model_len + p for slot, p in enumerate(position)]
        runs = self.plan_prefill()
        last_rows, scored, scored_rows = list(range(self.decoding)), [], []
        for slot, first, start, end in runs:
            request = self.running[slot]
            tokens += request.tokens[start:end]
            position += range(start, end)
            address += range(slot * self.max_model_len + start, slot * self.max_model_len + end)
            if request.sampling.prompt_logprobs is not None:
                begin, stop = len(request.prompt_scores), min(end, request.prompt_length - 1)
                scored.append((request, begin, max(begin, stop)))
                scored_rows += range(first + begin - start, first + stop - start)
            if end == len(request.tokens):
                last_rows.append(first + end - start - 1)
                ready.append(request)
            request.computed = end
        logits = self.forward(tokens, position, address, self.decoding, runs, last_rows + scored_rows)
        for request in self.running[: self.decoding]:
            request.computed = len(request.tokens)
        self.decoding = len(ready)
        self.score_prompts(logits[len(ready) :], scored)
        if ready:
            self.sample(logits[: len(ready)], ready)

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_num_seqs:
            request = self.waiting.popleft()
            request.marks.append((0, self.version))
            self.counters["prompt_tokens"] += request.prompt_length
            self.running.append(request)

    def plan_prefill(self) -> list[tuple[int, int, int, int]]:
        """Runs of prompt tokens for this forward, in slot order, within its limits.

        Only the last run can stop short of its request's end, so those that become ready to decode are the
        slots right after the decoding ones.
        """
        runs, first = [], self.decoding
        scores = max(1, STEP_LOGITS // self.vocab_size)
        for slot in range(self.decoding, len(self.running)):
            request = self.running[slot]
            take = min(len(request.tokens) - request.computed, STEP_TOKENS - first)
            if request.sampling.prompt_logprobs is not None:
                take = min(take, scores)
                scores -= take
            if take <= 0:
                break
            runs.append((slot, first, request.computed, request.computed + take))
            first += take
            if runs[-1][3] < len(request.tokens):
                break
        return runs

    def forward(self, tokens, position, address, decoding: int, runs, rows) -> torch.Tensor:
        """Run one row of tokens [N] through the model; returns float32 logits [len(rows), V]."""
        device = self.model.device
        packed = torch.from_numpy(np.array([tokens, position, address], dtype=np.int64)).to(device)
        longest = max(position[:decoding], default=-1) + 1
        self.cache.step = Step(packed[2], packed[1], decoding, longest, runs)
        out = self.model(
            input_ids=packed[:1],
            position_ids=packed[1:2],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=device),
            slots=self.cache,
        )
        return out.logits[0].float()

    def sample(self, logits: torch.Tensor, ready: list[Request]) -> None:
        """Draw the next token of every ready request; those that end make room."""
        for row, request in enumerate(ready):
            if request.generated < request.sampling.min_tokens:
                ends = sorted(request.sampling.eos_ids | request.sampling.stop_ids)
                logits[row, ends] = -torch.inf
        settings = [r.sampling for r in ready]
        uniform = [r.uniforms[r.generated] for r in ready]
        controls = [[s.temperature, s.top_k, s.top_p, s.min_p] for s in settings]
        controls = torch.tensor(controls, dtype=torch.float64).unbind(-1)
        tokens, logp = sample(logits, *controls, torch.tensor(uniform, dtype=torch.float64))
        wanted = [s.logprobs for s in settings if s.logprobs is not None]
        if wanted:
            chosen = logp.gather(-1, tokens[:, None])[:, 0].tolist()
            top_logp, top_ids = logp.topk(min(max(wanted), self.vocab_size))
            # numpy rows: lists of them would be a heap the garbage collector walks again and again
            top_logp, top_ids = top_logp.clamp(min=FILTERED).cpu().numpy(), top_ids.cpu().numpy()
        for row, (request, token) in enumerate(zip(ready, tokens.tolist(), strict=True)):
            count = request.sampling.logprobs
            if count is not None:
                request.logp.append(chosen[row])
                request.top.append((top_ids[row][:count], top_logp[row][:count]))
            request.append(token)
        self.counters["generation_tokens"] += len(ready)
        for request in [r for r in ready if r.finish_reason]:
            self.leave(request)
            self.end(request, request.finish_reason)

    def score_prompts(self, logits: torch.Tensor, scored: list[tuple[Request, int, int]]) -> None:
        """Log-probability and rank of each prompt token, and the most likely ones, at temperature 1."""
        for request, begin, stop in scored:
            logp = logits[: stop - begin].log_softmax(-1)
            logits = logits[stop - begin :]
            actual = torch.tensor(request.tokens[begin + 1 : stop + 1], device=logp.device)
            actual_logp = logp.gather(-1, actual[:, None])
            rank = (logp >= actual_logp).sum(-1)
            top_logp, top_ids = logp.topk(min(request.sampling.prompt_logprobs, self.vocab_size))
            logps = (actual_logp[:, 0].clamp(min=FILTERED), top_logp.clamp(min=FILTERED))
            columns = (actual, logps[0], rank, top_ids, logps[1])
            request.prompt_scores += zip(*(column.tolist() for column in columns), strict=True)

    def leave(self, request: Request) -> None:
        """Free a request's slot. The decoding slots stay the first ones, and no slot is left empty."""
        hole = self.running.index(request)
        if hole < self.decoding:
            self.decoding -= 1
            self.move(self.decoding, hole)
            hole = self.decoding
        self.move(len(self.running) - 1, hole)
        self.running.pop()
        if self.drained and not self.running:
            self.finish_draining()

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.running[target] = self.running[source]
            self.cache.move(source, target, self.running[source].computed)

    def end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self.counters[f"finished_{reason}"] += 1
        request.done.set()

    # -- reads, from any thread
    def piece(self, token: int) -> str:
        """The text of one token."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.decode([token])

    def text(self, request: Request) -> str:
        """What was generated, without the token that stopped it and without special tokens."""
        if self.tokenizer is None:
            return ""
        ids = request.output[:-1] if request.finish_reason == "stop" else request.output
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def load_model(options: Options):
    """The model in evaluation mode on its device, with attention over the slot cache."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ALL_ATTENTION_FUNCTIONS.register("slots", slot_attention)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="slots")
    return model.to(device).eval()


def load_tokenizer(path: str):
    """The tokenizer, or None for a directory that holds none (token ids are then all there is)."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        print(f"no tokenizer in {path}, serving token ids only: {error}", file=sys.stderr, flush=True)
        return None


def eos_ids(model, tokenizer) -> frozenset[int]:
    """The tokenizer's and the generation config's together: chat models often have one in each."""
    found = {None if tokenizer is None else tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id
    found |= set(configured) if isinstance(configured, list) else {configured}
    return frozenset(found - {None})


# ------------------------------------------------------------------------------------ request bodies
# Settings of vLLM's that change what is sampled or returned and that this server does not have. A request
# that sets one to anything but these values is refused.
UNSUPPORTED = {
    "stop": (None, [], ""),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logprob_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "structured_outputs": (None,),
    "response_format": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "stream": (None, False),
    "use_beam_search": (None, False),
}
TYPES = {
    int: ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
    float: ("float_parsing", "Input should be a valid number, unable to parse string as a number"),
    bool: ("bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    list: ("list_type", "Input should be a valid list"),
    dict: ("dict_type", "Input should be a valid dictionary"),
    str: ("string_type", "Input should be a valid string"),
}


def invalid(kind: str, location: str, message: str, value) -> ApiError:
    entry = {"type": kind, "loc": location, "msg": message, "input": str(value)[:100]}
    return ApiError(400, f"1 validation error:\n  {entry}", "Bad Request", location)


def bad_value(name: str, value, message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter={name}, value={value})", param=name)


def read(body: dict, name: str, kind: type, default=None):
    """A field of a request body, or its default where it is absent or null; 400 for another type."""
    value = body.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise invalid(TYPES[kind][0], f"body.{name}", TYPES[kind][1], value)
    return value


def require(body: dict, name: str, kind: type):
    if body.get(name) is None:
        raise invalid("missing", f"body.{name}", "Field required", None)
    return read(body, name, kind)


def parse_json(raw: bytes, headers) -> dict:
    if headers.get_content_type() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    try:
        body = json.loads(raw)
    except ValueError as error:
        place = f"body.{getattr(error, 'pos', 0)}"
        raise invalid("json_invalid", place, f"JSON decode error: {error}", "<body>") from error
    if not isinstance(body, dict):
        raise invalid("dict_type", "body", TYPES[dict][1], body)
    return body


def parse_prompts(body: dict, engine: Engine) -> list[list[int]]:
    """The token ids of each prompt; text is tokenised."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise ApiError(400, message, param="prompt")
    if not isinstance(prompt, (str, list)):
        raise invalid("list_type", "body.prompt", TYPES[list][1], prompt)
    prompts = [prompt] if isinstance(prompt, str) or (prompt and type(prompt[0]) is int) else prompt
    if not prompts or not all(prompts):
        raise ApiError(400, "You must pass at least one prompt")
    return [parse_prompt(one, engine) for one in prompts]


def parse_prompt(prompt, engine: Engine) -> list[int]:
    if isinstance(prompt, str) and engine.tokenizer is not None:
        prompt = engine.tokenizer(prompt).input_ids
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid("list_type", "body.prompt", "Input should be a list of token ids", prompt)
    if min(prompt) < 0:
        place = f"body.prompt.{prompt.index(min(prompt))}"
        raise invalid("greater_than_equal", place, "Input should be greater than or equal to 0", min(prompt))
    if max(prompt) >= engine.vocab_size:
        raise ApiError(400, f"Token id {max(prompt)} is out of vocabulary")
    if len(prompt) > engine.max_model_len:
        message = (
            f"This model's maximum context length is {engine.max_model_len} tokens. However, your prompt "
            f"contains {len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise bad_value("input_tokens", len(prompt), message)
    return prompt


def parse_sampling(body: dict, engine: Engine, prompt_length: int) -> Sampling:
    """Checked sampling settings of one prompt; its completion is cut, silently, at max_model_len."""
    for name, neutral in UNSUPPORTED.items():
        if body.get(name) not in neutral:
            raise bad_value(name, body[name], f"the embedded server does not implement {name}")
    max_tokens = min(read(body, "max_tokens", int, 16), engine.max_model_len - prompt_length)
    if max_tokens < 1:
        raise bad_value("max_tokens", max_tokens, f"max_tokens must be at least 1, got {max_tokens}.")
    min_tokens = read(body, "min_tokens", int, 0)
    if not 0 <= min_tokens <= read(body, "max_tokens", int, 16):
        raise bad_value("min_tokens", min_tokens, f"min_tokens must be in [0, max_tokens], got {min_tokens}.")
    temperature = read(body, "temperature", float, 1.0)
    if temperature < 0:
        raise bad_value("temperature", temperature, f"temperature must be non-negative, got {temperature}.")
    top_p = read(body, "top_p", float, 1.0)
    if not 0 < top_p <= 1:
        raise bad_value("top_p", top_p, f"top_p must be in (0, 1], got {top_p}.")
    top_k = read(body, "top_k", int, 0)
    if top_k < -1:
        raise bad_value("top_k", top_k, f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    min_p = read(body, "min_p", float, 0.0)
    if not 0 <= min_p <= 1:
        raise bad_value("min_p", min_p, f"min_p must be in [0, 1], got {min_p}.")
    stop_ids = read(body, "stop_token_ids", list, [])
    if not all(type(token) is int and 0 <= token < engine.vocab_size for token in stop_ids):
        raise invalid("int_type", "body.stop_token_ids", "Input should be a list of token ids", stop_ids)
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_ids=frozenset() if read(body, "ignore_eos", bool, False) else engine.eos_ids,
        stop_ids=frozenset(stop_ids),
        logprobs=parse_logprobs(body, "logprobs", "sample", engine),
        prompt_logprobs=parse_logprobs(body, "prompt_logprobs", "prompt", engine),
    )


def parse_logprobs(body: dict, name: str, what: str, engine: Engine) -> int | None:
    count, limit = read(body, name, int), engine.options.max_logprobs
    if count is None:
        return None
    count = engine.vocab_size if count == -1 else count
    if count < 0:
        raise bad_value(name, count, f"{name} must be non-negative or -1, got {count}.")
    if 0 <= limit < count:
        message = f"Requested {what} logprobs of {count}, which is greater than max allowed: {limit}"
        raise bad_value(name, count, message)
    return count


def parse_completion(body: dict, engine: Engine, name: str) -> list[list[Request]]:
    """The engine's requests of a completion body: one list for each prompt, one request for each of n."""
    model = read(body, "model", str, engine.name)
    if model != engine.name:
        message = f"The model `{model}` does not exist. Valid aliases: {engine.name}."
        raise ApiError(404, message, "NotFoundError", "model")
    prompts = parse_prompts(body, engine)
    n, seed = read(body, "n", int, 1), read(body, "seed", int)
    if n < 1:
        raise ApiError(400, f"n must be at least 1, got {n}.")
    requests = []
    for index, prompt in enumerate(prompts):
        sampling = parse_sampling(body, engine, len(prompt))
        seeds = [int(engine.seeds.integers(1 << 62)) if seed is None else seed + i for i in range(n)]
        requests.append(
            [
                Request(f"{name}-{index}", list(prompt), sampling, uniforms(s, sampling.max_tokens))
                for s in seeds
            ]
        )
    return requests


def uniforms(seed: int, count: int) -> np.ndarray:
    """The numbers in [0, 1) that decide a request's tokens. 32 bits each, so that their product with a
    float64 sum of probabilities stays below the sum."""
    generator = np.random.default_rng(seed % (1 << 64))
    return generator.integers(0, 1 << 32, size=count) / float(1 << 32)


# -------------------------------------------------------------------------------------------- answers
def completion_answer(body: dict, engine: Engine, name: str, requests: list[list[Request]]) -> dict:
    choices = [request for prompt in requests for request in prompt]
    prompt_tokens = sum(prompt[0].prompt_length for prompt in requests)
    generated = sum(request.generated for request in choices)
    return {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": engine.name,
        "choices": [choice(body, engine, index, request) for index, request in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": f"vllm-{VERSION}",
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + generated,
            "completion_tokens": generated,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def choice(body: dict, engine: Engine, index: int, request: Request) -> dict:
    with_ids = bool(body.get("return_token_ids"))
    answer = {
        "index": index,
        "text": engine.text(request),
        "logprobs": None,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": request.output if with_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": request.tokens[: request.prompt_length] if with_ids else None,
        "routed_experts": None,
    }
    if request.sampling.logprobs is not None:
        by_id = body.get("return_tokens_as_token_ids")
        answer["logprobs"] = token_logprobs(request, "token_id:{}".format if by_id else engine.piece)
    if request.sampling.prompt_logprobs is not None:
        scores = [prompt_entry(engine, *score) for score in request.prompt_scores]
        answer["prompt_logprobs"] = [None] + scores
    if body.get("return_weight_versions"):
        answer["weight_versions"] = request.weight_versions()
    return answer


def token_logprobs(request: Request, name) -> dict:
    """Log-probabilities of the generated tokens: the sampled one first, then the most likely by rank."""
    tokens = [name(token) for token in request.output]
    offsets = np.cumsum([0] + [len(token) for token in tokens])[:-1].tolist()
    top = []
    for token, logp, (ids, logps) in zip(tokens, request.logp, request.top, strict=True):
        entry = {token: logp}
        for other, value in zip(ids.tolist(), logps.tolist(), strict=True):
            entry.setdefault(name(other), value)
        top.append(entry)
    return {"text_offset": offsets, "token_logprobs": request.logp, "tokens": tokens, "top_logprobs": top}


def prompt_entry(engine: Engine, token: int, logp: float, rank: int, ids: list[int], logps: list) -> dict:
    """One prompt token: itself first, with its rank, then the most likely others."""
    ranked = [(token, logp, rank), *zip(ids, logps, range(1, len(ids) + 1), strict=True)]
    entry = {}
    for one, value, place in ranked:
        entry.setdefault(str(one), {"logprob": value, "rank": place, "decoded_token": engine.piece(one)})
    return entry


def models_answer(engine: Engine) -> dict:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": engine.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": engine.name,
        "object": "model",
        "created": engine.created,
        "owned_by": "vllm",
        "root": engine.options.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [model]}


def server_info(engine: Engine) -> dict:
    """The resolved configuration, under vLLM's names; one slot of the cache is one block."""
    options = engine.options
    config = {
        "model_config": {
            "model": options.model,
            "tokenizer": options.model,
            "dtype": str(engine.model.dtype),
            "seed": options.seed,
            "max_model_len": engine.max_model_len,
            "max_logprobs": options.max_logprobs,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": False,
            "generation_config": "vllm",
            "served_model_name": engine.name,
            "quantization": None,
        },
        "cache_config": {
            "block_size": engine.max_model_len,
            "num_gpu_blocks": options.max_num_seqs,
            "kv_cache_size_tokens": options.max_num_seqs * engine.max_model_len,
            "enable_prefix_caching": False,
        },
        "parallel_config": dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size"), 1
        ),
        "scheduler_config": {"max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": STEP_TOKENS},
        "device_config": {"device": str(engine.model.device)},
        "lora_config": None,
        "speculative_config": None,
        "weight_transfer_config": {"backend": "gloo"},
        "additional_config": {},
    }
    return {"vllm_config": config, "vllm_env": {}, "system_env": {"torch_version": torch.__version__}}


def metrics_text(engine: Engine) -> str:
    """Prometheus text of the series a client of vLLM reads."""
    counters, running = engine.counters, list(engine.running)
    capacity = engine.options.max_num_seqs * engine.max_model_len
    labels = f'engine="0",model_name="{engine.name}"'
    lines = []

    def series(name: str, kind: str, values: dict[str, float]) -> None:
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{{{labels}{extra}}} {float(value)}" for extra, value in values.items())

    series("num_requests_running", "gauge", {"": len(running)})
    series("num_requests_waiting", "gauge", {"": len(engine.waiting)})
    series("kv_cache_usage_perc", "gauge", {"": sum(r.computed for r in running) / capacity})
    series("prefix_cache_queries_total", "counter", {"": 0})
    series("prefix_cache_hits_total", "counter", {"": 0})
    series("num_preemptions_total", "counter", {"": counters["preemptions"]})
    series("prompt_tokens_total", "counter", {"": counters["prompt_tokens"]})
    series("generation_tokens_total", "counter", {"": counters["generation_tokens"]})
    reasons = ("stop", "length", "abort", "error", "repetition")
    ends = {f',finished_reason="{reason}"': counters[f"finished_{reason}"] for reason in reasons}
    series("request_success_total", "counter", ends)
    info = {"block_size": engine.max_model_len, "num_gpu_blocks": engine.options.max_num_seqs}
    info |= {"kv_cache_size_tokens": capacity, "enable_prefix_caching": False}
    series("cache_config_info", "gauge", {"".join(f',{key}="{value}"' for key, value in info.items()): 1})
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------- HTTP
class Handler(BaseHTTPRequestHandler):
    """One connection. A route is a method named after its path: `post_v1_completions`, `get_health`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet: two would wait for the client's delayed ACK

    def do_GET(self) -> None:
        self.answer("get")

    def do_POST(self) -> None:
        self.answer("post")

    def answer(self, method: str) -> None:
        self.url = urlsplit(self.path)
        self.engine: Engine = self.server.engine
        route = f"{method}_{self.url.path.strip('/').replace('/', '_')}"
        try:
            self.raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if route not in ROUTES or self.url.path != ROUTES[route]:
                return self.reply(404, {"detail": "Not Found"})
            self.reply(200, getattr(self, route)())
        except ClientGone:
            self.close_connection = True
        except ApiError as error:
            self.reply(error.status, error.body)
        except Exception as error:
            traceback.print_exc()
            self.reply(500, ApiError(500, str(error), "InternalServerError").body)

    def reply(self, status: int, answer: dict | str) -> None:
        content = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":"))
        data = content.encode()
        self.send_response(status)
        if data:
            text = "text/plain; version=1.0.0; charset=utf-8"
            self.send_header("Content-Type", text if isinstance(answer, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args) -> None:
        """No line per request."""

    def query(self, name: str, default: str) -> str:
        return parse_qs(self.url.query).get(name, [default])[-1]

    def body(self) -> dict:
        return parse_json(self.raw, self.headers)

    # -- reads
    def get_health(self) -> str:
        if self.engine.error is not None:
            raise ApiError(503, f"the engine has stopped: {self.engine.error}", "ServiceUnavailableError")
        return ""

    def get_version(self) -> dict:
        return {"version": VERSION}

    def get_v1_models(self) -> dict:
        return models_answer(self.engine)

    def get_server_info(self) -> dict:
        info = server_info(self.engine)
        as_json = self.query("config_format", "text") == "json"
        return info if as_json else info | {"vllm_config": str(info["vllm_config"])}

    def get_get_world_size(self) -> dict:
        return {"world_size": 1}

    def get_is_paused(self) -> dict:
        return {"is_paused": self.engine.paused}

    def get_metrics(self) -> str:
        return metrics_text(self.engine)

    def get_weight_info(self) -> dict:
        return {"weight_version": self.engine.version}

    # -- sampling
    def post_v1_completions(self) -> dict:
        body = self.body()
        chosen = read(body, "request_id", str) or self.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
        name = f"cmpl-{chosen}"
        requests = parse_completion(body, self.engine, name)
        every = [request for prompt in requests for request in prompt]
        self.engine.post(self.engine.submit, every)
        try:
            for request in every:
                while not request.done.wait(0.5):
                    self.engine.check()
                    self.check_client()
        except ClientGone:
            self.engine.post(self.engine.abort, set(every).__contains__)
            raise
        return completion_answer(body, self.engine, name, requests)

    def check_client(self) -> None:
        """Raise ClientGone when the client has closed the connection (readable, and nothing to read)."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                raise ClientGone
        except ConnectionError as error:
            raise ClientGone from error

    def post_abort_requests(self) -> dict:
        try:
            ids = json.loads(self.raw).get("request_ids")
        except (ValueError, AttributeError) as error:
            raise ApiError(400, "Invalid JSON format", "Bad Request") from error
        return {"status": "aborted", "aborted": self.engine.call(self.engine.abort_ids, ids)}

    # -- pausing
    def post_pause(self) -> dict:
        mode, clear = self.query("mode", "abort"), self.query("clear_cache", "true").lower()
        if mode not in ("abort", "wait", "keep"):
            raise invalid("literal_error", "query.mode", "Input should be 'abort', 'wait' or 'keep'", mode)
        if clear not in ("true", "false", "1", "0"):
            raise invalid(TYPES[bool][0], "query.clear_cache", TYPES[bool][1], clear)
        self.engine.wait(self.engine.call(self.engine.pause, mode, clear in ("true", "1")))
        return {"status": "paused"}

    def post_resume(self) -> dict:
        try:
            self.engine.call(self.engine.resume)
        except RuntimeError as error:
            failure = ApiError(500, str(error))
            failure.body = {"error": str(error)}  # the flat form vLLM has on these routes
            raise failure from error
        return {"status": "resumed"}

    # -- weights
    def post_init_weight_transfer_engine(self) -> dict:
        self.call_worker(self.engine.weights.init, require(self.body(), "init_info", dict))
        return {"message": "Weight transfer initialized"}

    def post_start_weight_update(self) -> dict:
        self.call_worker(self.engine.start_update)
        return {"message": "Weight update started"}

    def post_update_weights(self) -> dict:
        body = self.body()
        if isinstance(body.get("update_info"), list) and len(body["update_info"]) == 1:
            body["update_info"] = body["update_info"][0]  # one entry for each worker, and there is one
        self.call_worker(self.engine.update, require(body, "update_info", dict))
        return {"message": "Weights updated"}

    def post_finish_weight_update(self) -> dict:
        version = read(self.body(), "weight_version", str) if self.raw else None
        self.call_worker(self.engine.finish_update, version)
        return {"message": "Weight update finished"}

    def post_update_weight_version(self) -> dict:
        version = require(self.body(), "new_version", str)
        self.engine.call(self.engine.set_version, version)
        return {"success": True, "new_version": version}

    def call_worker(self, function, *args) -> None:
        try:
            self.engine.call(function, *args)
        except ApiError:
            raise
        except Exception as error:
            print(f"{self.path}: {error!r}", file=sys.stderr, flush=True)
            message = (
                f"Call to collective_rpc method failed: Worker failed with error '{error}', "
                "please check the stack trace above for the root cause"
            )
            raise ApiError(500, message, "InternalServerError") from error


ROUTES = {
    "get_health": "/health",
    "get_version": "/version",
    "get_v1_models": "/v1/models",
    "get_server_info": "/server_info",
    "get_get_world_size": "/get_world_size",
    "get_is_paused": "/is_paused",
    "get_metrics": "/metrics",
    "get_weight_info": "/weight_info",
    "post_v1_completions": "/v1/completions",
    "post_abort_requests": "/abort_requests",
    "post_pause": "/pause",
    "post_resume": "/resume",
    "post_init_weight_transfer_engine": "/init_weight_transfer_engine",
    "post_start_weight_update": "/start_weight_update",
    "post_update_weights": "/update_weights",
    "post_finish_weight_update": "/finish_weight_update",
    "post_update_weight_version": "/update_weight_version",
}


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a whole step's requests may connect at once

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has left is no news
            super().handle_error(request, client_address)


class Server:
    """A running sampler: `url` while it lives, `close()` to end it and free the port."""

    def __init__(self, options: Options):
        self.http = HttpServer((options.host, options.port), Handler)
        try:
            self.engine = self.http.engine = Engine(options)
        except BaseException:
            self.http.server_close()
            raise
        self.url = f"http://{options.host}:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), name="http", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.engine.stop()


def start(model: str, **options) -> Server:
    """Serve `model` from this process, on a free port; the options are those of the command line. Close it
    before the interpreter ends: its thread may be inside torch."""
    return Server(Options(model=str(model), **{"port": 0, **options}))


def launch(arguments: list[str], timeout_s: float) -> tuple[subprocess.Popen, str]:
    """`begin`, and wait until it takes requests; returns the process and its URL."""
    process = begin(arguments)
    return process, wait_for_url(process, timeout_s)


def begin(arguments: list[str]) -> subprocess.Popen:
    """Start `python serve.py` with these arguments in a process that ends with this one. It has a session of
    its own, so that a Ctrl-C reaches the trainer alone, which ends it when it is done with it."""
    command = [sys.executable, os.path.abspath(__file__), "--exit_with_parent", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_url(process: subprocess.Popen, timeout_s: float) -> str:
    """The URL of a process that was begun, once it takes requests. RuntimeError when it ends, or says nothing
    for `timeout_s`; its errors are on standard error."""
    notice, line = Notice(), ""
    while notice.waited() < timeout_s:
        if select.select([process.stdout], [], [], min(timeout_s, 1.0))[0]:
            line = process.stdout.readline()
            break
        notice.say("the embedded server to load its model")
    if not line:
        process.kill()
        raise RuntimeError(
            f"the embedded server did not start (exit code {process.wait()}; it had {timeout_s:.0f} s); "
            f"see its messages above. Command: {' '.join(process.args)}"
        )
    return json.loads(line)["url"]


def end(process: subprocess.Popen) -> None:
    """End a process that was begun; it is gone when this returns."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="The embedded sampler: vLLM's endpoints, on plain transformers."
    )
    for one in fields(Options):
        kind = {"action": "store_true"} if one.type == "bool" else {"type": type(one.default)}
        parser.add_argument(f"--{one.name}", default=one.default, help=one.metadata["help"], **kind)
    given = parser.parse_args()
    try:
        return Options(**vars(given))
    except ValueError as error:
        parser.error(str(error))


def end_with_stdin() -> None:
    """Standard input closes when the parent dies, however it dies."""

    def watch():
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def main() -> None:
    """Serve until SIGTERM, SIGINT or, with --exit_with_parent, the end of standard input. One line goes to
    standard output, {"url": "http://127.0.0.1:8000", "pid": 1}, once requests are taken."""
    options = parse_options()
    transformers.utils.logging.disable_progress_bar()
    if options.exit_with_parent:
        end_with_stdin()
    try:
        server = Server(options)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        print(
            f"error: --port {options.port} of {options.host} is in use: choose another (0 picks a free one), "
            "or end what listens there",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
    ended.wait()
    server.close()
    os._exit(0)  # the engine's thread may be inside a forward or a broadcast: nothing waits for it


if __name__ == "__main__":
    main()
