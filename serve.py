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
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
import transformers

from client import Notice
from engine import Engine, Request

VERSION = "0.32.0+embedded"  # the vLLM whose answers these are


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The embedded sampler: vLLM's endpoints, on transformers.")
    add = parser.add_argument
    add("--model", required=True, help="directory (or hub name) of the model to serve")
    add("--host", default="127.0.0.1", help="address to listen on; the server has no authentication")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks a free one")
    add("--max_model_len", type=int, default=0, help="longest prompt + answer; 0 = the model's own")
    add("--max_num_seqs", type=int, default=64, help="requests at once, max_model_len of cache each")
    add("--max_logprobs", type=int, default=64, help="log-probabilities per token; -1 = no limit")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the checkpoint's")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="cpu, cuda or cuda:<index>; cuda where there is one")
    add("--enable_lora", action="store_true", help="take low-rank adapters, at /v1/load_lora_adapter")
    add("--transfer_timeout", type=float, default=300.0, help="longest wait in a weight transfer, in seconds")
    add("--exit_with_parent", action="store_true", help="end when standard input is closed")
    return parser


# ------------------------------------------------------------------------------------ request bodies
class Refusal(Exception):
    """An answer other than 200: its status and what it says."""


REQUIRED = object()

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
    "return_weight_versions": (bool, False),
}

# vLLM's settings that this server does not have: refused, unless their value changes nothing.
UNSUPPORTED = """allowed_token_ids truncate_prompt_tokens prompt_embeds structured_outputs response_format
    stop bad_words logprob_token_ids suffix echo stream use_beam_search presence_penalty frequency_penalty
    min_tokens repetition_penalty n""".split()


def read(body: dict, name: str, kind: type, default=REQUIRED, fits=None, rule: str = ""):
    """A field of a request body, or its default where it is absent or null. Refusal that names it."""
    value = body.get(name)
    if value is None and default is not REQUIRED:
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        raise Refusal(400, f"{name} must be a valid {kind.__name__}, got {value!r:.100}.")
    if fits and not fits(value):
        raise Refusal(400, f"{name} {rule}, got {value}.")
    return value


def read_settings(body: dict, engine: Engine) -> SimpleNamespace:
    """The checked FIELDS of a completion request, and the adapter that its model names."""
    for name in UNSUPPORTED:
        if body.get(name) and (body[name] != 1 or name not in ("n", "repetition_penalty")):
            raise Refusal(400, f"the embedded server does not implement {name}")
    settings = SimpleNamespace(**{name: read(body, name, *field) for name, field in FIELDS.items()})
    settings.adapter = engine.adapters.loaded.get(settings.model)
    if settings.model not in (None, engine.name) and settings.adapter is None:
        raise Refusal(404, f"The model `{settings.model}` does not exist. Valid aliases: {engine.name}.")
    for token in settings.logit_bias:
        if not token.isdecimal() or int(token) >= engine.vocab_size:
            raise Refusal(400, f"token id {token} in logit_bias is out of vocabulary")
    limit = engine.options.max_logprobs
    for what, count in (("sample", settings.logprobs), ("prompt", settings.prompt_logprobs)):
        if 0 <= limit < (count or 0):
            message = f"Requested {what} logprobs of {count}, which is greater than max allowed: {limit}"
            raise Refusal(400, message)
    return settings


def read_prompt(body: dict, engine: Engine) -> list[int]:
    """The token ids of the prompt, which is text or ids; they leave room for one token or more."""
    prompt, limit = body.get("prompt"), engine.max_model_len
    ids = engine.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    if not ids:
        raise Refusal(400, "prompt must be provided and non-empty.")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < engine.vocab_size for i in ids):
        raise Refusal(400, f"prompt must be text or a list of token ids from 0 to {engine.vocab_size - 1}.")
    if len(ids) >= limit:
        rule = f"This model's maximum context length is {limit} tokens, the prompt has {len(ids)}"
        raise Refusal(400, f"max_tokens must be at least 1, got 0. ({rule})")
    return ids


# ---------------------------------------------------------------------------------------------- routes
def completions(call: Handler) -> dict:
    """One completion, cut at the model's length, silently."""
    engine = call.engine
    settings, prompt = read_settings(call.body, engine), read_prompt(call.body, engine)
    request = Request(prompt, settings, engine.eos_ids, engine.max_model_len)
    engine.post(engine.waiting.append, request)
    try:
        while not request.done.wait(0.5):
            engine.check()
            call.check_client()
    except BaseException:
        engine.post(engine.drop, request)
        raise
    model = request.settings.model or engine.name
    return {"object": "text_completion", "model": model, "choices": [choice(engine, request)]}


def choice(engine: Engine, request: Request) -> dict:
    """Log-probabilities are keyed by token id, as vLLM's are with return_tokens_as_token_ids."""
    settings, prompt = request.settings, request.tokens[: request.prompt_length]
    text = request.output[:-1] if request.finish_reason == "stop" else request.output
    answer = {
        "index": 0,
        "text": engine.tokenizer.decode(text, skip_special_tokens=True),
        "logprobs": None,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": request.output if settings.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if settings.return_token_ids else None,
    }
    if settings.logprobs is not None:
        key, top = "token_id:{}".format, []
        for token, logp, (ids, logps) in zip(request.output, request.logp, request.top, strict=True):
            others = dict(zip(map(key, ids.tolist()), logps.tolist(), strict=True))
            top.append({key(token): logp} | others)  # the sampled token first
        answer["logprobs"] = {"token_logprobs": request.logp, "top_logprobs": top}
    if settings.prompt_logprobs is not None:
        scores = [{str(i): {"logprob": logp} for i, logp in entry.items()} for entry in request.prompt_scores]
        answer["prompt_logprobs"] = [None, *scores]
    if settings.return_weight_versions:
        answer["weight_versions"] = request.weight_versions()
    return answer


def health(call: Handler) -> str:
    if call.engine.error is not None:
        raise Refusal(503, f"the engine has stopped: {call.engine.error}")
    return ""


def models(call: Handler) -> dict:
    engine = call.engine
    rows = [(engine.name, engine.name, None, engine.max_model_len)]
    rows += [(name, a.path, engine.name, None) for name, a in list(engine.adapters.loaded.items())]
    keys = ("id", "root", "parent", "max_model_len")
    return {"object": "list", "data": [dict(zip(keys, row, strict=True), object="model") for row in rows]}


def server_info(call: Handler) -> dict:
    """Of the resolved configuration what a client reads, under vLLM's names."""
    engine, options = call.engine, call.engine.options
    model = {
        "dtype": str(engine.model.dtype),
        "max_model_len": engine.max_model_len,
        "max_logprobs": options.max_logprobs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
    lora = {"max_loras": sys.maxsize, "max_lora_rank": sys.maxsize} if options.enable_lora else None
    transfer = {"backend": "gloo"}
    return {"vllm_config": {"model_config": model, "lora_config": lora, "weight_transfer_config": transfer}}


def metrics(call: Handler) -> str:
    """Prometheus text of the series that a client reads."""
    engine = call.engine
    values = {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": len(engine.waiting),
        "kv_cache_usage_perc": sum(r.computed for r in list(engine.running)) / engine.capacity,
        "num_preemptions_total": engine.preemptions,
        f'cache_config_info{{kv_cache_size_tokens="{engine.capacity}"}}': 1,
    }
    return "".join(f"vllm:{name} {value}\n" for name, value in values.items())


def pause(call: Handler) -> dict:
    if "mode=keep" not in call.query.split("&"):
        raise Refusal(400, "the embedded server pauses with mode=keep, which drops no request")
    call.engine.call(call.engine.pause)
    return {"status": "paused"}


def load_adapter(call: Handler) -> str:
    name, path = (read(call.body, field, str) for field in ("lora_name", "lora_path"))
    if name in (call.engine.name, *call.engine.adapters.loaded):
        raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
    if not os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}")
    call.engine.adapters.load(name, path)
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(call: Handler) -> str:
    name = read(call.body, "lora_name", str)
    if call.engine.adapters.loaded.pop(name, None) is None:
        raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
    return f"Success: LoRA adapter '{name}' removed successfully."


def command(method, answer: dict, *field):
    """The route that runs a method of the engine on its thread, with a field of the body (`read`) if any."""

    def route(call: Handler) -> dict:
        call.engine.call(method, call.engine, *([read(call.body, *field)] if field else []))
        return answer

    return route


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
        Engine.join, {"message": "Weight transfer initialized"}, "init_info", dict
    ),
    "POST /start_weight_update": command(Engine.start_update, {"message": "Weight update started"}),
    "POST /update_weights": command(Engine.update, {"message": "Weights updated"}, "update_info", dict),
    "POST /finish_weight_update": command(
        Engine.finish_update, {"message": "Weight update finished"}, "weight_version", str, None
    ),
}


class Handler(BaseHTTPRequestHandler):
    """One connection, and what the routes ask of it: `engine`, `query`, `body`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet: two would wait for the client's delayed ACK

    def do_GET(self) -> None:
        self.engine = self.server.engine
        path, _, self.query = self.path.partition("?")
        try:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            route = ROUTES.get(f"{self.command} {path}")
            if route is None:
                return self.reply(404, {"detail": "Not Found"})
            try:
                self.body = json.loads(raw or "{}")
            except ValueError as error:
                raise Refusal(400, f"JSON decode error: {error}") from error
            if not isinstance(self.body, dict):
                raise Refusal(400, "the body must be a JSON object")
            self.reply(200, route(self))
        except ConnectionError:  # the client has gone
            self.close_connection = True
        except Exception as error:
            status, text = error.args if isinstance(error, Refusal) else (500, str(error))
            if status == 500:
                traceback.print_exc()
            told = {"message": text, "type": HTTPStatus(status).phrase, "param": None, "code": status}
            self.reply(status, {"error": told})

    do_POST = do_GET

    def reply(self, status: int, answer: dict | str) -> None:
        text = isinstance(answer, str)
        data = (answer if text else json.dumps(answer, separators=(",", ":"))).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args) -> None:
        """No line per request."""

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
        self.engine = Engine(options)
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
    notice, ready = Notice(), []
    while not ready and notice.waited() < timeout_s:
        ready, _, _ = select.select([process.stdout], [], [], min(timeout_s, 1.0))
        notice.say("the embedded server to load its model")
    line = process.stdout.readline() if ready else ""
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
    os._exit(0)


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
        place = f"--port {options.port} of {options.host}"
        parser().exit(2, f"error: {place} is in use: choose another, 0 for a free one\n")
    for number in (signal.SIGTERM, signal.SIGINT):
        # the engine's thread may be inside a forward or a broadcast: nothing waits for it
        signal.signal(number, lambda *_: os._exit(0))
    print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
