"""Attention over prefix trees, for any transformers model whose layers go through the attention interface.

    attention.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tree")
    attention.check(model)                                   # raises where the architecture ignores the tree
    model.model(row.input_ids[None], position_ids=row.position_ids[None], **attention.index(row), ...)

`index(row)` is made once per row and travels through the forward as one keyword argument, the same object for
every layer and for the second forward of gradient checkpointing. A backend is a module with a function
`attend(query, key, value, plan, scale, window, softcap, sinks)`:

    reference       reference.py, plain PyTorch: the definition, and the CPU path
    triton          tree.py, Triton kernels; on Hopper those of hopper.py, written in Gluon
    flash           flash.py, flash-attn-4 with the rule as its mask, on Hopper

"auto" takes, layer by layer, the first of FASTEST that does not refuse, and the reference on a CPU.

Layers that carry a state along instead (hybrid models) get the same index; `check` connects them (delta.py).

A layer's options are honoured or refused, never ignored: a lost mask or bias trains another model than the
one that sampled. And no layer ever falls back to ordinary attention when the index does not arrive.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import count
from weakref import WeakValueDictionary

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

from attention import delta, reference

BACKENDS = {"reference": "reference", "triton": "tree", "flash": "flash"}  # name -> module of this package

# On a GPU, fastest first, for head sizes up to the number; measured on an H200 (bench/attention.py).
FASTEST = {128: ("triton",), 256: ("flash", "triton")}

# Keyword arguments that reach a layer's attention without changing its result.
HARMLESS = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "deterministic",
}


class Index:
    """What travels to the layers: one object that FSDP and checkpointing hand on untouched.

    No tensor, and no dataclass, which FSDP would copy for every layer, with all that its plan has found out
    (tests/test_attention.py::test_an_index_reaches_sharded_layers_itself).
    """

    def __init__(self, subtree_end, position_ids: torch.Tensor, backend: str = "auto", longest: int = 0):
        if backend != "auto" and backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ValueError(f"attention backend {backend!r} is unknown: choose auto or one of {known}")
        self.length, self.backend = len(subtree_end), backend  # N
        self.plan = reference.plan(subtree_end, position_ids, longest, plain=backend == "reference")
        self.number = torch.tensor(next(_numbers))  # int64, on the CPU
        _indices[int(self.number)] = self

    def module(self, query, key, value, scale, window):
        """The module of the backend that was asked for, else of the fastest one that does not refuse."""
        if self.backend != "auto":
            return _module(self.backend)
        size = max(query.shape[-1], value.shape[-1])
        names = next((names for largest, names in FASTEST.items() if size <= largest), ())
        if query.is_cuda and find_spec("triton"):
            for module in map(_module, names):
                if not module.refusal(query, key, value, scale, window):
                    return module
        return reference

    def attend(self, query, key, value, scale, window=None, **options):
        module = self.module(query, key, value, scale, window)
        return module.attend(query, key, value, self.plan, scale, window=window, **options)

    def gradients(self, doutput, query, key, value, sinks, output, lse, scale, window, softcap) -> tuple:
        """The backward of `attend` from what it returned, or by a second forward."""
        module = self.module(query, key, value, scale, window)
        if hasattr(module, "gradients"):
            rest = (output, lse, self.plan, scale, window, softcap, sinks)
            return module.gradients(doutput, query, key, value, *rest)
        # An operator runs with autograd switched off below it: not here.
        autograd = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in (query, key, value, sinks)]
            options = dict(window=window, softcap=softcap, sinks=leaves[3])
            output = module.attend(*leaves[:3], self.plan, scale, **options)
        return torch.autograd.grad(output, [leaf for leaf in leaves if leaf is not None], doutput)


_numbers = count()
_indices: WeakValueDictionary[int, Index] = WeakValueDictionary()  # how a compiled layer finds its row's


def register() -> None:
    """Makes `attn_implementation="tree"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register("tree", tree_attention)
    AttentionMaskInterface.register("tree", no_mask)
    attend_opaquely.register_autograd(_backward, setup_context=_save)


def index(row, backend: str = "auto") -> dict:
    """Keyword arguments of the model's forward for a row, to be built once and used by that row alone.

    Of the row (a packing.Row of tensors) it reads `subtree_end` [N] int32 and `position_ids` [N] int64.
    `backend` is one of BACKENDS, which refuses what it cannot do, or "auto": for every layer the fastest one
    that can. ValueError if it is unknown.
    """
    return {"tree": Index(row.subtree_end, row.position_ids, backend, getattr(row, "max_depth", 0))}


def _module(backend: str):
    return import_module(f"{__name__}.{BACKENDS[backend]}")


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: Index | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. `query` [1, H, N, D], `key`, `value` [1, G, N, D] -> [1, N, H, D].

    Honours the scale, the sliding window (in positions of the sample), the soft-cap, sinks (`s_aux` [H]) and
    grouped K/V heads. Raises ValueError, naming the module, for anything else that would change the result.
    """
    for name, other in others.items():
        if name not in HARMLESS and other is not None and other is not False:
            raise ValueError(f"tree attention does not implement {name}, which {_name(module)} asks for")
    if attention_mask is not None or is_causal is False:
        kind = "non-causal attention" if is_causal is False else "a mask of the model's own"
        raise ValueError(f"tree attention does not implement {kind}, which {_name(module)} asks for")
    if dropout:
        raise ValueError(
            f"tree attention has no dropout, and {_name(module)} asks for {dropout}: load the model with "
            "attention_dropout=0 (samples that share a token would share its noise)"
        )
    if tree is None:
        raise ValueError(
            f"{_name(module)} got no tree index: pass **attention.index(row) to the model's forward. If "
            "you do, this architecture keeps it from its attention and cannot be trained on trees"
        )
    compiling = torch.compiler.is_compiling()  # then the operator compares: N must not become a constant
    if not compiling and (query.shape[0], query.shape[2], key.shape[2]) != (1, tree.length, tree.length):
        found = f"attends from {query.shape[0]} x {query.shape[2]} to {key.shape[2]} tokens"
        raise ValueError(
            f"{_name(module)} {found}, but its index is of one row of {tree.length}: "
            "give one row per forward, with its own index, and use_cache=False"
        )
    # Norms and rotary embeddings may leave float32 queries beside 16-bit values; the kernels want one dtype.
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (
        tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value)
    )  # [N, H or G, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if compiling:
        output, _ = attend_opaquely(query, key, value, s_aux, tree.number, scale, sliding_window, softcap)
    else:
        output = tree.attend(query, key, value, scale, sliding_window, softcap=softcap, sinks=s_aux)
    return output[None], None


# ---- the same call as one operator, which torch.compile leaves alone


@torch.library.custom_op("treegrpo::attend", mutates_args=())
def attend_opaquely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` of the index `number` -> output [N, H, Dv], log-sum-exp [N, H] float32."""
    index = _find(number, query)
    options = {"softcap": softcap, "sinks": sinks, "with_lse": True}
    output, lse = index.attend(query, key, value, scale, window, **options)
    return output, lse.float()


@attend_opaquely.register_fake
def _(query, key, value, sinks, number, scale, window, softcap):
    output = query.new_empty(*query.shape[:2], value.shape[2])  # [N, H, Dv]
    return output, query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("treegrpo::attend_backward", mutates_args=())
def _attend_backward(
    doutput: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    number: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> list[torch.Tensor]:
    """Gradients by query, key, value, and sinks where there are some."""
    index = _find(number, query)
    found = index.gradients(doutput, query, key, value, sinks, output, lse, scale, window, softcap)
    return [gradient.contiguous() for gradient in found if gradient is not None]


@_attend_backward.register_fake
def _(doutput, query, key, value, sinks, output, lse, number, scale, window, softcap):
    wanted = [query, key, value] + ([] if sinks is None else [sinks])
    return [tensor.new_empty(tensor.shape) for tensor in wanted]


def _save(ctx, inputs, output) -> None:
    query, key, value, sinks, number, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, number)


def _backward(ctx, doutput, _):
    gradients = _attend_backward(doutput, *ctx.saved_tensors, *ctx.options)
    return *gradients, *[None] * (8 - len(gradients))


def _find(number: torch.Tensor, query: torch.Tensor) -> Index:
    index = _indices.get(int(number))
    if index is None:
        raise RuntimeError("the tree index of this row is gone: keep it until the backward has ended")
    if index.length != len(query):
        raise ValueError(f"a row of {len(query)} tokens came with an index of {index.length}")
    return index


def no_mask(attention_mask=None, mask_function=None, use_vmap=False, **_) -> None:
    """transformers' mask function: the index is the mask. Refuses what an index cannot say."""
    if attention_mask is not None:
        raise ValueError("tree attention takes no attention_mask: a row has no padding, so do not pass one")
    # use_vmap is set where the model combines the causal mask with a function of its own.
    if use_vmap or mask_function is bidirectional_mask_function:
        raise ValueError("tree attention does not implement this model's mask (bidirectional or custom)")


def _name(module: torch.nn.Module) -> str:
    model_type = getattr(getattr(module, "config", None), "model_type", "unknown model type")
    layer = getattr(module, "layer_idx", None)
    return f"{type(module).__name__} ({model_type}{'' if layer is None else f', layer {layer}'})"


@torch.no_grad()
def check(model: torch.nn.Module, backend: str = "auto") -> None:
    """Raises ValueError, naming the model type, unless the model computes on a tree what it does on paths.

    Call it after `register` and before the first row. Four forwards of at most 16 tokens, in the caller's
    mode and autocast; all ranks of a sharded model must call it. Such rows are too short to show a lost
    window, so windows are checked by what layers ask for.

        0 1 2 3 ── 4 5 6 7              when these tokens change, no prediction outside [4, 8) may move
                └─ 8 9 10 11            must equal 0 1 2 3 8 9 10 11 alone
        12 13 14 15                     must equal itself alone
    """
    delta.hook(model)
    config = model.config.get_text_config()
    refusal = f"model type {config.model_type!r} cannot be trained on trees: "
    if config._attn_implementation != "tree":
        raise ValueError(f'{refusal}it was loaded without attn_implementation="tree"')
    ids = [token % config.vocab_size for token in range(16, 32)]
    depth = [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3]
    subtree_end = [12] * 4 + [8] * 4 + [12] * 4 + [16] * 4
    branch, other = [0, 1, 2, 3, 8, 9, 10, 11], [12, 13, 14, 15]
    AttentionMaskInterface.register("tree", no_mask)
    calls = []  # (window, dtype) of each attention call of the first forward
    try:
        row = _hidden(model, backend, ids, depth, subtree_end, calls)  # [16, E]
        changed = _hidden(model, backend, ids[:4] + ids[12:] + ids[8:], depth, subtree_end)  # [16, E]
        paths = [
            _hidden(model, backend, [ids[i] for i in path], [depth[i] for i in path], [len(path)] * len(path))
            for path in (branch, other)
        ]  # [8, E], [4, E]
    except Exception as error:
        raise ValueError(f"{refusal}{error}") from error
    _check_windows(config, [window for window, _ in calls], refusal)
    # The two rows have one shape and so one rounding: a leak shows at any precision. Paths round differently.
    leak = _distance(changed[branch + other], row[branch + other])
    if not leak <= 1e-3:
        raise ValueError(
            f"{refusal}a token changes the predictions of other branches (by {leak:.1e} of their size). Its "
            "layers mix tokens outside attention (recurrence, convolution), or something random is on"
        )
    rough = any(dtype in (torch.bfloat16, torch.float16) for _, dtype in calls)
    error = _distance(row[branch + other], torch.cat(paths))
    if not error <= (5e-2 if rough else 1e-3):
        raise ValueError(
            f"{refusal}a row differs from its samples alone by {error:.1e}; are position_ids used?"
        )
    # No mask function, no mask: transformers would wait for the device in every forward, to see whether
    # position_ids start anew somewhere, before it called ours.
    AttentionMaskInterface._global_mapping.pop("tree", None)


def _hidden(model, backend, ids, depth, subtree_end, calls=None) -> torch.Tensor:
    """Hidden states [N, E] (logits [N, V] of a model with a head); notes the attention calls in `calls`."""
    device = next(model.parameters()).device
    ids, depth = torch.tensor(ids, device=device), torch.tensor(depth, device=device)  # [N], [N]
    tree = Index(torch.tensor(subtree_end, dtype=torch.int32, device=device), depth, backend)
    if calls is not None:
        attend = tree.attend

        def noting(query, key, value, scale, window=None, **options):
            calls.append((window, query.dtype))
            return attend(query, key, value, scale, window, **options)

        tree.attend = noting
    output = model(input_ids=ids[None], position_ids=depth[None], use_cache=False, tree=tree)
    hidden = getattr(output, "last_hidden_state", None)
    return (output.logits if hidden is None else hidden)[0]


def _check_windows(config, windows: list[int | None], refusal: str) -> None:
    """A layer that leaves its window to the mask would lose it without a word, since no mask is made."""
    if not windows:
        raise ValueError(f"{refusal}its layers do not go through transformers' attention interface")
    kinds = getattr(config, "layer_types", None) or []
    local = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    if not kinds and getattr(config, "sliding_window", None):
        local = 1
    told = sum(window is not None for window in windows)
    if told < local:
        raise ValueError(
            f"{refusal}{local} layers have a local window, but {told} tell their attention of it"
        )


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
