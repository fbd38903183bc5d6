"""The rollout loop: the life of a prompt, from the dataset to the queue.

    dataset -> filter_prompt -> group -> num_generations x generate_one -> rewards -> advantages -> queue
                             ^                    | one request a turn   ^                       |
              staleness limit, from the     client.Server         16 groups wait        dropped when all
              trainer's allowance           least loaded first    at most               rewards are equal

A *group* is one prompt and its rollouts, a *rollout* one conversation, a *turn* one sampling request, a
*sample* what is trained. `RolloutLoop` is an asyncio loop whose steps can be overridden one by one; it runs
in a process of its own (process.py) and tells the trainer what came of each prompt: one GroupMessage per
prompt of an epoch, an EndMessage once they are used up. An empty queue does not mean that they are.

How much is in flight has three limits: tokens not yet trained (`allowance`, published by the trainer), what
the servers' key/value caches hold (`next_cap`), and max_concurrent_rollouts.

Never: touch a GPU; lose a group without a message; turn a missing reward into a zero
(tests/test_scoring.py::test_group_scoring_case).
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import scoring
from calls import Caller, check_tools
from client import ServerError
from conversation import Renderer, Rollout, RolloutError, Turn, load_tokenizer, model_ids, samples_of
from packing import Sample
from prompts import Prompt, Prompts
from questions import needed_logprobs
from routing import Load, Routing, TooOld
from scoring import Group, MetricsBuffer
from task import Environments, Task, check_row, eval_rows, load_task, locate, opened, tools_of
from teachers import Teachers, check_rows, teacher_of

SCORE_QUEUE = 16  # groups that wait to be scored, and as many that are being scored
TICK_S = 0.05  # heartbeat, and how soon a new allowance is noticed
REPORT_S = 1.0  # between two metrics messages
CLOSE_S = 5.0  # seconds for close(), and for what is in flight, when the loop ends
MEMORY = 512  # rollouts that the running mean of their tokens looks back on
TOO_OLD = "too old"  # why a group is dropped whose prompt is sampled again


@dataclass
class GroupMessage:
    """One prompt of an epoch is through: its samples, or why there are none."""

    group_id: int
    samples: list[Sample]
    dropped: str | None
    dataset_size: int | None  # None = streaming, and the end was not seen yet
    generated: dict[str, int]  # samples and tokens that were generated, dropped ones too


@dataclass
class EndMessage:
    """No new prompt is left; a run that is resumed at its end learns the dataset's size from nothing else."""

    dataset_size: int


@dataclass
class MetricsMessage:
    """What was measured in about a second."""

    values: dict  # name -> number, list (mean over all of them) or (numerator, denominator)


@dataclass(eq=False)
class Flight(Group):
    """A group on its way, and what hooks do not see of it."""

    prompt: Prompt
    load: Load  # the server it stays on
    samples: list[list[Sample]]  # per rollout
    prefix: str  # of its metrics' names: eval/ in an evaluation

    @property
    def unfinished(self) -> int:
        return self.rollouts.count(None)

    @property
    def tokens(self) -> int:
        """Raw tokens of its samples so far."""
        return sum(len(sample) for samples in self.samples for sample in samples)


@dataclass(eq=False)
class Place:
    """A rollout that is running. Every request of it finds its place in PLACE."""

    group: Flight
    index: int
    load: Load  # the group's, or another one once that is down
    started: float
    version: int  # of the weights: what servers do not tell of its tokens
    turns: int = 0


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
        self.vocabulary: int | None = None  # rows of the model's output head
        self.prompts: Prompts | None = None
        self.metrics = MetricsBuffer()
        self.routing = Routing(options, link, self.metrics)
        self.loads = self.routing.loads
        self.teachers = Teachers(options, self.metrics) if options.teacher_server_urls else None
        self.caller = Caller(self.record, options.max_concurrent_rollouts)
        self._helpers = ThreadPoolExecutor(4, thread_name_prefix="helper")  # tools that hang hold them not
        self._tasks: set[asyncio.Task] = set()
        self._changed = asyncio.Event()
        self._waiting_for = "the task to load"
        self._running: set[Place] = set()
        self._flights: set[Flight] = set()  # groups that were started and not sent yet
        self._scorers = asyncio.Semaphore(SCORE_QUEUE)
        self._queued = 0  # groups that wait to be scored
        self.drought = scoring.Drought(options.vllm_server_timeout)
        self._refused = 0  # prompts in a row, by filter_prompt
        self._finished_rollouts = 0
        self._mean_tokens = 0.0  # of a finished rollout's samples
        self._sent_tokens = 0
        self._reported_at = self._started = time.monotonic()
        self._printed_version = None

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
            return self.too_long(held)
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

    def too_long(self, prompt_ids: list[int]) -> Rollout:
        place = PLACE.get()
        if place.index == 0:
            what = (
                f"its prompt has {len(prompt_ids)} tokens, the server's max_model_len is {place.load.context}"
            )
            print(f"note: dataset row {place.group.row_index} is skipped: {what}", flush=True)
        return Rollout([], [], [], given_up="prompt_too_long")

    async def generate_one_turn(self, prompt_ids: list[int]) -> Turn:
        """One request to the group's server, with the options' sampling settings and a seed of its own."""
        options, place = self.options, PLACE.get()
        group, limit = place.group, options.rollout_timeout
        place.turns += 1
        request = dict(
            prompt_ids=[int(token) for token in prompt_ids],
            max_tokens=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=request_seed(options.seed, group.group_id, group.prompt.attempt, place.index, place.turns),
            logprobs=None if group.prefix else needed_logprobs(options),  # evaluations train nothing
            stop_token_ids=sorted(self.renderer.eos_ids),
            cache_salt=str(self.link.version.value),  # never the keys and values of older weights
            deadline=None if limit is None else place.started + limit,
        )
        if self.routing.adapters:
            name = options.adapter(place.version)
            request |= dict(model=name, cache_salt=f"{name} {self._started}")  # nor those of an earlier start
        answer = await self.routing.ask(place, request)
        highest = answer.token_ids.max(initial=0)
        if self.vocabulary is not None and highest >= self.vocabulary:  # never clamped
            raise RolloutError(
                f"the server sampled token {highest}, but the output head of {options.model} has "
                f"{self.vocabulary} rows: the server does not serve this model"
            )
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
            for part in filter(None, (self.routing, self.teachers, self.caller)):
                part.close()
            self._helpers.shutdown(wait=False, cancel_futures=True)
            if self.prompts is not None:  # it was loaded
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
        await self.setup()
        await self._until(lambda: self.link.allowance.value > 0, "the first weights to reach the servers")
        await self.routing.look()
        self._spawn(self.routing.watch())
        if self.eval_rows:
            self._spawn(self._evaluate_on_time())
        await self._start_groups()

    def _load(self, position: int, finished: set[int]) -> None:
        """Tokenizer, task and what reward functions need; on a thread, so that the heart beats meanwhile."""
        options = self.options
        self.tokenizer = load_tokenizer(options)
        eos_ids, self.vocabulary = model_ids(options, self.tokenizer)
        self.task = load_task(options.task, options.task_kwargs)
        self.eval_rows = eval_rows(options.eval_dataset, self.task) if options.eval_dataset else []
        self.renderer = Renderer(self.tokenizer, options.chat_template_kwargs, eos_ids)
        self.environments = Environments(self.task.environments)
        check_tools(self.task, self.environments, self.renderer, rewarded=not options.distills)
        self.rewards = scoring.Rewards(self.task.rewards, options.on_reward_error, self.record)
        epochs = math.inf if options.max_steps > 0 else options.num_train_epochs
        self.prompts = Prompts(self.task.dataset, epochs, position, finished)

    async def _in_thread(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._helpers, function, *arguments)

    async def _until(self, ready, what: str, metric: str | None = None) -> None:
        """Wait until ready() is true; `metric` takes the seconds, if it has to."""
        if ready():
            return
        started = time.monotonic()
        while not ready():
            self._waiting_for = what
            self._changed.clear()
            await self._changed.wait()
        self._waiting_for = ""
        if metric:
            self.metrics.record(metric, [time.monotonic() - started])

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

    # ---- from prompt to message

    async def _start_groups(self) -> None:
        while True:
            prompt = await self._in_thread(self.prompts.next)
            if prompt is None:
                self.send(EndMessage(self.prompts.size))
                await self._until(lambda: self.prompts.again, "nothing: every prompt was sampled")
                continue
            await self._room_for_a_group()
            if self._admit(prompt):
                group, rollouts = await self._launch(prompt, self._sample)
                self._flights.add(group)
                self._spawn(self._finish(group, rollouts))

    async def _room_for_a_group(self) -> None:
        """Wait for what limits groups: one at a time at first, the scoring queue, staleness."""
        await self._until(lambda: not self.link.finish.value, "nothing: the run is over")
        await self._until(self._lengths_known, "the first group, which tells how long rollouts are")
        queue = "the scoring queue, which is full"
        await self._until(lambda: self._queued < SCORE_QUEUE, queue, "rollout/score_block_s")
        await self._until(self._fresh, "training, at the staleness limit", "rollout/backpressure_s")

    def _lengths_known(self) -> bool:
        return self._finished_rollouts >= self.options.num_generations or not self._flights

    def _fresh(self) -> bool:
        """Are the raw tokens sent and in flight below the allowance? A rollout in flight counts as the mean.

        The trainer is told when they are not, with --overlap false only once nothing is on its way to it.
        """
        in_flight = sum(group.tokens + group.unfinished * self._mean_tokens for group in self._flights)
        fresh = self._sent_tokens + in_flight < self.link.allowance.value
        self.link.held.value = not fresh and (self.options.overlap or not self._flights)
        return fresh

    def _admit(self, prompt: Prompt) -> bool:
        """Ask filter_prompt; a refused prompt is through for this epoch. ValueError for an unusable row."""
        where = f"dataset row {prompt.row_index}"
        if not self.filter_prompt(prompt.row_index, prompt.row, prompt.epoch):
            self.send(GroupMessage(prompt.group_id, [], "refused by filter_prompt", self.prompts.size, {}))
            self._refused += 1
            if self._refused == self.prompts.size:
                raise RolloutError(f"filter_prompt refused every prompt of epoch {prompt.epoch}")
            return False
        self._refused = 0
        check_row(prompt.row, self.task, where)
        if self.teachers:
            teacher_of(prompt.row.get("teacher_id"), self.teachers.servers, where)
        return True

    async def _launch(self, prompt: Prompt, play, prefix: str = "") -> tuple[Flight, list[asyncio.Task]]:
        """Begin play(place) for all rollouts of a prompt, as slots of the least loaded server become free."""
        await self._until(lambda: any(map(self._slot, self.loads)), "a free slot of a server")
        count, tasks = self.options.num_generations, []
        group = Flight(
            rollouts=[None] * count,
            prompts=[prompt.row.get("prompt") or []] * count,
            reward_kwargs={name: [v] * count for name, v in prompt.row.items() if name != "prompt"},
            rewards=np.full(count, np.nan),
            group_id=prompt.group_id,
            row_index=prompt.row_index,
            version=self.link.version.value,
            prompt=prompt,
            load=self.routing.least_loaded(filter(self._slot, self.loads)),
            samples=[[]] * count,
            prefix=prefix,
        )
        for index in range(count):
            await self._until(lambda: self._slot(self.routing.home(group)), "a free slot of a server")
            version = self.link.version.value if self.routing.adapters else group.version
            place = Place(group, index, group.load, time.monotonic(), version)
            place.load.running += 1
            self._running.add(place)
            tasks.append(self._spawn(play(place)))
        return group, tasks

    def _slot(self, load: Load) -> bool:
        return self.routing.free(load) and len(self._running) < self.options.max_concurrent_rollouts

    async def _sample(self, place: Place) -> None:
        """A rollout to train on: played, and made into samples."""
        rollout, group, index = await self._play(place), place.group, place.index
        rollout.rollout_id = group.group_id * len(group.rollouts) + index
        samples, drift = samples_of(rollout, group.group_id, group.row_index, place.version)
        group.rollouts[index], group.samples[index] = rollout, samples
        self._finished_rollouts += 1
        tokens = sum(map(len, samples))
        self._mean_tokens += (tokens - self._mean_tokens) / min(self._finished_rollouts, MEMORY)
        if not rollout.given_up:
            self.record("rollout/turns_mean", [len(rollout.turns)])
            self.record("rollout/turns_max", len(rollout.turns))
            self.record("rollout/samples_per_rollout", [len(samples)])
            self.record("rollout/fork_frac", (sum(d > 0 for d in drift), len(drift)))
            self.record("rollout/drift_tokens_mean", (sum(drift), len(drift)))
            self.record("rollout/drift_tokens_max", max(drift, default=0))
        if self.options.distills:  # there is nothing that a group would have to be complete for
            await self._teach(group, index)

    async def _play(self, place: Place) -> Rollout:
        """One rollout, in the slot that was taken for it; an empty one where it has to be given up."""
        PLACE.set(place)  # of this task alone
        limit = self.options.rollout_timeout
        try:
            play = self._converse_in_environment if self.task.environments else self._converse
            rollout = await asyncio.wait_for(play(place), limit)
        except (TimeoutError, asyncio.TimeoutError):  # a request's own, and wait_for's: one since Python 3.11
            if limit is None:
                raise
            rollout = Rollout([], [], [], given_up="timeout")
        except TooOld:
            rollout = Rollout([], [], [], given_up="unloaded")
        except ServerError as error:
            raise RolloutError(f"sampling dataset row {place.group.row_index} failed: {error}") from error
        finally:
            place.load.running -= 1
            place.load.finished += 1
            self._running.remove(place)
            self._changed.set()
        if rollout.given_up:
            self.record(f"rollout/{rollout.given_up}_count", 1)
        self.record("rollout/duration_s", [time.monotonic() - place.started])
        return rollout

    async def _converse(self, place: Place, tools: list = ()) -> Rollout:
        group = place.group
        prompt = [dict(message) for message in group.prompts[place.index]]  # a hook may build on it
        rollout = await self.generate_one(prompt, [*self.task.tools, *tools], group.group_id)
        if not isinstance(rollout, Rollout):
            raise TypeError(f"generate_one must return a Rollout, not {type(rollout).__name__}")
        return rollout

    async def _converse_in_environment(self, place: Place) -> Rollout:
        """With an instance to itself. A rollout that runs out of time leaves it: a tool may still run."""
        prompts, row = place.group.prompts, place.group.prompt.row
        where = f"dataset row {place.group.row_index}"
        name, environment = await self.caller.run(self.environments.take, row=row, where=where)
        kind = type(environment).__name__
        columns = {column: value for column, value in row.items() if column != "environment"}
        try:
            text = await self.caller.run(environment.reset, ["env/reset_s"], **columns)
        except Exception as error:
            raise RolloutError(f"{kind}.reset failed on {where}: {type(error).__name__}: {error}") from error
        prompts[place.index] = opened(prompts[place.index], text, where)
        rollout = await self._converse(place, tools_of(environment))
        scores = hasattr(environment, "get_reward") and (place.group.prefix or not self.options.distills)
        if scores and not rollout.given_up:
            try:
                reward = await self.caller.run(environment.get_reward, ["env/reward_s"])
                rollout.earned = kind, scoring.as_reward(reward)
            except Exception as error:
                rollout.earned = kind, self.rewards.failed(kind, f"{kind}.get_reward on {where}", error)
        self.environments.give_back(name, environment)
        return rollout

    async def _teach(self, group: Flight, index: int) -> None:
        """Have a rollout's teacher score its samples."""
        named = group.prompt.row.get("teacher_id")
        group.samples[index] = await self.teachers.score(group.samples[index], named, self.vocabulary)

    async def _finish(self, group: Flight, rollouts: list[asyncio.Task]) -> None:
        """Once its rollouts are done a group waits to be scored, and its message is sent."""
        await asyncio.gather(*rollouts)
        done = time.monotonic()
        self._queued += 1
        async with self._scorers:
            self._queued -= 1
            started = time.monotonic()
            self.metrics.record("rollout/score_wait_s", [started - done])
            message = await self._score(group)
            self.metrics.record("rollout/score_s", [time.monotonic() - started])
        self._flights.remove(group)  # tokens that are not sent are given back
        self._sent_tokens += sum(map(len, message.samples))  # as the trainer will count them
        self.send(message)
        if self.prompts.epochs == math.inf and message.dropped != TOO_OLD:
            self.drought.note(group.rewards, message.dropped, self.prompts.size)
        self._changed.set()

    async def _score(self, group: Flight) -> GroupMessage:
        """What a finished group is worth. A distillation has no rewards, and nothing to compare."""
        options, count = self.options, len(group.rollouts)
        sources, advantages, dropped = {}, np.zeros(count), None
        if any(rollout.given_up == "unloaded" for rollout in group.rollouts):
            dropped = TOO_OLD
        elif not options.distills:
            sources = await self._rewards_of(group)
            advantages = np.asarray(self.compute_advantages(group), dtype=np.float64)
            if advantages.shape != (count,) or not np.isfinite(advantages).all():
                raise RolloutError(f"compute_advantages must return {count} finite numbers, not {advantages}")
            dropped = scoring.drop_reason(group.rewards)
            self.metrics.update(scoring.reward_metrics(group.rewards, dropped))
            if self.teachers and not dropped:
                await asyncio.gather(*(self._teach(group, index) for index in range(count)))
        self.metrics.update(self._completion_metrics(group))
        if options.log_completions:
            await self._log_completions(scoring.completion_lines(group, sources, advantages))
        for index, samples in enumerate(group.samples):
            values = scoring.trained_metrics(sources, group.rewards, index)
            for sample in samples:
                sample.advantage, sample.metrics = float(advantages[index]), values
                sample.enqueued_at = time.time()
        samples = [sample for samples in group.samples for sample in samples]
        tokens = sum(len(turn.output_ids) for rollout in group.rollouts for turn in rollout.turns)
        generated = {"samples": len(samples), "tokens": tokens}
        dropped = dropped or (None if samples else "no trained token")
        return GroupMessage(group.group_id, [] if dropped else samples, dropped, self.prompts.size, generated)

    async def _rewards_of(self, group: Flight) -> dict:
        """What the rewards of a group are, or an error: one that hangs holds up every group behind it."""
        limit = self.options.vllm_server_timeout
        try:
            return await asyncio.wait_for(self.rewards.score(group), limit)
        except (TimeoutError, asyncio.TimeoutError):  # of Python 3.10 these are two
            raise RolloutError(
                f"the rewards of dataset row {group.prompt.row_index} are not there after {limit:.0f} s "
                "(--vllm_server_timeout): does one hang, or wait for a service that does not answer?"
            ) from None

    def _completion_metrics(self, group: Flight) -> dict:
        calls = bool(self.task.tools or self.task.environments)
        values = scoring.completion_metrics(group.rollouts, self.renderer.eos_ids, calls)
        return {group.prefix + name: value for name, value in values.items()}

    async def _log_completions(self, lines: list[dict]) -> None:
        """All to a file in output_dir, and one group of every version to the console."""
        if self._printed_version != self.link.version.value:
            self._printed_version = self.link.version.value
            scoring.print_completions(lines[: self.options.num_completions_to_print])
        path = Path(self.options.output_dir) / "completions.jsonl"
        await self._in_thread(scoring.append_lines, path, lines)

    # ---- evaluation

    async def _evaluate_on_time(self) -> None:
        """Play the held-out prompts at the start, every eval_steps steps on the servers, and at the end."""
        every, evaluated = self.options.eval_steps // self.options.weight_sync_steps, None
        while True:
            over, version = self.link.finish.value, self.link.version.value
            if evaluated is None or version // every > evaluated // every or (over and version > evaluated):
                await self._evaluate(version)
                evaluated = version
            await asyncio.sleep(4 * TICK_S)

    async def _evaluate(self, version: int) -> None:
        """Rewards of the held-out prompts, under eval/. A rollout with a reward above 0 counts as passed.

        Requests are training's, with seeds of their own, the same every time. Nothing here counts for the
        staleness limit, and nothing is trained on.
        """
        started, count, record = time.monotonic(), self.options.num_generations, self.metrics.record
        groups = []
        for number, row in enumerate(self.eval_rows):
            groups.append(await self._launch(Prompt(-1 - number, 0, number, row), self._play, "eval/"))
        for group, rollouts in groups:
            group.rollouts = await asyncio.gather(*rollouts)
            await self._rewards_of(group)
        for group, _ in groups:  # from here on nothing waits: one message takes it all
            scored = group.rewards[~np.isnan(group.rewards)]
            record("eval/reward", scored.tolist())
            record("eval/pass@1", (scored > 0).astype(float).tolist())
            if count > 1:
                record(f"eval/pass@{count}", (int((scored > 0).any()), 1))
            self.metrics.update(self._completion_metrics(group))
        record("eval/version", version)
        record("eval/duration_s", time.monotonic() - started)
        self._report(time.monotonic())  # two evaluations never share a message

    # ---- reports

    def record(self, name: str, value) -> None:
        """Note a value from inside a rollout; those of an evaluation are kept apart."""
        place = PLACE.get(None)
        self.metrics.record(place.group.prefix + name if place else name, value)

    def _report(self, now: float) -> None:
        """Once a second: a line for whoever asks what goes on, and what was measured since the last time."""
        seconds, self._reported_at = now - self._reported_at, now
        self.link.say(self.status(now))
        if self.link.allowance.value == 0:
            return  # nothing to measure before the first weights
        self.metrics.record("rollout/generated_tokens_per_s", (0, seconds))
        self.metrics.record("rollout/concurrency", len(self._running))
        self.metrics.record("rollout/concurrency_cap", self.routing.cap())
        self.metrics.record("rollout/score_queue_size", self._queued)
        self.send(MetricsMessage(self.metrics.take()))

    def status(self, now: float) -> str:
        """In a line: "31 rollouts in flight, oldest 118 s, 12 groups being scored, waits for training"."""
        oldest = min((place.started for place in self._running), default=None)
        oldest = "" if oldest is None else f", oldest {now - oldest:.0f} s"
        done = sum(group.unfinished == 0 for group in self._flights)
        parts = [f"{len(self._running)} rollouts in flight{oldest}", f"{done} groups being scored"]
        if self.teachers:
            parts.append(f"{self.teachers.asked} samples with teachers")
        if self._waiting_for:
            parts.append(f"waits for {self._waiting_for}")
        if down := self.routing.down():
            parts.append(f"down: {', '.join(down)}")
        if retries := sum(load.server.retry_count for load in self.loads):
            parts.append(f"{retries} requests were retried")
        return ", ".join(parts)


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
