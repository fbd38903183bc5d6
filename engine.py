"""What the embedded sampler computes: continuous batching, sampling and weight updates on plain transformers.

    slot 0  |prompt a......|answer......|            one forward is one row of tokens: the newest token of
    slot 1  |prompt b..|answer....|                  every decoding slot, then runs of prompts still to be
    slot 2  |prompt c.........~~~~~~~ (prefilling)   read. Each token's key and value go to (slot, position).
    slot 3  free

Decoding requests hold slots 0 .. decoding-1 and prefilling ones the slots after them, so a decode step
attends over views of the cache. A request leaves by the last one moving into its hole. One thread does all
that touches this, a forward or a command at a time: the commands of the HTTP threads run between forwards.

transformers' own continuous batching draws a whole batch from one random generator (a request's tokens would
depend on its company), returns the log-probability of the sampled token alone, and keeps the keys and values
of the old weights over a pause.

Must never: run a forward while weights are being loaded, or after an update that failed half-way
(tests/test_serve.py::test_after_a_failed_update_only_a_complete_one_makes_resume_safe); keep a key of an old
policy (::test_a_request_over_an_update_is_old_policy_then_new_policy); return a log-probability of another
distribution than the one sampled from (::test_logprobs_are_those_of_the_distribution_sampled_from).
Letters in shapes: N tokens of a forward, R rows of logits, T positions of a slot, the others as everywhere.
"""

from __future__ import annotations

import functools
import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lora import read_adapter, scaling
from stream import GlooGroup, packed_chunks, renaming

FILTERED = -9999.0  # how a log-probability of -inf is written in JSON
STEP_TOKENS = 2048  # tokens of one forward: bounds the activations of a prefill
STEP_LOGITS = 1 << 26  # float32 logits of prompt scoring in one forward (256 MiB, and as much again to work)
GREEDY = 1e-5  # temperatures below this are greedy


# ------------------------------------------------------------------------------------------ attention
@dataclass
class Step:
    """Where the tokens of one forward live: one token of each decoding slot, then runs of prompts."""

    address: torch.Tensor  # [N] int64, slot * T + position
    position: torch.Tensor  # [N] int64
    decoding: int  # the first tokens of the row are the newest ones of slots 0 .. decoding-1
    longest: int  # keys of the longest decoding slot
    visible: Callable  # sliding window -> [decoding, longest] bool: the keys that those may see, made once
    runs: list[tuple[int, int, int, int]]  # (slot, its first token in the row, start, end position)


def causal(position: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """[queries, keys] bool: key index <= position of the query, and inside the sliding window."""
    index = torch.arange(keys, device=position.device)
    seen = index <= position[:, None]
    return seen if window is None else seen & (index > position[:, None] - window)


class SlotCache:
    """Keys and values of every layer, [slots, T, G, D] each; a layer's are allocated when it first runs."""

    def __init__(self, slots: int, length: int):
        self.slots, self.length = slots, length
        self.layers: dict[int, list[torch.Tensor]] = {}

    def write(self, layer: int, address: torch.Tensor, *news: torch.Tensor) -> list[torch.Tensor]:
        """Store key and value, [1, G, N, D] each, at address [N]; returns the layer's buffers."""
        if layer not in self.layers:
            self.layers[layer] = [self.allocate(new.shape[1], new.shape[3], new) for new in news]
        for buffer, new in zip(self.layers[layer], news, strict=True):
            buffer.flatten(0, 1).index_copy_(0, address, new[0].transpose(0, 1))
        return self.layers[layer]

    def allocate(self, groups: int, width: int, like: torch.Tensor) -> torch.Tensor:
        try:
            # zeros: attention gives unwritten positions weight 0, and 0 times a NaN of old memory is NaN
            return like.new_zeros(self.slots, self.length, groups, width)
        except RuntimeError as error:
            size = f"--max_num_seqs ({self.slots}) or --max_model_len ({self.length})"
            raise RuntimeError(f"no memory for the cache of keys and values: lower {size}") from error

    def move(self, source: int, target: int, length: int) -> None:
        for buffer in itertools.chain(*self.layers.values()):
            buffer[target, :length] = buffer[source, :length]


# What may arrive at an attention function without changing what it has to compute.
HARMLESS = {"position_ids", "position_embeddings", "use_cache", "cache", "cache_position", "is_causal"}


def check_attention(module, kwargs: dict) -> None:
    """Refuse by name what `slot_attention` does not compute."""
    extra = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in HARMLESS)
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        extra.append("bidirectional attention")
    if extra:
        refuse(f"{type(module).__name__} uses {', '.join(extra)}")


def refuse(what: str):
    raise NotImplementedError(f"{what}: the embedded sampler does not do that; serve this model with vLLM")


def slot_attention(
    module, query, key, value, attention_mask, *, slots: SlotCache, step: Step,
    scaling=None, dropout=0.0, sliding_window=None, softcap=None, **kwargs,
):  # fmt: skip
    """Attention over the slot cache, as an attention function of transformers; returns [1, N, H, D].

    query [1, H, N, D]; key, value [1, G, N, D]. A name without a mask function gets no mask.
    """
    if module.layer_idx not in slots.layers:  # in the warm-up, so at start
        check_attention(module, kwargs)
    cached = slots.write(module.layer_idx, step.address, key, value)  # [slots, T, G, D] each
    query = query[0].unflatten(0, (key.shape[1], -1))  # [G, H/G, N, D]
    kernel = F.scaled_dot_product_attention if softcap is None else functools.partial(capped, softcap=softcap)
    outputs, attend = [], functools.partial(kernel, scale=scaling)
    if count := step.decoding:
        k, v = (x[:count, : step.longest].transpose(1, 2) for x in cached)  # [count, G, T, D]
        q = query[:, :, :count].permute(2, 0, 1, 3)  # [count, G, H/G, D]
        seen = step.visible(sliding_window)[:, None, None]  # [count, 1, 1, T]
        outputs.append(attend(q, k, v, seen).flatten(1, 2))
    for slot, first, start, end in step.runs:
        run = slice(first, first + end - start)
        k, v = (x[slot, :end].transpose(0, 1)[:, None] for x in cached)  # [G, 1, T, D]
        k, v = (x.expand(-1, query.shape[1], -1, -1) for x in (k, v))
        plain = start == 0 and softcap is None and (sliding_window is None or end <= sliding_window)
        seen = None if plain else causal(step.position[run], end, sliding_window)  # [n, T]
        out = attend(query[:, :, run], k, v, seen, is_causal=plain)  # [G, H/G, n, D]
        outputs.append(out.flatten(0, 1).transpose(0, 1))
    return torch.cat(outputs)[None], None


def capped(query, key, value, visible, scale: float | None, softcap: float, is_causal=False):
    """scaled_dot_product_attention of scores that a tanh keeps within softcap."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


# ------------------------------------------------------------------------------------------- sampling
def sample(logits: torch.Tensor, temperature, top_k, top_p, min_p, uniform):
    """One token per row, and the log-probabilities of exactly the distribution it was drawn from.

    logits [R, V] float32; the rest [R] float64 (top_k <= 0, top_p = 1, min_p = 0 are off).
    Returns tokens [R] int64 and log-probabilities [R, V] float32, -inf where filtered. The token is the first
    whose cumulative probability passes the row's `uniform`: one number in [0, 1) decides it, whoever shares
    the batch. A row of temperature 0 takes the most likely token; its log-probabilities are those of
    temperature 1, unfiltered, as vLLM reports them.
    """
    controls = (temperature, top_k, top_p, min_p, uniform)
    temperature, top_k, top_p, min_p, uniform = (x[:, None] for x in controls)  # [R, 1]
    greedy = temperature < GREEDY
    logits = logits / torch.where(greedy, 1.0, temperature).float()
    logits = filtered(logits, top_k.masked_fill(greedy, 0), top_p.masked_fill(greedy, 1), min_p * ~greedy)
    logp = logits.log_softmax(-1)
    if bool(logp.isnan().any()):
        raise FloatingPointError("the model's logits are NaN: its weights are broken")
    # float64: a float32 sum over a large vocabulary would lose the rare tokens
    cumulative = logp.exp().to(torch.float64).cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)[:, 0], logp


def filtered(logits: torch.Tensor, top_k, top_p, min_p) -> torch.Tensor:
    """[R, V] logits with -inf for what min-p, top-k and top-p leave out, one after the other, as in vLLM.

    min-p keeps tokens with at least min_p times the largest probability; top-p keeps one while the more
    likely ones of those left hold less than p. Ties with the last one kept stay.
    """
    if bool((min_p > 0).any()):
        floor = logits.amax(-1, keepdim=True) + min_p.log().float()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    limited = (top_k > 0) | (top_p < 1)
    if bool(limited.any()):
        top_k = torch.where(top_k > 0, top_k, torch.inf).clamp(max=logits.shape[-1])
        width = int(top_k[limited].max())  # only a top-p row without top-k needs the whole vocabulary
        ordered = logits.topk(width).values  # [R, width], falling
        kept = torch.arange(width, device=logits.device) < top_k
        share = ordered.masked_fill(~kept, -torch.inf).softmax(-1).to(torch.float64)
        kept &= share.cumsum(-1) - share < torch.where(top_p < 1, top_p, torch.inf)
        lowest = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill((logits < lowest) & limited, -torch.inf)
    return logits


def uniforms(seed: int | None, count: int) -> np.ndarray:
    """The numbers in [0, 1) that decide a request's tokens; others every time without a seed. 32 bits each,
    so that their product with a float64 sum of probabilities stays below the sum."""
    generator = np.random.default_rng(seed if seed is None else seed % (1 << 64))
    return generator.integers(0, 1 << 32, size=count) / float(1 << 32)


# ------------------------------------------------------------------------------------------- adapters
@dataclass(eq=False)
class Adapter:
    """A low-rank adapter (lora.py), in the served dtype."""

    path: str
    scaling: float
    layers: dict[str, list[torch.Tensor]]  # name of a linear layer -> A [r, in], B [out, r]


class Adapters:
    """Adapters beside the model's linear layers, several of them in one forward:

        y[rows] += scaling * (x[rows] A^T) B^T        rows: the tokens of the adapter's requests

    in the trainer's own order of operations. Loading and unloading happen beside the forwards: a request
    keeps the adapter it came with (tests/test_adapters.py::test_a_request_keeps_an_adapter_that_is_unloaded).
    """

    def __init__(self, model, enabled: bool):
        self.device, self.dtype = model.device, model.dtype
        self.loaded: dict[str, Adapter] = {}
        self.parts: list[tuple[Adapter, slice | torch.Tensor]] = []  # of the next forward, with their rows
        self.linear = {}
        decoder = set(model.get_decoder().modules()) if enabled else ()
        for name, module in model.named_modules():
            # an expert sees some of the tokens only, and nobody tells which
            if module in decoder and isinstance(module, torch.nn.Linear) and ".experts." not in name:
                self.linear[name] = module
                module.register_forward_hook(functools.partial(self.add, name))

    def load(self, name: str, path: str) -> None:
        """Read a folder of PEFT's. Raises for an adapter that does not fit the model."""
        config, layers = read_adapter(Path(path))
        rank = config["r"]
        for layer, matrices in layers.items():
            linear = self.linear.get(layer)
            fitting = linear and [(rank, linear.in_features), (linear.out_features, rank)]
            if [tuple(m.shape) for m in matrices] != fitting:
                why = f"{layer} is no linear layer of this model with these shapes"
                raise ValueError(f"{path}: {why}, or --enable_lora is missing")
            layers[layer] = [m.to(self.device, self.dtype) for m in matrices]
        scale = scaling(rank, config["lora_alpha"], config.get("use_rslora", False))
        self.loaded[name] = Adapter(path, scale, layers)

    def share(self, wanted: list[Adapter | None], counts: list[int]) -> None:
        """The next forward's tokens are counts[i] of wanted[i], one after the other."""
        self.parts = []
        for adapter in set(wanted) - {None}:
            own = np.repeat([other is adapter for other in wanted], counts)  # [N]
            rows = slice(None) if own.all() else torch.from_numpy(own.nonzero()[0]).to(self.device)
            self.parts.append((adapter, rows))

    def add(self, layer: str, module, arguments, output: torch.Tensor) -> None:
        """After a linear layer: [..., N, in] in, [..., N, out] out, changed in place."""
        for adapter, rows in self.parts:
            if layer in adapter.layers:
                down, up = adapter.layers[layer]
                low = F.linear(arguments[0][..., rows, :], down)  # [..., n, r]
                output[..., rows, :] += F.linear(low, up) * adapter.scaling


# ------------------------------------------------------------------------------------------- requests
class Request:
    """One completion: written by the engine's thread until `done`, read by the HTTP thread after it.

    `settings` are serve.FIELDS and `adapter`, which stays the request's own when it is unloaded meanwhile.
    """

    def __init__(self, prompt: list[int], settings: SimpleNamespace, eos_ids: frozenset[int], limit: int):
        self.tokens = prompt  # and then what was generated
        self.prompt_length = len(prompt)
        self.settings = settings
        self.eos_ids = frozenset() if settings.ignore_eos else eos_ids
        self.uniforms = uniforms(settings.seed, min(settings.max_tokens, limit - len(prompt)))
        self.computed = 0  # leading tokens whose keys and values are in the cache
        self.logp: list[float] = []  # of each generated token
        self.top: list[tuple[np.ndarray, np.ndarray]] = []  # ids and logp [logprobs] beside it
        self.prompt_scores: list[dict[int, float]] = []  # entry i is of token i + 1, which comes first
        self.marks: list[tuple[int, str]] = []  # (first output token, weight version)
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.done = threading.Event()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def unscored(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and not there yet."""
        asked = self.settings.prompt_logprobs is not None
        return asked * (self.prompt_length - 1 - len(self.prompt_scores))

    def append(self, token: int) -> None:
        """Take a sampled token and see whether it is the last."""
        self.tokens.append(token)
        if token in self.eos_ids:
            self.finish_reason = "stop"
        elif token in self.settings.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.generated == len(self.uniforms):
            self.finish_reason = "length"

    def weight_versions(self) -> list[dict]:
        """Runs of output tokens made by one weight version."""
        ends = [start for start, _ in self.marks[1:]] + [self.generated]
        runs = zip(self.marks, ends, strict=True)
        return [{"version": v, "start": start, "end": end} for (start, v), end in runs if end > start]


# -------------------------------------------------------------------------------------------- weights
class WeightReceiver:
    """The receiving end of a trainer's stream of weights.

    Names are those of the checkpoint. `stale` holds the ids of parameters (a tied head and its embedding are
    one) that have to come before the weights are one policy's again, after an update that failed.
    """

    def __init__(self, model, timeout_s: float):
        renamed = renaming(model)
        self.parameters = {renamed(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        self.timeout_s = timeout_s
        self.group = None
        self.stale: set[int] = set()

    def distrust(self) -> None:
        self.stale = set(map(id, self.parameters.values()))

    def join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        packed: bool = False,
        packed_buffer_size_bytes: int = 1 << 30,
        packed_num_buffers: int = 2,  # overlaps streams on a GPU; changes no byte
    ) -> None:
        """Join the trainer's group by vLLM's init_info; a second call leaves the first group."""
        self.leave()
        self.group = GlooGroup(master_address, master_port, rank_offset, world_size, self.timeout_s)
        self.buffer_bytes = packed_buffer_size_bytes if packed else 0  # at 0 a chunk ends with every tensor

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def receive(self, names: list[str], dtype_names: list[str], shapes: list) -> None:
        """Copy a whole stream into the parameters. What cannot be loaded is an error after its end, so that
        the group stays in step with the trainer and the next update can use it."""
        if self.group is None:
            raise RuntimeError("gloo weight transfer not initialized. Call init_transfer_engine() first.")
        problem = None
        try:
            for chunk in packed_chunks(names, dtype_names, shapes, self.buffer_bytes):
                sizes = [spec.nbytes for spec in chunk]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8)
                self.group.broadcast(buffer)
                for spec, data in zip(chunk, buffer.split(sizes), strict=True):
                    parameter = self.parameters.get(spec.name)
                    if parameter is not None and parameter.shape == spec.shape:
                        parameter.copy_(data.view(spec.dtype).view(spec.shape))
                        self.stale.discard(id(parameter))
                    else:
                        here = "unknown" if parameter is None else f"{list(parameter.shape)}"
                        problem = f"{spec.name}, sent with shape {list(spec.shape)}, is {here} here"
        except Exception:
            self.leave()  # this end no longer knows where in the stream the trainer is
            raise
        if problem:
            raise ValueError(problem)


# --------------------------------------------------------------------------------------------- engine
class Engine:
    """Batched decoding on its own thread. Whatever touches its state runs there, between two forwards.

    `options` are those of serve.py's command line.
    """

    def __init__(self, options):
        self.options = options
        self.name = options.model
        ALL_ATTENTION_FUNCTIONS.register("slots", slot_attention)
        form = {"dtype": options.dtype, "attn_implementation": "slots"}
        model = AutoModelForCausalLM.from_pretrained(options.model, **form)
        self.model = model.to(options.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        configured = model.generation_config.eos_token_id  # chat models often have one here and one there
        configured = configured if isinstance(configured, list) else [configured]
        self.eos_ids = frozenset([*configured, self.tokenizer.eos_token_id]) - {None}
        config = self.model.config.get_text_config()
        self.vocab_size = self.model.get_input_embeddings().num_embeddings
        limit = config.max_position_embeddings
        self.max_model_len = options.max_model_len or limit
        if self.max_model_len > limit:
            raise ValueError(f"--max_model_len {self.max_model_len}: {options.model} has {limit} positions")
        self.capacity = options.max_num_seqs * self.max_model_len  # tokens
        self.cache = SlotCache(options.max_num_seqs, self.max_model_len)
        self.adapters = Adapters(self.model, options.enable_lora)
        self.weights = WeightReceiver(self.model, options.transfer_timeout)
        self.version = "default"
        self.running: list[Request] = []  # by slot: the decoding ones, then those with tokens to prefill
        self.decoding = 0
        self.waiting: deque[Request] = deque()
        self.paused = self.updating = False
        self.preemptions = 0
        self.error: Exception | None = None  # what a forward ended in: nothing runs after it
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.stepping = False  # a step is queued
        self.call(self.warm_up, config)

    def warm_up(self, config) -> None:
        """One forward of one token: allocates the cache, and refuses a model with anything else in it."""
        kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds or getattr(config, "attention_chunk_size", None):
            refuse(f"{self.options.model} has {sorted(kinds) or 'chunked attention'} layers")
        self.forward([0], [(0, 0, 0, 1)], decoding=1, rows=[0])
        through, layers = len(self.cache.layers), config.num_hidden_layers
        if through != layers:
            name = self.options.model
            refuse(f"{through} of {layers} layers of {name} use transformers' attention interface")

    # -- the thread
    def post(self, function, *args) -> Future:
        """Have `function` run on the engine's thread, between two forwards."""
        return self.thread.submit(self.turn, function, *args)

    def call(self, function, *args):
        return self.post(function, *args).result()

    @torch.inference_mode()
    def turn(self, function, *args):
        """Run a command or a step; another step is queued behind the commands that wait, if there is work."""
        self.check()
        try:
            return function(*args)
        finally:
            if self.busy and not self.stepping:
                self.stepping = True
                self.post(self.step)

    @property
    def busy(self) -> bool:
        held = self.paused or self.updating or self.error
        return not held and bool(self.running or self.waiting)

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"EngineCore encountered an issue: {self.error}")

    # -- commands
    def drop(self, request: Request) -> None:
        """Forget a request whose client has gone."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.leave(request)

    def pause(self) -> None:
        """Stop before the next forward; requests stay where they are."""
        self.paused = True

    def resume(self) -> None:
        if self.updating:
            raise RuntimeError("a weight update is open: call finish_weight_update before resuming")
        if stale := self.weights.stale:
            raise RuntimeError(
                f"a weight update failed half-way, so {len(stale)} parameters may be another policy's: send "
                "one complete update (start, every parameter, finish) before resuming, or restart"
            )
        self.paused = False

    def join(self, info: dict) -> None:
        self.weights.join(**info)

    def start_update(self) -> None:
        """Open the window and forget all keys and values: every running request reads its prefix again."""
        if self.updating:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.updating = True
        if self.weights.stale:  # what an earlier window has brought may be another policy's
            self.weights.distrust()
        self.preemptions += sum(r.computed > 0 for r in self.running)
        self.decoding = 0
        for request in self.running:
            request.computed = 0
            if not request.generated:
                request.prompt_scores.clear()  # scores of one prompt come from one policy

    def update(self, info: dict) -> None:
        if not self.updating:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.weights.receive(**info)
        except BaseException:
            self.updating, self.paused = False, True
            self.weights.distrust()
            raise

    def finish_update(self, version: str | None) -> None:
        if not self.updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.updating = False
        if version is not None:
            self.version = version
            for request in self.running:
                request.marks.append((request.generated, version))

    # -- one forward and what follows from it
    def step(self) -> None:
        self.stepping = False
        try:
            if self.busy:  # no command that came in between has changed that
                self.advance()
        except Exception as error:
            traceback.print_exc()
            self.error = error

    def advance(self) -> None:
        """Admit requests, run one forward, and take what it gives: prompt scores and next tokens.

        Its tokens are, in slot order, the one new token of each decoding slot, then what is left of prefixes.
        Only the last run can stop short of its request's end, so those ready to sample are the first slots.
        """
        while self.waiting and len(self.running) < self.options.max_num_seqs:
            self.running.append(self.waiting.popleft())
            self.running[-1].marks.append((0, self.version))
        tokens, runs, ready, rows, scored = [], [], [], [], {}
        scores = max(1, STEP_LOGITS // self.vocab_size)  # room for prompt scores
        for slot, request in enumerate(self.running):
            start, first, whole = request.computed, len(tokens), len(request.tokens)
            end = min(whole, start + STEP_TOKENS - first, start + scores if request.unscored else whole)
            if end == start:
                break
            if count := min(request.unscored, end - start):
                scored[request] = range(first, first + count)
                scores -= count
            runs.append((slot, first, start, end))
            tokens += request.tokens[start:end]
            request.computed = end
            if end < whole:
                break
            ready.append(request)
            rows.append(len(tokens) - 1)
        owners = [request.settings.adapter for request in self.running[: len(runs)]]
        self.adapters.share(owners, [end - start for *_, start, end in runs])
        logits = self.forward(tokens, runs, self.decoding, [*rows, *itertools.chain(*scored.values())])
        self.decoding = len(ready)
        parts = logits[len(ready) :].split([len(positions) for positions in scored.values()])
        for request, part in zip(scored, parts, strict=True):
            self.score_prompt(request, part)
        if ready:
            self.sample(logits[: len(ready)], ready)

    def forward(self, tokens: list[int], runs: list, decoding: int, rows: list[int]) -> torch.Tensor:
        """Run one row of tokens [N] through the model; returns float32 logits [len(rows), V]."""
        slot, first, start, end = np.array(runs).T  # [runs] each
        position = np.arange(len(tokens)) + np.repeat(start - first, end - start)  # [N]
        address = position + np.repeat(slot, end - start) * self.max_model_len  # [N]
        device, longest = self.model.device, int(end[:decoding].max(initial=0))
        packed = torch.from_numpy(np.stack([tokens, position, address])).to(device)
        visible = functools.cache(functools.partial(causal, packed[1, :decoding], longest))
        out = self.model(
            input_ids=packed[:1],
            position_ids=packed[1:2],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=device),
            slots=self.cache,
            step=Step(packed[2], packed[1], decoding, longest, visible, runs[decoding:]),
        )
        return out.logits[0].float()

    def sample(self, logits: torch.Tensor, ready: list[Request]) -> None:
        """Draw the next token of every ready request; those that end make room."""
        settings = [(r.settings, r.uniforms[r.generated]) for r in ready]
        controls = [(s.temperature, s.top_k, s.top_p, s.min_p, drawn) for s, drawn in settings]
        controls = torch.tensor(controls, dtype=torch.float64, device=logits.device)  # [R, 5]
        tokens, logp = sample(logits, *controls.unbind(-1))
        chosen = logp.gather(-1, tokens[:, None])[:, 0].tolist()
        top = logp.topk(min(max(r.settings.logprobs or 0 for r in ready), self.vocab_size))
        # numpy rows: lists of them would be a heap the garbage collector walks again and again
        top_ids, top_logp = top.indices.cpu().numpy(), top.values.clamp(min=FILTERED).cpu().numpy()
        for row, (request, token) in enumerate(zip(ready, tokens.tolist(), strict=True)):
            count = request.settings.logprobs or 0
            request.logp.append(chosen[row])
            request.top.append((top_ids[row][:count], top_logp[row][:count]))
            request.append(token)
        for request in [r for r in ready if r.finish_reason]:
            self.leave(request)
            request.done.set()

    def score_prompt(self, request: Request, logits: torch.Tensor) -> None:
        """The next prompt tokens' log-probabilities and the most likely ones, at temperature 1: [n, V]."""
        logp, begin = logits.log_softmax(-1), len(request.prompt_scores) + 1
        actual = request.tokens[begin : begin + len(logp)]
        own = logp.gather(-1, torch.tensor(actual, device=logp.device)[:, None])[:, 0]  # [n]
        top = logp.topk(min(request.settings.prompt_logprobs, self.vocab_size))
        own, likeliest = (values.clamp(min=FILTERED).tolist() for values in (own, top.values))
        for token, score, ids, logps in zip(actual, own, top.indices.tolist(), likeliest, strict=True):
            request.prompt_scores.append({token: score} | dict(zip(ids, logps, strict=True)))

    def leave(self, request: Request) -> None:
        """Free a request's slot. The decoding slots stay the first ones, and no slot is left empty."""
        hole = self.running.index(request)
        if hole < self.decoding:
            self.decoding -= 1
            self.move(self.decoding, hole)
            hole = self.decoding
        self.move(len(self.running) - 1, hole)
        self.running.pop()

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.running[target] = self.running[source]
            self.cache.move(source, target, self.running[source].computed)

    def stop(self) -> None:
        self.error = RuntimeError("the server has been closed")
        self.thread.shutdown(wait=False, cancel_futures=True)
