"""Everything before the first step: inputs, ranks, servers, the model.

    check_inputs     what can be refused before anything loads
    join_ranks       torch.distributed, and how a signal ends a run
    start_embedded   serve.py beside the trainers
    reach_servers    wait for them, and see whether they fit the options
    load_model       float32 weights, sharded by FSDP2, computing in bf16, float16 or float32

Never: let a run begin that cannot end well. What is wrong is one line that names the option and what to do.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import Popen

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import get_scheduler

import attention
import checkpoint
import pretrained
import serve
from client import Server, ServerError
from conversation import load_tokenizer, read_template
from feed import LEAVING, PREEMPTED
from lora import adapted_layers, add_adapters, reset_adapters
from loss import router_coefficient
from memory import Memory
from options import OptionError, Options, refuse
from questions import check_server, price
from rollout import check_task, load_loop
from task import eval_rows, load_task

ASKED_TWICE_S = 5.0  # a second signal this long after the first ends the run at once


class Leaving:
    """SIGINT and SIGTERM end a run between two micro-batches, where nothing is half counted.

    SIGTERM (a job that is preempted) ends it after a checkpoint, with code 0; SIGINT (Ctrl-C) without one.
    Outside the loop (`in_loop` false), and when asked again after a while, both end it at once.
    """

    def __init__(self):
        self.number: int | None = None
        self.asked_at = 0.0
        self.in_loop = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number: int, _) -> None:
        if self.number is None:
            self.number, self.asked_at = number, time.monotonic()
            if self.in_loop:
                return
        elif time.monotonic() - self.asked_at < ASKED_TWICE_S:
            return
        self.leave()

    def word(self) -> str | None:
        """What the ranks are told in place of a row, if anything."""
        return {None: None, signal.SIGTERM: PREEMPTED}.get(self.number, LEAVING)

    def cause(self) -> str:
        return "" if self.number is None else f"{signal.Signals(self.number).name}: "

    def leave(self) -> None:
        """Exit through all the ends; no further signal cuts that short."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + (self.number or signal.SIGTERM))


@dataclass
class Ranks:
    """This process among the trainers."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, for plans and metrics; gradients and weights go over the default group
    leaving: Leaving


def check_inputs(options: Options, rollouts) -> tuple[Path | None, str | None]:
    """Look at model, task, loop, chat template, and the checkpoint to resume from.

    Returns the latter, and what is kept of the task's prompts (rank 0 alone looks at them). OptionError names
    what cannot work, before a model loads or a server starts.
    """
    directory, prompts = Path(options.model), None
    is_path = options.model.startswith((".", "/", "~")) or options.model.count("/") > 1  # no name on the hub
    refuse(is_path and not directory.is_dir(), f"--model {options.model}: there is no such directory")
    if directory.is_dir():
        refuse(not (directory / "config.json").is_file(), f"--model {directory} is no model: no config.json")
        refuse(not any(directory.glob("*.safetensors")), f"--model {directory} has no *.safetensors file")
    config = pretrained.read_config(options)
    option_of("router_aux_loss_coef", router_coefficient, options.router_aux_loss_coef, config)
    if rollouts is None and int(os.environ.get("RANK", 0)) == 0:
        loop = option_of("rollout_loop", load_loop, options.rollout_loop)
        task = option_of("task", load_task, options.task, options.task_kwargs)
        option_of("task", check_task, task, loop, options)
        prompts = checkpoint.fingerprint(task.dataset)
        if options.eval_dataset:
            option_of("eval_dataset", eval_rows, options.eval_dataset, task)
        if options.chat_template:
            option_of("chat_template", read_template, options.chat_template)
    tracker = options.report_to
    absent = tracker != "none" and importlib.util.find_spec(tracker) is None
    refuse(absent, f"--report_to {tracker} needs a package: pip install {tracker}")
    place = Path(options.output_dir).absolute()
    place = next(path for path in (place, *place.parents) if path.exists())
    writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    refuse(not writable, f"--output_dir {options.output_dir}: {place} is no directory that can be written to")
    wanted, found = options.resume_from_checkpoint, checkpoint.newest(options.output_dir)
    if wanted is None or wanted.lower() == "false":
        refuse(
            found,
            f"--output_dir {options.output_dir} holds {found and found.name} of an earlier run: go on with it"
            " by --resume_from_checkpoint true, or choose another directory",
        )
        return None, prompts
    path = found if wanted.lower() == "true" else Path(wanted)
    refuse(path is None, f"--resume_from_checkpoint true: no complete checkpoint in {options.output_dir}")
    checkpoint.check_resume(path, options, prompts)
    return path, prompts


def option_of(name: str, read, *arguments):
    """read(*arguments), the value of an option; what it refuses becomes an OptionError with the name."""
    try:
        return read(*arguments)
    except (ValueError, TypeError) as error:
        raise OptionError(f"--{name}: {error}") from error


def join_ranks(options: Options) -> Ranks:
    """Join the process group torchrun describes, or a group of one.

    Until it stands a signal kills: a rank that waits for one which is gone runs no handler of Python's, and
    there is nothing to end yet
    (tests/test_faults.py::test_a_rank_that_waits_for_one_that_never_joins_can_be_ended).
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # collectives outlast the calls to servers that rank 0 makes meanwhile: its error is the one to read
    timeout = timedelta(seconds=max(options.ddp_timeout, options.vllm_server_timeout + 60))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, **alone)
    torch.manual_seed(options.seed)
    return Ranks(rank, size, device, dist.new_group(backend="gloo", timeout=timeout), Leaving())


def claim(directory: str, ends: ExitStack) -> None:
    """OptionError where another run still writes to `directory`: the checkpoints of two would be mixed.

    The lock ends with this process, however that ends; a file system without locks refuses nobody
    (tests/test_faults.py::test_two_runs_never_write_to_one_directory). A run that ends before it writes
    anything leaves nothing.
    """
    path = Path(directory, "options.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = ends.enter_context(path.open("a"))
    except OSError as error:  # /proc, a full disk
        raise OptionError(f"--output_dir {directory}: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"--output_dir {directory}: another run is writing to it; end that or choose another directory"
        raise OptionError(why) from None
    except OSError:
        pass
    ends.callback(clear, path)


def clear(path: Path) -> None:
    """Take away what `claim` has made, if nothing was written into it."""
    with suppress(OSError):  # the directory holds something else
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()


def start_embedded(options: Options, ranks: Ranks, ends: ExitStack) -> Popen:
    """Rank 0 starts serve.py beside the trainers; it loads while they do, and ends with the run."""
    arguments = {
        "model": options.model,
        "port": 0,
        "dtype": options.compute_dtype,
        "device": str(ranks.device),
        "max_model_len": options.embedded_max_model_len,
        "max_num_seqs": options.embedded_max_num_seqs,
        "max_logprobs": max(options.top_k, options.num_sampler_logprobs),
        "transfer_timeout": options.vllm_server_timeout,
    }
    if options.lora_sync == "adapter":
        arguments["enable_lora"] = True
    process = serve.begin(serve.words(arguments))
    ends.callback(serve.end, process)
    return process


def reach_servers(options: Options, embedded: Popen | None, vocabulary: int | None = None) -> list[Server]:
    """The servers, up and fit for what the options and the trained model ask. OptionError with what to do."""
    urls = options.vllm_server_base_url
    if embedded:
        urls = [serve.wait_for_url(embedded, options.vllm_server_timeout)]
    servers = [Server(url, options.vllm_server_timeout) for url in urls]
    for server in servers:
        try:
            check_server(server, options, vocabulary)
        except ServerError as error:
            raise OptionError(str(error)) from error
    if not embedded:
        print(f"note: {price(options)}", flush=True)
    return servers


def obituary(process: Popen | None) -> str | None:
    """What to say of an embedded server that has ended."""
    if process is None or process.poll() is None:
        return None
    return (
        f"the embedded server ended with exit code {process.returncode} (-9: killed, out of memory?); "
        "what it said is above. Resume the run from its last checkpoint"
    )


def load_model(options: Options, ranks: Ranks):
    """The model in float32, sharded over the ranks, computing in bf16, float16 or float32; its tokenizer.

    What lies outside the language model (a vision tower, a projector) is loaded and kept as it is.
    """
    if options.attention == "flash":
        from attention import flash  # which needs Triton

        refuse(flash.missing(), f"--attention flash {flash.missing()}: choose another")
    attention.register()
    model = pretrained.skeleton(pretrained.read_config(options), options)
    tokenizer = load_tokenizer(options)
    for module in model.modules():  # under dropout the ratio of an unchanged policy would not be 1
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    for module in beside_language_model(model):
        module.requires_grad_(False)
    if options.lora_r:
        option_of("lora_r", add_adapters, model, options)
    kind, layers = model.config.model_type, getattr(model.get_decoder(), "layers", None)
    refuse(layers is None, f"--model: model type {kind!r} has no `layers` to be sharded by")
    shard(model, options, ranks)
    pretrained.read(model, options, ranks.device)
    reset_adapters(model, options.seed)
    model.train()
    option_of("model", attention.check, model.get_decoder())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without a backward its parameters may still be whole
    if compiles(options, ranks.device):
        compile_layers(model)
    return model, tokenizer


def beside_language_model(model) -> list[torch.nn.Module]:
    """The modules a row of text never passes through, none of them inside another."""
    backbone, head = model.get_decoder(), model.get_output_embeddings()
    found, inside = [], model
    while inside is not backbone:
        children = list(inside.children())
        found += [child for child in children if child is not head and backbone not in child.modules()]
        inside = next(child for child in children if backbone in child.modules())
    return [module for module in found if any(True for _ in module.parameters())]


def compiles(options: Options, device: torch.device) -> bool:
    return device.type == "cuda" if options.compile is None else options.compile


def compile_layers(model) -> None:
    """torch.compile of each decoder layer: equal layers share one graph, for rows of any length.

    Only `forward`: FSDP's hooks stay outside. Recurrent layers stay as they are: their walk over the tree is
    Python. See tests/test_attention.py::test_compiled_layers_share_a_graph_for_all_rows.
    """
    # Norms and products that the backward's matrix products read are made again in the kernels around them.
    torch._functorch.config.ban_recompute_materialized_backward = False
    for layer in model.get_decoder().layers:
        if not any("DeltaNet" in type(module).__name__ for module in layer.modules()):
            layer.forward = torch.compile(layer.forward, dynamic=True)


def fit(options: Options, model, budget: int, ranks: Ranks) -> int:
    """Fit rows of `budget` tokens into the device's memory. Returns how many layers recompute
    activations: under --gradient_checkpointing auto as few as have to.

    Where there is room beside them, layers keep their gathered weights from forward to backward, which then
    has none to gather: on all ranks or on none, since they gather together.
    """
    layers = model.get_decoder().layers
    asked = {"true": len(layers), "false": 0}.get(options.gradient_checkpointing)
    if ranks.device.type != "cuda":
        return asked or 0
    if budget <= 0:  # nothing bounds a row
        return len(layers) if asked is None else asked
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    shards, accumulates = options.shard_size or ranks.size, options.gradient_accumulation_steps > 1
    run = (model.config, parameters, shards, compiles(options, ranks.device), accumulates, frozen)
    needs, gathered = Memory(*run), Memory(*run, gathered=True)
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    count = needs.recomputing(budget, room) if asked is None else asked
    keeps = torch.tensor(int(gathered.fits(budget, count, room)))
    dist.all_reduce(keeps, dist.ReduceOp.MIN, group=ranks.control)
    if keeps:
        needs = gathered
        for layer in layers:
            layer.set_reshard_after_forward(False)
    peak, room = needs.peak(budget, count) / 2**30, room / 2**30
    advice = "; they may not fit: lower --token_budget" if peak > room else ""
    if advice or ranks.rank == 0:
        print(
            f"rank {ranks.rank}: {count} of {len(layers)} layers recompute their activations, for rows of "
            f"{budget} tokens to take {peak:.0f} of {room:.0f} GiB{advice}",
            flush=True,
        )
    return count


def checkpoint_layers(model, count: int) -> None:
    """Recompute the activations of the first `count` layers in the backward, and keep those of the others."""
    random = any(layer.dropout > 0 for layer in adapted_layers(model).values())
    for layer in model.get_decoder().layers[:count]:
        layer.forward = partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=random
        )


def shard(model, options: Options, ranks: Ranks) -> None:
    """FSDP2, a unit per layer and one for the rest of the backbone. Gradients are summed, not averaged.

    With --shard_size weights are split over that many ranks, and each group of them holds a copy (hybrid
    sharding): a gather then stays inside a group, a node say, and only gradients travel between groups.
    """
    size = options.shard_size or ranks.size
    refuse(ranks.size % size, f"--shard_size {size}: {ranks.size} ranks are no multiple of it")
    shape = (ranks.size,) if size == ranks.size else (ranks.size // size, size)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("copies", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(getattr(torch, options.compute_dtype), reduce_dtype=torch.float32)
    backbone, head = model.get_decoder(), model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    alone = {"reshard_after_forward": False} if ranks.size == 1 else {}  # there is nothing to free
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **alone)
    fully_shard(backbone, mesh=mesh, mp_policy=policy)
    if tied:
        head.weight = model.get_input_embeddings().weight  # the sharded one
    else:
        fully_shard(head, mesh=mesh, mp_policy=policy)
    for module in beside_language_model(model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def make_optimizer(options: Options, model):
    """AdamW and its schedule. Only matrices decay: norms and biases (one dimension) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=True,
    )
    name = options.lr_scheduler_type
    if name == "constant" and options.warmup_steps:
        name = "constant_with_warmup"
    steps = options.warmup_steps, options.max_steps
    return optimizer, get_scheduler(name, optimizer, *steps, options.lr_scheduler_kwargs)
