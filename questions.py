"""What a server is asked before it is used: does it give this run what it needs?

    /server_info  ->  its configuration  ->  misfits: one line each, with the flag to start the server with
    404 there     ->  two requests of one token tell what generation alone (--rollout_only) depends on

Never: let a run begin on log-probabilities of another distribution than the one sampled from
(tests/test_questions.py::test_raw_log_probabilities_are_refused_unless_sampling_is_plain).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from client import Server, ServerError
from options import OptionError, Options

SHAPE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
SHAPE += ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts")
SHAPE += ("tie_word_embeddings",)


def needed_logprobs(options: Options) -> int | None:
    """Log-probabilities a token of the answer carries: the top list, 0 = the sampled one's, None = none."""
    if options.rollout_only and not options.record:
        return None  # nothing is trained on them, now or in a replay
    if options.distills:
        return None  # the divergence compares the trainer's with a teacher's
    return options.num_sampler_logprobs if options.score_centering else 0


def check_server(server: Server, options: Options, vocabulary: int | None = None) -> None:
    """Wait for a server and look whether it fits; OptionError names all that does not, a line each.

    `vocabulary`: ids of the model that is trained; None = none is.
    """
    server.wait_until_ready()
    served = server.models()[0]
    if served.get("root") != options.model:
        print(f"note: {server.url} serves {served.get('root')}, trained is {options.model}", flush=True)
    config = configuration(server, options) | {"max_model_len": served["max_model_len"]}
    problems = misfits(config, options)
    if not options.rollout_only and served.get("root"):
        problems += other_shape(served["root"], options)
    if vocabulary and not problems and not server.is_paused():  # a paused one would keep the question
        problems += other_vocabulary(server, vocabulary)
    if problems:
        raise OptionError("\n".join(f"{server.url} {problem}" for problem in problems))
    for note in remarks(config, options):
        print(f"note: {server.url} {note}", flush=True)


def configuration(server: Server, options: Options) -> dict:
    """The server's model_config, or what can be found out where it does not tell; who trains needs it to."""
    try:
        return server.server_info()["vllm_config"]["model_config"]
    except ServerError as error:
        if error.status != 404 or not options.rollout_only:
            raise
        return {} if needed_logprobs(options) is None else probed(server, options)


def probed(server: Server, options: Options) -> dict:
    """Of a model_config, what the answers to one token at two temperatures tell."""
    width = max(options.top_k, needed_logprobs(options), 1)
    common = dict(max_tokens=1, seed=0, logprobs=width)
    try:
        hot, cold = (server.complete([0], temperature=t, **common).topk_logp[0, 0] for t in (2.0, 1.0))
    except ServerError as error:
        if limit := re.search(r"max allowed: (\d+)", str(error)):
            return {"max_logprobs": int(limit[1])}
        raise
    return {"logprobs_mode": "raw_logprobs" if hot == cold else "processed_logprobs"}


def misfits(config: dict, options: Options) -> list[str]:
    """What keeps a server from being used, each with what to do."""
    needed, found = needed_logprobs(options), []
    if needed is None:
        return found
    mode, most = config.get("logprobs_mode"), config.get("max_logprobs", -1)  # -1 = no limit
    plain = options.temperature == 1 and options.top_k == 0  # raw and processed ones are the same
    if mode not in (None, "processed_logprobs") and not plain:
        found.append(
            f"returns {mode}, not those of what it samples from at --temperature {options.temperature} "
            f"--top_k {options.top_k}: start it with --logprobs-mode processed_logprobs"
        )
    wanted = options.top_k or needed
    if 0 <= most < wanted:
        found.append(
            f"returns at most {most} log-probabilities a token, this run needs {wanted}: start it with "
            f"--max-logprobs {wanted}, or lower --top_k / --num_sampler_logprobs"
        )
    return found


def other_shape(root: str, options: Options) -> list[str]:
    """What keeps the trained weights out of the served model, where this machine can read about both."""
    try:
        served, ours = (json.loads(Path(p, "config.json").read_text()) for p in (root, options.model))
    except OSError:
        return []  # then `other_vocabulary` and the first update tell
    served, ours = (config.get("text_config", config) for config in (served, ours))
    ours |= options.model_init_kwargs
    names = [name for name in SHAPE if name in served and name in ours and served[name] != ours[name]]
    told = ", ".join(f"{name} {served[name]} (trained: {ours[name]})" for name in names)
    advice = f"start it with {options.model}, or with a model of its shape"
    return [f"serves a model with {told}: {advice}"] if names else []


def other_vocabulary(server: Server, size: int) -> list[str]:
    """Its model must have the trainer's last token id and not the one after it: no configuration tells."""
    found = []
    for token, known in ((size - 1, True), (size, False)):
        if server.knows(token) != known:
            told = f"{'refuses' if known else 'takes'} token id {token}, but --model has {size} ids"
            found.append(f"{told}: start it with the model that is trained")
    return found


def remarks(config: dict, options: Options) -> list[str]:
    """What a run can live with, but its owner should know."""
    found, most = [], config["max_model_len"]
    if most <= options.max_completion_length:
        found.append(
            f"cuts prompt and answer at {most} tokens, so --max_completion_length "
            f"{options.max_completion_length} is never reached: start it with a higher --max-model-len"
        )
    if config.get("generation_config", "vllm") != "vllm":
        found.append(
            "takes stop ids and a cap on the answer's length from the model's generation_config.json; "
            "--generation-config vllm turns that off"
        )
    dtype = config.get("dtype", options.compute_dtype).removeprefix("torch.")
    if dtype != options.compute_dtype and not options.rollout_only:
        found.append(
            f"computes in {dtype}, the trainer in {options.compute_dtype}: start it with --dtype "
            f"{options.compute_dtype}, or the ratio of an unchanged policy is not 1"
        )
    return found


def price(options: Options) -> str:
    """What the log-probabilities of a request cost, in a line; measured on a model of 0.6B parameters."""
    needed = needed_logprobs(options)
    if needed is None:
        return "no log-probabilities are asked for: nothing is trained on them"
    return (
        f"log-probabilities per token: {max(options.top_k or needed, 1)}. vLLM 0.26 on an H200 makes 26,400 "
        "tokens/s with none, 15,300 with the sampled token's alone, 6,450 with 8: --score_centering false, "
        "--num_sampler_logprobs or a lower --top_k asks for less"
    )
