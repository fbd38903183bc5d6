"""Claims about client.py, on a scripted server and recorded answers of a real vLLM.

Run: pytest tests/test_client.py
"""

import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_server import FakeServer, choice_of

import client
from client import Server, ServerError, parse_choice, parse_metrics

DATA = Path(__file__).parent / "data"
PROMPT = [3, 7, 8, 9]


def case(name: str) -> dict:
    return json.loads((DATA / "cases" / f"{name}.json").read_text())


def recorded(name: str) -> dict:
    return json.loads((DATA / "vllm" / f"{name}.json").read_text())["response"]


def choice(name: str) -> dict:
    return recorded(name)["json"]["choices"][0]


def ask(server: Server, **sampling):
    return server.complete(PROMPT, **({"max_tokens": 8, "seed": 1} | sampling))


# ---- retries


@pytest.mark.parametrize("name", ["two_500", "reset_once", "timeout_once", "rejected", "always_503"])
def test_a_request_is_sent_exactly_so_often(name):
    expect = case("A06_http_retries")["expect"][name]
    refusal = (400, {"error": {"message": "maximum context length is 4096 tokens"}})
    script = {
        "two_500": ["500", "500", "200"],
        "reset_once": ["reset", "200"],
        "timeout_once": ["timeout", "200"],
        "rejected": [refusal],
        "always_503": ["503"] * 50,
    }[name]
    with FakeServer() as fake:
        fake.script = list(script)
        server = Server(fake.url, timeout=0.3, attempts=5, backoff_s=0.001)
        if expect.get("turn_returned"):
            assert len(ask(server).token_ids) > 0
        else:
            with pytest.raises(ServerError, match=expect.get("error_text_contains", "503")):
                ask(server)
        assert len(fake.requests) == expect["requests"]
        assert server.retry_count == expect["requests"] - 1
        assert all(body == fake.requests[0] for body in fake.requests), "every attempt sends the same request"


def test_a_restarting_server_is_waited_for(monkeypatch):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    fake, sleeps = FakeServer(port), []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            fake.__enter__()

    monkeypatch.setattr(client.time, "sleep", sleep)
    server = Server(f"http://127.0.0.1:{port}", timeout=5, attempts=5, backoff_s=1.0)
    try:
        assert len(ask(server).token_ids) > 0
    finally:
        fake.__exit__()
    assert server.retry_count == 3 and len(fake.requests) == 1
    assert sleeps[0] <= 1 < sleeps[2] <= 4, "waits double"


def test_without_a_number_of_attempts_a_dead_server_is_given_up_after_the_timeout():
    server = Server("http://127.0.0.1:9", timeout=0.2, backoff_s=0.02)
    started = time.monotonic()
    with pytest.raises(ServerError, match="gave up after .* refused"):
        ask(server)
    assert 0.2 < time.monotonic() - started < 2 and server.retry_count > 2


def test_a_deadline_ends_a_request_whatever_the_timeout():
    with FakeServer() as fake:
        fake.delay_s = 1.0
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(Server(fake.url, timeout=30), deadline=started + 0.2)
        assert time.monotonic() - started < 0.9 and len(fake.requests) == 1


@pytest.mark.parametrize("fault", ["503", "truncated", "cut", "abort", "error"])
def test_what_may_pass_is_asked_for_again(fault):
    """A server that is paused or going down, an answer cut short, a request that ended inside the server."""
    ended = {
        "abort": (200, {"choices": [choice("inflight_over_pause_abort")]}),
        "error": (200, {"choices": [choice_of([9], [{9: -1.0}], "error")]}),
    }
    with FakeServer() as fake:
        fake.script = [ended.get(fault, fault)] * 2 + ["200"]
        server = Server(fake.url, timeout=5, backoff_s=0.001)
        assert len(ask(server).token_ids) > 0 and server.retry_count == 2


# ---- what is sent


def test_every_sampling_field_is_sent():
    with FakeServer() as fake:
        ask(Server(fake.url, 5), temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**62, logprobs=5)
        body = fake.requests[0]
    expected = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    expected |= {"seed": 2**62, "logprobs": 5, "n": 1, "return_token_ids": True, "repetition_penalty": 1.0}
    expected |= {"return_tokens_as_token_ids": True, "return_weight_versions": True, "presence_penalty": 0.0}
    assert {name: body.get(name) for name in expected} == expected
    assert "stream" not in body


def test_a_candidate_set_is_read_from_as_many_log_probabilities():
    with FakeServer() as fake:
        for logprobs, top_k, asked in [(2, 5, 5), (0, 5, 5), (8, 5, 5), (2, 0, 2), (None, 5, None)]:
            answer = ask(Server(fake.url, 5), logprobs=logprobs, top_k=top_k)
            assert fake.requests[-1]["logprobs"] == asked
            assert (answer.candidate_ids is not None) == (top_k > 0 and logprobs is not None)


def test_pause_names_its_mode_in_the_query():
    with FakeServer() as fake:
        server = Server(fake.url, 5)
        server.pause()
        assert fake.calls == [("/pause", {"mode": "keep", "clear_cache": "true"})]
        assert server.is_paused()
        server.resume()
        assert not server.is_paused()


def test_weight_update_calls_carry_what_the_protocol_names():
    with FakeServer() as fake:
        server = Server(fake.url, 5)
        server.init_weight_transfer({"rank_offset": 1})
        server.start_update()
        server.update_weights({"names": ["w"]})
        server.finish_update("7")
        assert fake.calls == [
            ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}),
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"names": ["w"]}}),
            ("/finish_weight_update", {"weight_version": "7"}),
        ]


def test_a_failed_weight_update_is_not_repeated():
    failure = recorded("error_update_weights_uninitialised")
    with FakeServer() as fake:
        fake.replies["/update_weights"] = (failure["status"], failure["json"])
        with pytest.raises(ServerError, match="NCCL weight transfer not initialized") as caught:
            Server(fake.url, 5, backoff_s=0.001).update_weights({})
        assert caught.value.status == 500 and len(fake.calls) == 1


# ---- what is read


def test_reads_understand_recorded_answers():
    with FakeServer() as fake:
        for path, name in [
            ("/version", "version"),
            ("/v1/models", "models"),
            ("/get_world_size", "get_world_size"),
            ("/is_paused", "is_paused_true"),
            ("/server_info", "server_info_json"),
        ]:
            fake.replies[path] = (200, recorded(name)["json"])
        server = Server(fake.url + "/", 5)
        assert server.version() == "0.32.0"
        assert server.models()[0]["max_model_len"] == 1024
        assert server.world_size() == 1
        assert server.is_paused()
        assert server.server_info()["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert ("/server_info", {"config_format": "json"}) in fake.calls


@pytest.mark.parametrize(
    "answer, text",
    [
        (recorded("error_pause_bad_mode"), "Input should be 'abort', 'wait' or 'keep'"),
        (recorded("error_no_prompt"), "Either prompt or prompt_embeds must be provided"),
        (recorded("nodev_pause"), "VLLM_SERVER_DEV_MODE=1"),
        ({"status": 500, "json": {"error": "engine is asleep"}}, "engine is asleep"),
        ({"status": 500, "json": "engine is asleep, in plain text"}, "engine is asleep"),
    ],
)
def test_errors_carry_the_servers_words(answer, text):
    with FakeServer() as fake:
        fake.replies["/pause"] = answer["status"], answer["json"]
        with pytest.raises(ServerError, match=text) as caught:
            Server(fake.url, 5).pause()
        assert caught.value.status == answer["status"]


def test_waiting_for_a_server_has_an_end_and_a_reason():
    with FakeServer() as fake:
        Server(fake.url, 5).wait_until_ready()
        fake.replies["/health"] = (503, {"error": {"message": "engine died"}})
        with pytest.raises(ServerError, match="did not come up within 0 s.*engine died"):
            Server(fake.url, 0.1, backoff_s=0.02).wait_until_ready()


def test_sampled_token_is_found_by_id():
    given, expect = case("A05_sampled_token_logprob")["given"], case("A05_sampled_token_logprob")["expect"]
    positions = given["server_reply_positions"]
    ids = [p["sampled"] for p in positions]
    entries = [{int(i): logp for i, logp in p["returned"].items()} for p in positions]
    answer = parse_choice(choice_of(ids, entries, "length"), width=2, restricted=False)
    np.testing.assert_allclose(answer.logp, expect["old_log_probs"], atol=1e-6)
    assert [sorted(row) for row in answer.topk_ids.tolist()] == expect["top_tokens_used_for_score_centering"]
    mass = np.exp(answer.topk_logp.astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(mass, expect["sampler_mass_per_position"], atol=1e-6)
    assert mass.mean() == pytest.approx(expect["sampler_mass"], abs=1e-6)


def test_order_of_entries_means_nothing():
    content = choice("completions_logprobs8_token_ids")
    straight = parse_choice(content, 8, False)
    for entries in content["logprobs"]["top_logprobs"]:
        items = list(entries.items())[::-1]
        entries.clear()
        entries.update(items)
    turned = parse_choice(content, 8, False)
    np.testing.assert_array_equal(straight.topk_ids, turned.topk_ids)
    np.testing.assert_array_equal(straight.logp, turned.logp)


def test_recorded_answer_is_read_in_full():
    content = choice("completions_logprobs8_token_ids")
    answer = parse_choice(content, 8, False)
    assert answer.token_ids.tolist() == content["token_ids"]
    np.testing.assert_allclose(answer.logp, content["logprobs"]["token_logprobs"])
    assert answer.topk_ids.shape == answer.topk_logp.shape == (16, 8)
    assert answer.topk_ids[0, :3].tolist() == [504, 60, 15319]
    assert (np.diff(answer.topk_logp, axis=1) <= 0).all() and answer.candidate_ids is None


def test_top_list_leaves_the_extra_token_out():
    content = choice("completions_sampled_outside_top")  # 2 log-probabilities asked for, 3 sent
    answer = parse_choice(content, 2, False)
    assert answer.topk_ids[0].tolist() == [504, 60]
    assert not (answer.topk_ids == answer.token_ids[:, None]).any()
    np.testing.assert_allclose(answer.logp, content["logprobs"]["token_logprobs"])


def test_extra_token_that_ties_with_the_last_listed_one_is_left_out_too():
    answer = parse_choice(choice_of([9], [{9: -2.0, 5: -1.0, 6: -2.0}], "stop"), 2, False)
    assert answer.topk_ids.tolist() == [[5, 6]]


def test_candidate_set_is_what_could_be_sampled():
    answer = parse_choice(choice("completions_processed_top_k5_temp07"), 8, restricted=True)
    values, offsets = answer.candidate_ids
    assert len(offsets) == len(answer.token_ids) + 1
    assert sorted(values[offsets[0] : offsets[1]].tolist()) == [60, 504, 2219, 15319]
    assert values[offsets[1] : offsets[2]].tolist() == [3575], "padding at -9999 is dropped"
    assert answer.topk_ids[1].tolist() == [3575] + [-1] * 7 and np.isneginf(answer.topk_logp[1, 1:]).all()
    assert all(t in values[a:b] for t, a, b in zip(answer.token_ids, offsets, offsets[1:], strict=False))
    for row in answer.topk_logp.astype(np.float64):
        assert np.exp(row).sum() == pytest.approx(1, abs=1e-5)


def test_token_outside_its_own_candidate_set_gets_an_empty_one():
    answer = parse_choice(choice_of([9, 4], [{9: -9999.0, 5: 0.0}, {4: 0.0}], "stop"), 1, restricted=True)
    assert answer.candidate_ids[1].tolist() == [0, 0, 1]


def test_no_log_probabilities_but_the_sampled_ones():
    answer = parse_choice(choice("completions_finish_stop_eos"), 0, False)
    assert answer.topk_ids is None and answer.logp[0] == pytest.approx(-1.8643048)
    assert answer.token_ids[-1] == 2


def test_nothing_is_read_where_no_log_probabilities_were_asked_for():
    answer = parse_choice(choice("completions_finish_stop_eos") | {"logprobs": None}, None, False)
    assert np.isnan(answer.logp).all() and len(answer.logp) == len(answer.token_ids) > 0


def test_answers_that_cannot_be_trusted_are_refused():
    content = choice_of([9, 8], [{9: -1.0}, {8: -1.0}], "stop")
    with pytest.raises(ValueError, match="3 token ids but 2 log-probabilities"):
        parse_choice(content | {"token_ids": [9, 8, 7]}, 1, False)
    with pytest.raises(ValueError, match="keyed by text"):
        parse_choice(choice("completions_logprobs8_text_keys"), 8, False)
    with pytest.raises(ValueError, match="token ids must be whole numbers"):
        parse_choice(choice("completions_no_logprobs_defaults"), 0, False)
    with pytest.raises(ValueError, match="lacks the log-probability of a token"):
        content = choice_of([9], [{9: -1.0}], "stop")
        content["logprobs"]["top_logprobs"] = [{"token_id:8": -1.0}]
        parse_choice(content, 1, False)
    with FakeServer() as fake:
        fake.script = [(200, {"choices": [choice_of([9], [{9: -1.0}], "stop") | {"prompt_token_ids": [3]}]})]
        with pytest.raises(ServerError, match="another prompt than the 4 tokens"):
            ask(Server(fake.url, 5))


TOP = ("logprobs", "top_logprobs", 0)
NAN = float("nan")


@pytest.mark.parametrize(
    "place, value",
    [
        *(((), value) for value in ({}, None, "text", 5)),
        (("finish_reason",), ...),
        *((("token_ids",), value) for value in ("abc", {"a": 1}, [5.5, 2], [2**40, 2], [None, 2], [-5, 2])),
        *((("logprobs",), value) for value in ([1], "x", {}, {"content": None})),
        *((TOP, value) for value in (None, [1], {"token_id:x": -1.0})),
        *((TOP, {"token_id:5": value}) for value in (NAN, None, 1.5, [1])),
        *((TOP, {"token_id:5": -1.0, name: -2.0}) for name in ("token_id:-7", "token_id:99999999999")),
        (TOP, {"token_id:5": -1.0, "token_id:7": NAN}),
        (("prompt_token_ids",), 5),
        *(
            (("weight_versions",), value)
            for value in ("x", [{}], [{"version": "9" * 20, "start": 0, "end": 2}])
        ),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_that_names_the_server(place, value):
    content = choice_of([5, 2], [{5: -0.5, 7: -1.0}, {2: -0.1, 9: -3.0}], "stop")
    at = content if place else value
    for key in place[:-1]:
        at = at[key]
    if value is ...:
        del at[place[-1]]
    elif place:
        at[place[-1]] = value
    with FakeServer() as fake:
        fake.script = [(200, {"choices": [content if place else value]})] * 2
        with pytest.raises(ServerError, match=fake.url):
            ask(Server(fake.url, 5, attempts=2, backoff_s=0.001), logprobs=2, top_k=4)


@pytest.mark.parametrize(
    "entry",
    ["b", [1], {"7": {}}, {"x": {"logprob": -1}}, {"8": {"logprob": -1}}]
    + [{"9": {"logprob": value}} for value in (None, NAN, 3.0)]
    + [{"9": {"logprob": -1}, wrong: {"logprob": -1}} for wrong in ("-3", "99999999999")],
)
def test_scores_that_cannot_be_read_are_an_error_that_names_the_server(entry):
    with FakeServer() as fake:
        fake.script = [(200, {"choices": [{"finish_reason": "length", "prompt_logprobs": [None, entry]}]})]
        with pytest.raises(ServerError, match=fake.url):
            Server(fake.url, 5).score([3, 9], 2)


@pytest.mark.parametrize("reply", ["<html>", {}, [], {"data": []}, {"data": [{}]}, {"world_size": "x"}])
def test_a_read_of_what_is_no_vllm_server_names_it(reply):
    paths = {"/version": "version", "/v1/models": "models", "/server_info": "server_info"}
    paths |= {"/get_world_size": "world_size", "/weight_info": "weight_version", "/is_paused": "is_paused"}
    with FakeServer() as fake:
        server = Server(fake.url, 5)
        for path, name in paths.items():
            fake.replies = {path: (200, reply)}
            with pytest.raises(ServerError, match=fake.url):
                getattr(server, name)()
        fake.replies = {"/metrics": (200, "vllm:num_requests_running x"), "/v1/completions": (200, reply)}
        for read in (server.metrics, lambda: server.tokenize("a")):
            with pytest.raises(ServerError, match=f"{fake.url} sent an answer that cannot be read"):
                read()


def test_versions_are_read_from_labels():
    content = choice("generate_weight_versions")
    spans = content["weight_versions"]
    assert client.token_versions(spans, 24).tolist() == [7] * 10 + [8] * 14
    assert client.token_versions([{"version": "default", "start": 0, "end": 2}], 2).tolist() == [-1, -1]
    assert client.token_versions(spans, 25).tolist()[-1] == -1, "a token without a version"
    assert client.token_versions(None, 3) is None


def test_metrics_sum_over_engines_and_take_the_fullest_cache():
    values = parse_metrics(recorded("metrics_busy")["text"])
    assert values["num_requests_running"] == 3 and 0 < values["kv_cache_usage_perc"] < 1
    assert values["kv_cache_size_tokens"] > 1000
    two = parse_metrics(
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
        'vllm:num_preemptions_total{engine="0"} 2\nvllm:num_preemptions_total{engine="1"} 3.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="10",kv_cache_size_tokens="None"} 1\n'
        'vllm:cache_config_info{kv_cache_size_tokens="200"} 1\n# HELP vllm:num_preemptions_total text\n'
    )
    assert two == {"kv_cache_usage_perc": 0.7, "num_preemptions_total": 5, "kv_cache_size_tokens": 360}


# ---- speed and threads


def test_reading_an_answer_keeps_up_with_a_fast_server():
    """Tens of thousands of tokens a second with 8 log-probabilities each; measured about 200 000 a CPU
    second.
    """
    entries = [{i + shift: -1.0 - i for i in range(8)} for shift in range(2000)]
    data = json.dumps(choice_of(list(range(2000)), entries, "length"))
    started = time.process_time()
    for _ in range(5):
        parse_choice(json.loads(data), 8, False)
    assert 5 * 2000 / (time.process_time() - started) > 30_000


def test_one_server_object_serves_many_threads():
    with FakeServer() as fake:
        fake.delay_s = 0.2
        server, answers = Server(fake.url, 5), []
        threads = [
            threading.Thread(target=lambda seed=seed: answers.append(ask(server, seed=seed)))
            for seed in range(40)
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 40 and time.monotonic() - started < 4, "one by one it takes 8 s"


def test_health_is_asked_over_a_connection_of_its_own():
    """A server that is going down keeps the connections it has and answers nothing on them (vLLM 0.32)."""
    with FakeServer() as fake:
        server = Server(fake.url)
        server._session = None
        server.health()
        assert fake.calls == [("/health", {})]
