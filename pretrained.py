"""Models in the Hugging Face format: read into a sharded model, written out of one. No rank holds it whole.

    read     *.safetensors -- the slices of this rank --> its part of every parameter
    write    its part of every parameter -- bytes, to where they belong --> *.safetensors and their index

FSDP2 splits a parameter along its first dimension, so what a rank holds is one run of bytes of the file: all
ranks write into the same files, and nothing is gathered. Some names differ between file and model, and some
tensors are cut otherwise (one per expert in the file, one of all experts in the model): both directions ask
the rules that transformers itself loads and saves by.

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
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from conversation import first_line
from lora import is_adapter, merging
from options import OptionError
from sync import full_tensor

FILE_BYTES = 5 << 30  # most bytes of tensors in one file that is written
SOURCE = ("revision", "subfolder", "token", "cache_dir", "local_files_only")  # where from, not how
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
KINDS |= {torch.float64: "F64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
# what a multimodal server reads beside config and tokenizer
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


# ---- where a model is, and what it is


def source_of(options) -> dict:
    """The part of model_init_kwargs that says which revision of which place."""
    return {k: v for k, v in options.model_init_kwargs.items() if k in SOURCE}


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
    if unknown := sorted(set(unused) - set(SOURCE) - {"trust_remote_code"}):
        raise OptionError(f"--model_init_kwargs: {', '.join(unknown)} is no setting of this model's config")
    if getattr(config, "quantization_config", None):
        raise OptionError(f"--model {options.model} is quantized: train from a checkpoint that is not")
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
        model.generation_config = GenerationConfig.from_pretrained(options.model, **source_of(options))
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
    raise OptionError(
        f"--model {name} has no weights: there is no model.safetensors, nor an index of several"
    )


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
    files = [safe_open(path, framework="pt") for path in weight_files(options.model, source_of(options))]
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


def fill(name: str, tensor: torch.Tensor, value: torch.Tensor, twin: str) -> None:
    target = local(tensor)
    if target.shape != value.shape:
        raise OptionError(
            f"--model: {name} has shape {list(value.shape)} in the files and {list(target.shape)} here"
        )
    if name != twin and not torch.equal(target, value.to(target)):
        raise OptionError(
            f"--model: config.json ties {name} to {twin}, but the files hold two different tensors: "
            "set tie_word_embeddings to false in it"
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
        if names:
            some = ", ".join(sorted(names, key=dot_natural_key)[:5])
            raise OptionError(f"--model {name}: {problem} {len(names)} tensors: {some}")


# ---- writing


class Group(NamedTuple):
    """Tensors of the model that become tensors of the files together."""

    names: list[str]  # the model's
    by_rows: bool  # is what becomes of a row known without the other rows?
    experts: bool  # is each row a tensor of the files, or several?


def saved_tensors(model) -> dict[str, torch.Tensor]:
    """What files hold of a model, by the model's own names: parameters, tied ones once, and buffers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {n: p for n, p in model.named_parameters() if not is_adapter(n)} | buffers


def groups(model, names) -> list[Group]:
    """What `as_saved` has to be given together."""
    rules = [rule.reverse_transform() for rule in reversed(getattr(model, "_weight_conversions", []))]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, tuple[list[str], str | None]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        found.setdefault(target if pattern else f"={name}", ([], pattern))[0].append(name)
    operations = {pattern: rule.operations for rule in converters for pattern in rule.source_patterns}
    return [
        Group(several, pattern is None or splits_rows(operations[pattern]), pattern is not None)
        for several, pattern in found.values()
    ]


def splits_rows(operations: list) -> bool:
    *rest, last = operations
    return isinstance(last, SplitModulelist) and last.dim == 0 and all(map(keeps_rows, rest))


def keeps_rows(operation) -> bool:
    """Does it leave the first dimension alone?"""
    if isinstance(operation, Transpose):
        return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return isinstance(operation, (Concatenate, Chunk)) and operation.dim > 0


def as_saved(model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A group's tensors by the names, and in the cut, that the files have; meta tensors will do."""
    return revert_weight_conversion(model, tensors)


def blank(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="meta")


class Layout:
    """Where every tensor goes: the same on every rank, computed from names and shapes alone."""

    def __init__(self, model, dtype: torch.dtype, file_bytes: int = FILE_BYTES):
        self.model, self.dtype = model, dtype
        self.tensors, self.merged = saved_tensors(model), merging(model)
        self.groups = groups(model, self.tensors)
        contents, size = [{}], 0
        for group in self.groups:
            blanks = {name: blank(self.tensors[name], dtype) for name in group.names}
            for name, tensor in as_saved(model, blanks).items():
                if size and size + tensor.nbytes > file_bytes:
                    contents.append({})
                    size = 0
                contents[-1][name] = tensor
                size += tensor.nbytes
        self.files: dict[str, tuple[bytes, int]] = {}  # name -> (header, bytes of the tensors)
        self.places: dict[str, tuple[str, int]] = {}  # tensor -> (file, its first byte)
        for number, held in enumerate(contents, 1):
            many = f"-{number:05d}-of-{len(contents):05d}" if len(contents) > 1 else ""
            self.add_file(f"model{many}.safetensors", held)

    def add_file(self, file: str, held: dict[str, torch.Tensor]) -> None:
        entries, end = {"__metadata__": {"format": "pt"}}, 0
        for name, tensor in held.items():
            place = [end, end + tensor.nbytes]
            entries[name] = {
                "dtype": KINDS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": place,
            }
            end += tensor.nbytes
        text = json.dumps(entries).encode()
        header = (len(text) + -len(text) % 8).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
        self.files[file] = header, end
        for name in held:
            self.places[name] = file, len(header) + entries[name]["data_offsets"][0]

    def create(self, path: Path) -> None:
        """Make the files, empty but for their headers, and the index of several. One rank calls it."""
        for file, (header, size) in self.files.items():
            with (path / file).open("wb") as opened:
                opened.write(header)
                opened.truncate(len(header) + size)
        if len(self.files) > 1:
            total = sum(size for _, size in self.files.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {n: f for n, (f, _) in self.places.items()},
            }
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def value(self, name: str) -> torch.Tensor:
        """What is written under a name: the model's tensor, adapters merged in. Every rank calls this."""
        return self.merged(self.tensors[name])

    def gather(self) -> dict[str, torch.Tensor]:
        """Whole tensors, on rank 0's CPU, of the few groups that cannot be written part by part. Every rank
        calls this."""
        whole = {}
        for group in self.groups:
            for name in [] if group.by_rows else group.names:
                tensor = full_tensor(self.value(name))
                if dist.get_rank() == 0:
                    whole[name] = tensor.to("cpu", copy=True)
        return whole

    def fill(self, path: Path, values: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
        """Write this rank's part (`values`, on the CPU) into the files. Every rank calls it."""
        opened = {file: (path / file).open("r+b") for file in self.files}
        try:
            for group in self.groups:
                for name, row, value in self.pieces(group, values, whole):
                    file, place = self.places[name]
                    value = value.to(self.dtype) if value.is_floating_point() else value
                    stride = value[0].nbytes if value.ndim else 0
                    opened[file].seek(place + row * stride)
                    opened[file].write(value.contiguous().flatten().view(torch.uint8).numpy())
        finally:
            for file in opened.values():
                file.close()

    def pieces(self, group: Group, values: dict, whole: dict) -> Iterator[tuple[str, int, torch.Tensor]]:
        """What this rank writes of a group: name in the files, first row, tensor."""
        if not group.by_rows:
            if dist.get_rank() == 0:
                yield from (
                    (n, 0, v) for n, v in as_saved(self.model, {n: whole[n] for n in group.names}).items()
                )
            return
        (name,) = group.names
        tensor = self.tensors[name]
        rows = part(tensor)[0] if tensor.ndim else slice(0, 1)
        if not writes(tensor) or rows.start == rows.stop:
            return
        mine = as_saved(self.model, {name: values[name]})
        if not group.experts:
            yield from ((n, rows.start, value) for n, value in mine.items())
            return
        every = list(
            as_saved(self.model, {name: blank(tensor, self.dtype)})
        )  # all experts of gate, then of up
        starts = range(0, len(every), tensor.shape[0])
        names = [every[start + row] for start in starts for row in range(rows.start, rows.stop)]
        yield from ((n, 0, value) for n, value in zip(names, mine.values(), strict=True))


def writes(tensor: torch.Tensor) -> bool:
    """Does this rank write its part? Where parts are replicated the first of the replicas does."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    place = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(number == 0 for number, placement in place if isinstance(placement, Replicate))


def write_beside(path: Path, model, options, tokenizer, dtype: torch.dtype) -> None:
    """All that a directory of weights needs to be loaded: config, tokenizer, and what its source has more."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    for name in PROCESSOR_FILES:
        quiet = dict(_raise_exceptions_for_missing_entries=False, **source_of(options))
        if (file := cached_file(options.model, name, **quiet)) is not None:
            shutil.copy(file, path)
    for file in Path(options.model).glob("*.py"):  # code of its own
        shutil.copy(file, path)
