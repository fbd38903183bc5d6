"""Asynchronous GRPO over prefix trees: the loop. Run it with

    torchrun --nproc-per-node 8 train.py --model ... --task ...        beside one or more vLLM servers
    torchrun --nproc-per-node 2 train.py --model tiny --task tasks/sort.py --vllm_server_base_url embedded

One step:
     1  rank 0 takes groups from the queue that the rollout process fills                (rollout.py, feed.py)
     2  and plans a micro-batch: one list of samples per rank, under the token budget    (packing.Planner)
     3  folds each list into a prefix trie, a row, and hands every rank its own          (packing.pack)
     4  each rank forwards its row; a token that several samples share is forwarded once (attention/)
     5  the fused head turns hidden states and loss terms into a sum and its gradient    (head.py, loss.py)
     6  backward; the gradients are summed over the ranks       (1 to 6 once per accumulated micro-batch)
     7  gradients are divided once, by all trained tokens of the step, then clipped
     8  AdamW
     9  every weight_sync_steps the servers get the weights; their requests wait in place (sync.py)
    10  metrics, checkpoint                                                 (metrics.py, checkpoint.py)

1 to 3 happen while the devices are busy with the micro-batch before. Generation goes on during all of it;
`max_staleness` bounds how far it may run ahead.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from transformers.utils.logging import disable_progress_bar

import attention
import checkpoint
import loss
import start
from adapters import AdapterSync, choose
from checkpoint import Progress, SaveError, Saver
from feed import LEAVING, PREEMPTED, WAITING, Batch, Feed
from flops import row_cost_from_config
from generate import generate
from head import head_of
from metrics import Logger, Stopwatch, Window, peak_flops, term_metrics
from options import OptionError, Options, check, describe, parse_or_exit, refuse
from packing import Planner, Row
from process import RolloutProcess
from recording import NoServers, Replay
from sync import Fleet, WeightSync
from teachers import check_teachers

PATIENCE_S = 60.0  # rank 0 tells the others this often that it still waits for rollouts


@dataclass
class Run:
    """What a run is made of and where it stands. Every rank has one; feed and logger are rank 0's alone."""

    options: Options
    ranks: start.Ranks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sync: Any
    feed: Feed | None
    logger: Logger | None
    saver: Saver
    watch: Stopwatch
    objective: loss.Objective
    scale: LossScale
    step: int  # optimizer steps so far
    version: int  # of the weights the servers hold
    prompts: str | None  # their fingerprint, where rank 0 knows one
    batch: Any = WAITING  # the next micro-batch, or why there is none
    window: Window = field(default_factory=Window)
    rate: float = 0.0  # learning rate of the last step
    ended: float = 0.0  # when the last step did, time.perf_counter()
    nonfinite_in_a_row: int = 0

    @property
    def syncs(self) -> bool:
        """Do the servers get the weights of the step that was just made?"""
        return self.step % self.options.weight_sync_steps == 0


def train(options: Options, rollouts=None, sync=None) -> Path:
    """Train to the end of the prompts or of max_steps; returns the last checkpoint. Every rank calls this.

    `rollouts` (default: the rollout process) and `sync` (default: packed weights to the servers) can be
    replaced by anything with the same methods, see README. Only rank 0 uses `rollouts`.
    """
    with ExitStack() as ends:
        run = begin(options, rollouts, sync, ends)
        options, model, watch = run.options, run.model, run.watch
        while options.max_steps < 0 or run.step < options.max_steps:
            trained_tokens, microbatches = accumulate(run)
            if microbatches == 0 or run.batch == PREEMPTED:  # a server may be gone already: no more is sent
                break
            run.rate = run.scheduler.get_last_lr()[0]
            divisor = loss.step_divisor(options.loss_normalization, trained_tokens, microbatches)
            with watch("perf/optimizer_s", on_device=True):
                scaled = divisor * run.scale.value
                norm = optimizer_step(model, run.optimizer, run.scheduler, scaled, options.max_grad_norm)
            run.step += 1
            judge(run, norm)
            if run.syncs:
                run.version += 1
                update_weights(run)
            close_step(run, norm, microbatches)
        finish(run)
    dist.destroy_process_group()
    return run.saver.saved


def accumulate(run: Run) -> tuple[int, int]:
    """Forward and backward of a step's micro-batches: trained tokens of all ranks, and how many there were.

    Fewer than gradient_accumulation_steps where the prompts are used up: the step closes with what it has.
    """
    options, feed = run.options, run.feed
    trained_tokens = microbatches = 0
    while microbatches < options.gradient_accumulation_steps:
        with run.watch("perf/rollout_wait_s"):
            while run.batch == WAITING:
                run.batch = next_batch(feed, run.ranks)
        if run.batch == LEAVING:
            run.ranks.leaving.leave()
        if not isinstance(run.batch, Batch):
            break
        if feed:
            feed.begin()
        batch, run.batch = run.batch, WAITING
        with run.watch("perf/fwd_bwd_s", on_device=True):
            total, stats = forward_backward(
                run.model, batch.row, batch.trained_tokens, run.objective, options, run.scale.value, run.watch
            )
        trained_tokens += batch.trained_tokens
        microbatches += 1
        closes = microbatches == options.gradient_accumulation_steps
        if not closes or run.step + 1 != options.max_steps:  # while the device is busy
            updates = closes and (run.step + 1) % options.weight_sync_steps == 0
            run.batch = next_batch(feed, run.ranks, ahead_for=run.version + updates)
        run.window.add("loss", (total, batch.row.terms))
        term_metrics(run.window, stats, batch.row, batch.teachers)
    return trained_tokens, microbatches


def judge(run: Run, norm: float) -> None:
    """Count gradients that are not finite; three steps in a row of them end the run."""
    finite = math.isfinite(norm)
    run.scale.update(finite)
    run.nonfinite_in_a_row = 0 if finite else run.nonfinite_in_a_row + 1
    if run.nonfinite_in_a_row < 3:
        return
    where = ""
    if run.feed:
        path = Path(run.options.output_dir) / f"nonfinite-step-{run.step}.pickle"
        path.write_bytes(pickle.dumps(run.feed.last_plan))
        where = f"; the last micro-batch is in {path}"
    raise RuntimeError(f"gradients were not finite three steps in a row{where}")


def close_step(run: Run, norm: float, microbatches: int) -> None:
    """Metrics, and a checkpoint where one is due."""
    options, window = run.options, run.window
    window.settle()
    window.add("grad_norm", norm)
    window.add("nonfinite_grad_count", 1 if run.ranks.rank == 0 and not math.isfinite(norm) else 0)
    now = time.perf_counter()
    seconds = {**run.watch.take(), "perf/step_s": now - run.ended}
    run.ended = now
    window.update(seconds)
    if run.feed:
        run.feed.close_step(seconds, microbatches)
        run.logger.progress(run.step, run.feed.share_done(run.step), run.feed.rollouts.status())
    if run.step % options.logging_steps == 0:
        log(run)
    if options.save_steps and run.step % options.save_steps == 0:
        with run.watch("perf/save_s"):
            run.saver.save(run.step, state_of(run))


def finish(run: Run) -> None:
    """What is left when the last step is made: metrics, checkpoint, evaluation, a last line."""
    options, saver = run.options, run.saver
    if run.window.totals and run.step % options.logging_steps:  # the last steps may not fill a window
        log(run)
    with contextlib.suppress(SaveError):  # it has been said
        saver.wait()
    if saver.saved is None or saver.saved.name != f"checkpoint-{run.step}":
        saver.save(run.step, state_of(run))
        saver.wait()
    preempted = run.batch == PREEMPTED
    if options.eval_steps and not preempted:
        if not run.syncs:  # the last weights are evaluated too
            run.version += 1
            update_weights(run)
        for values in run.feed.evaluations() if run.feed else ():
            run.logger.record({"step": run.step, "num_tokens": run.feed.forwarded_tokens, **values})
    if run.feed and preempted:
        say_stopped(run)
    elif run.feed:
        print(f"done after {run.step} steps: {saver.saved}", flush=True)


def say_stopped(run: Run) -> None:
    saved = run.saver.saved
    how = f"go on with --resume_from_checkpoint {saved}" if saved else "nothing was saved yet"
    print(f"{run.ranks.leaving.cause()}stopped after step {run.step}; {how}", flush=True)


# ---- the step ----


def next_batch(feed: Feed | None, ranks: start.Ranks, ahead_for: int | None = None):
    """The next micro-batch, its row on the device: rank 0 plans and packs it, every rank gets its own.

    None when the prompts are used up, LEAVING or PREEMPTED when the run was asked to end; WAITING after
    PATIENCE_S, so that no collective times out. With `ahead_for`, the version of the weights that it will be
    trained at, it never waits: the device is busy with the micro-batch before.
    """
    packets = feed.packets(PATIENCE_S, ahead_for) if feed else [None]
    received = [None]
    dist.scatter_object_list(received, packets, src=0, group=ranks.control)
    batch = received[0]
    return replace(batch, row=upload(batch.row, ranks.device)) if isinstance(batch, Batch) else batch


def upload(row: Row, device: torch.device) -> Row:
    """The row on the device, copied beside whatever that is busy with."""
    if device.type != "cuda":
        return row.to(device)
    busy, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(beside):
        row = row.to(device)
    busy.wait_stream(beside)
    for tensor in row.arrays().values():
        tensor.record_stream(busy)  # its memory is not given away before `busy` is done with it
    return row


class LossScale:
    """Keeps float16 gradients inside its range (Micikevicius et al. 2018); 1 for other dtypes.

    A loss here is a sum over tokens: 1 is what ten thousand is for a mean, so it starts there. A gradient
    that is not finite costs its step, and a factor of 16; a hundred good steps give 2 back.
    """

    def __init__(self, dtype: str):
        self.moves = dtype == "float16"
        self.value, self.good = 1.0, 0

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if self.moves and not finite:
            self.value /= 16
        elif self.moves and self.good % 100 == 0:
            self.value = min(2 * self.value, 2.0**16)


def forward_backward(
    model, row: Row, trained_tokens: int, objective: loss.Objective, options: Options, scale=1.0, watch=None
):
    """Forward a row, sum the loss over its terms, backward. Returns the sum and statistics per term [M].

    These are gradients of plain sums, added up over ranks and micro-batches and divided once per step, so
    that they do not depend on how samples were packed
    (tests/test_train.py::test_gradient_does_not_depend_on_packing).
    """
    loss.check_row(row.host, model.get_input_embeddings().num_embeddings, objective)
    index = attention.index(row, options.attention)  # needed until the backward has ended
    balance = loss.router_coefficient(options.router_aux_loss_coef, model.config)
    with (watch or Stopwatch())("perf/fwd_s", on_device=True):
        output = backbone_output(model, row, **index, **({"output_router_logits": True} if balance else {}))
        hidden = output.last_hidden_state[0]  # [N, E]
        with gathered_head(model) as head:
            total, stats = loss.row_loss(hidden, head, row, objective, options.temperature)
    value = total.detach()
    if balance:  # weighs by the row's trained tokens, so that its share of the step's is what counts
        stats["aux_loss"] = loss.router_loss(
            output.router_logits, model.config.get_text_config().num_experts_per_tok
        )
        total = total + balance * row.terms * stats["aux_loss"]
    (total * (scale * loss.microbatch_weight(options.loss_normalization, trained_tokens))).backward()
    return value, stats


def backbone_output(model, row: Row, **arguments):
    """What lies below the head, called by itself: the head runs fused with the loss, on terms only."""
    return model.get_decoder()(
        input_ids=row.input_ids[None],  # [1, N]
        position_ids=row.position_ids[None],  # [1, N]
        use_cache=False,
        **arguments,
    )


@contextlib.contextmanager
def gathered_head(model):
    """The output head, its weight as FSDP gathers it for the products: with the backbone where they are tied.

    Its gradient stays float32 up to the shards, unlike a layer's
    (tests/test_train.py::test_the_head_is_gathered_in_the_type_of_the_products).
    """
    linear = model.get_output_embeddings()
    alone = isinstance(linear, FSDPModule)
    unit, module = (linear, linear) if alone else (model.get_decoder(), model.get_input_embeddings())
    bias = linear.bias
    if bias is not None:
        bias = bias.full_tensor(grad_placements=[Partial()] * bias.device_mesh.ndim)
    head = replace(head_of(model), weight=Unread.apply(linear.weight), bias=bias)
    unit.unshard()
    yield replace(head, values=module.weight.detach())
    if alone:
        unit.reshard()


class Unread(torch.autograd.Function):
    """The whole of a sharded parameter, for its gradient only: it has no memory and no values."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.layout = parameter.device_mesh, parameter.placements
        return parameter.to_local().new_empty(()).expand(parameter.shape)  # [V, E]

    @staticmethod
    def backward(ctx, gradient):
        mesh, placements = ctx.layout
        return DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim).redistribute(placements=placements)


def optimizer_step(model, optimizer, scheduler, divisor: int, max_grad_norm: float) -> float:
    """Divide, clip by the norm over all ranks, step. A gradient that is not finite changes no weight.

    A fused optimizer does all of it on the device (`grad_scale`, `found_inf`, made for loss scaling); reading
    the norm at the end is the one time in a step that the host waits for the device. Others wait for it here.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) / divisor
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    scale = divisor / (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = scale, (~norm.isfinite()).float()
        optimizer.step()
    elif norm.isfinite():
        for parameter in parameters:
            parameter.grad /= float(scale)
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def update_weights(run: Run) -> None:
    """Give the servers the model as run.version; it is published with the URLs of those that hold it."""
    sync, watch = run.sync, run.watch
    with watch("perf/weight_sync_s"):
        with watch("perf/weight_sync_barrier_s"):
            dist.barrier(run.ranks.control)
        with watch("perf/weight_sync_prepare_s"):
            sync.prepare(run.model)
        with watch("perf/weight_sync_pause_s"):
            sync.pause()
        with watch("perf/weight_sync_transfer_s"):
            sync.send(run.model, run.version)
        servers = sync.resume()
    if run.feed:
        run.feed.start_version(run.version, servers)


def log(run: Run) -> None:
    """Reduce the window over the ranks and open the next; rank 0 writes its record."""
    window, run.window = run.window, Window()
    windows = [None] * run.ranks.size if run.ranks.rank == 0 else None
    dist.gather_object(window, windows, dst=0, group=run.ranks.control)
    if run.feed:
        merged = run.feed.take_window()
        for other in windows:
            merged.merge(other)
        values = {
            "step": run.step,
            "epoch": run.feed.epoch,
            "num_tokens": run.feed.forwarded_tokens,
            "learning_rate": run.rate,
        }
        run.logger.record({**values, **merged.values()})


# ---- what the step runs on ----


def begin(options: Options, rollouts, sync, ends: ExitStack) -> Run:
    """Everything before the first step. `ends` gets what has to be undone when the run is over."""
    check(options)
    if options.replay:
        rollouts, sync = start.option_of("replay", Replay, options.replay), NoServers()
        options = replace(options, num_train_epochs=1.0, overlap=True)
    if rollouts is not None and options.lora_sync == "auto":  # its requests may name no adapter
        options = replace(options, lora_sync="merged")
    resumed, prompts = start.check_inputs(options, rollouts)
    ranks = start.join_ranks(options)
    if ranks.rank == 0:
        start.claim(options.output_dir, ends)
    needs_servers = ranks.rank == 0 and (rollouts is None or sync is None)
    embedded = start.start_embedded(options, ranks, ends) if needs_servers and options.embedded else None
    model, tokenizer = start.load_model(options, ranks)
    optimizer, scheduler = start.make_optimizer(options, model)
    step, version, progress = resume(resumed, model, optimizer, scheduler)
    vocabulary = model.get_input_embeddings().num_embeddings
    servers = start.reach_servers(options, embedded, vocabulary) if needs_servers else []
    if ranks.rank == 0 and rollouts is None:
        check_teachers(options, tokenizer, vocabulary)
    if sync is None:
        options, sync = make_sync(options, servers, ranks)
    budget = token_budget(options, servers, ranks)
    start.checkpoint_layers(model, start.fit(options, model, budget, ranks))
    feed = None
    if ranks.rank == 0:
        source = (rollouts, servers, progress, version)
        feed = make_feed(options, ranks, ends, *source, model.config, budget)
    run = Run(
        options=options,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sync=sync,
        feed=feed,
        logger=Logger(options, step) if feed else None,
        saver=Saver(options, model, optimizer, tokenizer, resumed),
        watch=Stopwatch(ranks.device.type == "cuda"),
        objective=make_objective(options),
        scale=LossScale(options.compute_dtype),
        step=step,
        version=version,
        prompts=prompts,
    )
    ends.push(lambda kind, *_: last_words(run, embedded, kind))
    ends.callback(run.saver.close)
    if feed:
        feed.bad_news = partial(start.obituary, embedded)
        run.watch.speak_up("perf/rollout_wait_s")
    sync.init()
    ends.callback(sync.close)
    update_weights(run)  # before the first prompt, on resume too
    run.watch.take()
    ranks.leaving.in_loop = True
    run.ended = time.perf_counter()
    return run


def last_words(run: Run, embedded, failed) -> None:
    if run.feed:
        run.logger.close()
        print(run.feed.ledger(), flush=True)
    if news := start.obituary(embedded):  # an error of whoever called it says less
        print(news, flush=True)
    if run.feed and failed:
        say_stopped(run)


def make_objective(options: Options) -> loss.Objective:
    policy = loss.score_centering if options.score_centering else loss.clipped_surrogate
    return loss.Objective(
        policy=None if options.distills else policy,
        distill_coef=1.0 if options.distills else options.distill_coef,
        beta=options.beta,
        add_tail_bucket=options.add_tail_bucket,
        teacher_temperature=options.teacher_temperature,
        score_centering_tail=options.score_centering_tail,
        epsilon=options.epsilon,
        epsilon_high=options.epsilon_high,
        clip_min=options.vllm_importance_sampling_clip_min,
        clip_max=options.vllm_importance_sampling_clip_max,
    )


def agreed(value, ranks: start.Ranks):
    """Rank 0's value, on every rank."""
    told = [value]
    dist.broadcast_object_list(told, src=0, group=ranks.control)
    return told[0]


def token_budget(options: Options, servers: list, ranks: start.Ranks) -> int:
    """Most unique tokens of a row: as asked for, or the least context of the servers."""
    budget = options.token_budget
    if ranks.rank == 0 and budget is None:
        refuse(not servers, "--token_budget is required where no server tells its max_model_len")
        budget = min(server.models()[0]["max_model_len"] for server in servers)
    return agreed(budget, ranks)


def make_sync(options: Options, servers: list, ranks: start.Ranks) -> tuple[Options, Fleet]:
    """Merged weights, or adapters, to the servers; the options with what --lora_sync auto has come to."""
    chosen = choose(servers, options) if ranks.rank == 0 else None
    options = replace(options, lora_sync=agreed(chosen, ranks))
    if options.lora_sync == "adapter":
        return options, AdapterSync(servers, options, ranks.device)
    return options, WeightSync(servers, options.vllm_server_timeout, ranks.device)


def make_feed(options: Options, ranks, ends, rollouts, servers, progress, version, config, budget) -> Feed:
    """Start the rollouts, which wait for the first allowance, and plan rows from what they queue."""
    rollouts = rollouts or RolloutProcess(replace(options, vllm_server_base_url=[s.url for s in servers]))
    cost, samples = row_cost_from_config(config), options.per_device_train_batch_size
    planner = Planner(ranks.size, budget, cost, samples_per_rank=samples, share=options.share_prefixes)
    rollouts.start(progress.position, progress.beyond, version)
    ends.callback(rollouts.stop)
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    peak = ranks.size * peak_flops(device) if cost.known else math.nan
    feed = Feed(rollouts, planner, progress, options, peak)
    feed.leaving = ranks.leaving.word
    return feed


def resume(saved: Path | None, model, optimizer, scheduler) -> tuple[int, int, Progress]:
    """Step, version and finished prompts: of a fresh start, or of the checkpoint that is loaded here."""
    if saved is None:
        return 0, 0, Progress()
    state = checkpoint.read_state(saved)
    checkpoint.load(saved, model, optimizer)
    with warnings.catch_warnings():  # it prefers to count for itself, from 0
        warnings.simplefilter("ignore")
        scheduler.step(state["step"])  # of these options, not of those the checkpoint was made with
    return state["step"], state["version"], Progress(state["position"], state["beyond"], state["num_tokens"])


def state_of(run: Run) -> dict:
    """What rollout_state.json holds of the run: rank 0 knows it."""
    if run.feed is None:
        return {}
    return {
        "version": run.version,
        "position": run.feed.progress.position,
        "beyond": sorted(run.feed.progress.beyond),
        "num_tokens": run.feed.forwarded_tokens,
        "prompts": run.prompts,
    }


@record  # under torchrun: its report then ends with the traceback
def main() -> None:
    options = parse_or_exit(sys.argv[1:])
    disable_progress_bar()
    try:
        if options.dry_run:
            start.check_inputs(options, options.replay)
            print(describe(options))
        else:
            generate(options) if options.rollout_only else train(options)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
