"""The embedded sampler: a small server with vLLM's endpoints, for machines without vLLM.

    python serve.py --model tiny --port 8000

    HTTP threads   parse, check, wait, answer              one thread per connection
         |  commands            ^  finished requests
         v                      |
    engine.py      batching, cache, sampling, weights      one thread

Answers are those of vLLM, as far as this project and a person with curl read them. Must never: let a setting
it does not implement pass (tests/test_serve.py::test_a_setting_the_server_does_not_have_is_refused_by_name);
listen beyond this machine unless told to: it has no authentication.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import numpy as np
import transformers

from client import Notice
from engine import Engine, Request, uniforms

VERSION = "0.32.0+embedded"  # the vLLM whose answers these are


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The embedded sampler: vLLM's endpoints, on transformers.")
    add = parser.add_argument
    add("--model", required=True, help="directory (or hub name) of the model to serve")
    add("--host", default="127.0.0.1", help="address to listen on; the server has no authentication")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks a free one")
    add("--max_model_len", type=at_least(0), default=0, help="longest prompt + answer; 0 = the model's own")
    add("--max_num_seqs", type=at_least(1), default=64, help="requests at once, max_model_len of cache each")
    add("--max_logprobs", type=at_least(-1), default=64, help="log-probabilities per token; -1 = no limit")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the checkpoint's")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    add("--served_model_name", default="", help="the model's name in requests and answers; default: --model")
    add("--enable_lora", action="store_true", help="take low-rank adapters, at /v1/load_lora_adapter")
    add("--max_loras", type=at_least(1), default=1, help="adapters loaded at once")
    add("--max_lora_rank", type=at_least(1), default=16, help="highest rank of an adapter")
    add("--transfer_timeout", type=float, default=300.0, help="longest wait in a weight transfer, in seconds")
    add("--exit_with_parent", action="store_true", help="end when standard input is closed")
    return parser


def at_least(lowest: int):
    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is below {lowest}")
        return int(text)

    return number


# ------------------------------------------------------------------------------------ request bodies
class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


# What a completion request may set: its kind, its default, what the value has to be.
FIELDS = {
    "model": (str, None),
    "seed": (int, None),
    "max_tokens": (int, 16, lambda v: v >= 1, "must be at least 1"),
    "temperature": (float, 1.0, lambda v: v >= 0, "must be non-negative"),
    "top_k": (int, 0, lambda v: v >= -1, "must be 0 (disable), or at least 1"),
    "top_p": (float, 1.0, lambda v: 0 < v <= 1, "must be in (0, 1]"),
    "min_p": (float, 0.0, lambda v: 0 <= v <= 1, "must be in [0, 1]"),
    "logprobs": (int, None, lambda v: v >= 0, "must be non-negative"),
    "prompt_logprobs": (int, None, lambda v: v >= 0, "must be non-negative"),
    "stop_token_ids": (list, [], lambda v: all(type(i) is int for i in v), "must be a list of token ids"),
    "logit_bias": (dict, {}, lambda v: not any(v.values()), "must be 0 at the embedded server"),
    "ignore_eos": (bool, False),
    "return_token_ids": (bool, False),
    "return_tokens_as_token_ids": (bool, False),
    "return_weight_versions": (bool, False),
}

# vLLM's settings that this server does not have, with the values that change nothing: others are refused.
UNSUPPORTED = {
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "prompt_embeds"), (None,)),
    **dict.fromkeys(("structured_outputs", "response_format"), (None, {})),
    **dict.fromkeys(("stop", "bad_words", "logprob_token_ids", "suffix"), (None, [], "")),
    **dict.fromkeys(("echo", "stream", "use_beam_search"), (None, False)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (None, 0)),
    **dict.fromkeys(("repetition_penalty", "n"), (None, 1)),
}


def read(body: dict, name: str, kind: type, default=None, fits=None, rule: str = ""):
    """A field of a request body, or its default where it is absent or null. Refusal that names it."""
    value = body.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise Refusal(400, f"{name} must be a valid {kind.__name__}, got {value!r:.100}.", name)
    if fits and not fits(value):
        raise Refusal(400, f"{name} {rule}, got {value}. (parameter={name}, value={value})", name)
    return value


def read_settings(body: dict, engine: Engine) -> SimpleNamespace:
    """The checked FIELDS of a completion request."""
    for name, neutral in UNSUPPORTED.items():
        if body.get(name) not in neutral:
            raise Refusal(400, f"the embedded server does not implement {name}", name)
    settings = {name: read(body, name, *field) for name, field in FIELDS.items()}
    settings["adapter"] = engine.adapters.loaded.get(settings["model"])
    if settings["model"] not in (None, engine.name) and settings["adapter"] is None:
        message = f"The model `{settings['model']}` does not exist. Valid aliases: {engine.name}."
        raise Refusal(404, message, "model")
    for token in settings["logit_bias"]:
        if not token.isdecimal() or int(token) >= engine.vocab_size:
            raise Refusal(400, f"token id {token} in logit_bias is out of vocabulary", "logit_bias")
    settings["top_k"] = min(settings["top_k"], engine.vocab_size)
    limit = engine.options.max_logprobs
    for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        count = settings[name] or 0
        if 0 <= limit < count:
            message = f"Requested {what} logprobs of {count}, which is greater than max allowed: {limit}"
            raise Refusal(400, f"{message} (parameter={name}, value={count})", name)
        settings[name] = settings[name] and min(count, engine.vocab_size)
    return SimpleNamespace(**settings)


def read_prompt(body: dict, engine: Engine) -> list[int]:
    """The token ids of the prompt, which is text or ids."""
    ids = body.get("prompt")
    if ids in (None, ""):
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise Refusal(400, message, "prompt")
    if isinstance(ids, str):
        ids = engine.tokenizer(ids).input_ids
    if not ids:
        raise Refusal(400, "You must pass at least one prompt")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise Refusal(400, "prompt must be text or a list of token ids, which start at 0.", "prompt")
    if max(ids) >= engine.vocab_size:
        raise Refusal(400, f"Token id {max(ids)} is out of vocabulary")
    limit = f"This model's maximum context length is {engine.max_model_len} tokens."
    if len(ids) > engine.max_model_len:
        raise Refusal(400, f"{limit} However, your prompt contains {len(ids)} input tokens.", "prompt")
    if len(ids) == engine.max_model_len:
        raise Refusal(400, f"max_tokens must be at least 1, got 0. ({limit})", "max_tokens")
    return ids


def request_of(body: dict, engine: Engine) -> Request:
    """The engine's request of a completion body, cut at the model's length, silently."""
    settings, prompt = read_settings(body, engine), read_prompt(body, engine)
    eos_ids = frozenset() if settings.ignore_eos else engine.eos_ids
    drawn = uniforms(settings.seed, min(settings.max_tokens, engine.max_model_len - len(prompt)))
    return Request(prompt, settings, eos_ids, frozenset(settings.stop_token_ids), drawn, settings.adapter)


# -------------------------------------------------------------------------------------------- answers
def completion_answer(engine: Engine, request: Request) -> dict:
    usage = {"prompt_tokens": request.prompt_length, "completion_tokens": request.generated}
    return {
        "id": f"cmpl-{uuid.uuid4().hex[:16]}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.settings.model or engine.name,
        "choices": [choice(engine, request)],
        "usage": usage | {"total_tokens": len(request.tokens)},
    }


def choice(engine: Engine, request: Request) -> dict:
    settings, prompt = request.settings, request.tokens[: request.prompt_length]
    answer = {
        "index": 0,
        "text": engine.text(request),
        "logprobs": None,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": request.output if settings.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if settings.return_token_ids else None,
    }
    if settings.logprobs is not None:
        by_id = settings.return_tokens_as_token_ids
        answer["logprobs"] = token_logprobs(request, "token_id:{}".format if by_id else engine.piece)
    if settings.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None, *(prompt_entry(engine, *s) for s in request.prompt_scores)]
    if settings.return_weight_versions:
        answer["weight_versions"] = request.weight_versions()
    return answer


def token_logprobs(request: Request, name) -> dict:
    """Log-probabilities of the generated tokens: the sampled one first, then the most likely by rank."""
    tokens = [name(token) for token in request.output]
    offsets = np.cumsum([0] + [len(token) for token in tokens])[:-1].tolist()
    top = []
    for token, logp, (ids, logps) in zip(tokens, request.logp, request.top, strict=True):
        others = zip(map(name, ids.tolist()), logps.tolist(), strict=True)
        top.append({token: logp, **{other: value for other, value in others if other != token}})
    return {"text_offset": offsets, "token_logprobs": request.logp, "tokens": tokens, "top_logprobs": top}


def prompt_entry(engine: Engine, token: int, logp: float, rank: int, ids: list[int], logps: list) -> dict:
    """One prompt token: itself first, with its rank, then the most likely others."""
    entry = {str(token): {"logprob": logp, "rank": rank, "decoded_token": engine.piece(token)}}
    for place, (other, value) in enumerate(zip(ids, logps, strict=True), start=1):
        if other != token:
            entry[str(other)] = {"logprob": value, "rank": place, "decoded_token": engine.piece(other)}
    return entry


# ---------------------------------------------------------------------------------------------- routes
def health(call: Handler) -> str:
    if call.engine.error is not None:
        raise Refusal(503, f"the engine has stopped: {call.engine.error}")
    return ""


def models(call: Handler) -> dict:
    engine = call.engine
    rows = [(engine.name, engine.options.model, None, engine.max_model_len)]
    rows += [(a.name, a.path, engine.name, None) for a in list(engine.adapters.loaded.values())]
    keys = ("id", "root", "parent", "max_model_len")
    return {"object": "list", "data": [dict(zip(keys, row, strict=True), object="model") for row in rows]}


def server_info(call: Handler) -> dict:
    """The resolved configuration, under vLLM's names."""
    engine, options = call.engine, call.engine.options
    model = {"dtype": str(engine.model.dtype), "max_model_len": engine.max_model_len}
    model |= {"max_logprobs": options.max_logprobs, "logprobs_mode": "processed_logprobs"}
    lora = {"max_loras": options.max_loras, "max_lora_rank": options.max_lora_rank}
    config = {
        "model_config": model | {"generation_config": "vllm", "served_model_name": engine.name},
        "cache_config": {"kv_cache_size_tokens": engine.capacity, "enable_prefix_caching": False},
        "scheduler_config": {"max_num_seqs": options.max_num_seqs},
        "lora_config": lora if options.enable_lora else None,
        "weight_transfer_config": {"backend": "gloo"},
    }
    return {"vllm_config": config}


def metrics(call: Handler) -> str:
    """Prometheus text of the series a client of vLLM reads."""
    engine = call.engine
    values = {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": len(engine.waiting),
        "kv_cache_usage_perc": sum(r.computed for r in list(engine.running)) / engine.capacity,
        "num_preemptions_total": engine.counters["preemptions"],
        "prompt_tokens_total": engine.counters["prompt_tokens"],
        "generation_tokens_total": engine.counters["generation_tokens"],
    }
    label = f'engine="0",model_name="{engine.name}"'
    lines = [f"vllm:{name}{{{label}}} {float(value)}\n" for name, value in values.items()]
    size = f'kv_cache_size_tokens="{engine.capacity}"'
    return "".join(lines) + f"vllm:cache_config_info{{{label},{size}}} 1.0\n"


def completions(call: Handler) -> dict:
    engine, request = call.engine, request_of(call.body(), call.engine)
    engine.post(engine.waiting.append, request)
    try:
        while not request.done.wait(0.5):
            engine.check()
            call.check_client()
    except BaseException:
        engine.post(engine.drop, request)
        raise
    return completion_answer(engine, request)


def pause(call: Handler) -> dict:
    mode = parse_qs(call.url.query).get("mode", ["abort"])[-1]
    if mode != "keep":
        raise Refusal(
            400, f"the embedded server pauses with mode=keep, which drops no request, not {mode}", "mode"
        )
    call.engine.call(call.engine.pause)
    return {"status": "paused"}


def command(method, answer: dict, argument: str | None = None):
    """The route that has the engine run a method of its own, on a field of the body where it takes one."""

    def route(call: Handler) -> dict:
        call.engine.call(method, call.engine, *([call.required(argument)] if argument else []))
        return answer

    return route


def finish_update(call: Handler) -> dict:
    version = read(call.body(), "weight_version", str) if call.raw else None
    call.engine.call(call.engine.finish_update, version)
    return {"message": "Weight update finished"}


def load_adapter(call: Handler) -> str:
    name, path = (call.required(field, str) for field in ("lora_name", "lora_path"))
    if name in (call.engine.name, *call.engine.adapters.loaded):
        raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
    if call.engine.options.enable_lora and not os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}")
    call.engine.adapters.load(name, path)
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(call: Handler) -> str:
    name = call.required("lora_name", str)
    if call.engine.adapters.loaded.pop(name, None) is None:
        raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
    return f"Success: LoRA adapter '{name}' removed successfully."


ROUTES = {
    "GET /health": health,
    "GET /version": lambda call: {"version": VERSION},
    "GET /v1/models": models,
    "GET /server_info": server_info,
    "GET /get_world_size": lambda call: {"world_size": 1},
    "GET /is_paused": lambda call: {"is_paused": call.engine.paused},
    "GET /weight_info": lambda call: {"weight_version": call.engine.version},
    "GET /metrics": metrics,
    "POST /v1/completions": completions,
    "POST /v1/load_lora_adapter": load_adapter,
    "POST /v1/unload_lora_adapter": unload_adapter,
    "POST /pause": pause,
    "POST /resume": command(Engine.resume, {"status": "resumed"}),
    "POST /init_weight_transfer_engine": command(
        Engine.join, {"message": "Weight transfer initialized"}, "init_info"
    ),
    "POST /start_weight_update": command(Engine.start_update, {"message": "Weight update started"}),
    "POST /update_weights": command(Engine.update, {"message": "Weights updated"}, "update_info"),
    "POST /finish_weight_update": finish_update,
}


class Handler(BaseHTTPRequestHandler):
    """One connection, and what the routes ask of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet: two would wait for the client's delayed ACK

    def do_GET(self) -> None:
        self.url, self.engine = urlsplit(self.path), self.server.engine
        route = ROUTES.get(f"{self.command} {self.url.path}")
        try:
            self.raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if route is None:
                return self.reply(404, {"detail": "Not Found"})
            self.reply(200, route(self))
        except ConnectionError:  # the client has gone
            self.close_connection = True
        except Refusal as error:
            self.refuse(error.status, str(error), error.param)
        except Exception as error:
            traceback.print_exc()
            self.refuse(500, str(error))

    do_POST = do_GET

    def reply(self, status: int, answer: dict | str) -> None:
        text = isinstance(answer, str)
        data = (answer if text else json.dumps(answer, separators=(",", ":"))).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str, param: str | None = None) -> None:
        error = {"message": message, "type": HTTPStatus(status).phrase, "param": param, "code": status}
        self.reply(status, {"error": error})

    def log_message(self, format, *args) -> None:
        """No line per request."""

    def body(self) -> dict:
        if self.headers.get_content_type() != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise Refusal(400, message)
        try:
            body = json.loads(self.raw)
        except ValueError as error:
            raise Refusal(400, f"JSON decode error: {error}", "body") from error
        if not isinstance(body, dict):
            raise Refusal(400, "the body must be a JSON object", "body")
        return body

    def required(self, name: str, kind: type = dict):
        value = read(self.body(), name, kind)
        if value is None:
            raise Refusal(400, f"{name}: Field required", name)
        return value

    def check_client(self) -> None:
        """ConnectionError when the client has closed the connection (readable, and nothing to read)."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the client has gone")


# --------------------------------------------------------------------------------------------- process
class Server(ThreadingHTTPServer):
    """A running sampler: `url` while it lives, `close()` to end it and free the port."""

    daemon_threads = True
    request_queue_size = 1024  # a whole step's requests may connect at once

    def __init__(self, options: argparse.Namespace):
        super().__init__((options.host, options.port), Handler)
        self.url = f"http://{options.host}:{self.server_address[1]}"
        try:
            self.engine = Engine(options)
        except BaseException:
            self.server_close()
            raise
        threading.Thread(target=self.serve_forever, args=(0.05,), name="http", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.engine.stop()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has left is no news
            super().handle_error(request, client_address)


def start(model: str, **options) -> Server:
    """Serve `model` from this process, on a free port; the options are those of the command line. Close it
    before the interpreter ends: its thread may be inside torch."""
    options = {"model": model, "port": 0, **options}
    return Server(parser().parse_args(words(options)))


def words(options: dict) -> list[str]:
    """Options as words of the command line; True is a flag."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def launch(arguments: list[str], timeout_s: float) -> tuple[subprocess.Popen, str]:
    """`begin`, and wait until it takes requests; returns the process and its URL."""
    process = begin(arguments)
    return process, wait_for_url(process, timeout_s)


def begin(arguments: list[str]) -> subprocess.Popen:
    """Start `python serve.py` with these arguments in a process that ends with this one. It has a session of
    its own, so that a Ctrl-C reaches the trainer alone, which ends it when it is done with it."""
    command = [sys.executable, os.path.abspath(__file__), "--exit_with_parent", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_url(process: subprocess.Popen, timeout_s: float) -> str:
    """The URL of a process that was begun, once it takes requests. RuntimeError when it ends, or says nothing
    for `timeout_s`; its errors are on standard error."""
    notice, line = Notice(), ""
    while notice.waited() < timeout_s:
        if select.select([process.stdout], [], [], min(timeout_s, 1.0))[0]:
            line = process.stdout.readline()
            break
        notice.say("the embedded server to load its model")
    if not line:
        process.kill()
        raise RuntimeError(
            f"the embedded server did not start (exit code {process.wait()}; it had {timeout_s:.0f} s); "
            f"see its messages above. Command: {' '.join(process.args)}"
        )
    return json.loads(line)["url"]


def end(process: subprocess.Popen) -> None:
    """End a process that was begun; it is gone when this returns."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_with_stdin() -> None:
    """Standard input closes when the parent dies, however it dies."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve until SIGTERM, SIGINT or, with --exit_with_parent, the end of standard input. One line goes to
    standard output, {"url": "http://127.0.0.1:8000", "pid": 1}, once requests are taken."""
    options = parser().parse_args()
    transformers.utils.logging.disable_progress_bar()
    if options.exit_with_parent:
        threading.Thread(target=end_with_stdin, name="stdin", daemon=True).start()
    try:
        server = Server(options)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        place, do = f"--port {options.port} of {options.host}", "choose another, 0 for a free one"
        parser().exit(2, f"error: {place} is in use: {do}, or end what listens there\n")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
    ended.wait()
    server.close()
    os._exit(0)  # the engine's thread may be inside a forward or a broadcast: nothing waits for it


if __name__ == "__main__":
    main()
