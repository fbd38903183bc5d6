"""Checkpoints: what a run needs to go on, and a model that anyone can load.

    output_dir/checkpoint-40/
        config.json model.safetensors tokenizer.json ...  Hugging Face format in the compute dtype
        state/                                            float32 weights and AdamW state, sharded
        rng/rank-0.pt ...                                 random state of each rank
        rollout_state.json                                step, version, schedule, prompts that are done

A directory is written under another name and renamed when complete, so that a half-written one is never
picked up. The position that is saved is the *trained* one, not the generator's, which runs ahead.

Never: leave a directory called checkpoint-N that is not complete.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from options import OptionError
from sync import checkpoint_name, full_tensor


class Progress:
    """Which prompts are done: all before `position`, and those in `beyond`. Prompts are numbered over the
    epochs.

    A prompt is done when any of its samples was trained, or it was dropped for a reason that will not go
    away.
    """

    def __init__(self, position: int = 0, beyond=()):
        self.position = position
        self.beyond = set(beyond)

    def done(self, prompt: int) -> None:
        if prompt >= self.position:
            self.beyond.add(prompt)
        while self.position in self.beyond:
            self.beyond.remove(self.position)
            self.position += 1

    @property
    def count(self) -> int:
        return self.position + len(self.beyond)


def newest(output_dir: str) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    found = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (
            path / "rollout_state.json"
        ).is_file():
            found[int(match[1])] = path
    return found[max(found)] if found else None


class SaveError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are as they were."""


def save(
    output_dir, step, model, optimizer, state, tokenizer, dtype, save_only_model, save_total_limit
) -> Path:
    """Write checkpoint-<step>; every rank calls it. `state` (rank 0's) is what rollout_state.json holds.

    Raises SaveError on every rank when one of them could not write (a full disk, say); nothing stays behind.
    """
    final = Path(output_dir) / f"checkpoint-{step}"
    partial = Path(output_dir) / f"partial-checkpoint-{step}"
    rank = dist.get_rank()

    def prepare():
        for kind in ("partial", "removed"):  # what a save or a removal that was cut short has left
            for path in Path(output_dir).glob(f"{kind}-checkpoint-*"):
                shutil.rmtree(path)
        (partial / "rng").mkdir(parents=True)

    def finish():
        write_json(partial / "rollout_state.json", {"step": step, "only_model": save_only_model, **state})
        if final.exists():
            remove(final)
        partial.rename(final)

    try:
        together(prepare, only_on=0)
        weights = gathered_weights(model, dtype)
        together(lambda: export(partial, model, weights, tokenizer, dtype), only_on=0)
        if not save_only_model:
            together(lambda: dcp.save(sharded_state(model, optimizer), checkpoint_id=partial / "state"))
            together(lambda: torch.save(torch.get_rng_state(), partial / "rng" / f"rank-{rank}.pt"))
        together(finish, only_on=0)
    except SaveError as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"could not write {final}: {error}") from error
    if rank == 0:
        forget_old(Path(output_dir), save_total_limit)
    return final


def together(write, only_on: int | None = None) -> None:
    """Run `write` on every rank, or on one. An error of one is a SaveError on all: none waits."""
    problem = None
    if only_on in (None, dist.get_rank()):
        try:
            write()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := next(filter(None, problems), None):
        raise SaveError(found)


def write_json(path: Path, value) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def forget_old(output_dir: Path, keep: int | None) -> None:
    steps = sorted(
        int(p.name.split("-")[1]) for p in output_dir.glob("checkpoint-*") if p.name[11:].isdigit()
    )
    for step in steps[:-keep] if keep else []:
        remove(output_dir / f"checkpoint-{step}")


def remove(path: Path) -> None:
    """Delete a checkpoint; under another name first, so that one deleted half way is never picked up."""
    doomed = path.rename(path.with_name(f"removed-{path.name}"))
    shutil.rmtree(doomed)


@torch.no_grad()
def gathered_weights(model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model by checkpoint name, in `dtype`, on rank 0's CPU; empty on the others, which take part."""
    weights = {}
    for name, tensor in {**dict(model.named_parameters()), **dict(persistent_buffers(model))}.items():
        whole = full_tensor(tensor)
        if dist.get_rank() == 0:
            weights[checkpoint_name(name)] = whole.to("cpu", dtype if whole.is_floating_point() else None)
    return weights


def export(path: Path, model, weights: dict[str, torch.Tensor], tokenizer, dtype: torch.dtype) -> None:
    """The model in Hugging Face format."""
    model.save_pretrained(path, state_dict=weights)
    config = copy.deepcopy(model.config)  # save_pretrained wrote the dtype of the master weights
    config.dtype = dtype
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def persistent_buffers(model):
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def sharded_state(model, optimizer) -> dict:
    """The model and AdamW state as tensors by parameter name: what DCP writes, and reads into in place."""
    state = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        if parameter.requires_grad:
            for key, value in moments(optimizer, parameter).items():
                state[f"optimizer.{name}.{key}"] = value
    return state


def moments(optimizer, parameter) -> dict:
    """AdamW's state of one parameter; made now (zeros) when it has not been stepped yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def read_state(path: Path) -> dict:
    """rollout_state.json of a checkpoint. Raises OptionError when it cannot be resumed, with the reason."""
    file = Path(path) / "rollout_state.json"
    if not file.is_file():
        raise OptionError(
            f"--resume_from_checkpoint: {path} is not a complete checkpoint (no rollout_state.json)"
        )
    state = json.loads(file.read_text())
    if state["only_model"]:
        raise OptionError(
            f"--resume_from_checkpoint: {path} holds only the model (--save_only_model); "
            f"train from it with --model {path} instead"
        )
    return state


def load(path: Path, model, optimizer) -> None:
    """Put weights, optimizer and random state of a checkpoint into place; every rank calls it."""
    state = sharded_state(model, optimizer)
    dcp.load(state, checkpoint_id=Path(path) / "state")
    rng = Path(path) / "rng" / f"rank-{dist.get_rank()}.pt"
    if rng.is_file():  # absent where this run has more ranks than the one that saved
        torch.set_rng_state(torch.load(rng))
