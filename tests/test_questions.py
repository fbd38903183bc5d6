"""Claims about questions.py, on recorded answers of a real vLLM and a scripted server.

Run: pytest tests/test_questions.py
"""

import json
from pathlib import Path

import pytest
from fake_server import FakeServer

from client import Server, ServerError
from options import OptionError, Options
from questions import check_server, configuration, misfits, needed_logprobs, price, remarks

DATA = Path(__file__).parent / "data" / "vllm"
SHAPED = dict(temperature=0.7, top_k=5)


def recorded(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())["response"]


def options_of(**changes) -> Options:
    return Options(**({"model": "m", "max_completion_length": 16, "bf16": False} | changes))


def vllm(fake: FakeServer, **config) -> Server:
    """The fake as a vLLM that says what it was started with."""
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


def test_recorded_configuration_fits():
    with FakeServer() as fake:
        config = configuration(vllm(fake, max_logprobs=64), options_of())
    assert misfits(config, options_of(**SHAPED)) == [] == remarks(config, options_of())


def test_raw_log_probabilities_are_refused_unless_sampling_is_plain():
    for mode in ("raw_logprobs", "processed_logprobs"):
        for changes in ({}, SHAPED, {"temperature": 0.5}):
            problems = misfits({"logprobs_mode": mode}, options_of(**changes))
            assert bool(problems) == (mode == "raw_logprobs" and changes != {})
            assert all("start it with --logprobs-mode processed_logprobs" in text for text in problems)


def test_limit_on_log_probabilities_is_compared_with_what_a_request_asks_for():
    (problem,) = misfits({"max_logprobs": 64}, options_of(num_sampler_logprobs=65))
    assert "at most 64" in problem and "needs 65" in problem and "--max-logprobs 65" in problem
    assert misfits({"max_logprobs": -1}, options_of(num_sampler_logprobs=65)) == []
    assert misfits({"max_logprobs": 5}, options_of(top_k=4)) == []
    assert "needs 9" in misfits({"max_logprobs": 5}, options_of(top_k=9))[0]
    assert misfits({"max_logprobs": 5}, options_of(rollout_only=True, top_k=9)) == []


def test_a_server_that_does_not_tell_is_asked_by_a_token_where_nothing_is_trained():
    recorded = options_of(rollout_only=True, record="groups", temperature=0.7)
    with FakeServer() as fake:
        fake.replies["/server_info"] = (404, {"detail": "Not Found"})
        server = Server(fake.url, 5)
        check_server(server, options_of(rollout_only=True))
        with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
            check_server(server, options_of())
        with pytest.raises(OptionError, match="--logprobs-mode processed_logprobs"):
            check_server(server, recorded)  # its log-probabilities do not mind the temperature
        fake.replies["/v1/completions"] = (400, {"error": {"message": "greater than max allowed: 3"}})
        with pytest.raises(OptionError, match="--max-logprobs 8"):
            check_server(server, recorded)


def test_every_mismatch_is_one_line_with_what_to_do():
    with FakeServer() as fake:
        server = vllm(fake, logprobs_mode="raw_logprobs", max_logprobs=2)
        with pytest.raises(OptionError) as caught:
            check_server(server, options_of(**SHAPED))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and all(line.startswith(fake.url) and "start it with --" in line for line in lines)


def test_what_a_run_can_live_with_is_a_note(capsys):
    with FakeServer() as fake:
        fake.max_model_len = 16
        check_server(vllm(fake, dtype="torch.float16", generation_config="auto"), options_of())
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"note: {fake.url}")]
    assert len(notes) == 4, "and one that the fake serves another model"
    for flag in ("--max-model-len", "--generation-config vllm", "--dtype float32"):
        assert sum(flag in note for note in notes) == 1


def test_a_server_of_another_shape_is_refused_before_anything_is_sent(tmp_path):
    for name, size in (("served", 64), ("trained", 96)):
        (tmp_path / name).mkdir()
        config = {"model_type": "qwen3", "hidden_size": size, "num_hidden_layers": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with FakeServer() as fake:
        served = {"id": "m", "root": str(tmp_path / "served"), "max_model_len": 99}
        fake.replies["/v1/models"] = (200, {"data": [served]})
        with pytest.raises(OptionError, match=r"hidden_size 64 \(trained: 96\): start it with .*trained"):
            check_server(vllm(fake), options_of(model=str(tmp_path / "trained")))
        check_server(vllm(fake), options_of(model=served["root"]))


@pytest.mark.parametrize(
    "answers, words",
    [
        (["200", "400"], None),
        (["200", "200"], "takes token id 60"),
        (["400", "400"], "refuses token id 59"),
    ],
)
def test_a_server_of_another_vocabulary_is_refused(answers, words):
    """Whose files are elsewhere: ids are asked for, never in a prompt, which a vLLM may die of."""
    with FakeServer() as fake:
        server, fake.script = vllm(fake), [(int(status), {}) for status in answers]
        if words is None:
            check_server(server, options_of(), 60)
        else:
            with pytest.raises(OptionError, match=words):
                check_server(server, options_of(), 60)
        assert [body["logit_bias"] for body in fake.requests] == [{"59": 0}, {"60": 0}]
        assert all(body["prompt"] == [0] for body in fake.requests)


def test_a_paused_server_is_not_asked_to_sample():
    with FakeServer() as fake:
        fake.paused = True
        check_server(vllm(fake), options_of(), 60)
        assert not fake.requests


def test_price_of_a_request_is_told_in_a_line():
    for changes, words in [
        ({}, "per token: 8. "),
        ({"score_centering": False}, "per token: 1. "),
        ({"top_k": 64}, "per token: 64. "),
        ({"rollout_only": True}, "no log-probabilities"),
    ]:
        assert words in price(options_of(**changes))
