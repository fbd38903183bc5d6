"""The embedded sampler against recorded vLLM answers and against plain transformers forwards.

python -m pytest tests/test_serve.py
"""

import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import client
import engine
import serve
import stream
from options import Options
from questions import probed

RECORDED = Path(__file__).parent / "data" / "vllm"
VOCAB, MAX_LEN, EOS = 64, 1024, {1, 2}
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=MAX_LEN,
    initializer_range=0.4,
    eos_token_id=[2],
    bos_token_id=0,
    pad_token_id=0,
)
MOE = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL),
    "mistral_sliding_window": MistralConfig(**SMALL, sliding_window=6),
    "gemma2_softcap": Gemma2Config(
        **SMALL, sliding_window=6, query_pre_attn_scalar=5, attn_logit_softcapping=2.0
    ),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **MOE),
}


def build(config, directory: Path, seed: int = 0) -> Path:
    """A random model with a tokenizer whose EOS id differs from the generation config's."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    words = {("</s>" if i == 1 else f"w{i}"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(FAMILIES["qwen3"], tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def shared_server(directory):
    server = serve.start(directory, max_num_seqs=8)
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    """The module's server, unpaused after each test."""
    yield shared_server
    post(shared_server, "/resume")


@pytest.fixture
def fresh(directory):
    """A server of its own, for tests that change weights."""
    server = serve.start(directory, max_num_seqs=8, transfer_timeout=10.0)
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(directory):
    return reference(directory)


def reference(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def get(server, path):
    return requests.get(server.url + path, timeout=30)


def post(server, path, body=None, **kwargs):
    return requests.post(server.url + path, json=body, timeout=60, **kwargs)


def complete(server, prompt, **settings):
    """The one choice of a completion, asked for with ids, log-probabilities and no end of sequence."""
    body = {"prompt": prompt, "logprobs": 0, "max_tokens": 12, "ignore_eos": True, "seed": 1}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_weight_versions": True}
    answer = post(server, "/v1/completions", body | settings)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def in_background(function, *args, **kwargs):
    """Run `function` on a thread; calling what comes back waits for its result, or raises its error."""
    result = Future()

    def run():
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return lambda: result.result(60)


def wait_for(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.002)


@torch.no_grad()
def reference_logits(model, tokens):
    """[L, V] float64 logits of a plain forward; row t predicts token t + 1."""
    return model(input_ids=torch.tensor([tokens])).logits[0].double().numpy()


def reference_logp(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The log-probabilities of one position after min-p, top-k, top-p, written one token at a time."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p)
    if top_k > 0:
        p[order[top_k:]] = 0
        p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
        mass += p[token]
    filtered = np.zeros_like(p)
    filtered[kept] = p[kept]
    with np.errstate(divide="ignore"):
        return np.log(filtered / filtered.sum())


# ------------------------------------------------------------------------- shapes of recorded answers
def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


def replay(server, name):
    """Send a recorded request, its ids brought into our small vocabulary; returns both answers."""
    fixture = recorded(name)
    request = fixture["request"]
    body = request.get("json")
    if isinstance(body, dict):
        body.pop("model", None)
    if isinstance(body, dict) and isinstance(body.get("prompt"), list):
        small = re.sub(
            r"\d+", lambda number: str(3 + int(number[0]) % (VOCAB - 3)), json.dumps(body["prompt"])
        )
        body = body | {"prompt": json.loads(small)}
    data = request["raw_body"] if "raw_body" in request else None if body is None else json.dumps(body)
    headers = {"Content-Type": request.get("content_type", "application/json")}
    url = server.url + request["path"]
    answer = requests.request(
        request["method"], url, params=request.get("query"), data=data, headers=headers, timeout=60
    )
    return fixture["response"], answer


def assert_part(ours, theirs, place="answer"):
    """Every field of ours is one of the recorded answer, of the same kind; token ids as keys are alike."""
    if isinstance(ours, dict):
        theirs = {re.sub(r"\d+$", "N", key): value for key, value in theirs.items()}
        for key, value in ours.items():
            assert_part(value, theirs[re.sub(r"\d+$", "N", key)], f"{place}.{key}")
    elif isinstance(ours, list):
        assert bool(ours) == bool(theirs), place
        if ours:
            assert_part(ours[-1], theirs[-1], place)
    else:
        assert type(ours) is type(theirs), place


@pytest.mark.parametrize(
    "name",
    """completions_logprobs8_token_ids completions_no_logprobs_defaults completions_processed_top_k5_temp07
    completions_sampled_outside_top completions_greedy_temp0 completions_ignore_eos unknown_field_is_ignored
    teacher_prompt_logprobs8 teacher_prompt_logprobs0 version models get_world_size is_paused_false pause_keep
    resume weight_info start_weight_update finish_weight_update server_info_json""".split(),
)
def test_answers_are_part_of_recorded_ones(server, name):
    expected, answer = replay(server, name)
    assert answer.status_code == expected["status"]
    assert_part(answer.json(), expected["json"])
    assert answer.headers["Content-Type"] == expected["content_type"]
    for choice in expected["json"].get("choices", []):
        read = {"index", "text", "finish_reason", "stop_reason", "token_ids", "logprobs", "prompt_logprobs"}
        assert read <= set(choice) and read <= set(answer.json()["choices"][0])
        assert len(answer.json()["choices"]) == len(expected["json"]["choices"])


@pytest.mark.parametrize(
    "wrong, status, words",
    [
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [VOCAB]}, 400, "prompt must be text or a list of token ids from 0 to 63"),
        ({"prompt": [5] * MAX_LEN}, 400, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1}, 400, "temperature must be non-negative, got -1"),
        ({"top_p": 0}, 400, "top_p must be in (0, 1], got 0"),
        ({"logprobs": 65}, 400, "greater than max allowed: 64"),
        ({"prompt_logprobs": 65}, 400, "greater than max allowed: 64"),
        ({"logit_bias": {str(VOCAB): 0}}, 400, "token id 64 in logit_bias is out of vocabulary"),
        ({"model": "nope"}, 404, "The model `nope` does not exist"),
    ],
)
def test_a_wrong_setting_is_refused_with_vllms_code_and_words(server, wrong, status, words):
    answer = post(server, "/v1/completions", {"prompt": [5]} | wrong)
    assert answer.status_code == status == answer.json()["error"]["code"]
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name, word",
    [
        ("error_wrong_type", "max_tokens"),
        ("error_prompt_too_long", "maximum context length is 1024 tokens"),
        ("error_finish_before_start", "called without a matching start_weight_update"),
        ("error_update_weights_before_start", "start_weight_update must be called before"),
        ("error_bad_json", "JSON decode error"),
        ("error_negative_token_id", "prompt"),
        ("error_no_prompt", "prompt"),
        ("error_pause_bad_mode", "mode"),
        ("error_init_weight_transfer_missing_init_info", "init_info"),
        ("error_init_weight_transfer_unknown_field", "nope"),
        ("error_init_weight_transfer_no_rendezvous", "master_address"),
        ("error_update_weights_missing_update_info", "update_info"),
    ],
)
def test_other_errors_have_the_recorded_code_and_name_the_field(server, name, word):
    expected, answer = replay(server, name)
    assert answer.status_code == expected["status"] == answer.json()["error"]["code"]
    assert word in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == set(expected["json"]["error"])


def test_an_unknown_route_is_the_recorded_404(server):
    expected, answer = replay(server, "error_not_found")
    assert (answer.status_code, answer.json()) == (404, expected["json"])


def test_health_is_empty_and_info_has_the_fields_clients_read(server):
    assert (get(server, "/health").status_code, get(server, "/health").text) == (200, "")
    ours = get(server, "/server_info?config_format=json").json()["vllm_config"]
    assert ours["model_config"]["dtype"] == "torch.float32"
    assert ours["model_config"]["max_model_len"] == MAX_LEN
    assert ours["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert ours["weight_transfer_config"] == {"backend": "gloo"} and ours["lora_config"] is None


def test_metrics_have_recorded_names_and_count(server):
    def values():
        return client.parse_metrics(get(server, "/metrics").text)

    wait = long_request(server)
    post(server, "/pause?mode=keep")
    busy = values()
    known = set(recorded("metrics_busy")["response"]["all_metric_names"])
    assert {f"vllm:{name}" for name in busy.keys() - {"kv_cache_size_tokens"}} <= known
    assert busy["kv_cache_size_tokens"] == 8 * MAX_LEN
    assert (busy["num_requests_running"], busy["num_requests_waiting"]) == (1, 0)
    assert 10 / (8 * MAX_LEN) < busy["kv_cache_usage_perc"] < 403 / (8 * MAX_LEN)
    post(server, "/start_weight_update")
    post(server, "/finish_weight_update")
    assert values()["num_preemptions_total"] == busy["num_preemptions_total"] + 1
    post(server, "/resume")
    wait()
    assert values()["kv_cache_usage_perc"] == values()["num_requests_running"] == 0


@pytest.mark.parametrize(
    "setting", [{"stop": ["x"]}, {"repetition_penalty": 1.2}, {"stream": True}, {"n": 3}]
)
def test_a_setting_the_server_does_not_have_is_refused_by_name(server, setting):
    answer = post(server, "/v1/completions", {"prompt": [5]} | setting)
    assert answer.status_code == 400 and list(setting)[0] in answer.json()["error"]["message"]


def test_text_prompts(server):
    body = {"prompt": "w5 w9", "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 9]
    assert choice["text"] == " ".join(f"w{i}" for i in choice["token_ids"] if i != 1)


# -------------------------------------------------------------------------------- log-probabilities
SETTINGS = {
    "plain": {},
    "temperature": dict(temperature=0.6),
    "top_k": dict(top_k=5),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.1),
    "all": dict(temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logprobs_are_those_of_the_distribution_sampled_from(server, model, settings):
    prompt = [5, 9, 33, 60]
    choice = complete(server, prompt, logprobs=VOCAB, max_tokens=20, **settings)
    logits = reference_logits(model, prompt + choice["token_ids"])
    for step, (token, top) in enumerate(
        zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)
    ):
        expected = reference_logp(logits[len(prompt) + step - 1], **settings)
        got = np.full(VOCAB, -np.inf)
        for key, value in top.items():
            got[int(key.removeprefix("token_id:"))] = value if value > -9999 else -np.inf
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
        np.testing.assert_allclose(got, expected, atol=2e-5)
        assert list(top)[0] == f"token_id:{token}" and np.isfinite(got[token])
        assert list(top.values())[1:] == sorted(list(top.values())[1:], reverse=True)


def test_greedy_takes_the_likeliest_and_reports_temperature_one(server, model):
    prompt = [5, 9, 33, 60]
    choice = complete(server, prompt, temperature=0, top_k=3, logprobs=VOCAB)
    logits = reference_logits(model, prompt + choice["token_ids"])
    for step, token in enumerate(choice["token_ids"]):
        row = logits[len(prompt) + step - 1]
        assert token == row.argmax()
        assert choice["logprobs"]["token_logprobs"][step] == pytest.approx(
            reference_logp(row)[token], abs=2e-5
        )


def test_two_tokens_tell_that_its_log_probabilities_are_processed():
    server = serve.start("tiny", max_num_seqs=2)
    told = probed(client.Server(server.url, 10), Options(model="tiny"))
    server.close()
    assert told == {"logprobs_mode": "processed_logprobs"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_its_own_eager_attention(family, tmp_path, monkeypatch):
    """Through chunked prefill, decoding, and slots that others have left."""
    monkeypatch.setattr(engine, "STEP_TOKENS", 10)
    server = serve.start(build(FAMILIES[family], tmp_path), max_num_seqs=3)
    model = reference(tmp_path)
    prompts = [[3 + (i * 7 + j * 5) % (VOCAB - 3) for j in range(4 + 3 * i)] for i in range(6)]
    waits = [in_background(complete, server, p, max_tokens=5 + 4 * i) for i, p in enumerate(prompts)]
    for prompt, wait in zip(prompts, waits, strict=True):
        assert_logp(model, prompt, wait())
    server.close()


def assert_logp(model, prompt, choice, first=0, last=None):
    """The choice's log-probabilities of output tokens first..last are the model's, over the full prefix."""
    ids = choice["token_ids"]
    logits = reference_logits(model, prompt + ids)
    steps = range(len(ids))[first:last]
    expected = [reference_logp(logits[len(prompt) + t - 1])[ids[t]] for t in steps]
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][first:last], expected, atol=5e-5)


@pytest.mark.parametrize("chunk", [10**9, 5])
def test_prompt_logprobs_equal_a_plain_forward_and_ignore_sampling(server, model, monkeypatch, chunk):
    """And no forward makes the logits of more positions than fit, however long or many the prompts are."""
    monkeypatch.setattr(engine, "STEP_LOGITS", chunk * VOCAB)
    forward, rows = server.engine.forward, []
    monkeypatch.setattr(server.engine, "forward", lambda *a: rows.append(len(a[-1])) or forward(*a))
    prompts = [[5, 9, 33, 60, 7, 8, 7, 8, 20, 21, 22, 40][first:] for first in (0, 0, 7)]
    post(server, "/pause?mode=keep")
    asked = [
        in_background(complete, server, prompt, max_tokens=1, prompt_logprobs=3, temperature=number)
        for number, prompt in enumerate(prompts)
    ]
    wait_for(lambda: len(server.engine.waiting) == 3, "three requests")
    post(server, "/resume")
    for prompt, answer in zip(prompts, asked, strict=True):
        scores, logits = answer()["prompt_logprobs"], reference_logits(model, prompt)
        assert len(scores) == len(prompt) and scores[0] is None
        for position, entry in enumerate(scores[1:]):
            logp = reference_logp(logits[position])
            order = np.argsort(-logp)
            actual = prompt[position + 1]
            assert list(entry)[0] == str(actual)
            assert set(entry) == {str(actual), *map(str, order[:3])}
            for token, score in entry.items():
                assert score["logprob"] == pytest.approx(logp[int(token)], abs=2e-5)
    assert max(rows) <= chunk + 3 and sum(rows) == sum(map(len, prompts))


def test_sampled_frequencies_are_the_probabilities():
    """Chi-square of 40 000 draws for each setting; filtered tokens are never drawn."""
    draws = 40_000
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, VOCAB)).float()
    uniform = torch.from_numpy(engine.uniforms(7, draws))
    for settings in SETTINGS.values():
        s = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | settings
        controls = [torch.full((draws,), s[name], dtype=torch.float64) for name in s]
        tokens, _ = engine.sample(logits.expand(draws, -1).clone(), *controls, uniform)
        p = np.exp(reference_logp(logits.double().numpy(), **s))
        counts = np.bincount(tokens.numpy(), minlength=VOCAB)
        assert counts[p == 0].sum() == 0
        expected = p[p > 0] * draws
        chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
        freedom = (p > 0).sum() - 1
        assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4, settings


def test_extreme_uniforms_never_draw_a_filtered_token():
    logits = torch.tensor([[-3.0, 4.0, 2.0, -5.0]]).expand(2, -1).clone()
    uniform = torch.tensor([0.0, 1 - 2.0**-32], dtype=torch.float64)
    one, two = torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64)
    tokens, _ = engine.sample(logits, one, two, one, one * 0, uniform)
    assert tokens.tolist() == [1, 2]


# --------------------------------------------------------------------------------- batches and seeds
def test_company_does_not_change_a_seeded_request(server):
    """Rows of different settings share the batch; alone, a request gives the same tokens."""
    asks = [
        dict(prompt=[5 + i] * (3 + i), seed=i, max_tokens=8 + 5 * i, **s)
        for i, s in enumerate(SETTINGS.values())
    ]
    alone = [complete(server, **ask) for ask in asks]
    waits = [in_background(complete, server, **ask) for ask in asks]
    for one, wait in zip(alone, waits, strict=True):
        together = wait()
        assert together["token_ids"] == one["token_ids"]
        np.testing.assert_allclose(
            together["logprobs"]["token_logprobs"], one["logprobs"]["token_logprobs"], atol=2e-5
        )


def test_unseeded_requests_differ(server):
    assert complete(server, [5], seed=None)["token_ids"] != complete(server, [5], seed=None)["token_ids"]


def test_more_requests_than_slots_all_finish(server):
    waits = [in_background(complete, server, [5, 9], max_tokens=6) for _ in range(30)]
    assert all(len(wait()["token_ids"]) == 6 for wait in waits)
    assert len(server.engine.running) == 0


# --------------------------------------------------------------------------------------- how they end
def first_end(ids, ends):
    return next(i for i, token in enumerate(ids) if token in ends)


def test_each_eos_ends_a_request_without_a_stop_reason(server):
    seen = set()
    for seed in range(40):
        ids = complete(server, [5], seed=seed, max_tokens=200)["token_ids"]
        if not EOS & set(ids):
            continue
        choice = complete(server, [5], seed=seed, max_tokens=200, ignore_eos=False)
        assert choice["token_ids"] == ids[: first_end(ids, EOS) + 1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        seen.add(choice["token_ids"][-1])
        if seen == EOS:
            break
    assert seen == EOS, "the tokenizer's EOS and the generation config's"


def test_stop_ids_end_a_request_and_are_named(server):
    free = complete(server, [5, 9], max_tokens=30)["token_ids"]
    choice = complete(server, [5, 9], max_tokens=30, stop_token_ids=[free[7]])
    assert choice["token_ids"] == free[: free.index(free[7]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", free[7])


def test_length_ends_a_request_at_max_tokens_and_at_the_model_length(server):
    choice = complete(server, [5, 9], max_tokens=7)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (7, "length")
    choice = complete(server, [5] * (MAX_LEN - 3), max_tokens=100)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")


def test_a_client_that_disconnects_has_its_request_dropped(server):
    body = json.dumps({"prompt": [5], "max_tokens": 1000, "ignore_eos": True}).encode()
    post(server, "/pause?mode=keep")
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: server.engine.waiting, "the request")
    wait_for(lambda: not server.engine.waiting, "its end")


# ---------------------------------------------------------------------------------------------- pause
def long_request(server, **settings):
    """A request in the background that has made some tokens, and is far from its end."""
    settings = {"max_tokens": 400, "seed": 3} | settings
    wait = in_background(complete, server, [5, 9, 33], **settings)
    wait_for(lambda: [r for r in server.engine.running if r.generated > 10], "ten tokens")
    return wait


def generated(server) -> int:
    return sum(request.generated for request in server.engine.running)


def test_pause_keep_holds_requests_and_changes_no_token(server):
    alone = complete(server, [5, 9, 33], max_tokens=400, seed=3)
    wait = long_request(server)
    for _ in range(2):
        assert post(server, "/pause?mode=keep&clear_cache=true").json() == {"status": "paused"}
        assert get(server, "/is_paused").json() == {"is_paused": True}
        made = generated(server)
        queued = in_background(complete, server, [7], max_tokens=2)
        wait_for(lambda: server.engine.waiting, "the queued request")
        assert generated(server) == made
        assert post(server, "/resume").json() == {"status": "resumed"}
        assert queued()["finish_reason"] == "length"
    again = wait()
    assert again["token_ids"] == alone["token_ids"]
    np.testing.assert_allclose(
        again["logprobs"]["token_logprobs"], alone["logprobs"]["token_logprobs"], atol=5e-5
    )


def test_a_step_whose_requests_have_left_does_nothing(server):
    """They can leave between the moment it is queued and its turn."""
    server.engine.call(server.engine.step)
    server.engine.check()


# --------------------------------------------------------------------------------------------- weights
class Trainer:
    """The sending end: hosts the store, joins the group, broadcasts packed chunks."""

    def __init__(self, server, **info):
        self.server = server
        self.store = stream.host_store(2, 10)
        self.info = {"packed": True, "packed_buffer_size_bytes": 3000} | info
        place = {
            "master_address": "127.0.0.1",
            "master_port": self.store.port,
            "rank_offset": 1,
            "world_size": 2,
        }
        joining = in_background(
            post, server, "/init_weight_transfer_engine", {"init_info": place | self.info}
        )
        self.group = stream.GlooGroup("127.0.0.1", self.store.port, 0, 2, 10, self.store)
        assert joining().json() == {"message": "Weight transfer initialized"}

    def update(self, tensors, dtype=torch.float32):
        """One update_weights call and its stream; returns the answer."""
        names, shapes = list(tensors), [list(t.shape) for t in tensors.values()]
        info = {
            "names": names,
            "dtype_names": [str(dtype).removeprefix("torch.")] * len(names),
            "shapes": shapes,
        }
        answer = in_background(post, self.server, "/update_weights", {"update_info": info})
        size = self.info["packed_buffer_size_bytes"] if self.info["packed"] else 0
        for chunk in stream.packed_chunks(names, info["dtype_names"], shapes, size):
            parts = [tensors[spec.name].detach().to(dtype).reshape(-1).view(torch.uint8) for spec in chunk]
            self.group.broadcast(torch.cat(parts))
        return answer()

    def send(self, model, version):
        """A whole update under pause."""
        assert post(self.server, "/pause?mode=keep").status_code == 200
        assert post(self.server, "/start_weight_update").status_code == 200
        answer = self.update(dict(model.named_parameters()))
        assert answer.json() == {"message": "Weights updated"}
        finish = post(self.server, "/finish_weight_update", {"weight_version": version})
        assert finish.json() == {"message": "Weight update finished"}


def other_policy(directory, seed):
    """The model of `directory` with noise on every weight."""
    torch.manual_seed(seed)
    model = reference(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def test_a_request_over_an_update_is_old_policy_then_new_policy(fresh, directory, model):
    """Before the one split its log-probabilities are the old weights', after it the new weights' over the
    full prefix: no key or value of the old policy is left. Three policies, several requests, two joins."""
    new, newer = other_policy(directory, 1), other_policy(directory, 2)
    prompt = [5, 9, 33]
    waits = [in_background(complete, fresh, prompt, max_tokens=600, seed=seed) for seed in range(4)]
    wait_for(lambda: [r for r in fresh.engine.running if r.generated > 10], "ten tokens")
    for version, policy in (("7", new), ("8", newer)):
        trainer = Trainer(fresh, packed=version == "7")  # the second one replaces the first
        made = max(r.generated for r in fresh.engine.running)
        trainer.send(policy, version)
        assert post(fresh, "/resume").status_code == 200
        wait_for(lambda made=made: [r for r in fresh.engine.running if r.generated > made + 20], "new tokens")
    for wait in waits:
        choice = wait()
        versions = choice["weight_versions"]
        assert [v["version"] for v in versions] == ["default", "7", "8"]
        assert [v["start"] for v in versions[1:]] == [v["end"] for v in versions[:-1]]
        assert versions[-1]["end"] == 600
        for policy, run in zip((model, new, newer), versions, strict=True):
            assert_logp(policy, prompt, choice, run["start"], run["end"])
        with pytest.raises(AssertionError):  # the policies do differ
            assert_logp(model, prompt, choice, versions[1]["start"], versions[1]["end"])
    assert get(fresh, "/weight_info").json() == {"weight_version": "8"}


def test_an_update_is_cast_to_the_served_dtype(fresh, directory):
    new = other_policy(directory, 1)
    for parameter in new.parameters():
        parameter.data = parameter.bfloat16().float()
    trainer = Trainer(fresh)
    post(fresh, "/start_weight_update")
    assert trainer.update(dict(new.named_parameters()), torch.bfloat16).status_code == 200
    post(fresh, "/finish_weight_update")
    assert_logp(new, [5, 9], complete(fresh, [5, 9]))


def test_no_token_is_made_inside_an_open_window(fresh):
    wait = long_request(fresh)
    post(fresh, "/start_weight_update")
    made = generated(fresh)
    time.sleep(0.1)
    assert generated(fresh) == made
    assert "finish_weight_update" in post(fresh, "/resume").json()["error"]["message"]
    post(fresh, "/finish_weight_update")
    assert len(wait()["token_ids"]) == 400


def message_of(answer):
    return answer.json()["error"]["message"]


def test_windows_open_once_and_uninitialised_transfers_fail(fresh):
    post(fresh, "/start_weight_update")
    expected, answer = replay(fresh, "error_start_twice")
    assert answer.status_code == 500 and message_of(answer) in expected["json"]["error"]["message"]
    answer = post(fresh, "/update_weights", recorded("error_update_weights_uninitialised")["request"]["json"])
    assert answer.status_code == 500 and "not initialized" in answer.json()["error"]["message"]
    expected, answer = replay(fresh, "finish_after_failed_update")
    assert answer.status_code == 500 and message_of(answer) in expected["json"]["error"]["message"]


@pytest.mark.parametrize("fault", ["unknown name", "wrong shape"])
def test_after_a_failed_update_only_a_complete_one_makes_resume_safe(fresh, directory, fault):
    trainer, new = Trainer(fresh), other_policy(directory, 1)
    waiting = long_request(fresh)
    bad = dict(new.named_parameters())
    last = list(bad)[-1]
    tensor = bad.pop(last)
    bad |= {"model.nope.weight": tensor} if fault == "unknown name" else {last: torch.zeros(3)}
    post(fresh, "/pause?mode=keep")
    post(fresh, "/start_weight_update")
    answer = trainer.update(bad)
    assert answer.status_code == 500 and re.search(f"nope|{last}", message_of(answer))
    refused = post(fresh, "/resume")
    assert refused.status_code == 500 and "complete update" in refused.json()["error"]["message"]
    assert get(fresh, "/is_paused").json() == {"is_paused": True}
    post(fresh, "/start_weight_update")  # half an update does not do
    assert trainer.update({last: tensor}).status_code == 200
    post(fresh, "/finish_weight_update")
    assert post(fresh, "/resume").status_code == 500
    trainer.send(new, "1")
    assert post(fresh, "/resume").status_code == 200
    choice = waiting()
    assert_logp(new, [5, 9, 33], choice, choice["weight_versions"][1]["start"])


def test_a_trainer_lost_in_a_broadcast_gives_an_error_in_time(directory):
    server = serve.start(directory, transfer_timeout=1.5)
    trainer = Trainer(server)
    post(server, "/start_weight_update")
    name = "model.norm.weight"
    info = {"names": [name], "dtype_names": ["float32"], "shapes": [[32]]}
    started = time.monotonic()
    answer = post(server, "/update_weights", {"update_info": info})  # and no broadcast comes
    assert answer.status_code == 500 and time.monotonic() - started < 10
    assert post(server, "/resume").status_code == 500
    trainer.group.close()
    again = Trainer(server)
    again.send(reference(directory), "1")
    assert post(server, "/resume").status_code == 200
    server.close()


def test_a_rendezvous_nobody_hosts_gives_an_error_in_time(directory):
    server = serve.start(directory, transfer_timeout=1.5)
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    answer = post(server, "/init_weight_transfer_engine", {"init_info": info})
    assert answer.status_code == 500 and message_of(answer)
    assert complete(server, [5])["finish_reason"] == "length"
    server.close()


# --------------------------------------------------------------------------------- models and process
@pytest.mark.parametrize(
    "config, word",
    [
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
        (
            Qwen3NextConfig(**SMALL, **MOE, layer_types=["linear_attention", "full_attention"]),
            "linear_attention",
        ),
    ],
    ids=["sinks", "linear"],
)
def test_a_model_it_cannot_serve_exactly_is_refused_by_name(config, word, tmp_path):
    with pytest.raises(NotImplementedError, match=word):
        serve.start(build(config, tmp_path))


def test_a_dead_engine_answers_instead_of_hanging(directory, monkeypatch):
    server = serve.start(directory)
    monkeypatch.setattr(server.engine, "forward", lambda *args: 1 / 0)
    assert post(server, "/v1/completions", {"prompt": [5]}).status_code == 500
    assert get(server, "/health").status_code == 503
    assert post(server, "/pause?mode=keep").status_code == 500
    server.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_process_ends_with_its_parent_and_frees_the_port(directory):
    process, url = serve.launch(["--model", str(directory), "--port", "0", "--max_model_len", "64"], 60)
    port = int(url.rsplit(":", 1)[1])
    assert requests.get(url + "/v1/models", timeout=30).json()["data"][0]["max_model_len"] == 64
    process.stdin.close()  # what the death of a parent does
    assert process.wait(20) == 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_sigterm_ends_the_process(directory):
    process, _ = serve.launch(["--model", str(directory), "--port", "0"], 60)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_server_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(serve.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start .exit code 1"):
        serve.launch([], 60)


def test_nan_weights_end_in_an_error_and_not_in_tokens(fresh):
    fresh.engine.weights.parameters["model.norm.weight"].data.fill_(torch.nan)
    answer = post(fresh, "/v1/completions", {"prompt": [5], "temperature": 0})
    assert answer.status_code == 500 and "NaN" in answer.json()["error"]["message"]
