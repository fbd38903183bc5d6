"""Models in the Hugging Face format: read into a sharded model, written out of one. No rank holds it whole.

    read     *.safetensors -- the slices of this rank --> its part of every parameter
    write    its part of every parameter -- a tensor at a time --> rank 0 --> *.safetensors and their index

Some names differ between file and model, and some tensors are cut otherwise (one per expert in the file, one
of all experts in the model): both directions ask the rules that transformers itself loads and saves by.

Never: guess at a name. What the files hold and the model does not know, or the reverse, is an error.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from conversation import first_line
from lora import is_adapter
from options import SOURCE, OptionError, refuse

FILE_BYTES = 5 << 30  # most bytes of tensors in one file that is written
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
KINDS |= {torch.float64: "F64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
# what a multimodal server reads beside config and tokenizer
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


# ---- where a model is, and what it is


def read_config(options):
    """The model's configuration. OptionError for what cannot be read, is quantized, or has no effect."""
    changes = {k: v for k, v in options.model_init_kwargs.items() if k != "dtype"}
    try:
        config, unused = AutoConfig.from_pretrained(
            options.model,
            trust_remote_code=options.trust_remote_code,
            return_unused_kwargs=True,
            **changes,
        )
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--model {options.model} is neither a directory with a model nor a hub name that can be read: "
            f"{first_line(error)}"
        ) from error
    unknown = sorted(set(unused) - set(SOURCE) - {"trust_remote_code"})
    refuse(unknown, f"--model_init_kwargs: {', '.join(unknown)} is no setting of this model's config")
    quantized = getattr(config, "quantization_config", None)
    refuse(quantized, f"--model {options.model} is quantized: train from a checkpoint that is not")
    return config


def skeleton(config, options):
    """The model on the meta device, in float32, with no weights at all."""
    auto = AutoModelForImageTextToText if getattr(config, "vision_config", None) else AutoModelForCausalLM
    code = {"trust_remote_code": options.trust_remote_code}
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float32, attn_implementation="tree", **code)
    except ValueError as error:
        raise OptionError(f"--model {options.model}: {first_line(error)}") from error
    with contextlib.suppress(OSError):  # else what config.json says
        model.generation_config = GenerationConfig.from_pretrained(options.model, **options.source)
    return model


def weight_files(name: str, source: dict) -> list[str]:
    """The safetensors files of a directory or hub name. OptionError when there are none."""
    try:
        quiet = dict(_raise_exceptions_for_missing_entries=False, **source)
        if (index := cached_file(name, "model.safetensors.index.json", **quiet)) is not None:
            return get_checkpoint_shard_files(name, index, **source)[0]
        if (one := cached_file(name, "model.safetensors", **quiet)) is not None:
            return [one]
    except OSError as error:
        raise OptionError(f"--model {name}: {first_line(error)}") from error
    raise OptionError(f"--model {name} has no weights: no model.safetensors, nor an index of several")


# ---- reading


def part(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of a tensor this rank holds, a slice for each dimension."""
    shape, offset = tensor.shape, [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def read(model, options, device: torch.device) -> None:
    """Give a sharded skeleton its weights, float32 on `device`; each rank reads what it holds.

    Buffers that no file holds (rotary frequencies) are computed as transformers does. Raises OptionError
    naming the tensors that are missing, left over, or of another shape.
    """
    to_device(model, device)
    wanted = {n: t for n, t in model.state_dict(keep_vars=True).items() if not is_adapter(n)}
    for module in model.modules():
        module._is_hf_initialized = False
    for tensor in wanted.values():
        tensor._is_hf_initialized = True  # comes from the files
    model.initialize_weights()
    files = [safe_open(path, framework="pt") for path in weight_files(options.model, options.source)]
    found = {key: file for file in files for key in file.keys()}
    plan, unexpected = read_plan(model, found, wanted)
    rounded = options.model_init_kwargs.get("dtype", options.dtype).removeprefix("torch.")
    through = getattr(torch, rounded) if rounded in ("bfloat16", "float16") else torch.float32
    filled, ids = set(), {}
    for name, (converter, keys) in plan.items():
        sources = {
            pattern: [found[key].get_slice(key) for key in several] for pattern, several in keys.items()
        }
        for target, value in converted(model, wanted, name, converter, sources).items():
            if (tensor := wanted.get(target)) is None:
                unexpected.append(target)
                continue
            value = value.to(through) if value.is_floating_point() else value
            fill(target, tensor, value, twin=ids.setdefault(id(tensor), target))
            filled.add(target)
    missing = [n for n, t in wanted.items() if n not in filled and id(t) not in ids]
    complain(model, missing, unexpected, options.model)


def to_device(model, device: torch.device) -> None:
    """Memory for a skeleton, its ties kept: to_empty alone makes two tensors of a tied one."""
    first: dict[int, str] = {}
    names = [(n, first.setdefault(id(p), n)) for n, p in model.named_parameters(remove_duplicate=False)]
    model.to_empty(device=device)
    for name, original in names:
        if name != original:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter(original))


def read_plan(model, keys, wanted: dict) -> tuple[dict, list[str]]:
    """Model's name -> (converter or None, {pattern: keys of the files}); and the keys that go nowhere."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    plan, unexpected = {}, []
    for key in sorted(keys, key=dot_natural_key):
        place = model.base_model_prefix, wanted
        name, pattern = rename_source_key(key, renamings, converters, *place)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], *place)
        if name not in wanted:
            unexpected.append(key)
            continue
        converter = copy.deepcopy(by_pattern[pattern]) if pattern else None
        plan.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(key)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # saving goes the same way back
    return plan, unexpected


def converted(model, wanted, name: str, converter, sources: dict[str, list]) -> dict[str, torch.Tensor]:
    """This rank's part of the tensors that some tensors of the files make."""
    if converter is None:
        ((only,),) = sources.values()
        return {name: whole_or_part(only, wanted[name])}
    own = part(wanted[name])
    if by_experts(converter, wanted[name], sources):
        if own[0].start == own[0].stop:
            return {name: local(wanted[name])}
        sources = {pattern: several[own[0]] for pattern, several in sources.items()}
        own = ()
    converter.collected_tensors.update(
        {pattern: [piece[:] for piece in several] for pattern, several in sources.items()}
    )
    made = converter.convert(name, model=model, config=model.config)
    made = {n: value[0] if isinstance(value, list) else value for n, value in made.items()}
    return made if not own else {n: v[part(wanted[n])] if n in wanted else v for n, v in made.items()}


def whole_or_part(source, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of a file; all of it where the shapes differ, which `fill` refuses."""
    if not tensor.ndim or source.get_shape() != list(tensor.shape):
        return source[...]
    return source[part(tensor)]


def by_experts(converter, tensor: torch.Tensor, sources: dict[str, list]) -> bool:
    """Is row i of a tensor made of the i-th tensor of each list alone? Then a rank reads only its own."""
    first, *rest = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(map(keeps_rows, rest))
        and all(len(several) == tensor.shape[0] for several in sources.values())
        and all(s == slice(0, n) for s, n in zip(part(tensor)[1:], tensor.shape[1:], strict=True))
    )


def keeps_rows(operation) -> bool:
    """Does it leave the first dimension alone?"""
    if isinstance(operation, Transpose):
        return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return isinstance(operation, (Concatenate, Chunk)) and operation.dim > 0


def fill(name: str, tensor: torch.Tensor, value: torch.Tensor, twin: str) -> None:
    target = local(tensor)
    shapes = list(value.shape), list(target.shape)
    refuse(shapes[0] != shapes[1], f"--model: {name} has shape {shapes[0]} in the files and {shapes[1]} here")
    refuse(
        name != twin and not torch.equal(target, value.to(target)),
        f"--model: config.json ties {name} to {twin}, but the files hold two different tensors: set "
        "tie_word_embeddings to false in it",
    )
    target.copy_(value)


def complain(model, missing: list[str], unexpected: list[str], name: str) -> None:
    """Raise for what is missing or left over, but for what the model's own class says can be."""
    keys = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(keys)
    for problem, names in (
        ("its files lack", keys.missing_keys),
        ("its files hold, and this architecture does not know,", keys.unexpected_keys),
    ):
        some = ", ".join(sorted(names, key=dot_natural_key)[:5])
        refuse(names, f"--model {name}: {problem} {len(names)} tensors: {some}")


# ---- writing


def saved_tensors(model) -> dict[str, torch.Tensor]:
    """What files hold of a model, by the model's own names: parameters, tied ones once, and buffers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {n: p for n, p in model.named_parameters() if not is_adapter(n)} | buffers


def write(path: Path, model, parts: dict[str, torch.Tensor], dtype: torch.dtype, group) -> None:
    """Write a model to *.safetensors from `parts`, a copy of `saved_tensors` on the CPUs of all ranks.

    Every rank calls it; rank 0 alone writes, what it gathers over `group` a few tensors at a time. The
    model is trained meanwhile: none of its tensors is touched
    (tests/test_checkpoint.py::test_the_thread_that_writes_asks_the_model_for_no_tensor).
    """
    gathering = gathered(model, parts, dtype, group)
    try:
        files, held, size = [], {}, 0
        for whole in gathering:
            for name, tensor in revert_weight_conversion(model, whole).items():
                if held and size + tensor.nbytes > FILE_BYTES:
                    files.append(write_file(path, held))
                    held, size = {}, 0
                held[name] = tensor
                size += tensor.nbytes
        if held:
            files.append(write_file(path, held))
        name_files(path, files)
    finally:
        for _ in gathering:  # where rank 0 cannot write, the others still give it their parts
            pass


def gathered(model, parts, dtype: torch.dtype, group) -> Iterator[dict[str, torch.Tensor]]:
    """At rank 0: whole tensors, together what the files cut otherwise. Elsewhere nothing."""
    for names in groups(model, parts):
        whole = {name: gather(parts[name], dtype, group) for name in names}
        if dist.get_rank() == 0:
            yield whole


def groups(model, names) -> list[list[str]]:
    """Tensors of the model that become tensors of the files together."""
    rules = [rule.reverse_transform() for rule in reversed(getattr(model, "_weight_conversions", []))]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, list[str]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        found.setdefault(target if pattern else f"={name}", []).append(name)
    return list(found.values())


def gather(tensor: torch.Tensor, dtype: torch.dtype, group) -> torch.Tensor | None:
    """The whole of a tensor on rank 0's CPU, in `dtype` where it is of floats, from what each rank holds."""
    own = local(tensor)
    own = own.to(dtype) if own.is_floating_point() else own
    if not isinstance(tensor, DTensor):
        return own
    ranks = tensor.device_mesh.size(-1)  # the first so many hold all of it; others may hold copies
    padded = own.new_zeros(-(-len(tensor) // ranks), *tensor.shape[1:])
    padded[: len(own)] = own
    first = dist.get_rank() == 0
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size())] if first else None
    dist.gather(padded, rows, group=group)
    return torch.cat(rows[:ranks])[: len(tensor)] if first else None


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Path, list[str]]:
    """A safetensors file. The library's own writer would hold up the threads that train meanwhile."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        place = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = path / f"{next(iter(tensors))}.part"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return path, list(tensors)


def name_files(path: Path, files: list[tuple[Path, list[str]]]) -> None:
    """Their names say how many there are, and an index of several says what each holds."""
    places, size = {}, 0
    for number, (file, names) in enumerate(files, 1):
        many = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        size += file.stat().st_size
        file = file.rename(path / f"model{many}.safetensors")
        places |= dict.fromkeys(names, file.name)
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_beside(path: Path, model, options, dtype: torch.dtype) -> None:
    """All that a directory of weights needs beside a tokenizer: config, and what its source has more."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    for name in PROCESSOR_FILES:
        quiet = dict(_raise_exceptions_for_missing_entries=False, **options.source)
        if (file := cached_file(options.model, name, **quiet)) is not None:
            shutil.copy(file, path)
    for file in Path(options.model).glob("*.py"):  # code of its own
        shutil.copy(file, path)
