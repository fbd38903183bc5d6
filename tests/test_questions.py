"""Claims about questions.py, on recorded answers of a real vLLM and a scripted server.

Run: pytest tests/test_questions.py
"""

import json
import math
from pathlib import Path

import pytest
from fake_server import VOCABULARY, FakeServer

from client import COMPLETIONS, TOKENS, Server, ServerError
from options import OptionError, Options
from questions import (
    Facts,
    check_server,
    choose_endpoint,
    facts_of,
    misfits,
    needed_logprobs,
    price,
    probed,
    remarks,
)

DATA = Path(__file__).parent / "data" / "vllm"
SHAPED = dict(temperature=0.7, top_k=5)


def recorded(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())["response"]


def options_of(**changes) -> Options:
    return Options(**({"model": "m", "max_completion_length": 16, "bf16": False} | changes))


def vllm(fake: FakeServer, mode: str = "processed_logprobs", **config) -> Server:
    """The fake as a vLLM without developer mode, or with it where `config` says what it was started with."""

    def answer(body):
        scale = body["temperature"] if mode == "processed_logprobs" else 1.0
        weights = [math.exp(-rank / scale) for rank in range(VOCABULARY)]
        logp = {7 + rank: math.log(w / sum(weights)) for rank, w in enumerate(weights)}
        return [8], [dict(list(logp.items())[: max(body["logprobs"] or 0, 2)])], "length"

    fake.answer = answer
    if config:
        model_config = recorded("server_info_json")["json"]["vllm_config"]["model_config"] | config
        fake.replies["/server_info"] = (200, {"vllm_config": {"model_config": model_config}})
    return Server(fake.url, 5, backoff_s=0.001)


def test_objective_needs_no_more_log_probabilities_than_it_uses():
    for changes, wanted in [
        ({}, 8),
        ({"num_sampler_logprobs": 3}, 3),
        ({"score_centering": False}, 0),
        ({"rollout_only": True}, None),
        ({"rollout_only": True, "record": "f"}, 8),
    ]:
        assert needed_logprobs(Options(**changes)) == wanted


def test_recorded_configuration_is_read():
    with FakeServer() as fake:
        facts = facts_of(vllm(fake, max_logprobs=64), options_of())
    assert facts == Facts("processed_logprobs", 64, False, 1024, "vllm", "torch.float32")
    assert misfits(facts, options_of(**SHAPED)) == [] == remarks(facts, options_of())


@pytest.mark.parametrize("off", [False, True])
def test_raw_log_probabilities_are_refused_unless_sampling_is_plain(off):
    """Also where /server_info is off: processed ones change with the temperature, raw ones do not."""
    for mode in ("raw_logprobs", "processed_logprobs"):
        for changes in ({}, SHAPED, {"temperature": 0.5}):
            with FakeServer() as fake:
                server = vllm(fake, mode, **({} if off else {"logprobs_mode": mode}))
                problems = misfits(facts_of(server, options_of(**changes)), options_of(**changes))
            assert bool(problems) == (mode == "raw_logprobs" and changes != {})
            assert all("start it with --logprobs-mode processed_logprobs" in text for text in problems)


def test_limit_on_log_probabilities_is_found_without_server_info():
    refusal = recorded("error_logprobs_above_max")
    with FakeServer() as fake:
        fake.script = [(refusal["status"], refusal["json"])]
        facts = probed(vllm(fake), options_of(num_sampler_logprobs=65))
        assert fake.requests[0]["logprobs"] == 65
    (problem,) = misfits(facts, options_of(num_sampler_logprobs=65))
    assert "at most 64" in problem and "needs 65" in problem and "--max-logprobs 65" in problem
    assert misfits(Facts(max_logprobs=-1), options_of(num_sampler_logprobs=65)) == []
    assert misfits(Facts(max_logprobs=5), options_of(rollout_only=True, top_k=9)) == []


def test_refused_probe_is_told_in_the_servers_words():
    with FakeServer() as fake:
        fake.script = [(400, {"error": {"message": "no such thing"}})]
        with pytest.raises(ServerError, match="no such thing"):
            probed(vllm(fake), options_of())


def test_server_that_returns_sampling_masks_needs_top_k():
    facts = Facts(return_sampling_mask=True)
    assert "--return-sampling-mask" in misfits(facts, options_of())[0]
    assert misfits(facts, options_of(top_k=5)) == []


def test_every_mismatch_is_one_line_with_what_to_do():
    with FakeServer() as fake:
        server = vllm(fake, logprobs_mode="raw_logprobs", max_logprobs=2)
        with pytest.raises(OptionError) as caught:
            check_server(server, options_of(**SHAPED), None)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and all(line.startswith(fake.url) and "start it with --" in line for line in lines)


def test_what_a_run_can_live_with_is_a_note(capsys):
    with FakeServer() as fake:
        server = vllm(fake, dtype="torch.float16", max_model_len=16, generation_config="auto")
        check_server(server, options_of(), None)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"note: {fake.url}")]
    assert len(notes) == 4, "and one that the fake serves another model"
    for flag in ("--max-model-len", "--generation-config vllm", "--dtype float32"):
        assert sum(flag in note for note in notes) == 1


@pytest.mark.parametrize(
    "size, words", [(VOCABULARY, None), (50, "takes token id 50"), (70, "refuses .* 69")]
)
def test_server_of_another_vocabulary_is_refused(size, words):
    with FakeServer() as fake:
        server, fake.vocabulary = vllm(fake, max_logprobs=20), VOCABULARY
        if words is None:
            check_server(server, options_of(), size)
            assert all(body["top_k"] for body in fake.requests), "some servers take no other requests"
            assert max(max(body["prompt"]) for body in fake.requests) == 0, "vLLM dies of an unknown id there"
        else:
            with pytest.raises(OptionError, match=words):
                check_server(server, options_of(), size)


def test_paused_server_is_not_asked_to_sample():
    with FakeServer() as fake:
        fake.paused = True
        check_server(vllm(fake), options_of(**SHAPED), VOCABULARY)
        assert not fake.requests


def test_a_server_of_another_shape_is_refused_before_anything_is_sent(tmp_path):
    for name, size in (("served", 64), ("trained", 96)):
        (tmp_path / name).mkdir()
        config = {"model_type": "qwen3", "hidden_size": size, "num_hidden_layers": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with FakeServer() as fake:
        fake.vocabulary = VOCABULARY
        served = {"id": "m", "root": str(tmp_path / "served"), "max_model_len": 99}
        fake.replies["/v1/models"] = (200, {"data": [served]})
        with pytest.raises(OptionError, match=r"hidden_size 64 \(trained: 96\): start it with .*trained"):
            check_server(vllm(fake), options_of(model=str(tmp_path / "trained")), VOCABULARY)
        check_server(vllm(fake), options_of(model=served["root"]), VOCABULARY)


# ---- the endpoint


def test_server_without_a_token_endpoint_is_asked_at_the_other():
    disabled = recorded("nodev_generate_disabled")
    for status, answer in ((404, {"detail": "Not Found"}), (disabled["status"], disabled["json"])):
        with FakeServer() as fake:
            fake.replies[TOKENS] = (status, answer)
            server = Server(fake.url, 5)
            why = choose_endpoint(server, options_of())
        assert server.endpoint == COMPLETIONS and not fake.requests and f"answered {status}" in why
        assert ("--enable-scale-out" in why) == (status == 403) and "DEV_MODE" not in why


def test_server_of_the_token_endpoint_alone_is_used():
    with FakeServer() as fake:
        fake.tokens, fake.replies[COMPLETIONS] = True, (404, {"detail": "Not Found"})
        server = Server(fake.url, 5)
        assert f"{COMPLETIONS} answered 404" in choose_endpoint(server, options_of())
    assert server.endpoint == TOKENS


def test_server_that_fails_the_question_is_asked_at_the_usual_endpoint():
    for script, wanted in [
        (["500"], COMPLETIONS),
        (["200", "reset"], TOKENS),
        (["200"] * 2 + ["500"] * 40, COMPLETIONS),
    ]:
        with FakeServer() as fake:
            fake.tokens, fake.script, server = True, script, Server(fake.url, 5)
            choose_endpoint(server, options_of())
        assert server.endpoint == wanted and server.retry_count == 0


@pytest.mark.parametrize("slow", [COMPLETIONS, TOKENS])
def test_faster_endpoint_is_used(slow):
    with FakeServer() as fake:
        fake.tokens, server = True, Server(fake.url, 5)
        fake.delay_s, fake.token_delay_s = (0.3, 0.0) if slow == COMPLETIONS else (0.0, 0.3)
        why = choose_endpoint(server, options_of())
    assert server.endpoint != slow and server.endpoint in why and "tokens/s" in why and not server.masks


def test_sampling_masks_are_used_where_the_server_has_them():
    for top_k, masks in ((5, True), (0, False)):
        with FakeServer() as fake:
            fake.tokens = True
            fake.masks, server = True, Server(fake.url, 5)
            if not top_k:  # such a server was refused before; it would refuse the request, too
                assert "requires top_k" in choose_endpoint(server, options_of())
            else:
                assert "could be sampled" in choose_endpoint(server, options_of(top_k=5))
                assert server.endpoint == TOKENS
            assert server.masks == masks


def test_price_of_a_request_is_told_in_a_line():
    quarter = (
        "8 log-probabilities: vLLM then makes about a quarter of the tokens per second it makes with none"
    )
    assert quarter in price(options_of(), masks=False)
    assert "--num_sampler_logprobs or --score_centering false asks for less" in price(options_of(), False)
    assert "about six tenths" in price(options_of(score_centering=False), False)
    assert "64 log-probabilities: vLLM then makes less than a quarter" in price(options_of(top_k=64), False)
    assert "a lower --top_k" in price(options_of(top_k=64), False)
    assert quarter in price(options_of(top_k=64), masks=True), "the set comes without"
    assert "no log-probabilities" in price(options_of(rollout_only=True), False)
