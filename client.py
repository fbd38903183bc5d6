"""The one place that knows the server's HTTP API (vLLM 0.26 and later, or serve.py, which answers alike).

    complete   POST /v1/completions   prompt ids in, token ids and log-probabilities out; retried
    score      POST /v1/completions   what a teacher thinks of given tokens; retried
    reads      GET  /health /version /v1/models /server_info /get_world_size /is_paused /metrics
    updates    POST /pause /resume /abort_requests /init_weight_transfer_engine /start_weight_update
                    /update_weights /finish_weight_update   once each: a second could meet a half-done update
               POST /v1/load_lora_adapter /v1/unload_lora_adapter

Calls block (callers use threads) and never stream: the connection stays silent until the last token, so
`timeout` must cover the longest generation and the pauses of weight updates.

Never: a second retry layer (tests/test_client.py::test_a_request_is_sent_exactly_so_often); a log-probability
read by its place in the answer instead of its id (tests/test_client.py::test_sampled_token_is_found_by_id).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import threading
import time
from dataclasses import dataclass

import numpy as np
import requests
from requests.adapters import HTTPAdapter

CONNECT_S = 10.0  # seconds to reach the machine; a refused connection fails at once
LONGEST_WAIT_S = 30.0  # between two attempts of one request
FIRST_NOTICE_S, NOTICE_EVERY_S = 30.0, 60.0
ROUNDING = 1e-4  # how far above 0 a log-probability may lie
OUTSIDE = -9999.0  # how JSON carries minus infinity: a token that sampling could not have drawn
TOKEN_ID = "token_id:"
# sampling that changes nothing; a field that were left out would be filled from generation_config.json
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)  # what reading raises


class Notice:
    """Speaks up for whoever waits: what for and how long, after 30 s and every 60 s then."""

    def __init__(self):
        self.started = time.monotonic()
        self.next = self.started + FIRST_NOTICE_S

    def waited(self) -> float:
        return time.monotonic() - self.started

    def say(self, what: str) -> None:
        """Print "waited 42 s for <what>", if it is time to."""
        if time.monotonic() > self.next:
            print(f"waited {self.waited():.0f} s for {what}", flush=True)
            self.next = time.monotonic() + NOTICE_EVERY_S


class ServerError(RuntimeError):
    """The server refused a request or cannot be reached; `status` is the HTTP status, if there was one.

    `given_up`: the caller ended the attempts.
    """

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        self.status = status
        self.given_up = False


@dataclass
class Completion:
    """One answer. L sampled tokens, the K most likely per token, numpy arrays."""

    token_ids: np.ndarray  # int32 [L], the token that ended it included
    logp: np.ndarray  # float32 [L], of the sampled tokens; NaN when none were asked for
    topk_ids: np.ndarray | None  # int32 [L, K] by falling probability, -1 = padding; None unless asked for
    topk_logp: np.ndarray | None  # float32 [L, K], -inf where padding
    candidate_ids: tuple | None  # (int32 [C], int64 offsets [L+1]) when top_k bounds the set, else None
    versions: np.ndarray | None  # int32 [L], what made each token; None when the server does not say


class Server:
    """One server. Thread-safe; keeps up to `connections` connections open.

    `timeout` (seconds) bounds every call. A completion that fails for a passing reason is asked for again,
    `attempts` times in all, or, when that is None, until `timeout` seconds after its first failure; waits
    start at `backoff_s` and double. `retry_count` counts the repetitions.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 1800.0,
        attempts: int | None = None,
        backoff_s: float = 1.0,
        connections: int = 512,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a server's URL starts with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.attempts = attempts
        self.backoff_s = backoff_s
        self.retry_count = 0
        self._next_notice = 0.0
        self._lock = threading.Lock()
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy would cut connections that stay silent for minutes
        adapter = HTTPAdapter(pool_connections=1, pool_maxsize=connections, max_retries=0)
        self._session.mount(self.url, adapter)

    # ---- reads

    def wait_until_ready(self) -> None:
        """Returns once /health answers 200; ServerError after `timeout` seconds, with the last reason."""
        notice = Notice()
        while True:
            try:
                return self.health()
            except ServerError as error:
                if notice.waited() > self.timeout:
                    raise ServerError(
                        f"{self.url} did not come up within {self.timeout:.0f} s: {error}. Start it, correct "
                        "its URL, or raise --vllm_server_timeout"
                    ) from None
                notice.say(f"{self.url} to come up: {error}")
            time.sleep(min(self.backoff_s, 1.0))

    def health(self, timeout: float = 30.0) -> None:
        """Returns when the server can take requests, paused or not; ServerError otherwise.

        Over a connection of its own: a server that is going down keeps those it has, and answers nothing.
        """
        Server(self.url)._call("GET", "/health", timeout=min(self.timeout, timeout))

    def version(self) -> str:
        return self._read("/version", lambda answer: answer["version"])

    def models(self) -> list[dict]:
        """The served model first (`id`, `max_model_len`), loaded adapters after it."""

        def checked(answer):
            int(answer["data"][0]["max_model_len"])
            return answer["data"]

        return self._read("/v1/models", checked)

    def server_info(self) -> dict:
        """The resolved configuration, under `vllm_config`. The first call takes seconds."""

        def checked(info):
            dict(info["vllm_config"]["model_config"])
            return info

        return self._read("/server_info", checked, {"config_format": "json"})

    def world_size(self) -> int:
        """Workers that take part in a weight update (tensor x pipeline x data parallel)."""
        return self._read("/get_world_size", lambda answer: int(answer["world_size"]))

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, see `parse_metrics`. ServerError with status 404 when the server has none."""
        read = lambda data: parse_metrics(data.decode())  # noqa: E731
        return self._call("GET", "/metrics", read, timeout=min(self.timeout, 30.0))

    def weight_version(self) -> str | None:
        """The label of the weights in use: "default" until an update has set one; None before vLLM 0.28."""
        try:
            return self._read("/weight_info", lambda answer: str(answer["weight_version"]))
        except ServerError as error:
            if error.status != 404:
                raise
            return None

    def is_paused(self) -> bool:
        return self._read("/is_paused", lambda answer: bool(answer["is_paused"]))

    def _read(self, path: str, pick, params=None):
        """What `pick` finds in the JSON of an answer."""
        return self._call("GET", path, lambda data: pick(json.loads(data)), params=params)

    # ---- weight updates

    def pause(self) -> None:
        """Hold every request in place and drop cached keys and values: they belong to the old weights.

        The mode travels in the query: the server ignores a JSON body, and its default mode aborts everything.
        """
        self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    def resume(self) -> None:
        """Let requests go on. After a failed update this kills the engine: see sync.py."""
        self._call("POST", "/resume")

    def abort_all(self) -> None:
        """End every request; each answers what it has, as aborted."""
        self._call("POST", "/abort_requests", body={})

    def init_weight_transfer(self, info: dict) -> None:
        """Blocks until the group of the sender and all workers has formed."""
        self._call("POST", "/init_weight_transfer_engine", body={"init_info": info})

    def start_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update_weights(self, info: dict) -> None:
        """Blocks until every byte that `info` announces was received and loaded."""
        self._call("POST", "/update_weights", body={"update_info": info})

    def finish_update(self, version: str) -> None:
        """Close the update. Where the server reports versions, tokens sampled from now on carry this one."""
        self._call("POST", "/finish_weight_update", body={"weight_version": version})

    # ---- adapters

    def takes_adapters(self) -> bool:
        """Does it load adapters while it runs? A call that names none tells: without the route a 404."""
        try:
            self._call("POST", "/v1/load_lora_adapter", body={})
        except ServerError as error:
            if error.status is None:
                raise
            return error.status != 404
        return True

    def load_adapter(self, name: str, path: str) -> None:
        """Load a folder of PEFT's, which the server reads itself; requests ask for it as their `model`."""
        self._call("POST", "/v1/load_lora_adapter", body={"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the requests that run with it keep it."""
        self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    # ---- generation

    def complete(
        self, prompt_ids: list[int], *, logprobs: int | None = 0, deadline=None, give_up=None, **asked
    ) -> Completion:
        """Sample one completion of `prompt_ids`; with every token come the `logprobs` most likely ones.

        `asked`: max_tokens, seed, and what else the request is to say: temperature, top_p, top_k, min_p,
        stop_token_ids; cache_salt, under which alone requests share cached prefixes; model, the name of an
        adapter (one that is not loaded is a refusal with status 404).
        logprobs 0 gives the sampled tokens' alone, None not even these. Otherwise, under top_k, the answer
        also holds each token's candidate set, which is among the top_k most likely ones.

        Raises ServerError with the server's text, at once for a refusal (4xx), after the last attempt for
        what may pass (timeout, reset, refused connection, 5xx, a request that was aborted). Raises
        TimeoutError when `deadline` (time.monotonic) passes; the server drops the request when its connection
        closes. `give_up`, asked after every failure that may pass, ends the attempts when it returns True.
        """
        body = {"prompt": prompt_ids, **NEUTRAL, **asked, "logprobs": logprobs, "return_token_ids": True}
        body |= {"return_tokens_as_token_ids": True, "return_weight_versions": True}
        width, restricted = logprobs, body["top_k"] > 0
        if restricted and logprobs is not None:
            body["logprobs"] = body["top_k"]  # the candidate set is read from them
            width = min(width, body["top_k"])
        return self._retried(body, lambda choice: parse_choice(choice, width, restricted), deadline, give_up)

    def score(self, ids: list[int], count: int, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """What this server's model thinks of a given sequence of L tokens; retried like `complete`.

        For every token the `count` most likely ones given those before it, and the token itself where it is
        none of them: ids int32 [L, count + 1] by falling probability, -1 = padding; their log-probabilities
        float32, -inf. The first token, which nothing predicts, has none. One more token is generated, so L
        must be below max_model_len. vLLM ignores `temperature` here (teachers.py asks whether it does).
        """
        body = {"prompt": ids, **NEUTRAL, "max_tokens": 1, "temperature": temperature}
        body |= {"prompt_logprobs": count, "return_token_ids": True}
        return self._retried(body, lambda choice: parse_scores(choice, ids, count + 1))

    def tokenize(self, text: str) -> list[int]:
        """The token ids that the server makes of a prompt given as text."""
        body = {"prompt": text, **NEUTRAL, "max_tokens": 1, "return_token_ids": True}
        read = lambda data: list(json.loads(data)["choices"][0]["prompt_token_ids"])  # noqa: E731
        return self._call("POST", "/v1/completions", read, body=body)

    def knows(self, token: int) -> bool:
        """Has its model this token id? Asked as a bias of 0: as a prompt, an unknown one may kill a vLLM."""
        body = {"prompt": [0], **NEUTRAL, "max_tokens": 1, "logit_bias": {str(token): 0.0}}
        try:
            self._call("POST", "/v1/completions", body=body)
        except ServerError as error:
            if error.status != 400:
                raise
            return False
        return True

    def _retried(self, body: dict, parse, deadline: float | None = None, give_up=None):
        """parse(choice) of the answer to a completion request: the only retry layer there is."""

        def read(data: bytes):
            choice = json.loads(data)["choices"][0]
            if choice["finish_reason"] in ("abort", "error"):
                raise ServerError(f"{self.url} ended the request: {choice['finish_reason']}", status=503)
            if choice.get("prompt_token_ids") not in (None, body["prompt"]):
                raise ValueError(f"sampled from another prompt than the {len(body['prompt'])} tokens it got")
            return parse(choice)

        first_failure = None
        for number in itertools.count(1):
            left = self.timeout if deadline is None else min(self.timeout, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"{self.url}: no time left for the request")
            try:
                return self._call("POST", "/v1/completions", read, body=body, timeout=left)
            except ServerError as error:
                if error.status is not None and error.status < 500:
                    raise
                error.given_up = give_up is not None and give_up()
                if error.given_up:
                    raise
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise TimeoutError(f"{self.url}: no time left for the request: {error}") from error
                first_failure = first_failure or now
                failing_s = now - first_failure
                if failing_s > self.timeout if self.attempts is None else number >= self.attempts:
                    text = f"gave up after {number} attempts in {failing_s:.0f} s: {error}"
                    raise ServerError(text, error.status) from error
                self._wait_before_attempt(number, failing_s, error)

    def _wait_before_attempt(self, number: int, failing_s: float, error: ServerError) -> None:
        with self._lock:
            self.retry_count += 1
            now = time.monotonic()
            tell = failing_s > FIRST_NOTICE_S and now > self._next_notice  # once for all requests that wait
            if tell:
                self._next_notice = now + NOTICE_EVERY_S
        if tell:
            print(f"a request failed {number} times in {failing_s:.0f} s, trying on: {error}", flush=True)
        wait = min(self.backoff_s * 2 ** min(number - 1, 16), LONGEST_WAIT_S)
        time.sleep(wait * random.uniform(0.5, 1.0))  # apart: a server that comes back is not hit at once

    def _call(self, method: str, path: str, read=None, *, params=None, body=None, timeout=None):
        """One attempt: read(the bytes of the answer). ServerError for every answer but 2xx, for none at all,
        and for one that cannot be read; when it was cut off, by a proxy or a dying server, with status 502.
        """
        what, within = f"{method} {self.url}{path}", (CONNECT_S, timeout or self.timeout)
        try:
            answer = self._session.request(method, self.url + path, params=params, json=body, timeout=within)
        except requests.RequestException as error:
            raise ServerError(f"{what}: {error}") from None  # its text says it all
        if not answer.ok:
            status = answer.status_code
            raise ServerError(f"{what} answered {status}: {error_text(answer, path)}", status)
        try:
            return read and read(answer.content)
        except UNREADABLE as error:
            cut_off = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
            why = f"{self.url} sent an answer that cannot be read ({type(error).__name__}: {error})"
            raise ServerError(f"{why}: is this a vLLM server?", 502 if cut_off else 400) from error


def error_text(response: requests.Response, path: str) -> str:
    """What the server says: {"error": {"message": text}}, {"error": text}, {"detail": ...} or text."""
    try:
        said = response.json()
    except ValueError:
        return response.text.strip() or response.reason
    if said == {"detail": "Not Found"}:
        return f"no such route; with VLLM_SERVER_DEV_MODE=1 in its environment a server has {path}"
    for key in ("error", "detail", "message"):
        said = said.get(key, said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else json.dumps(said)


def parse_choice(choice: dict, width: int | None, restricted: bool) -> Completion:
    """One choice of an answer: the `width` most likely tokens (None: no log-probabilities were asked for),
    and candidate sets where `restricted`. ValueError for what cannot be trusted.

    Per token the server lists its most likely ids, and the sampled id with them when it is not one. The order
    of the entries means nothing. The top list leaves that extra one out, or it would depend on what was
    sampled (tests/test_client.py::test_top_list_leaves_the_extra_token_out). No Python loop over the tokens
    of {"token_id:N": logp, ...}: this bounds tokens per second.
    """
    token_ids = as_ids(choice["token_ids"])  # [L]
    length = len(token_ids)
    versions = token_versions(choice.get("weight_versions"), length)
    if width is None:
        return Completion(token_ids, np.full(length, np.nan, np.float32), None, None, None, versions)
    lists = choice["logprobs"]["top_logprobs"]
    counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))  # [L]
    if len(counts) != length or not counts.all():
        raise ValueError(f"it has {length} token ids but {np.count_nonzero(counts)} log-probabilities")
    text = " ".join(itertools.chain.from_iterable(lists))
    if text.count(TOKEN_ID) != counts.sum():
        raise ValueError("log-probabilities are keyed by text: return_tokens_as_token_ids is not honoured")
    ids = as_ids(np.fromstring(text.replace(TOKEN_ID, ""), dtype=np.int64, sep=" "))  # [C] = all entries
    logp = np.fromiter(itertools.chain.from_iterable(map(dict.values, lists)), np.float64)  # [C]
    place, sampled = locate(ids, logp, counts, token_ids)
    topk_ids = topk_logp = candidates = None
    if width:
        topk_ids, topk_logp = most_likely(ids, logp, place, sampled, counts, width)
    if restricted:  # a sampled token outside its own set makes it unusable: empty = whole vocabulary
        kept = (logp > OUTSIDE) & (logp[sampled] > OUTSIDE)[place]  # [C]
        sizes = np.bincount(place[kept], minlength=length)  # [L]
        candidates = ids[kept], np.concatenate([[0], np.cumsum(sizes)])
    return Completion(token_ids, logp[sampled].astype(np.float32), topk_ids, topk_logp, candidates, versions)


def parse_scores(choice: dict, ids: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """prompt_logprobs, a {id: {"logprob": ...}} per token (None where nothing predicts it), as two tables."""
    entries = choice["prompt_logprobs"]
    counts = np.array([len(entry or ()) for entry in entries], dtype=np.int64)  # [L]
    if len(counts) != len(ids):
        raise ValueError(f"it has prompt_logprobs of {len(counts)} tokens, not of {len(ids)}")
    listed = [item for entry in entries if entry for item in entry.items()]
    found = as_ids([int(token) for token, _ in listed])  # [C]
    logp = np.array([value["logprob"] for _, value in listed], dtype=np.float64)  # [C]
    place, actual = locate(found, logp, counts, as_ids(ids))
    return most_likely(found, logp, place, actual, counts, width)


def as_ids(ids) -> np.ndarray:
    """Token ids as int32 [C]; ValueError for what can be none."""
    found = np.asarray(ids)
    if found.size and (found.dtype.kind != "i" or found.min() < 0 or found.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids must be whole numbers from 0 on, not {found}")
    return found.astype(np.int32)


def locate(ids, logp, counts, token_ids) -> tuple[np.ndarray, np.ndarray]:
    """Of all entries [C], `counts` [L] with each token: whose each one is, and is it that token itself?"""
    if logp.size and not logp.max() <= ROUNDING:  # nor a NaN
        raise ValueError(f"{logp.max()} is no log-probability")
    place = np.repeat(np.arange(len(counts)), counts)  # [C]
    own = ids == token_ids[place]  # [C]
    if np.count_nonzero(own) != np.count_nonzero(counts):
        raise ValueError("it lacks the log-probability of a token that was sampled or given")
    return place, own


def most_likely(ids, logp, token, sampled, counts, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The `width` most likely entries of every token, int32 and float32 [L, width], most likely first."""
    order = np.lexsort((sampled, -logp, token))  # of equals, the sampled one last: it may be the extra entry
    first = np.cumsum(counts) - counts  # [L]
    rank = np.arange(len(ids)) - first[token]  # [C], in sorted order
    keep = (rank < width) & (logp[order] > OUTSIDE)
    topk_ids = np.full((len(counts), width), -1, dtype=np.int32)
    topk_logp = np.full((len(counts), width), -np.inf, dtype=np.float32)
    topk_ids[token[keep], rank[keep]] = ids[order][keep]
    topk_logp[token[keep], rank[keep]] = logp[order][keep]
    return topk_ids, topk_logp


def token_versions(spans: list[dict] | None, length: int) -> np.ndarray | None:
    """[{"version": "3", "start": 0, "end": 10}, ...] -> int32 [L]; None when the server reports none.

    A label that is no number becomes -1: weights that no trainer of ours has sent.
    """
    if not spans:
        return None
    versions = np.full(length, -1, dtype=np.int32)
    for span in spans:
        if str(span["version"]).isdecimal():
            versions[span["start"] : span["end"]] = int(span["version"])
    return versions


LINE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> dict[str, float]:
    """The server's Prometheus page: `vllm:` names without the prefix, summed over engines and labels.

    `kv_cache_usage_perc` (0 to 1) is the fullest engine's. `kv_cache_size_tokens` is added: tokens that fit
    the key and value caches of all engines, NaN where the server does not tell.
    """
    values: dict[str, float] = {}
    for name, labels, value in LINE.findall(text):
        value = float(value)
        if name == "cache_config_info":
            name, value = "kv_cache_size_tokens", cache_tokens(dict(LABEL.findall(labels)))
        together = max if name == "kv_cache_usage_perc" else float.__add__
        values[name] = together(values.get(name, 0.0), value)
    return values


def cache_tokens(labels: dict[str, str]) -> float:
    """Tokens that fit one engine's cache; before vLLM 0.28 only its blocks are told."""
    told = labels.get("kv_cache_size_tokens", "None")
    if told == "None":
        told = labels.get("num_gpu_blocks", "None")
        return math.nan if told == "None" else float(told) * float(labels["block_size"])
    return float(told)
