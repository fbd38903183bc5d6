"""A scripted stand-in for a vLLM server: same routes and shapes, made-up tokens, and faults on demand.

    with FakeServer() as server:
        server.script = ["500", "reset", "200"]        # what the next completion requests meet; afterwards
        all is well ... server.url, server.requests (bodies in order of arrival), server.calls (paths)

Tokens are drawn from the request's seed, so equal requests get equal answers. `answer(body)` may be replaced:
it returns (ids, entries per token {id: logp}, finish_reason).
"""

import json
import random
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

EOS = 2
VOCABULARY = 60

METRICS = """vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}
vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{capacity}"}} 1.0
"""


def random_answer(body: dict):
    """2 to 8 tokens, the last one EOS, with as many log-probabilities as were asked for."""
    draw = random.Random(body["seed"])
    ids = [
        draw.randrange(7, VOCABULARY) for _ in range(min(draw.randrange(1, 8), body["max_tokens"] - 1))
    ] + [EOS]
    entries = []
    for token in ids:
        others = [i for i in range(3, VOCABULARY) if i != token]
        draw.shuffle(others)
        rest = others[: max((body["logprobs"] or 0) - 1, 0)]
        outside = (body["top_k"] or VOCABULARY) - 1  # ranks from here on could not be sampled
        listed = {i: -1.0 - 0.1 * rank if rank < outside else -9999.0 for rank, i in enumerate(rest)}
        entries.append({token: -0.5, **listed})
    return ids, entries, "stop"


def choice_of(ids: list[int], entries: list[dict], finish_reason: str) -> dict:
    """One element of `choices`, keyed by token id."""
    return {
        "index": 0,
        "text": " ".join(map(str, ids)),
        "token_ids": ids,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "logprobs": {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": [e[i] for i, e in zip(ids, entries, strict=True)],
            "top_logprobs": [{f"token_id:{i}": logp for i, logp in e.items()} for e in entries],
            "text_offset": [0] * len(ids),
        },
    }


def teacher_entry(token: int, place: int, count: int) -> dict:
    """What a teacher says of a token at a place: it prefers the ids from 3 on, whatever came before."""
    named = {3 + i: -0.5 - i for i in range(count)}
    named = {token: named.get(token, -9.0), **named}  # the actual one first, as vLLM sends them
    return {str(i): {"logprob": logp, "rank": None, "decoded_token": ""} for i, logp in named.items()}


class Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that arrive at once; with fewer some wait a second


class FakeServer:
    def __init__(self, port: int = 0):
        self.script: list = []  # statuses, "reset", "timeout", (status, body) or (status, json)
        self.answer = random_answer
        self.requests: list[dict] = []
        self.calls: list[tuple[str, dict]] = []
        self.teach = teacher_entry  # (token, place, count, [temperature]) -> its entry of prompt_logprobs
        self.max_logprobs = 20
        self.tokenize = lambda text: list(text.encode())
        self.scoring = self.most_scoring = 0  # requests of teachers' students at once
        self.delay_s = 0.0  # every completion takes this long
        self.gate: threading.Event | None = None  # completions wait for it
        self.weight_versions: list[dict] | None = None
        self.adapters: dict[str, str] | None = None  # loaded ones and their folders; None = no such routes
        self.load = {"usage": 0.1, "running": 0, "waiting": 0, "preemptions": 0, "capacity": 64000}
        self.replies: dict = {}  # path -> (status, json or text) instead of the usual
        self.max_model_len = 1000
        self.paused = False
        self.dead = False
        self._port = port
        self._lock = threading.Lock()

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet per answer

            def do_GET(self):
                fake.handle(self, None)

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                fake.handle(self, self.rfile.read(length))

            def log_message(self, *_):
                pass

        self._http = Http(("127.0.0.1", self._port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.gate is not None:
            self.gate.set()
        self._http.shutdown()
        self._http.server_close()

    def die(self) -> None:
        """Refuse connections, and drop those that are open without an answer."""
        self.dead = True
        self._http.shutdown()
        self._http.server_close()
        if self.gate is not None:
            self.gate.set()

    def handle(self, http, data: bytes | None) -> None:
        parts = urlsplit(http.path)
        body = json.loads(data) if data else {}
        if self.dead:  # over a connection that was open
            http.close_connection = True
            return None
        with self._lock:
            self.calls.append((parts.path, dict(parse_qsl(parts.query)) or body))
        if parts.path in self.replies:
            return self.reply(http, *self.replies[parts.path])
        if parts.path.endswith("_lora_adapter") and self.adapters is not None:
            return self.reply(http, *self.adapt(parts.path, **body))
        if body.get("model") and body["model"] not in (self.adapters or ()):
            return self.reply(
                http, 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            )
        if parts.path == "/v1/completions":
            return self.complete(http, body)
        self.reply(http, *self.control(parts.path, dict(parse_qsl(parts.query))))

    def adapt(self, path: str, lora_name="", lora_path="") -> tuple[int, object]:
        """As vLLM answers, which reads the folder itself."""
        if not lora_name:
            return 400, {"error": {"message": "Field required"}}
        if path.startswith("/v1/unload"):
            return (200, "Success") if self.adapters.pop(lora_name, None) else (404, {"error": "not found"})
        if not Path(lora_path, "adapter_config.json").is_file():
            return 404, {"error": {"message": f"Loading lora {lora_name} failed: No adapter found"}}
        self.adapters[lora_name] = lora_path
        return 200, "Success"

    def control(self, path: str, query: dict) -> tuple[int, object]:
        loaded = [{"id": name, "parent": "m", "max_model_len": None} for name in self.adapters or ()]
        if path == "/pause":
            self.paused = True
        if path == "/resume":
            self.paused = False
        return {
            "/health": (200, ""),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"data": [{"id": "m", "max_model_len": self.max_model_len}, *loaded]}),
            "/metrics": (200, METRICS.format(**self.load)),
            "/get_world_size": (200, {"world_size": 2}),
            "/is_paused": (200, {"is_paused": self.paused}),
            "/pause": (200, {"status": "paused"}),
            "/resume": (200, {"status": "resumed"}),
            "/abort_requests": (200, {"status": "aborted", "aborted": 0}),
            "/init_weight_transfer_engine": (200, {"message": "Weight transfer initialized"}),
            "/start_weight_update": (200, {"message": "Weight update started"}),
            "/update_weights": (200, {"message": "Weights updated"}),
            "/finish_weight_update": (200, {"message": "Weight update finished"}),
        }.get(path, (404, {"detail": "Not Found"}))

    def complete(self, http, body: dict) -> None:
        with self._lock:
            self.requests.append(body)
            step = self.script.pop(0) if self.script else "200"
        if self.gate is not None:
            self.gate.wait(30)
        time.sleep(self.delay_s)
        if step == "reset" or self.dead:
            linger = struct.pack("ii", 1, 0)
            http.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            http.connection.close()  # unread answer and linger 0: the client sees a reset
            http.close_connection = True
        elif step == "timeout":
            time.sleep(1.0)
            http.close_connection = True
        elif step == "200" and (isinstance(body["prompt"], str) or body.get("prompt_logprobs")):
            self.reply(http, *self.scores(body))
        elif step in ("truncated", "cut"):  # by whoever wrote it; on its way
            data = json.dumps({"choices": [choice_of(*self.answer(body))]})
            self.reply(http, 200, data[: len(data) // 2], length=len(data) if step == "cut" else None)
            http.close_connection = step == "cut"  # else the client would use it again
        elif step == "200":
            choice = choice_of(*self.answer(body))
            if self.weight_versions is not None:
                choice["weight_versions"] = self.weight_versions
            choice["prompt_token_ids"] = body["prompt"]
            self.reply(http, 200, {"choices": [choice]})
        else:
            status, content = (
                step if isinstance(step, tuple) else (int(step), {"error": {"message": "scripted"}})
            )
            self.reply(http, status, content)

    def scores(self, body: dict) -> tuple[int, dict]:
        """What a teacher's server answers."""
        prompt, count = body["prompt"], body.get("prompt_logprobs") or 0
        if count > self.max_logprobs:
            limit = f"which is greater than max allowed: {self.max_logprobs}"
            text = f"Requested prompt logprobs of {count}, {limit}"
            return 400, {"error": {"message": text}}
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        if len(ids) >= self.max_model_len:
            return 400, {"error": {"message": "max_tokens must be at least 1, got 0."}}
        entries = [None] + [self.teach(token, place, count) for place, token in enumerate(ids) if place]
        choice = {"finish_reason": "length", "token_ids": [2], "prompt_token_ids": ids, "logprobs": None}
        return 200, {"choices": [choice | {"prompt_logprobs": entries}]}

    def reply(self, http, status: int, content, length: int | None = None) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        try:
            http.send_response(status)
            http.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
            http.send_header("Content-Length", str(length or len(data)))
            http.end_headers()
            http.wfile.write(data)
            http.wfile.flush()
        except OSError:
            http.close_connection = True  # the client has gone
