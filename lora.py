r"""Low-rank adapters (LoRA, arXiv 2106.09685), trained in place of the model and stored as PEFT stores them.

    y = x W^T + b + scaling * (dropout(x) A^T) B^T          A [r, in], B [out, r], only these two are trained
    scaling = alpha / r, or alpha / sqrt(r) with rank stabilisation (arXiv 2312.03732)

B starts at zero, so a fresh adapter leaves the policy as it is, bit for bit. An adapted layer keeps its
weight under its old name; A and B stand beside it:

    layers.0.self_attn.q_proj.weight      frozen, in the compute dtype: no gradient, no AdamW state
    layers.0.self_attn.q_proj.lora_A      float32, trained
    layers.0.self_attn.q_proj.lora_B

Servers get either the merged weights, W + scaling B A made in float32 and cast once, or the adapter alone
(sync.py). The trainer's own W is never written to
(tests/test_lora.py::test_a_hundred_merges_leave_the_weights_alone).

Never: adapt the output head. The loss projects with its plain weight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

RANKS_OF_VLLM = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its --max-lora-rank may be
PATTERN = re.compile(r"[\\^$*+?()\[\]{}|]")  # a target that holds one of these is a regular expression


class LoraLinear(torch.nn.Linear):
    """A linear layer and its adapter. Takes the weight [out, in] and bias of `linear` over as they are."""

    def __init__(self, linear: torch.nn.Linear, rank: int, alpha: float, dropout: float, stabilised: bool):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = torch.nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = torch.nn.Parameter(torch.empty(self.out_features, rank, device=device))
        self.scaling = scaling(rank, alpha, stabilised)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = functional.dropout(x, self.dropout, self.training) if self.dropout else x  # [..., in]
        low = functional.linear(low, self.lora_A)  # [..., r]
        return super().forward(x) + functional.linear(low, self.lora_B) * self.scaling  # [..., out]

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """W + scaling B A, float32 [out, in]; of a sharded layer a shard, made from its own rows of W and B.

        Every rank has to call it: A is gathered.
        """
        weight, down, up = self.weight.detach(), self.lora_A.detach(), self.lora_B.detach()
        if not isinstance(weight, DTensor):
            return weight.float() + self.scaling * (up.float() @ down.float())
        local = weight.to_local().float() + self.scaling * (up.to_local() @ down.full_tensor())
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )


def scaling(rank: int, alpha: float, stabilised: bool) -> float:
    return alpha / (math.sqrt(rank) if stabilised else rank)


def add_adapters(model, options) -> None:
    """Freeze the model and put an adapter without values beside each target, before the model is sharded.

    Targets are modules of the decoder: "all-linear", ends of names (q_proj, mlp.up_proj), or one regular
    expression that matches a whole name. `lora_modules_to_save` names modules that are trained whole. Raises
    ValueError for a target that is not there, is no linear layer, or is the output head.
    """
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    named = {f"{prefix}.{name}": module for name, module in decoder.named_modules() if name}
    targets = find_targets(named, options.lora_target_modules)
    whole = [name for name in named if ends_with(name, options.lora_modules_to_save)]
    for wanted in options.lora_modules_to_save:
        if not any(ends_with(name, [wanted]) for name in whole):
            raise ValueError(f"lora_modules_to_save: no module of the model is called {wanted}")
    if both := set(targets) & set(whole):
        raise ValueError(f"lora_modules_to_save: {min(both)} has an adapter already; name it in one option")
    model.requires_grad_(False)
    for name in targets:
        parent, _, last = name.rpartition(".")
        layer = LoraLinear(
            named[name], options.lora_r, options.lora_alpha, options.lora_dropout, options.lora_rslora
        )
        setattr(model.get_submodule(parent), last, layer)
    for name in whole:
        named[name].requires_grad_(True)
    for parameter in decoder.parameters():
        if not parameter.requires_grad:  # nothing adds to it: rounded once is as good as at every step
            parameter.data = parameter.data.to(getattr(torch, options.compute_dtype))


@torch.no_grad()
def reset_adapters(model, seed: int) -> None:
    """A as torch initialises a linear layer, B zero: the same numbers however the model is sharded."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model).values():
        bound = 1 / math.sqrt(layer.in_features)
        down = layer.lora_A  # [r, in]
        whole = torch.empty(down.shape).uniform_(-bound, bound, generator=generator).to(down.device)
        if isinstance(down, DTensor):  # a slice of what every rank has drawn
            whole = distribute_tensor(whole, down.device_mesh, down.placements, src_data_rank=None)
        down.copy_(whole)
        layer.lora_B.zero_()


def find_targets(named: dict[str, torch.nn.Module], wanted: list[str]) -> list[str]:
    """Names of the linear layers that get an adapter. ValueError says what cannot have one."""
    linear = [name for name, module in named.items() if isinstance(module, torch.nn.Linear)]
    if wanted == ["all-linear"]:
        return linear
    found: list[str] = []
    for target in wanted:
        if PATTERN.search(target):
            hits = [name for name in named if re.fullmatch(target, name)]
        else:
            hits = [name for name in named if ends_with(name, [target])]
        if "lm_head" in target:
            raise ValueError(
                "lora_target_modules: the output head (lm_head) cannot have an adapter: the loss projects "
                "with its plain weight"
            )
        if not hits:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"lora_target_modules: nothing in the model matches {target}; there are {', '.join(kinds)}"
            )
        if others := [name for name in hits if name not in linear]:
            raise ValueError(
                f"lora_target_modules: {others[0]} is {type(named[others[0]]).__name__}, no linear layer; "
                "experts of a mixture that are stored as one tensor cannot have an adapter"
            )
        found += [name for name in hits if name not in found]
    return found


def ends_with(name: str, ends: list[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def adapted_layers(model) -> dict[str, LoraLinear]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merging(model) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of the model's tensors: an adapted weight becomes merged, any other stays what it is.

    Every rank has to call it, for the same tensors in the same order.
    """
    layers = {id(layer.weight): layer for layer in adapted_layers(model).values()}
    return lambda tensor: layers[id(tensor)].merged_weight() if id(tensor) in layers else tensor


def is_adapter(name: str) -> bool:
    """Is a parameter of this name part of an adapter? Files of models hold none."""
    return name.endswith((".lora_A", ".lora_B"))


@torch.no_grad()
def adapter_state(model) -> dict[str, torch.Tensor]:
    """What PEFT stores of the adapter, by its names, float32 on the CPU. Every rank has to call it."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            kept = f"{name}.weight" if is_adapter(name) else name
            state[f"base_model.model.{kept}"] = whole.detach().cpu()
    return state


def save_adapter(path: Path, state: dict[str, torch.Tensor], options) -> None:
    """adapter_config.json and adapter_model.safetensors, as `peft.PeftModel.from_pretrained` reads them."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    adapted = {key.removeprefix("base_model.model.") for key in state if key.endswith(".lora_A.weight")}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": options.model,
        "r": options.lora_r,
        "lora_alpha": options.lora_alpha,
        "lora_dropout": options.lora_dropout,
        "use_rslora": options.lora_rslora,
        "target_modules": sorted(key.removesuffix(".lora_A.weight") for key in adapted),
        "modules_to_save": options.lora_modules_to_save or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(config, indent=1))
    save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapter(path: Path) -> tuple[dict, dict[str, list[torch.Tensor]]]:
    """The configuration in a folder of PEFT's, and [A, B] of every adapted layer, by the layer's name.

    ValueError names what is more than two matrices beside linear layers.
    """
    config = json.loads((path / "adapter_config.json").read_text())
    more = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
    if odd := [name for name in more if config.get(name)]:
        raise ValueError(f"{path}: an adapter with {', '.join(odd)} cannot be served")
    state, layers = load_file(path / "adapter_model.safetensors"), {}
    for key in sorted(state):  # A before B
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key)
        if not match:
            raise ValueError(f"{path}: {key} is no matrix of a linear layer's adapter")
        layers.setdefault(match[1], []).append(state[key])
    return config, layers
