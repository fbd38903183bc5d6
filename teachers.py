"""Teachers: servers that say what they think of the student's own samples (on-policy distillation).

    finished rollout -> its samples -> the teacher that its row names -> Sample.teacher_ids, teacher_logp
                        (column teacher_id)   prompt + completion, prompt_logprobs = teacher_top_k,
                                              at most max_concurrent_scorings at once to each teacher

A teacher generates nothing: it is forced along the sample's tokens (GKD, arXiv 2306.13649). Exactly one
scores a sample, never a mean of several. This runs in the rollout process, so nothing here imports torch.

Never: score a sample by a teacher that reads its token ids otherwise than the student
(tests/test_teachers.py::test_a_teacher_that_does_not_fit_is_refused_at_start).
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from client import Server, ServerError
from conversation import RolloutError
from options import OptionError, Options
from packing import Sample, common_prefix

PROBE = "sort: dbca = 3.14, naïve 你好\n\tdef f(x):  # 😀\n"  # what tokenizers differ in


def teacher_of(name: str | None, names, where: str) -> str:
    """The teacher that a row's teacher_id names; ValueError says which rows do not fit."""
    if name is None and len(names) == 1:
        return next(iter(names))
    if name in names:
        return name
    said = "has no teacher_id" if name is None else f"names the teacher {name!r}"
    raise ValueError(
        f"{where} {said}: every row needs the column teacher_id with one of --teacher_server_urls, which has "
        f"{', '.join(names)}"
    )


def check_rows(dataset, names) -> None:
    """Do all rows of a dataset name a teacher? Those of a stream are looked at one by one, when sampled."""
    if isinstance(dataset, list):
        given = {row.get("teacher_id") for row in dataset if isinstance(row, dict)}
    elif hasattr(dataset, "unique"):
        given = dataset.unique("teacher_id") if "teacher_id" in dataset.column_names else [None]
    else:
        return
    for name in given:
        teacher_of(name, names, "the dataset")


class Teachers:
    """The teachers as the rollout loop uses them. `metrics`: a scoring.MetricsBuffer."""

    def __init__(self, options: Options, metrics):
        self.options = options
        self.metrics = metrics
        self.servers, self.threads, self.context = {}, {}, {}
        self.retried = 0  # requests, so far
        self.asked = 0  # samples that are being scored, or wait to be
        most = options.max_concurrent_scorings
        for name, url in options.teacher_server_urls.items():
            self.servers[name] = Server(url, options.vllm_server_timeout, connections=most)
            self.threads[name] = ThreadPoolExecutor(most, thread_name_prefix="teacher")

    def close(self) -> None:
        for threads in self.threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def score(self, samples: list[Sample], named: str | None, vocabulary: int | None) -> list[Sample]:
        """Have the teacher `named` by their row score the samples of a rollout; returns those still trained.

        A token the teacher says nothing of leaves a distillation's loss and its divisor, not the forward.
        RolloutError when the teacher cannot be asked, or names an id that the student lacks.
        """
        name = teacher_of(named, self.servers, "a sampled row")
        call = asyncio.get_running_loop().run_in_executor
        self.asked += len(samples)
        asked = [call(self.threads[name], self._score, sample, name, vocabulary) for sample in samples]
        self.metrics.record("rollout/teacher_s", list(await asyncio.gather(*asked)))
        self.asked -= len(samples)
        retried, self.retried = self.retried, sum(server.retry_count for server in self.servers.values())
        self.metrics.record("rollout/teacher_retry_count", self.retried - retried)
        for sample in samples:
            named = sample.teacher_ids >= 0  # [L, K + 1]
            if self.options.beta == 1:  # see loss.teacher_support
                named &= sample.teacher_ids == sample.input_ids[:, None]
            signal = named.any(1) & sample.trained  # [L]
            self.metrics.record("teacher_signal_frac", (int(signal.sum()), int(sample.trained.sum())))
            if self.options.distills:
                sample.trained = signal
        return [sample for sample in samples if sample.trained.any()]

    def _score(self, sample: Sample, name: str, vocabulary: int | None) -> float:
        """Fill a sample's teacher_id, teacher_ids, teacher_logp; on a thread. Returns the seconds it took."""
        server, started = self.servers[name], time.monotonic()
        shape = len(sample), self.options.teacher_top_k + 1
        ids, logp = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        try:
            if name not in self.context:
                self.context[name] = server.models()[0]["max_model_len"]
            asked = sample.input_ids[: self.context[name] - 1].tolist()  # it must have room for one more
            ids[: len(asked)], logp[: len(asked)] = server.score(
                asked, self.options.teacher_top_k, self.options.teacher_temperature
            )
        except ServerError as error:
            where = f"a sample of dataset row {sample.row_index}"
            raise RolloutError(f"teacher {name} cannot score {where}: {error}") from error
        check_ids(ids, vocabulary, f"teacher {name} at {server.url}")
        sample.teacher_id, sample.teacher_ids, sample.teacher_logp = name, ids, logp
        return time.monotonic() - started


def check_ids(ids: np.ndarray, vocabulary: int | None, who: str) -> None:
    """RolloutError for a token that the student has no row for."""
    if vocabulary is not None and ids.max(initial=-1) >= vocabulary:
        raise RolloutError(
            f"{who} names token {ids.max()}, but the student's output head has {vocabulary} rows: student "
            "and teacher must share a vocabulary"
        )


def check_teachers(options: Options, tokenizer, vocabulary: int | None) -> None:
    """Wait for every teacher and look whether it fits; OptionError says what does not and what to do."""
    for name, url in (options.teacher_server_urls or {}).items():
        server = Server(url, options.vllm_server_timeout)
        try:
            server.wait_until_ready()
            problem = misfit(server, options, tokenizer, vocabulary)
        except (ServerError, RolloutError) as error:
            problem = str(error)
        if problem:
            raise OptionError(f"--teacher_server_urls: teacher {name} at {url}: {problem}")


def misfit(server: Server, options: Options, tokenizer, vocabulary: int | None) -> str | None:
    """Why a teacher cannot be used; None when it can."""
    text = PROBE + "".join(tokenizer.all_special_tokens)
    ids, its_ids = tokenizer(text).input_ids, server.tokenize(text)
    if ids != its_ids:
        at = common_prefix(ids, its_ids)
        return (
            f"it reads a text otherwise than --model, from token {at} on ({its_ids[at : at + 3]}, not "
            f"{ids[at : at + 3]}): student and teacher must share a tokenizer"
        )
    wanted = options.teacher_top_k
    try:
        named, logp = server.score(ids, wanted, options.teacher_temperature)
    except ServerError as error:
        if "max allowed" not in str(error):
            raise
        return f"{error}: start it with --max-logprobs {wanted}, or lower --teacher_top_k"
    check_ids(named, vocabulary, "it")
    if options.teacher_temperature != 1 and np.array_equal(logp, server.score(ids, wanted)[1]):
        return (
            f"it answers the same at temperature {options.teacher_temperature} as at 1 (as vLLM does, "
            "whatever its flags): leave --teacher_temperature out"
        )
    return None
