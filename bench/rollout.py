"""What one rollout process takes in, beside a canned server: python bench/rollout.py [--json FILE] [--quick]

    canned server (a process)  <- 512 requests at once -  rollout process  - groups ->  this process
     answers in vLLM's words,                             parse, reply, score           takes and forgets
     serialised beforehand

Every answer is `--tokens` long and carries `--logprobs` alternatives a token, as the tests' server shapes
them; the server sends it as soon as it has read the request, so the client is what limits.
Printed: tokens/s of wall time, the rollout process's share of a core, tokens per second of its
processor time, bytes received per token, and how late the event loop ever was (its heart beats every 50 ms).
"""

import argparse
import asyncio
import json
import multiprocessing
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from fake_server import choice_of  # noqa: E402

from options import Options  # noqa: E402
from process import RolloutProcess  # noqa: E402
from rollout import TICK_S, GroupMessage  # noqa: E402

VOCABULARY = 151_936
GROUP = 8
ANSWERS = 32  # different ones
PROMPT = re.compile(rb'"prompt": (\[[^]]*\])')
METRICS = 'vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{kv_cache_size_tokens="100000000"} 1\n'


# ---- the task


def by_place(completions, **_):
    return list(range(len(completions)))


def task():
    return SimpleNamespace(
        dataset=[{"prompt": [{"role": "user", "content": "hello " * 20}]}], rewards=[by_place]
    )


# ---- the canned server


def canned(length: int, logprobs: int) -> list[tuple[bytes, bytes]]:
    """Answers in two halves, between which the prompt belongs."""
    rng, made, shape = np.random.default_rng(0), [], (length, max(logprobs, 1))
    for _ in range(ANSWERS):
        ids, tops = rng.integers(40, 240, length), rng.integers(1000, VOCABULARY, shape)
        tops[:, 0] = ids
        logps = -np.sort(rng.exponential(3, shape).astype(np.float32)).astype(float)
        entries = [dict(zip(*row, strict=True)) for row in zip(tops.tolist(), logps.tolist(), strict=True)]
        choice = choice_of(ids.tolist(), entries, "length") | {"prompt_token_ids": []}
        body = json.dumps({"id": "cmpl-1", "choices": [choice]}, separators=(",", ":"))
        head, _, tail = body.partition('"prompt_token_ids":[]')
        made.append((f'{head}"prompt_token_ids":'.encode(), tail.encode()))
    return made


class Canned(asyncio.Protocol):
    """Answers every request with the next canned answer; HTTP/1.1 with as little work as possible."""

    answers: list = []
    served = 0

    def connection_made(self, transport):
        self.transport, self.held = transport, b""

    def data_received(self, data):
        self.held += data
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:end].lower()
            size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            if len(self.held) < end + 4 + size:
                return
            body, self.held = self.held[end + 4 : end + 4 + size], self.held[end + 4 + size :]
            self.reply(head.split(b" ")[1].decode(), body)

    def reply(self, path: str, body: bytes):
        status, kind = "200 OK", "application/json"
        if path == "/v1/completions":
            head, tail = Canned.answers[Canned.served % ANSWERS]
            content = head + PROMPT.search(body)[1] + tail
            Canned.served += 1
        elif path == "/v1/models":
            content = b'{"data":[{"id":"m","max_model_len":32768}]}'
        elif path == "/metrics":
            content, kind = METRICS.encode(), "text/plain"
        else:
            status, content = "404 Not Found", b'{"detail":"Not Found"}'
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        self.transport.write(head.encode() + content)


def serve_canned(connection, length: int, logprobs: int) -> None:
    Canned.answers = canned(length, logprobs)

    async def main():
        server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0, backlog=1024)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextmanager
def canned_server(length: int, logprobs: int):
    """URL and process of the canned server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_canned, args=(theirs, length, logprobs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


# ---- the measurement


def model_of_many_tokens(directory: Path) -> str:
    """The shipped model's tokenizer under a config with the vocabulary of a large one; no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(ROOT / "tiny" / name, directory / name)
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def options_for(url: str, model: str, in_flight: int, logprobs: int) -> Options:
    return Options(
        model=model,
        task=f"{__file__}:task",
        num_generations=GROUP,
        max_steps=10**9,
        max_concurrent_rollouts=in_flight,
        max_completion_length=4096,
        vllm_server_base_url=[url],
        score_centering=logprobs > 0,
        num_sampler_logprobs=max(logprobs, 1),
    )


def take(process: RolloutProcess, rollouts: int) -> int:
    """Tokens of the next `rollouts` rollouts."""
    tokens, left = 0, rollouts
    while left > 0:
        try:
            message = process.queue.get(timeout=1)
        except queue.Empty:
            process.check()
            continue
        if isinstance(message, GroupMessage):
            tokens += message.generated["tokens"]
            left -= message.generated["samples"]
    return tokens


def watch_heart(link, late: list, over: threading.Event) -> None:
    """How late the event loop's heart was at worst, in seconds."""
    while not over.wait(0.005):
        late[0] = max(late[0], time.monotonic() - link.beat.value - TICK_S)


def measure(arguments) -> dict:
    with (
        canned_server(arguments.tokens, arguments.logprobs) as (url, served),
        tempfile.TemporaryDirectory() as directory,
    ):
        model = model_of_many_tokens(Path(directory))
        process = RolloutProcess(options_for(url, model, arguments.in_flight, arguments.logprobs))
        process.start(0, set(), 1)
        process.publish(1, 2**60)
        late, over = [0.0], threading.Event()
        try:
            take(process, 2 * arguments.in_flight)  # everything is warm, and the pipeline full
            child = psutil.Process(process._process.pid)
            started, used, busy = time.monotonic(), cpu(child), cpu(served)
            threading.Thread(target=watch_heart, args=(process._link, late, over), daemon=True).start()
            tokens = take(process, arguments.rollouts)
            seconds, used, busy = time.monotonic() - started, cpu(child) - used, cpu(served) - busy
        finally:
            over.set()
            process.stop()
        answers = canned(arguments.tokens, arguments.logprobs)
        size = sum(len(part) for answer in answers for part in answer)
    return {
        "logprobs": arguments.logprobs,
        "tokens_per_s": tokens / seconds,
        "cpu_share": used / seconds,
        "tokens_per_cpu_s": tokens / used,
        "bytes_per_token": size / (ANSWERS * arguments.tokens),
        "loop_late_ms": 1000 * late[0],
        "server_cpu_share": busy / seconds,
    }


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a rollout process takes in.")
    parser.add_argument("--rollouts", type=int, default=4096, help="measured ones")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--logprobs", type=int, default=8, help="per token")
    parser.add_argument("--in_flight", type=int, default=512, help="requests at once")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rollouts")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    arguments.rollouts //= 4 if arguments.quick else 1
    figures = measure(arguments)
    print(", ".join(f"{name} {value:,.4g}" for name, value in figures.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
