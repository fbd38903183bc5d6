"""The rollout loop: the life of a prompt, from the dataset to the queue.

    dataset -> filter_prompt -> group -> num_generations x generate_one -> rewards -> advantages -> queue
                             ^                    | one request a turn   ^                       |
              staleness limit, from the     client.Server         16 groups wait        dropped when all
              trainer's allowance           least loaded first    at most               rewards are equal

A *group* is one prompt and its rollouts, a *rollout* one conversation, a *turn* one sampling request, a
*sample* what is trained. `RolloutLoop` is an asyncio loop whose steps can be overridden one by one; it runs
in a process of its own (process.py) and tells the trainer what came of each prompt (messages.py).

How much is in flight has three limits: tokens not yet trained (`allowance`, published by the trainer), what
the servers' key/value caches hold (`next_cap`), and max_concurrent_rollouts.

Never: touch a GPU; lose a group without a message; turn a missing reward into a zero
(tests/test_scoring.py::test_group_scoring_case).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import itertools
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from calls import Caller, check_tools
from client import ServerError
from conversation import (
    Renderer,
    Rollout,
    RolloutError,
    Turn,
    model_ids,
    read_template,
    samples_of,
)
from messages import TOO_OLD, EndMessage, GroupMessage, MetricsMessage
from packing import Sample
from prompts import Prompt, Prompts
from questions import needed_logprobs, price
from routing import Load, Routing, TooOld
from scoring import (
    Group,
    MetricsBuffer,
    Rewards,
    append_lines,
    as_reward,
    completion_lines,
    completion_metrics,
    drop_reason,
    print_completions,
    total_rewards,
    trained_metrics,
)
from task import (
    Environments,
    Task,
    check_row,
    environment_name,
    eval_rows,
    load_task,
    locate,
    opened,
    tools_of,
)
from teachers import Teachers, check_rows, teacher_of

SCORE_QUEUE = 16  # groups that wait to be scored, and as many that are being scored
TICK_S = 0.05  # heartbeat, and how soon a new allowance is noticed
REPORT_S = 1.0  # between two metrics messages
CLOSE_S = 5.0  # seconds for close(), and for what is in flight, when the loop ends
MEMORY = 512  # rollouts that the running mean of their tokens looks back on


# -------------------------------------------------------------------------------------------------- the loop


@dataclass
class Flight:
    """A group on its way: what the loop keeps about it beside what hooks see."""

    group: Group
    prompt: Prompt
    load: Load
    left: int  # rollouts not finished yet
    prefix: str = ""  # of its metrics' names: eval/ in an evaluation
    abandoned: set[int] = field(default_factory=set)  # rollouts that ran out of time, or are too old
    too_old: bool = False  # one of them is
    earned: dict[int, tuple[str, float]] = field(default_factory=dict)  # environment's class, its reward
    samples: list[list[Sample]] = field(default_factory=list)  # per rollout
    tokens: int = 0  # raw tokens of the samples so far
    done_at: float = 0.0


@dataclass
class Place:
    """Whose turn a request is: every request of a rollout finds it in PLACE."""

    flight: Flight
    index: int
    deadline: float | None
    load: Load  # the group's, or another one once that is down
    version: int = 0  # of the weights: what servers do not tell of its tokens
    turns: int = 0


class PromptTooLong(Exception):
    """The server has no room for a token after the prompt."""


PLACE: contextvars.ContextVar[Place] = contextvars.ContextVar("place")


def request_seed(*parts) -> int:
    """A sampling seed of 63 bits, different for every request: engines that share one repeat each other."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


class RolloutLoop:
    """Samples prompts, scores groups, sends messages. Subclass it to change a step:

        filter_prompt        once per prompt, before generation; False skips it for this epoch
        generate_one         once per rollout
        generate_one_turn    once per sampling request
        compute_advantages   once per group, dropped ones too, after group.rewards is set
        setup, close         on the event loop, before the first prompt and at the end, after a failure too

    Hooks read `self.options` (task_kwargs holds the task's own settings) and `self.tokenizer`. A subclass is
    named by the option rollout_loop and built in the rollout process: define it in a module, and make clients
    in `setup`.
    """

    def __init__(self, options, link, send):
        self.options = options
        self.link = link  # process.Link: numbers shared with the trainer
        self.send = send  # send(message), never blocks
        self.tokenizer = None
        self.task: Task | None = None
        self.eos_ids: set[int] = set()
        self.vocabulary: int | None = None  # rows of the model's output head
        self.prompts: Prompts | None = None
        self.metrics = MetricsBuffer()
        self.routing = Routing(options, link, self.metrics)
        self.loads = self.routing.loads
        self.teachers = Teachers(options, self.metrics) if options.teacher_server_urls else None
        self._helpers = ThreadPoolExecutor(4, thread_name_prefix="helper")
        self._tasks: set[asyncio.Task] = set()
        self._ready_to_close = False
        self._refused = Counter()  # epoch -> prompts that filter_prompt refused
        self._running: dict[int, float] = {}  # rollout -> when it started
        self._waiting_for = "the task to load"
        self._scoring = 0  # groups
        self._blocked = 0  # finished groups that found the scoring queue full
        self._unfinished = 0  # rollouts of groups that were started
        self._finished_rollouts = 0
        self._mean_tokens = 0.0  # of a finished rollout's samples
        self._held_tokens = 0  # of finished rollouts whose group was not sent yet
        self._sent_tokens = 0
        self._reported_at = self._started = time.monotonic()
        self._printed_version = None
        self._log_lock = asyncio.Lock()
        self.caller = Caller(self.record, options.max_concurrent_rollouts)

    # ---- hooks

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        return True

    async def setup(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate_one(self, prompt: list[dict], tools: list, group_id: int) -> Rollout:
        """Turns until one calls no tool, the context is full, or max_tool_calling_iterations is reached.

        `tools` are functions: the task's, and the methods of the rollout's own environment.
        """
        by_name = {tool.__name__: tool for tool in tools}
        schemas = [self.caller.schema(tool) for tool in tools]
        rollout, exhausted = Rollout([], [], []), False
        held = self.render(prompt, schemas)
        if self.is_full(held):
            raise PromptTooLong(len(held))
        for rounds in itertools.count():
            turn = await self.generate_one_turn(held)
            message, calls = self.renderer.reply(turn, schemas)
            rollout.turns.append(turn)
            rollout.completion.append(message)
            rollout.completion_ids.extend(turn.output_ids)
            exhausted = bool(calls) and rounds == self.options.max_tool_calling_iterations
            if not calls or exhausted:
                break
            before = prompt + rollout.completion
            results = await self.caller.answer(calls, by_name, rollout)
            rollout.completion += results
            held = self.renderer.next_prompt(held + turn.output_ids, before, results, schemas)
            if self.is_full(held):
                rollout.out_of_room = True
                break
        if tools:
            self.record("tools/loop_exhausted_frac", (int(exhausted), 1))
        return rollout

    def render(self, messages: list[dict], schemas: list[dict] | None = None) -> list[int]:
        """The conversation so far through the chat template, ready for the assistant's turn: token ids."""
        return self.renderer.prompt(messages, schemas)

    def is_full(self, prompt_ids: list[int]) -> bool:
        """Does the prompt leave the server no room for a token?"""
        context = PLACE.get().load.context
        return context is not None and len(prompt_ids) >= context

    async def generate_one_turn(self, prompt_ids: list[int]) -> Turn:
        """One request to the group's server, with the options' sampling settings and a seed of its own."""
        options, place = self.options, PLACE.get()
        prompt = place.flight.prompt
        place.turns += 1
        seed = request_seed(options.seed, prompt.group_id, prompt.attempt, place.index, place.turns)
        request = dict(
            prompt_ids=[int(token) for token in prompt_ids],
            max_tokens=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p or 0.0,
            seed=seed,
            logprobs=None if place.flight.prefix else needed_logprobs(options),  # evaluations train nothing
            stop_token_ids=sorted(self.eos_ids),
            cache_salt=str(self.link.version.value),  # never the keys and values of older weights
            deadline=place.deadline,
        )
        if self.routing.adapters:
            name = options.adapter(place.version)
            request |= dict(model=name, cache_salt=f"{name} {self._started}")  # nor those of an earlier start
        answer = await self.routing.ask(place, request)
        self.check_vocabulary(answer.token_ids)
        self.metrics.record("rollout/generated_tokens_per_s", (len(answer.token_ids), 0))
        return Turn(
            prompt_ids=prompt_ids,
            output_ids=answer.token_ids.tolist(),
            output_logp=answer.logp,
            candidate_ids=answer.candidate_ids,
            topk=None if answer.topk_ids is None else (answer.topk_ids, answer.topk_logp),
            versions=answer.versions,
        )

    def compute_advantages(self, group: Group) -> np.ndarray:
        """(reward - mean) / (std + 1e-8) over the group's scored rollouts, population std; else 0.

        float64 [num_generations]. GRPO, arXiv 2402.03300.
        """
        scored = ~np.isnan(group.rewards)
        advantages = np.zeros(len(group.rewards))
        if scored.any():
            rewards = group.rewards[scored]
            advantages[scored] = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        return advantages

    # ---- start and end

    async def run(self, position: int, finished: set[int]) -> None:
        """Sample prompts from `position` on, without those in `finished`, until the link says stop."""
        self._over = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._score_queue: asyncio.Queue[Flight] = asyncio.Queue(SCORE_QUEUE)
        self._spawn(self._tick())
        self._spawn(self._work(position, finished))
        try:
            await self._over
        finally:
            self._report(time.monotonic())  # what was measured since the last time
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_S)
            self.routing.close()
            if self.teachers:
                self.teachers.close()
            self.caller.threads.shutdown(wait=False, cancel_futures=True)
            self._helpers.shutdown(wait=False, cancel_futures=True)
            if self._ready_to_close:
                await asyncio.wait_for(self.close(), CLOSE_S)

    def _spawn(self, coroutine) -> asyncio.Task:
        """Run a coroutine beside the others; what it raises ends the loop."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._over.done():
            self._over.set_exception(task.exception())

    async def _work(self, position: int, finished: set[int]) -> None:
        await self._in_thread(self._load, position, finished)
        self._ready_to_close = True
        await self.setup()
        for _ in range(SCORE_QUEUE):
            self._spawn(self._score_groups())
        await self._until(lambda: self.link.allowance.value > 0, "the first weights to reach the servers")
        print(f"note: {price(self.options)}", flush=True)
        await self.routing.look()
        self._spawn(self.routing.watch())
        if self.eval_rows:
            self._spawn(self._evaluate_on_time())
        await self._start_groups()

    def _load(self, position: int, finished: set[int]) -> None:
        """Tokenizer, task and what reward functions need; on a thread, so that the heart beats meanwhile."""
        from transformers import AutoTokenizer  # here: importing it takes seconds

        options = self.options
        source = {"trust_remote_code": options.trust_remote_code}
        source |= {
            k: v for k, v in (options.model_init_kwargs or {}).items() if k in ("revision", "subfolder")
        }
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, **source)
        if options.chat_template:
            self.tokenizer.chat_template = read_template(options.chat_template)
        self.eos_ids, self.vocabulary = model_ids(options.model, source, self.tokenizer)
        self.task = load_task(options.task, options.task_kwargs)
        self.eval_rows = eval_rows(options.eval_dataset, self.task) if options.eval_dataset else []
        self.renderer = Renderer(self.tokenizer, options.chat_template_kwargs or {}, self.eos_ids)
        self.environments = Environments(self.task.environments)
        check_tools(self.task, self.environments, self.renderer, rewarded=not options.distills)
        self.rewards = Rewards(self.task.rewards, options.on_reward_error, self.record)
        epochs = math.inf if options.max_steps > 0 else options.num_train_epochs
        self.prompts = Prompts(self.task.dataset, epochs, position, finished)

    async def _in_thread(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._helpers, function, *arguments)

    async def _until(self, ready, what: str) -> None:
        while not ready():
            self._waiting_for = what
            self._changed.clear()
            await self._changed.wait()
        self._waiting_for = ""

    async def _tick(self) -> None:
        """The heart, and everything that has to be looked at now and then."""
        while True:
            now = time.monotonic()
            self.link.beat.value = now
            if self.link.stop.value and not self._over.done():
                self._over.set_result(None)
            if again := self.link.take_again():
                self.prompts.again.extend(again)
            self.routing.report_changes()
            self._changed.set()
            if now - self._reported_at > REPORT_S:
                self._report(now)
            await asyncio.sleep(TICK_S)

    # ---- prompts

    def _admit(self, prompt: Prompt) -> bool:
        """Ask filter_prompt; a refused prompt is through for this epoch."""
        if self.filter_prompt(prompt.row_index, prompt.row, prompt.epoch):
            return True
        self.send(GroupMessage(prompt.group_id, [], "refused by filter_prompt", self.prompts.size, {}))
        self._refused[prompt.epoch] += prompt.attempt == 0
        if self._refused[prompt.epoch] == self.prompts.size:
            raise RolloutError(f"filter_prompt refused every prompt of epoch {prompt.epoch}")
        return False

    # ---- groups and rollouts

    async def _start_groups(self) -> None:
        while True:
            prompt = await self._in_thread(self.prompts.next)
            if prompt is None:
                self.send(EndMessage(self.prompts.size))
                await self._until(lambda: self.prompts.again, "nothing: every prompt was sampled")
                continue
            await self._room_for_a_group()
            if self._admit(prompt):
                await self._start_group(prompt)

    async def _room_for_a_group(self) -> None:
        """Wait for what limits groups: one at a time at first, the scoring queue, staleness."""
        await self._until(lambda: not self.link.finish.value, "nothing: the run is over")
        await self._until(self._lengths_known, "the first group, which tells how long rollouts are")
        await self._until(lambda: not self._blocked, "the scoring queue, which is full")
        started = time.monotonic()
        if not self._fresh():
            await self._until(self._fresh, "training, at the staleness limit")
            self.metrics.record("rollout/backpressure_s", [time.monotonic() - started])

    def _lengths_known(self) -> bool:
        return self._finished_rollouts >= self.options.num_generations or self._unfinished == 0

    def _fresh(self) -> bool:
        """Are the raw tokens sent and in flight below the allowance? One in flight counts as the mean.

        The trainer is told when they are not, with --overlap false only once nothing is on its way to it.
        """
        in_flight = self._held_tokens + self._unfinished * self._mean_tokens
        fresh = self._sent_tokens + in_flight < self.link.allowance.value
        self.link.held.value = not fresh and (self.options.overlap or in_flight == 0)
        return fresh

    async def _start_group(self, prompt: Prompt) -> None:
        """Start all rollouts of a prompt, as the servers' and the resource limit allow."""
        check_row(prompt.row, self.task, f"dataset row {prompt.row_index}")
        if self.teachers:
            teacher_of(prompt.row.get("teacher_id"), self.teachers.servers, f"dataset row {prompt.row_index}")
        self._unfinished += self.options.num_generations
        await self._launch(prompt, self._run_rollout)

    async def _launch(self, prompt: Prompt, play, prefix: str = "") -> tuple[Flight, list[asyncio.Task]]:
        """Begin play(flight, index, rollout_id) for all rollouts of a prompt, as slots become free."""
        await self._until(lambda: any(map(self._slot, self.loads)), "a free slot of a server")
        flight, tasks, count = self._flight(prompt, prefix), [], self.options.num_generations
        for index in range(count):
            await self._until(lambda: self._slot(self.routing.home(flight)), "a free slot of a server")
            rollout_id = prompt.group_id * count + index
            flight.load.running += 1
            self._running[rollout_id] = time.monotonic()
            tasks.append(self._spawn(play(flight, index, rollout_id)))
        return flight, tasks

    def _flight(self, prompt: Prompt, prefix: str = "") -> Flight:
        """A group that is about to start, on the server that is least loaded."""
        count = self.options.num_generations
        group = Group(
            rollouts=[None] * count,
            prompts=[prompt.row.get("prompt") or []] * count,
            reward_kwargs={name: [v] * count for name, v in prompt.row.items() if name != "prompt"},
            rewards=None,
            group_id=prompt.group_id,
            row_index=prompt.row_index,
            version=self.link.version.value,
        )
        load = self.routing.least_loaded(filter(self._slot, self.loads))
        return Flight(group, prompt, load, left=count, prefix=prefix, samples=[[]] * count)

    def _slot(self, load: Load) -> bool:
        return self.routing.free(load) and len(self._running) < self.options.max_concurrent_rollouts

    async def _converse(self, flight: Flight, index: int, rollout_id) -> Rollout:
        """One rollout, in the slot that was taken for it; an empty one when its time is over."""
        group, limit, started = flight.group, self.options.rollout_timeout, self._running[rollout_id]
        deadline = None if limit is None else started + limit
        version = self.link.version.value if self.routing.adapters else group.version
        place = Place(flight, index, deadline, flight.load, version)
        PLACE.set(place)  # of this task alone
        rollout, ended = Rollout([], [], []), None
        try:
            play = self._play_in_environment if self.task.environments else self._play
            rollout = await asyncio.wait_for(play(flight, index), limit)
        except (TimeoutError, asyncio.TimeoutError):
            if limit is None:
                raise
            ended = "timeout"
        except PromptTooLong as error:
            ended = "prompt_too_long"
            if index == 0:
                row = f"dataset row {group.row_index} is skipped: its prompt has {error} tokens"
                print(f"note: {row}, the server's max_model_len is {place.load.context}", flush=True)
        except TooOld:
            ended, flight.too_old = "unloaded", True
        except ServerError as error:
            raise RolloutError(f"sampling dataset row {group.row_index} failed: {error}") from error
        finally:
            place.load.running -= 1
            place.load.finished += 1
            del self._running[rollout_id]
        if not isinstance(rollout, Rollout):
            raise TypeError(f"generate_one must return a Rollout, not {type(rollout).__name__}")
        if ended:
            flight.abandoned.add(index)
            self.record(f"rollout/{ended}_count", 1)
        self.record("rollout/duration_s", [time.monotonic() - started])
        return rollout

    async def _play(self, flight: Flight, index: int, tools: list = ()) -> Rollout:
        messages = flight.group.prompts[index]
        prompt = [dict(message) for message in messages]  # a hook may build its conversation on it
        return await self.generate_one(prompt, [*self.task.tools, *tools], flight.group.group_id)

    async def _play_in_environment(self, flight: Flight, index: int) -> Rollout:
        """A rollout with an instance to itself. One that runs out of time leaves it: a tool may still run."""
        group, where = flight.group, f"dataset row {flight.group.row_index}"
        name = environment_name(flight.prompt.row, self.task.environments, where)
        environment = await self.caller.off_loop(self.environments.take, name=name)
        kind = type(environment).__name__
        columns = {column: value for column, value in flight.prompt.row.items() if column != "environment"}
        try:
            with self._timed("env/reset_s"):
                text = await self.caller.off_loop(environment.reset, **columns)
        except Exception as error:
            raise RolloutError(f"{kind}.reset failed on {where}: {type(error).__name__}: {error}") from error
        group.prompts[index] = opened(group.prompts[index], text, where)
        rollout = await self._play(flight, index, tools_of(environment))
        if hasattr(environment, "get_reward") and (flight.prefix or not self.options.distills):
            flight.earned[index] = kind, await self._environment_reward(kind, environment)
        self.environments.give_back(name, environment)
        return rollout

    async def _environment_reward(self, kind: str, environment) -> float:
        try:
            with self._timed("env/reward_s"):
                return as_reward(await self.caller.off_loop(environment.get_reward))
        except Exception as error:
            return self.rewards.failed(kind, f"{kind}.get_reward", error)

    @contextlib.contextmanager
    def _timed(self, name: str):
        started = time.monotonic()
        yield
        self.record(name, [time.monotonic() - started])

    async def _run_rollout(self, flight: Flight, index: int, rollout_id: int) -> None:
        """A rollout to train on: played, made into samples, and with the last of its group to be scored."""
        rollout, group = await self._converse(flight, index, rollout_id), flight.group
        rollout.rollout_id = rollout_id
        group.rollouts[index] = rollout
        flight.samples[index], drift = samples_of(
            rollout, group.group_id, group.row_index, PLACE.get().version
        )
        tokens = sum(len(s.input_ids) for s in flight.samples[index])
        self._finished_rollouts += 1
        self._mean_tokens += (tokens - self._mean_tokens) / min(self._finished_rollouts, MEMORY)
        self._unfinished -= 1
        self._held_tokens += tokens
        flight.tokens += tokens
        if index not in flight.abandoned:
            record = self.metrics.record
            record("rollout/turns_mean", [len(rollout.turns)])
            record("rollout/turns_max", len(rollout.turns))
            record("rollout/samples_per_rollout", [len(flight.samples[index])])
            record("rollout/fork_frac", (sum(d > 0 for d in drift), len(drift)))
            record("rollout/drift_tokens_mean", (sum(drift), len(drift)))
            record("rollout/drift_tokens_max", max(drift, default=0))
        if self.options.distills:  # there is nothing that a group would have to be complete for
            flight.samples[index] = await self._teach(flight, index)
        flight.left -= 1
        if flight.left == 0:
            await self._to_scoring(flight)
        self._changed.set()

    async def _teach(self, flight: Flight, index: int) -> list[Sample]:
        """A rollout's samples as its teacher has scored them."""
        named = flight.group.reward_kwargs.get("teacher_id", [None])[0]
        return await self.teachers.score(flight.samples[index], named, self.vocabulary)

    async def _to_scoring(self, flight: Flight) -> None:
        flight.done_at = time.monotonic()
        if self._score_queue.full():
            self._blocked += 1
            await self._score_queue.put(flight)
            self._blocked -= 1
            self.metrics.record("rollout/score_block_s", [time.monotonic() - flight.done_at])
        else:
            self._score_queue.put_nowait(flight)

    # ---- scoring

    async def _score_groups(self) -> None:
        while True:
            flight = await self._score_queue.get()
            started = time.monotonic()
            self.metrics.record("rollout/score_wait_s", [started - flight.done_at])
            self._scoring += 1
            await self._score(flight)
            self._scoring -= 1
            self.metrics.record("rollout/score_s", [time.monotonic() - started])
            self._changed.set()

    async def _score(self, flight: Flight) -> None:
        """What a finished group is worth, then its message."""
        group = flight.group
        sources, advantages, reason = await self._judge(flight)
        if self.teachers and not self.options.distills and reason is None:
            taught = [self._teach(flight, index) for index in range(len(group.rollouts))]
            flight.samples = await asyncio.gather(*taught)
        self._record_completions(flight)
        if self.options.log_completions:
            await self._log_completions(completion_lines(group, sources, advantages))
        samples = [s for samples in flight.samples for s in samples]
        generated = {
            "samples": len(samples),
            "tokens": sum(len(t.output_ids) for r in group.rollouts for t in r.turns),
        }
        for index, rollout_samples in enumerate(flight.samples):
            values = trained_metrics(sources, group.rewards, index)
            for sample in rollout_samples:
                sample.advantage = float(advantages[index])
                sample.metrics = values
                sample.enqueued_at = time.time()
        self._held_tokens -= flight.tokens
        if reason is None and not samples:
            reason = "no trained token"
        if reason is not None:  # its tokens are given back: they are neither held nor sent
            self.send(GroupMessage(group.group_id, [], reason, self.prompts.size, generated))
        else:
            self._sent_tokens += sum(len(sample) for sample in samples)  # as the trainer will count them
            self.send(GroupMessage(group.group_id, samples, None, self.prompts.size, generated))

    async def _judge(self, flight: Flight) -> tuple[dict, np.ndarray, str | None]:
        """Rewards by source, advantages, and why the group teaches nothing; a distillation has none of it."""
        group, count = flight.group, len(flight.group.rollouts)
        if self.options.distills or flight.too_old:
            group.rewards = np.full(count, np.nan)
            return {}, np.zeros(count), TOO_OLD if flight.too_old else None
        sources = await self.rewards.sources(group, flight.abandoned, flight.earned)
        group.rewards = total_rewards(sources, count)
        advantages = np.asarray(self.compute_advantages(group), dtype=np.float64)
        if advantages.shape != (count,) or not np.isfinite(advantages).all():
            raise RolloutError(f"compute_advantages must return {count} finite numbers, not {advantages}")
        reason = drop_reason(group.rewards)
        self._record_rewards(group.rewards, reason)
        return sources, advantages, reason

    def _record_rewards(self, rewards: np.ndarray, reason: str | None) -> None:
        rewards = rewards[~np.isnan(rewards)].tolist()
        self.metrics.record("reward", rewards)
        self.metrics.record("frac_reward_zero_std", (int(reason is not None), 1))
        self.metrics.record("reward_dropped", [] if reason is None else rewards)

    async def _log_completions(self, lines: list[dict]) -> None:
        """All to a file in output_dir, and one group of every version to the console."""
        if self._printed_version != self.link.version.value:
            self._printed_version = self.link.version.value
            print_completions(lines[: self.options.num_completions_to_print])
        async with self._log_lock:  # one group after the other
            await self._in_thread(append_lines, Path(self.options.output_dir) / "completions.jsonl", lines)

    def _record_completions(self, flight: Flight) -> None:
        rollouts = [r for i, r in enumerate(flight.group.rollouts) if i not in flight.abandoned]
        calls = bool(self.task.tools or self.task.environments)
        values = completion_metrics(rollouts, self.eos_ids, len(flight.abandoned), calls)
        for name, value in values.items():
            self.metrics.record(flight.prefix + name, value)

    def record(self, name: str, value) -> None:
        """Note a value from inside a rollout; those of an evaluation are kept apart."""
        place = PLACE.get(None)
        self.metrics.record(place.flight.prefix + name if place else name, value)

    # ---- evaluation

    async def _evaluate_on_time(self) -> None:
        """Play the held-out prompts at the start, every eval_steps steps on the servers, and at the end."""
        every = self.options.eval_steps // self.options.weight_sync_steps
        while True:
            version = self.link.version.value
            await self._evaluate(version)
            while not self._is_due(version, every):
                await asyncio.sleep(4 * TICK_S)

    def _is_due(self, evaluated: int, every: int) -> bool:
        version = self.link.version.value
        return version // every > evaluated // every or bool(self.link.finish.value) and version > evaluated

    async def _evaluate(self, version: int) -> None:
        """Rewards of the held-out prompts, under eval/. A rollout with a reward above 0 counts as passed.

        Requests are training's, with seeds of their own, the same every time. Nothing here counts for the
        staleness limit, and nothing is trained on.
        """
        started = time.monotonic()
        flights = []
        for number, row in enumerate(self.eval_rows):
            flights.append(await self._launch(Prompt(-1 - number, 0, number, row), self._converse, "eval/"))
        scores = []
        for flight, tasks in flights:
            flight.group.rollouts = await asyncio.gather(*tasks)
            sources = await self.rewards.sources(flight.group, flight.abandoned, flight.earned)
            scores.append(total_rewards(sources, flight.left))
        for (flight, _), rewards in zip(flights, scores, strict=True):
            scored = rewards[~np.isnan(rewards)]
            self.metrics.record("eval/reward", scored.tolist())
            self.metrics.record("eval/pass@1", (scored > 0).astype(float).tolist())
            if flight.left > 1:
                self.metrics.record(f"eval/pass@{flight.left}", (int((scored > 0).any()), 1))
            self._record_completions(flight)
        self.metrics.record("eval/version", version)
        self.metrics.record("eval/duration_s", time.monotonic() - started)
        self._report(time.monotonic())  # two evaluations never share a message

    # ---- servers and reports

    def _report(self, now: float) -> None:
        """Once a second: a line for whoever asks what goes on, and what was measured since the last time."""
        seconds, self._reported_at = now - self._reported_at, now
        self.link.say(self.status(now))
        if self.link.allowance.value == 0:
            return  # nothing to measure before the first weights
        self.metrics.record("rollout/generated_tokens_per_s", (0, seconds))
        self.metrics.record("rollout/concurrency", len(self._running))
        self.metrics.record("rollout/concurrency_cap", self.routing.cap())
        self.metrics.record("rollout/score_queue_size", self._score_queue.qsize())
        self.send(MetricsMessage(self.metrics.take()))

    def status(self, now: float) -> str:
        """In a line: "31 rollouts in flight, oldest 118 s, 12 groups being scored, waits for training"."""
        oldest = f", oldest {now - min(self._running.values()):.0f} s" if self._running else ""
        scoring = self._scoring + self._score_queue.qsize()
        parts = [f"{len(self._running)} rollouts in flight{oldest}", f"{scoring} groups being scored"]
        if self.teachers:
            parts.append(f"{self.teachers.asked} samples with teachers")
        if self._waiting_for:
            parts.append(f"waits for {self._waiting_for}")
        if down := self.routing.down():
            parts.append(f"down: {', '.join(down)}")
        if retries := sum(load.server.retry_count for load in self.loads):
            parts.append(f"{retries} requests were retried")
        return ", ".join(parts)

    def check_vocabulary(self, token_ids: np.ndarray) -> None:
        """RolloutError for an id that the model has no row for; it is never clamped."""
        highest = token_ids.max(initial=0)
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise RolloutError(
                f"the server sampled token {highest}, but the output head of {self.options.model} has "
                f"{self.vocabulary} rows: the server does not serve this model"
            )


def load_loop(spec) -> type[RolloutLoop]:
    """The RolloutLoop subclass that `spec` is or names (path.py:Class, module:Class); None = RolloutLoop."""
    found = RolloutLoop if spec is None else locate(spec, "rollout_loop")
    if not (inspect.isclass(found) and issubclass(found, RolloutLoop)):
        raise TypeError(f"rollout_loop {spec!r} is not a subclass of rollout.RolloutLoop")
    return found


def check_task(task: Task, loop: type[RolloutLoop], options) -> None:
    """ValueError for a task that the loop can make nothing of, or an option without effect on it."""
    if task.dataset is None and options.max_steps < 1:
        raise ValueError(f"task {task.name} has no dataset, so nothing ends the run: set --max_steps")
    if options.teacher_server_urls:
        check_rows(task.dataset, options.teacher_server_urls)
    if loop.generate_one is not RolloutLoop.generate_one:
        return
    if not task.rewards and not task.environments and (options.eval_dataset or not options.distills):
        raise ValueError(f"task {task.name} has no rewards: nothing would be learnt")
    if options.max_tool_calling_iterations is not None and not task.tools and not task.environments:
        raise ValueError(f"--max_tool_calling_iterations has no effect: task {task.name} has no tools")
