"""Asynchronous GRPO over prefix trees: the loop. Run it with

    torchrun --nproc-per-node 8 train.py --model ... --task ...        beside one or more vLLM servers
    torchrun --nproc-per-node 2 train.py --model tiny --task tasks/sort.py --vllm_server_base_url embedded

One step:
     1  rank 0 takes groups from the queue that the rollout process fills                (rollout.py, feed.py)
     2  and plans a micro-batch: one list of samples per rank, under the token budget    (packing.Planner)
     3  folds each list into a prefix trie, a row, and hands every rank its own          (packing.pack)
     4  each rank forwards its row; a token that several samples share is forwarded once (attention/)
     5  the fused head turns hidden states and loss terms into a sum and its gradient    (loss.py)
     6  backward; the gradients are summed over the ranks       (1 to 6 once per accumulated micro-batch)
     7  gradients are divided once, by all trained tokens of the step, then clipped
     8  AdamW
     9  every weight_sync_steps the servers get the weights; their requests wait in place (sync.py)
    10  metrics, checkpoint                                                 (metrics.py, checkpoint.py)

Generation goes on during all of it; `max_staleness` bounds how far it may run ahead.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from subprocess import Popen

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.utils.logging import disable_progress_bar

import attention
import checkpoint
import serve
from checkpoint import Progress, SaveError
from client import Notice, Server, ServerError
from conversation import read_template
from feed import WAITING, Batch, Feed
from loss import Head, Objective, head_of, microbatch_weight, policy_loss, step_divisor
from messages import GroupMessage, MetricsMessage
from metrics import Logger, Stopwatch, Window, peak_flops, term_metrics
from options import OptionError, Options, check, describe, parse_or_exit
from packing import Planner, Row, row_cost_from_config
from process import RolloutProcess
from recording import NoServers, Replay
from rollout import check_task, load_loop
from sync import WeightSync
from task import eval_rows, load_task

PATIENCE_S = 60.0  # rank 0 tells the others this often that it still waits for rollouts


@dataclass
class Ranks:
    """This process among the trainers."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, for plans and metrics; gradients and weights go over the default group


def train(options: Options, rollouts=None, sync=None) -> Path:
    """Train to the end of the prompts or of max_steps; returns the last checkpoint. Every rank calls this.

    `rollouts` (default: the rollout process) and `sync` (default: packed weights to the servers) can be
    replaced by anything with the same methods, see README. Only rank 0 uses `rollouts`.
    """
    check(options)
    if options.replay:
        rollouts, sync = option_of("replay", Replay, options.replay), NoServers()
        options = replace(options, num_train_epochs=1.0)
    start = check_inputs(options, rollouts)
    with ExitStack() as ends:
        ranks = join_ranks(options)
        needs_servers = ranks.rank == 0 and (rollouts is None or sync is None)
        embedded = start_embedded(options, ranks, ends) if needs_servers and options.embedded else None
        model, tokenizer = load_model(options, ranks)
        optimizer, scheduler = make_optimizer(options, model)
        step, version, progress = resume(start, model, optimizer, scheduler)
        servers = reach_servers(options, embedded, model) if needs_servers else []
        sync = sync or WeightSync(servers, options.vllm_server_timeout)
        feed = make_feed(options, ranks, ends, rollouts, progress, version, servers, embedded, model)
        logger = Logger(options, step) if ranks.rank == 0 else None
        saved_at = start

        @ends.push
        def last_words(kind, *_):
            if feed:
                print(feed.ledger(), flush=True)
            if embedded and embedded.poll() is not None:  # an error of whoever called it says less
                print(obituary(embedded), flush=True)
            if feed and kind:
                again = (
                    f"go on with --resume_from_checkpoint {saved_at}" if saved_at else "nothing was saved yet"
                )
                print(f"stopped after step {step}; {again}", flush=True)

        watch, window = Stopwatch(), Window()
        sync.init()
        ends.callback(sync.close)
        update_weights(sync, model, version, feed, ranks, watch)  # before the first prompt, on resume too
        watch.take()

        step_started = time.perf_counter()
        objective = make_objective(options)
        nonfinite_in_a_row = 0
        while options.max_steps < 0 or step < options.max_steps:
            trained_tokens = microbatches = 0
            for _ in range(options.gradient_accumulation_steps):
                with watch("perf/rollout_wait_s"):
                    batch = next_batch(feed, ranks)
                if batch is None:  # the prompts are used up: the step closes with what it has
                    break
                row = batch.row.to(ranks.device)
                with watch("perf/fwd_bwd_s"):
                    total, stats = forward_backward(model, row, batch.trained_tokens, objective, options)
                window.add("loss", (total.item(), row.terms))
                term_metrics(window, stats, row)
                trained_tokens += batch.trained_tokens
                microbatches += 1
            if microbatches == 0:
                break
            divisor = step_divisor(options.loss_normalization, trained_tokens, microbatches)
            with watch("perf/optimizer_s"):
                grad_norm = optimizer_step(model, optimizer, scheduler, divisor, options.max_grad_norm)
            nonfinite_in_a_row = 0 if math.isfinite(grad_norm) else nonfinite_in_a_row + 1
            step += 1
            if nonfinite_in_a_row == 3:
                stop_for_nonfinite_gradients(options, feed, step)
            if step % options.weight_sync_steps == 0:
                version += 1
                update_weights(sync, model, version, feed, ranks, watch)

            window.add("grad_norm", grad_norm)
            window.add("nonfinite_grad_count", 1 if ranks.rank == 0 and not math.isfinite(grad_norm) else 0)
            seconds = {**watch.take(), "perf/step_s": time.perf_counter() - step_started}
            step_started = time.perf_counter()
            window.update(seconds)
            if feed:
                feed.close_step(seconds, microbatches)
                logger.progress(step, feed.rollouts.status())
            if step % options.logging_steps == 0:
                log(logger, window, feed, step, scheduler.get_last_lr()[0], ranks)
                window = Window()
            if options.save_steps and step % options.save_steps == 0:
                try:
                    saved_at = save(options, model, optimizer, scheduler, tokenizer, step, version, feed)
                except SaveError as error:  # on every rank; the run goes on and the next save tries again
                    if feed:
                        print(f"{error}; training goes on from memory, free some space", flush=True)
        if saved_at is None or saved_at.name != f"checkpoint-{step}":
            saved_at = save(options, model, optimizer, scheduler, tokenizer, step, version, feed)
        if feed:
            print(f"done after {step} steps: {saved_at}", flush=True)
    dist.destroy_process_group()
    return saved_at


def generate(options: Options) -> dict[str, float]:
    """Generation and scoring alone (--rollout_only): every prompt once per epoch, on the servers as they are.

    Prints and returns what was measured over all of it; --record keeps the groups. One process.
    """
    check(options)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise OptionError("--rollout_only is one process: start it without torchrun")
    check_inputs(options, None)
    with ExitStack() as ends:
        urls = options.vllm_server_base_url
        if options.embedded:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            embedded = start_embedded(options, Ranks(0, 1, device, None), ends)
            urls = [serve.wait_for_url(embedded, options.vllm_server_timeout)]
        for url in urls:
            Server(url, options.vllm_server_timeout).wait_until_ready()
        rollouts = RolloutProcess(replace(options, vllm_server_base_url=urls))
        ends.callback(rollouts.stop)
        rollouts.start(0, set(), 0)
        rollouts.publish(0, sys.maxsize)
        window, groups, size, notice = Window(), 0, None, Notice()
        while size is None or groups < math.ceil(options.num_train_epochs * size):
            try:
                message = rollouts.queue.get(timeout=0.1)
            except queue.Empty:
                rollouts.check()
                notice.say(f"rollouts: {rollouts.status()}")
                continue
            notice = Notice()
            measure(window, message)
            if isinstance(message, GroupMessage):
                groups, size = groups + 1, message.dataset_size
        rollouts.stop()
        while not rollouts.queue.empty():
            measure(window, rollouts.queue.get())
    values = {"groups": groups, **window.values()}
    for name, value in sorted(values.items()):
        print(f"{name:48} {value:.6g}", flush=True)
    return values


def measure(window: Window, message) -> None:
    """What a message of the rollout process says, where nothing is trained."""
    if isinstance(message, MetricsMessage):
        window.update(message.values)
    elif isinstance(message, GroupMessage):
        for sample in message.samples:
            window.update({name: [value] for name, value in sample.metrics.items()})


# ---- the step ----


def next_batch(feed: Feed | None, ranks: Ranks) -> Batch | None:
    """The next micro-batch: rank 0 plans it, every rank gets its row. None when the prompts are used up."""
    while True:
        packets = feed.packets(PATIENCE_S) if feed else None
        received = [None]
        dist.scatter_object_list(received, packets, src=0, group=ranks.control)
        if received[0] != WAITING:
            return received[0]


def forward_backward(model, row: Row, trained_tokens: int, objective: Objective, options: Options):
    """Forward a row, sum the loss over its terms, backward. Returns the sum and statistics per term [M].

    These are gradients of plain sums, added up over ranks and micro-batches and divided once per step, so
    that they do not depend on how samples were packed
    (tests/test_train.py::test_gradient_does_not_depend_on_packing).
    """
    backbone = model.get_decoder()  # called below the root: the head runs fused with the loss, on terms only
    hidden = backbone(
        input_ids=row.input_ids[None],  # [1, N]
        position_ids=row.position_ids[None],  # [1, N]
        use_cache=False,
        **attention.index(row, options.attention),
    ).last_hidden_state[0]  # [N, E]
    head = gathered_head(model, hidden.dtype)
    total, stats = policy_loss(hidden, head, row, objective, options.temperature)
    (total * microbatch_weight(options.loss_normalization, trained_tokens)).backward()
    return total.detach(), stats


def gathered_head(model, dtype: torch.dtype) -> Head:
    """The output head, its weight gathered from all ranks once per micro-batch; gradients are summed back."""

    def whole(parameter):
        return None if parameter is None else parameter.full_tensor(grad_placements=[Partial()]).to(dtype)

    linear = model.get_output_embeddings()
    return head_of(model, whole(linear.weight), whole(linear.bias))


def optimizer_step(model, optimizer, scheduler, divisor: int, max_grad_norm: float) -> float:
    """Divide, clip by the norm over all ranks, step. A gradient that is not finite changes no weight."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    for parameter in parameters:
        parameter.grad.div_(divisor)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if math.isfinite(norm):
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def update_weights(sync, model, version: int, feed: Feed | None, ranks: Ranks, watch: Stopwatch) -> None:
    """Give the servers the model as `version`; it is published once it is in place on all of them."""
    with watch("perf/weight_sync_s"):
        with watch("perf/weight_sync_pause_s"):
            sync.pause()
        with watch("perf/weight_sync_barrier_s"):
            dist.barrier(ranks.control)
        with watch("perf/weight_sync_transfer_s"):
            sync.send(model, version)
        sync.resume()
    if feed:
        feed.version = version
        feed.publish()


def stop_for_nonfinite_gradients(options: Options, feed: Feed | None, step: int) -> None:
    if feed:
        path = Path(options.output_dir) / f"nonfinite-step-{step}.pickle"
        path.write_bytes(pickle.dumps(feed.last_plan))
        raise RuntimeError(
            f"gradients were not finite three steps in a row; the last micro-batch is in {path}"
        )
    raise RuntimeError("gradients were not finite three steps in a row")


def log(
    logger: Logger | None, window: Window, feed: Feed | None, step: int, rate: float, ranks: Ranks
) -> None:
    """Reduce the window over the ranks; rank 0 writes its record."""
    windows = [None] * ranks.size if ranks.rank == 0 else None
    dist.gather_object(window, windows, dst=0, group=ranks.control)
    if feed:
        merged = feed.take_window()
        for other in windows:
            merged.merge(other)
        values = {
            "step": step,
            "epoch": feed.epoch,
            "num_tokens": feed.forwarded_tokens,
            "learning_rate": rate,
        }
        logger.record({**values, **merged.values()})


# ---- what the step runs on ----


def check_inputs(options: Options, rollouts) -> Path | None:
    """Look at model, task, loop, chat template, and the checkpoint to resume from; returns the latter.

    OptionError names what cannot work, before a model loads or a server starts.
    """
    directory = Path(options.model)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise OptionError(f"--model {directory} is no model: it has no config.json")
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise OptionError(f"--model {directory} has no weights: there is no *.safetensors file in it")
    source = {k: v for k, v in options.model_init_kwargs.items() if k in ("revision", "subfolder")}
    try:
        AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code, **source)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--model {options.model} is neither a directory with a model nor a hub name that can be read: "
            f"{first_line(error)}"
        ) from error
    if rollouts is None and int(os.environ.get("RANK", 0)) == 0:
        loop = option_of("rollout_loop", load_loop, options.rollout_loop)
        task = option_of("task", load_task, options.task, options.task_kwargs)
        option_of("task", check_task, task, loop, options)
        if options.eval_dataset:
            option_of("eval_dataset", eval_rows, options.eval_dataset, task)
        if options.chat_template:
            option_of("chat_template", read_template, options.chat_template)
    wanted = options.resume_from_checkpoint
    if wanted is None or wanted.lower() == "false":
        return None
    path = checkpoint.newest(options.output_dir) if wanted.lower() == "true" else Path(wanted)
    if path is None:
        raise OptionError(f"--resume_from_checkpoint true: no complete checkpoint in {options.output_dir}")
    checkpoint.read_state(path)
    return path


def option_of(name: str, read, *arguments):
    """read(*arguments), the value of an option; what it refuses becomes an OptionError with the name."""
    try:
        return read(*arguments)
    except (ValueError, TypeError) as error:
        raise OptionError(f"--{name}: {error}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def leave(number: int, _) -> None:
    """A signal becomes an exit through all the ends; a second one does not cut that short."""
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.SIG_IGN)
    print(f"ended by {signal.Signals(number).name}", flush=True)
    raise SystemExit(128 + number)


def join_ranks(options: Options) -> Ranks:
    """Join the process group torchrun describes, or a group of one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
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
    return Ranks(rank, size, device, dist.new_group(backend="gloo", timeout=timeout))


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
    words = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    process = serve.begin(words)
    ends.callback(serve.end, process)
    return process


def reach_servers(options: Options, embedded: Popen | None, model) -> list[Server]:
    """Rank 0's servers, up and fit for what the options ask. ServerError or OptionError with what to do."""
    urls = options.vllm_server_base_url
    if embedded:
        urls = [serve.wait_for_url(embedded, options.vllm_server_timeout)]
    servers = [Server(url, options.vllm_server_timeout) for url in urls]
    for server in servers:
        server.wait_until_ready()
        served = server.models()[0].get("root")
        if served != options.model:
            print(f"note: {server.url} serves {served}, trained is {options.model}", flush=True)
        config = server.server_info()["vllm_config"]["model_config"]
        plain = options.temperature == 1 and options.top_k == 0
        if config["logprobs_mode"] != "processed_logprobs" and not plain:
            raise OptionError(
                f"{server.url} returns {config['logprobs_mode']}, not what it samples from at --temperature "
                f"{options.temperature} --top_k {options.top_k}: start it with --logprobs-mode "
                "processed_logprobs"
            )
        wanted = max(options.top_k, options.num_sampler_logprobs if options.score_centering else 0)
        if 0 <= config["max_logprobs"] < wanted:
            raise OptionError(
                f"{server.url} returns at most {config['max_logprobs']} log-probabilities a token, this run "
                f"needs {wanted}: start it with --max-logprobs {wanted}, or lower --top_k / "
                "--num_sampler_logprobs"
            )
        if not server.is_paused():  # a paused one would keep the question
            check_vocabulary(server, model.get_input_embeddings().num_embeddings)
    return servers


def check_vocabulary(server: Server, size: int) -> None:
    """The server must take the trainer's last token id and refuse the one after it."""
    for token, known in ((size - 1, True), (size, False)):
        try:
            server.complete([token], max_tokens=1, seed=0)
            taken = True
        except ServerError as error:
            if error.status != 400:
                raise
            taken = False
        if taken != known:
            raise OptionError(
                f"{server.url} {'takes' if taken else 'refuses'} token id {token}, but --model has {size} "
                "ids: start it with the model that is trained"
            )


def load_model(options: Options, ranks: Ranks):
    """The model in float32, sharded over the ranks, computing in bf16 or float32; and its tokenizer."""
    attention.register()
    kwargs = {
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
        **options.model_init_kwargs,
    }
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="tree", **kwargs)
    except OSError as error:
        raise OptionError(f"--model {options.model}: {first_line(error)}") from error
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    model.float().to(ranks.device)
    for module in model.modules():  # under dropout the ratio of an unchanged policy would not be 1
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    attention.check(model)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, options, ranks)
    return model.train(), tokenizer


def shard(model, options: Options, ranks: Ranks) -> None:
    """FSDP2, a unit per layer and one for the rest of the backbone. Gradients are summed, not averaged."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.compute_dtype), reduce_dtype=torch.float32
    )
    backbone, head = model.get_decoder(), model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(backbone, mesh=mesh, mp_policy=policy)
    if tied:
        head.weight = model.get_input_embeddings().weight  # the sharded one
    else:
        fully_shard(head, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def make_optimizer(options: Options, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        weight_decay=options.weight_decay,
        fused=True,
    )
    name = options.lr_scheduler_type
    if name == "constant" and options.warmup_steps:
        name = "constant_with_warmup"
    return optimizer, get_scheduler(name, optimizer, options.warmup_steps, options.max_steps)


def make_objective(options: Options) -> Objective:
    return Objective(
        score_centering=options.score_centering,
        score_centering_tail=options.score_centering_tail,
        epsilon=options.epsilon,
        epsilon_high=options.epsilon_high,
        clip_min=options.vllm_importance_sampling_clip_min,
        clip_max=options.vllm_importance_sampling_clip_max,
    )


def make_feed(
    options, ranks: Ranks, ends: ExitStack, rollouts, progress, version, servers, embedded, model
) -> Feed | None:
    """Rank 0: start the rollouts, which wait for the first allowance, and plan rows from what they queue."""
    if ranks.rank != 0:
        return None
    rollouts = rollouts or RolloutProcess(replace(options, vllm_server_base_url=[s.url for s in servers]))
    budget = options.token_budget
    if budget is None:
        if not servers:
            raise OptionError("--token_budget is required where no server tells its max_model_len")
        budget = min(server.models()[0]["max_model_len"] for server in servers)
    planner = Planner(
        ranks.size,
        budget,
        row_cost_from_config(model.config),
        samples_per_rank=options.per_device_train_batch_size,
        share=options.share_prefixes,
    )
    rollouts.start(progress.position, progress.beyond, version)
    ends.callback(rollouts.stop)
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    feed = Feed(rollouts, planner, progress, options, ranks.size * peak_flops(device))
    if embedded:
        feed.on_wait.append(lambda: check_embedded(embedded))
    return feed


def check_embedded(process: Popen) -> None:
    if process.poll() is not None:
        raise RuntimeError(obituary(process))


def obituary(process: Popen) -> str:
    return (
        f"the embedded server ended with exit code {process.returncode} (-9: killed, out of memory?); "
        "what it said is above. Resume the run from its last checkpoint"
    )


def resume(start: Path | None, model, optimizer, scheduler) -> tuple[int, int, Progress]:
    """Step, version and finished prompts: of a fresh start, or of the checkpoint that is loaded here."""
    if start is None:
        return 0, 0, Progress()
    state = checkpoint.read_state(start)
    checkpoint.load(start, model, optimizer)
    scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return state["step"], state["version"], Progress(state["position"], state["beyond"])


def save(options, model, optimizer, scheduler, tokenizer, step: int, version: int, feed) -> Path:
    state = {}
    if feed:
        progress = feed.progress
        state = {"version": version, "position": progress.position, "beyond": sorted(progress.beyond)}
        state["scheduler"] = scheduler.state_dict()
    return checkpoint.save(
        options.output_dir,
        step,
        model,
        optimizer,
        state,
        tokenizer,
        getattr(torch, options.compute_dtype),
        options.save_only_model,
        options.save_total_limit,
    )


@record  # under torchrun: its report then ends with the traceback
def main() -> None:
    options = parse_or_exit(sys.argv[1:])
    if options.dry_run:
        print(describe(options))
        return
    disable_progress_bar()
    try:
        generate(options) if options.rollout_only else train(options)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
