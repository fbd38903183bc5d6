"""What a server is asked before it is used: does it give this run what it needs?

    /server_info  ->  Facts  ->  misfits: one line each, with the flag to start the server with
    404 there     ->  one or two requests of one token tell the same

    /v1/completions or the token endpoint: the one that answers sooner (`choose_endpoint`)

Never: let a run begin on log-probabilities of another distribution than the one sampled from
(tests/test_questions.py::test_raw_log_probabilities_are_refused_unless_sampling_is_plain).
"""

from __future__ import annotations

import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from client import COMPLETIONS, TOKENS, Completion, Server, ServerError
from options import OptionError, Options

SHAPE = ("model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
SHAPE += ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "tie_word_embeddings")
TIMED_REQUESTS, TIMED_TOKENS = 32, 32  # of the comparison of two endpoints


def needed_logprobs(options: Options) -> int | None:
    """Log-probabilities a token of the answer carries: the top list, 0 = the sampled one's, None = none."""
    if options.rollout_only and not options.record:
        return None  # nothing is trained on them, now or in a replay
    if options.distills:
        return None  # the divergence compares the trainer's with a teacher's
    return options.num_sampler_logprobs if options.score_centering else 0


@dataclass
class Facts:
    """What a server says of itself; None where it does not."""

    logprobs_mode: str | None = None
    max_logprobs: int = -1  # -1 = no limit
    return_sampling_mask: bool = False
    max_model_len: int | None = None
    generation_config: str | None = None
    dtype: str | None = None


def check_server(server: Server, options: Options, vocabulary: int | None) -> None:
    """Wait for a server and look whether it fits; OptionError names all that does not, a line each.

    `vocabulary`: ids the model that is trained has; None = no model is at hand.
    """
    server.wait_until_ready()
    served = server.models()[0]
    if served.get("root") != options.model:
        print(f"note: {server.url} serves {served.get('root')}, trained is {options.model}", flush=True)
    facts = facts_of(server, options)
    facts.max_model_len = facts.max_model_len or served.get("max_model_len")
    problems = misfits(facts, options)
    if vocabulary is not None and served.get("root"):
        problems += other_shape(served["root"], options)
    if problems:
        raise OptionError("\n".join(f"{server.url} {problem}" for problem in problems))
    for note in remarks(facts, options):
        print(f"note: {server.url} {note}", flush=True)
    if vocabulary is not None and not is_paused(server):  # a paused one would keep the question
        check_vocabulary(server, vocabulary)


def other_shape(root: str, options: Options) -> list[str]:
    """What keeps the trained weights out of the served model, where this machine can read about both."""
    try:
        served, ours = (json.loads(Path(p, "config.json").read_text()) for p in (root, options.model))
    except OSError:
        return []  # then the first update tells
    served, ours = (
        served.get("text_config", served),
        ours.get("text_config", ours) | options.model_init_kwargs,
    )
    names = [name for name in SHAPE if name in served and name in ours and served[name] != ours[name]]
    if not names:
        return []
    told = ", ".join(f"{name} {served[name]} (trained: {ours[name]})" for name in names)
    return [f"serves a model with {told}: start it with {options.model}, or with a model of its shape"]


def facts_of(server: Server, options: Options) -> Facts:
    try:
        config = server.server_info()["vllm_config"]["model_config"]
    except ServerError as error:
        if error.status != 404:
            raise
        return Facts() if is_paused(server) else probed(server, options)
    return Facts(**{name: config[name] for name in vars(Facts()) if name in config})


def is_paused(server: Server) -> bool:
    try:
        return server.is_paused()
    except ServerError as error:
        if error.status != 404:
            raise
        return False  # without that route nobody can have paused it


def needs_processed(options: Options) -> bool:
    """Must log-probabilities be those after temperature and top-k? Not where these change nothing."""
    plain = options.temperature == 1 and options.top_k == 0
    return not plain and needed_logprobs(options) is not None


def wanted_logprobs(options: Options) -> int:
    """The most log-probabilities a request may ask for: the candidate set is read from them."""
    needed = needed_logprobs(options)
    return 0 if needed is None else max(options.top_k, needed)


def probed(server: Server, options: Options) -> Facts:
    """Facts from answers: one prompt at two temperatures tells raw log-probabilities from processed ones."""
    width, facts = max(wanted_logprobs(options), 1), Facts()

    def likeliest(temperature: float) -> float:
        answer = server.complete([0], max_tokens=1, seed=0, temperature=temperature, logprobs=width)
        return float(answer.topk_logp[0, 0])

    try:
        once = likeliest(1.0)
    except ServerError as error:
        if error.max_logprobs is None:
            raise
        return Facts(max_logprobs=error.max_logprobs)  # it does not fit, whatever its mode
    if needs_processed(options):
        facts.logprobs_mode = "raw_logprobs" if likeliest(2.0) == once else "processed_logprobs"
    return facts


def misfits(facts: Facts, options: Options) -> list[str]:
    """What keeps a server from being used, each with what to do."""
    found, wanted = [], wanted_logprobs(options)
    if facts.logprobs_mode not in (None, "processed_logprobs") and needs_processed(options):
        found.append(
            f"returns {facts.logprobs_mode}, not those of what it samples from at --temperature "
            f"{options.temperature} --top_k {options.top_k}: start it with --logprobs-mode processed_logprobs"
        )
    if 0 <= facts.max_logprobs < wanted:
        found.append(
            f"returns at most {facts.max_logprobs} log-probabilities a token, this run needs {wanted}: start "
            f"it with --max-logprobs {wanted}, or lower --top_k / --num_sampler_logprobs"
        )
    if facts.return_sampling_mask and options.top_k == 0:
        found.append(
            "refuses requests without top_k: start it without --return-sampling-mask, or set --top_k"
        )
    return found


def remarks(facts: Facts, options: Options) -> list[str]:
    """What a run can live with, but its owner should know."""
    found = []
    if facts.max_model_len is not None and facts.max_model_len <= options.max_completion_length:
        found.append(
            f"cuts prompt and answer at {facts.max_model_len} tokens, so --max_completion_length "
            f"{options.max_completion_length} is never reached: start it with a higher --max-model-len"
        )
    if facts.generation_config not in (None, "vllm"):
        found.append(
            "takes stop ids and a cap on the answer's length from the model's generation_config.json; "
            "--generation-config vllm turns that off"
        )
    dtype = (facts.dtype or "").removeprefix("torch.")
    if dtype and dtype != options.compute_dtype and not options.rollout_only:
        found.append(
            f"computes in {dtype}, the trainer in {options.compute_dtype}: start it with --dtype "
            f"{options.compute_dtype}, or the ratio of an unchanged policy is not 1"
        )
    return found


def check_vocabulary(server: Server, size: int) -> None:
    """The server's model must have the trainer's last token id and not the one after it."""
    for token, known in ((size - 1, True), (size, False)):
        if server.knows(token) != known:
            raise OptionError(
                f"{server.url} {'refuses' if known else 'takes'} token id {token}, but --model has {size} "
                "ids: start it with the model that is trained"
            )


def choose_endpoint(server: Server, options: Options) -> str:
    """Point the server at the endpoint this run uses; returns why it is that one.

    A sampling mask wins: it is exact where ties let more than `top_k` tokens survive. Else both are timed.
    """
    answer = answered(server, TOKENS, options)
    if isinstance(answer, ServerError):
        server.endpoint = COMPLETIONS
        return f"{COMPLETIONS} ({answer})"
    if options.top_k and answer.masked:
        server.masks = True
        return f"{TOKENS}, which names the tokens that could be sampled"
    refusal = answered(server, COMPLETIONS, options)
    if isinstance(refusal, ServerError):
        server.endpoint = TOKENS
        return f"{TOKENS} ({refusal})"
    try:
        rates = {endpoint: timed(server, endpoint, options) for endpoint in (COMPLETIONS, TOKENS)}
    except ServerError as error:
        server.endpoint = COMPLETIONS
        return f"{COMPLETIONS} ({error})"
    server.endpoint = max(rates, key=rates.get)
    text = ", ".join(f"{rate:,.0f} tokens/s at {endpoint}" for endpoint, rate in rates.items())
    return f"{server.endpoint}, the faster one ({text})"


def answered(server: Server, endpoint: str, options: Options) -> Completion | ServerError:
    """The answer to a first request, after which nothing is slow for being the first; or its refusal."""
    server.endpoint = endpoint
    try:
        return sample(server, options, tokens=1)
    except ServerError as error:
        return error


def sample(server: Server, options: Options, tokens: int, seed: int = 0) -> Completion:
    return server.complete(
        [0],
        max_tokens=tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=seed,
        logprobs=needed_logprobs(options),
        cache_salt="timed",
        give_up=lambda: True,  # the question waits for nothing: the run's own requests do
    )


def timed(server: Server, endpoint: str, options: Options) -> float:
    """Tokens per second of a burst of requests, sent and read."""
    server.endpoint = endpoint
    started = time.monotonic()
    with ThreadPoolExecutor(TIMED_REQUESTS) as threads:
        ask = functools.partial(sample, server, options, TIMED_TOKENS)
        answers = list(threads.map(ask, range(TIMED_REQUESTS)))
    return sum(len(answer.token_ids) for answer in answers) / (time.monotonic() - started)


def price(options: Options, masks: bool) -> str:
    """What the log-probabilities of a request cost, in words; measured on vLLM 0.26, one H200, 0.6B.

    26,400 tokens/s without, 15,300 with the sampled token's alone, 6,450 with 8: its front end is the limit.
    """
    needed = needed_logprobs(options)
    if needed is None:
        return "no log-probabilities are asked for: nothing is trained on them"
    count = needed if masks else options.top_k or needed
    if count == 0:
        return (
            "each token's answer carries its own log-probability, no fewer will do: vLLM then makes about "
            "six tenths of the tokens per second it makes with none"
        )
    share = "between a quarter and six tenths" if count < 8 else "about a quarter"
    share = "less than a quarter" if count > 8 else share
    less = "a lower --top_k" if count != needed else "--num_sampler_logprobs or --score_centering false"
    return (
        f"each token's answer carries {count} log-probabilities: vLLM then makes {share} of the tokens per "
        f"second it makes with none; {less} asks for less"
    )
