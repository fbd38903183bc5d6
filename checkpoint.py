"""Checkpoints: what a run needs to go on, and a model that anyone can load.

    output_dir/checkpoint-40/
        config.json model.safetensors tokenizer.json ...  Hugging Face format in the compute dtype
        state/                                            float32 weights and AdamW state, sharded
        rng/rank-0.pt ...                                 random state of each rank
        rollout_state.json                                step, version, prompts that are done

Of low-rank adapters it holds, in place of the model, adapter_config.json and adapter_model.safetensors; under
--merge_on_save the model with them merged in, and the two in adapter/.

A save costs the training a copy to the CPU (12 bytes a parameter of host memory, over all ranks, until it is
written); the files are written beside it, on a file system that all ranks see. The directory has another name
until it is complete, so that a half-written one is never picked up. The position that is saved is the
*trained* one, not the generator's, which runs ahead.

Never: leave a directory called checkpoint-N that is not complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from client import Notice
from lora import adapter_state, merging, save_adapter
from options import OptionError, refuse
from pretrained import local, saved_tensors, write, write_beside

LAST_SAVE_S = 10.0  # how long a run that is ended waits for the checkpoint it was writing


class Progress:
    """Which prompts, numbered over the epochs, are done: all before `position`, and those in `beyond`.

    A prompt is done when any of its samples was trained, or it was dropped for a reason that stays.
    """

    def __init__(self, position: int = 0, beyond=(), tokens: int = 0):
        self.position = position
        self.beyond = set(beyond)
        self.tokens = tokens  # unique tokens forwarded before a resume

    def done(self, prompt: int) -> None:
        if prompt >= self.position:
            self.beyond.add(prompt)
        while self.position in self.beyond:
            self.beyond.remove(self.position)
            self.position += 1

    def includes(self, prompt: int) -> bool:
        return prompt < self.position or prompt in self.beyond

    @property
    def count(self) -> int:
        return self.position + len(self.beyond)


def complete(output_dir: Path | str) -> list[Path]:
    """The complete checkpoints in a directory, by step."""
    found = [state.parent for state in Path(output_dir).glob("checkpoint-*/rollout_state.json")]
    return sorted((p for p in found if p.name[11:].isdigit()), key=lambda path: int(path.name[11:]))


def newest(output_dir: Path | str) -> Path | None:
    return next(reversed(complete(output_dir)), None)


class SaveError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are as they were."""


class Saver:
    """Writes checkpoints while training goes on. Every rank has one, and calls it at the same steps.

    `saved` is the last checkpoint that is complete, or None. What goes wrong in the thread that writes goes
    wrong on every rank: it is printed, and `wait` raises it.
    """

    def __init__(self, options, model, optimizer, tokenizer, saved: Path | None):
        self.options, self.model, self.optimizer, self.tokenizer = options, model, optimizer, tokenizer
        # used by nothing else: the thread's collectives never meet another's
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=options.ddp_timeout))
        self.saved = saved
        self.error: SaveError | None = None
        self.thread: threading.Thread | None = None

    def save(self, step: int, state: dict) -> None:
        """Copy what checkpoint-<step> will hold and return; a thread writes it. `state`: rank 0's part of
        rollout_state.json. Waits for the save before this one; that one's error has been said."""
        with contextlib.suppress(SaveError):
            self.wait()
        options, parts, shards = self.options, {}, {}
        adapter = adapter_state(self.model) if options.lora_r else None
        if adapter is None or options.merge_on_save:
            merged = merging(self.model)
            parts = {name: on_cpu(merged(tensor)) for name, tensor in saved_tensors(self.model).items()}
        if not options.save_only_model:
            for name, tensor in sharded_state(self.model, self.optimizer).items():
                same = name.removeprefix("model.")
                shards[name] = parts[same] if same in parts else on_cpu(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        state = {"step": step, "only_model": options.save_only_model, "options": kept(options), **state}
        work = (state, parts, adapter, shards, torch.get_rng_state())
        self.thread = threading.Thread(target=self.write, args=work, daemon=True)
        self.thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Until the save that runs is over. SaveError when it failed; RuntimeError when it takes longer than
        `timeout` seconds (default: --ddp_timeout)."""
        timeout = self.options.ddp_timeout if timeout is None else timeout
        notice = Notice()
        while self.thread is not None and self.thread.is_alive():
            notice.say("the checkpoint to be written")
            if notice.waited() > timeout:
                raise RuntimeError(f"the checkpoint was not written within {timeout:.0f} s (--ddp_timeout)")
            self.thread.join(0.2)
        self.thread, error, self.error = None, self.error, None
        if error:
            raise error

    def close(self) -> None:
        """The run ends: give a save that is under way a moment."""
        with contextlib.suppress(RuntimeError):
            self.wait(LAST_SAVE_S)

    def write(self, state: dict, parts: dict, adapter: dict | None, shards: dict, random_state) -> None:
        final = Path(self.options.output_dir) / f"checkpoint-{state['step']}"
        partial = final.with_name(f"partial-{final.name}")
        rank, dtype = dist.get_rank(), getattr(torch, self.options.compute_dtype)

        def prepare():
            for kind in ("partial", "removed"):  # what a save or a removal that was cut short has left
                for path in final.parent.glob(f"{kind}-checkpoint-*"):
                    shutil.rmtree(path)
            (partial / "rng").mkdir(parents=True)
            self.tokenizer.save_pretrained(partial)
            if parts:
                write_beside(partial, self.model, self.options, dtype)
            if adapter:
                save_adapter(partial / "adapter" if parts else partial, adapter, self.options)

        def fill():
            if parts:
                write(partial, self.model, parts, dtype, self.group)
            if shards:
                torch.save(random_state, partial / "rng" / f"rank-{rank}.pt")

        def finish():
            write_json(partial / "rollout_state.json", state)
            if final.exists():
                remove(final)
            partial.rename(final)
            limit = self.options.save_total_limit
            for path in complete(final.parent)[:-limit] if limit else ():
                remove(path)

        try:
            self.together(prepare, only_on=0)
            self.together(fill)
            if shards:
                place = {"checkpoint_id": partial / "state", "process_group": self.group}
                self.together(lambda: dcp.save(shards, **place))
            self.together(finish, only_on=0)
            self.saved = final
        except Exception as error:  # SaveError, or a rank that is gone
            self.error = SaveError(f"could not write {final}: {error}")
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                with contextlib.suppress(OSError):  # the output may be on the same full disk
                    print(f"{self.error}; training goes on from memory, free some space", flush=True)

    def together(self, write, only_on: int | None = None) -> None:
        """Run `write` on every rank, or on one. An error of one is a SaveError on all: none waits."""
        problem = None
        if only_on in (None, dist.get_rank()):
            try:
                write()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self.group)
        if found := next(filter(None, problems), None):
            raise SaveError(found)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of a shard a shard, in pinned memory: under way where it comes from a GPU, so synchronize."""
    own = local(tensor.detach())
    copy = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda).copy_(own, non_blocking=True)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def write_json(path: Path, value) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a checkpoint; under another name first, so that one deleted half way is never picked up."""
    doomed = path.rename(path.with_name(f"removed-{path.name}"))
    shutil.rmtree(doomed)


def sharded_state(model, optimizer) -> dict:
    """What is trained and its AdamW state as tensors by parameter name: what DCP writes, and reads into in
    place. The rest is as --model has it."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[f"model.{name}"] = parameter.detach()
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


# options without which trained adapters mean something else
ADAPTERS = ("model", "lora_r", "lora_alpha", "lora_rslora", "lora_target_modules", "lora_modules_to_save")


def kept(options) -> dict:
    """The options that a checkpoint remembers."""
    return {name: getattr(options, name) for name in ADAPTERS}


def fingerprint(dataset) -> str | None:
    """What a checkpoint remembers of the prompts: how many there are and what a few say; None of a stream."""
    if not hasattr(dataset, "__len__"):
        return None
    some = [dataset[row] for row in range(0, len(dataset), len(dataset) // 32 + 1)]
    some = [row.get("prompt") for row in some if isinstance(row, Mapping)]  # see rollout._admit
    return f"{len(dataset)} rows ({hashlib.blake2b(repr(some).encode(), digest_size=4).hexdigest()})"


def check_resume(path: Path, options, prompts: str | None) -> None:
    """OptionError where a checkpoint was made with other adapters, whose weights would be read as if not, or
    with other prompts, of which it says by number which are done. `prompts`: their fingerprint."""
    state, now = read_state(path), kept(options)
    made, counted = state["options"], state.get("prompts")
    told = {name: made[name] for name in ADAPTERS} if made["lora_r"] else "no --lora_r"
    changed = (made["lora_r"] or now["lora_r"]) and made != now
    refuse(changed, f"--resume_from_checkpoint: {path} was made with {told}; give the same")
    refuse(
        prompts and counted and prompts != counted,
        f"--resume_from_checkpoint: the task's dataset has {prompts}, that of {path} had {counted}: its "
        f"prompts are other ones. Resume with the same dataset, or train on with --model {path}",
    )


def read_state(path: Path) -> dict:
    """rollout_state.json of a checkpoint. Raises OptionError when it cannot be resumed, with the reason."""
    file = Path(path) / "rollout_state.json"
    incomplete = f"--resume_from_checkpoint: {path} is not a complete checkpoint (no rollout_state.json)"
    refuse(not file.is_file(), incomplete)
    try:
        state = json.loads(file.read_text())
        only_model, _ = state["only_model"], state["options"]
    except (ValueError, LookupError, TypeError) as error:
        raise OptionError(f"--resume_from_checkpoint: {file} is damaged: {error!r}") from error
    refuse(
        only_model,
        f"--resume_from_checkpoint: {path} holds only the model (--save_only_model); train from it with "
        f"--model {path} instead",
    )
    return state


def load(path: Path, model, optimizer) -> None:
    """Put weights, optimizer and random state of a checkpoint into place; every rank calls it."""
    state = sharded_state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=Path(path) / "state")
    except (Exception, CheckpointException) as error:  # missing, damaged, or of another model
        raise OptionError(
            f"--resume_from_checkpoint: {path} cannot be read into this model: {error}. Give the options it "
            "was made with, or an earlier checkpoint"
        ) from error
    rng = Path(path) / "rng" / f"rank-{dist.get_rank()}.pt"
    if rng.is_file():  # absent where this run has more ranks than the one that saved
        torch.set_rng_state(torch.load(rng))
