"""Claims about teachers.py and what the loop makes of it: a scripted student's server, scripted teachers.

Run: pytest tests/test_teachers.py
"""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from fake_server import FakeServer, teacher_entry
from replay import ListRollouts, NoSync, random_groups
from rollout_run import TINY, Run, options_for
from test_delta import hybrid
from transformers import AutoTokenizer

from client import parse_scores
from conversation import Rollout, RolloutError
from options import OptionError, Options
from recording import Recording, read
from rollout import RolloutLoop
from teachers import check_rows, check_teachers
from train import train

ROWS = ["a", "b", "a", "b"]


def failing(**_):
    raise AssertionError("nothing is rewarded")


def two_kinds(ids=ROWS):
    rows = {"prompt": [[{"role": "user", "content": str(n)}] for n in range(len(ids))], "teacher_id": ids}
    return SimpleNamespace(dataset=datasets.Dataset.from_dict(rows), rewards=[failing])


def streamed():
    yield {"prompt": [{"role": "user", "content": "0"}], "teacher_id": "c"}


def stream():
    return SimpleNamespace(dataset=datasets.IterableDataset.from_generator(streamed), rewards=[])


def rewarded():
    dataset = two_kinds(["a"] * 3).dataset
    return SimpleNamespace(dataset=dataset, rewards=[by_place_or_equal])


def by_place_or_equal(completions, prompts, **_):
    """The first prompt's rollouts are worth the same."""
    return [0.0 if prompts[0][0]["content"] == "0" else float(i) for i in range(len(completions))]


def distilled(model, fake, task="test_teachers:two_kinds", **changes):
    """Options of a distillation; `changes` names the teachers."""
    urls = {name: server.url for name, server in changes.pop("teachers").items()}
    settings = dict(num_sampler_logprobs=8, num_generations=1, objective="distill", teacher_top_k=3)
    return options_for(model, fake, task=task, teacher_server_urls=urls, **(settings | changes))


# ---- what a teacher is asked, and what becomes of its answer


def test_scores_of_a_real_vllm_are_two_tables_by_falling_probability():
    path = Path(__file__).parent / "data" / "vllm" / "teacher_prompt_logprobs8.json"
    recorded = json.loads(path.read_text())
    ids = recorded["request"]["json"]["prompt"]
    found, logp = parse_scores(recorded["response"]["json"]["choices"][0] | {}, ids, 9)
    assert found.shape == logp.shape == (len(ids), 9)
    assert (found[0] == -1).all() and np.isneginf(logp[0]).all(), "nothing predicts the first token"
    assert (np.diff(logp[1:], axis=1)[logp[1:, 1:] > -np.inf] <= 0).all()
    assert (found[1:] == np.array(ids)[1:, None]).any(1).all(), "the actual token is always there"
    assert found[1].tolist() == [29, 28, 198, 506, 79, 284, 314, 30, 47] and logp[1, 8] == pytest.approx(
        -9.118081
    )
    assert found[2, 2] == 2 and found[2, 8] == -1, "among the first eight: no ninth"


def test_every_sample_goes_to_the_teacher_its_row_names_and_the_student_is_asked_for_nothing_more(model):
    with FakeServer() as fake, FakeServer() as a, FakeServer() as b:
        b.teach = lambda token, place, count: teacher_entry(token, place, count - 1)
        with Run(distilled(model, fake, teachers={"a": a, "b": b}, num_generations=2)) as run:
            groups = sorted(run.groups(4), key=lambda g: g.group_id)
        assert all(body["logprobs"] is None for body in fake.requests)
        assert len(a.requests) == len(b.requests) == 4
        for body in a.requests + b.requests:
            assert (body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == (1, 3, 1.0)
    for group in groups:
        assert group.dropped is None and len(group.samples) == 2, "no reward was asked for"
        for sample in group.samples:
            name = ROWS[sample.row_index]
            assert sample.teacher_id == name and sample.advantage == 0 and not sample.metrics
            ids, logp = sample.teacher_ids[sample.trained], sample.teacher_logp[sample.trained]
            assert ids.shape == (sample.trained.sum(), 4) and ids[:, 0].tolist() == [3] * len(ids)
            assert (ids == sample.input_ids[sample.trained][:, None]).any(1).all()
            assert (logp[:, 2] == -2.5).all() == (name == "a")
    assert run.metrics()["teacher_signal_frac"][0] == run.metrics()["teacher_signal_frac"][1] > 0
    assert "reward" not in run.metrics() and "frac_reward_zero_std" not in run.metrics()


class Forgetful(RolloutLoop):
    """Two turns, the second of which does not go on where the first ended: two samples."""

    async def generate_one(self, prompt, tools, group_id):
        turns = [await self.generate_one_turn(ids) for ids in ([3, 7, 4], [3, 8, 4])]
        return Rollout([{"role": "assistant", "content": "x"}], turns[-1].output_ids, turns)


def test_all_samples_of_a_rollout_are_scored(model):
    with FakeServer() as fake, FakeServer() as teacher:
        options = distilled(model, fake, teachers={"a": teacher, "b": teacher}, rollout_loop=Forgetful)
        with Run(options) as run:
            groups = run.groups(4)
        assert {tuple(body["prompt"][:3]) for body in teacher.requests} == {(3, 7, 4), (3, 8, 4)}
    assert all(len(g.samples) == 2 and all(s.teacher_ids is not None for s in g.samples) for g in groups)


def test_requests_are_limited_timed_and_retried(model):
    with FakeServer() as fake, FakeServer() as teacher:
        answer, lock, now, most = teacher.scores, threading.Lock(), [0], [0]

        def scores(body):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.02)
            with lock:
                now[0] -= 1
            return answer(body)

        teacher.scores, teacher.script = scores, ["500", "reset"]
        options = distilled(model, fake, teachers={"a": teacher, "b": fake}, num_generations=4)
        options.max_concurrent_scorings = 2
        run = Run(options)
        for server in run.loop.teachers.servers.values():
            server.backoff_s = 0.001
        with run:
            run.groups(4)
    values = run.metrics()
    assert most[0] == 2 and values["rollout/teacher_retry_count"] == 2
    assert len(values["rollout/teacher_s"]) == 16 and max(values["rollout/teacher_s"]) >= 0.02


def test_an_id_that_the_student_lacks_ends_the_run_at_the_sample(model):
    with FakeServer() as fake, FakeServer() as teacher:
        teacher.teach = lambda token, place, count: {
            **teacher_entry(token, place, count),
            "60": {"logprob": -3},
        }
        with (
            Run(distilled(model, fake, teachers={"a": teacher, "b": teacher})) as run,
            pytest.raises(RolloutError, match="teacher [ab] at http.* names token 60, .* has 60 rows"),
        ):
            run.groups(1)


@pytest.mark.parametrize(
    "step, text",
    [((400, {"error": {"message": "no such model"}}), "no such model"), ("500", "gave up after")],
)
def test_a_teacher_that_refuses_or_stays_away_ends_the_run_by_name(model, step, text):
    with FakeServer() as fake, FakeServer() as teacher:
        teacher.script = [step] * 1000
        options = distilled(model, fake, teachers={"a": teacher, "b": teacher}, vllm_server_timeout=0.3)
        with (
            Run(options) as run,
            pytest.raises(RolloutError, match=f"teacher [ab] cannot score .* row [0-3]: .*{text}"),
        ):
            run.groups(1)


def test_tokens_that_the_teacher_says_nothing_of_leave_the_loss_and_its_divisor(model):
    """Also those that its context has no room for; a sample without any other is not sent."""
    with FakeServer() as fake, FakeServer() as a, FakeServer() as b:
        a.teach = lambda token, place, count: teacher_entry(token, place, count) if place % 2 else {}
        b.max_model_len = 6  # prompts have 4 tokens: it sees one that was generated
        with Run(distilled(model, fake, teachers={"a": a, "b": b})) as run:
            groups = run.groups(4)
        samples = [s for g in groups for s in g.samples]
        assert max(len(body["prompt"]) for body in b.requests) == 5
    for sample in samples:
        places = np.flatnonzero(sample.trained)
        expected = range(5, len(sample), 2) if sample.teacher_id == "a" else [4]
        assert places.tolist() == list(expected)
    signal, trained = run.metrics()["teacher_signal_frac"]
    assert signal == sum(s.trained.sum() for s in samples) < trained
    assert not run.loop._flights and run.loop._sent_tokens == sum(map(len, samples))


def test_at_beta_1_the_token_itself_is_the_signal(model):
    with FakeServer() as fake, FakeServer() as teacher:
        teacher.teach = lambda token, place, count: {
            "5": {"logprob": -0.1},
            str(token): {"logprob": -2.0 if place > 5 else -9999.0},  # 0 in the teacher's eyes
        }
        with Run(distilled(model, fake, teachers={"a": teacher, "b": teacher}, beta=1.0)) as run:
            samples = [sample for group in run.groups(4) for sample in group.samples]
    assert samples and all(np.flatnonzero(s.trained).tolist() == list(range(6, len(s))) for s in samples)


def test_held_out_prompts_are_rewarded_one_rollout_each(model):
    with FakeServer() as fake, FakeServer() as teacher:
        held_out = {"eval_dataset": "rollout_tasks:held_out", "eval_steps": 4, "max_steps": 8}
        options = distilled(model, fake, "rollout_tasks:lengths", teachers={"only": teacher}, **held_out)
        with Run(options) as run:
            run.until(lambda: run.metrics().get("eval/version") == [1])
            values, group = run.metrics(), run.groups(1)[0]
    assert values["eval/reward"] == values["eval/pass@1"] == [0.0] * 3
    assert "reward" not in values and all(sample.teacher_id == "only" for sample in group.samples)


def test_a_sample_without_any_signal_is_not_sent(model):
    with FakeServer() as fake, FakeServer() as teacher:
        teacher.teach = lambda token, place, count: {}
        with Run(distilled(model, fake, teachers={"a": teacher, "b": teacher})) as run:
            groups = run.groups(4)
    assert {g.dropped for g in groups} == {"no trained token"} and run.loop._sent_tokens == 0


def test_with_rewards_the_teacher_scores_the_groups_that_are_kept(model):
    with FakeServer() as fake, FakeServer() as teacher:
        teacher.teach = lambda token, place, count: teacher_entry(token, place, count) if place > 5 else {}
        settings = {"objective": "grpo", "distill_coef": 0.5, "num_generations": 3}
        options = distilled(model, fake, "test_teachers:rewarded", teachers={"a": teacher}, **settings)
        with Run(options) as run:
            groups = sorted(run.groups(3), key=lambda g: g.group_id)
        assert len(teacher.requests) == 6 and all(body["logprobs"] == 8 for body in fake.requests)
    assert [g.dropped for g in groups] == ["equal rewards", None, None]
    for group in groups[1:]:
        assert [s.advantage for s in group.samples] == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)
        for sample in group.samples:
            assert sample.teacher_id == "a" and sample.topk_ids is not None and sample.trained[5:].all()


def test_a_recording_carries_what_the_teachers_said(model, tmp_path):
    with FakeServer() as fake, FakeServer() as teacher:
        with Run(distilled(model, fake, teachers={"a": teacher, "b": teacher})) as run:
            message = run.groups(4)[0]
    path = tmp_path / "groups.jsonl"
    Recording(str(path), go_on=False).write(message)
    again = read(path.read_text(), "line 1")
    for sample, same in zip(message.samples, again.samples, strict=True):
        assert same.teacher_id == sample.teacher_id
        assert (same.teacher_ids == sample.teacher_ids).all() and (
            same.teacher_logp == sample.teacher_logp
        ).all()


# ---- what is trained (the whole loop: tests/test_loop.py)


@pytest.mark.parametrize("student", ["adapters", "hybrid"])
def test_adapters_and_hybrids_learn_what_the_teacher_says(student, tmp_path, alone):
    """The divergence falls over steps of samples that the teacher speaks of in the same way."""
    groups, directory = random_groups(40, vocabulary=200), TINY
    for sample in (sample for group in groups for sample in group):
        sample.teacher_id = "a"
        sample.teacher_ids = np.stack([sample.input_ids, np.full_like(sample.input_ids, 7)], 1)  # [L, K + 1]
        sample.teacher_logp = np.log(np.float32([[0.1, 0.8]])).repeat(len(sample), 0)
    if student == "hybrid":
        directory = tmp_path / "hybrid"
        hybrid("Qwen3_5Text", torch.float32, vocab_size=264).save_pretrained(directory)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(directory)
    options = Options(
        model=str(directory),
        objective="distill",
        bf16=False,
        token_budget=256,
        learning_rate=1e-2,
        num_train_epochs=1.0,
        max_staleness=99,
        save_steps=0,
        output_dir=str(tmp_path / "out"),
        **({"lora_r": 4} if student == "adapters" else {}),
    )
    train(options, rollouts=ListRollouts(groups), sync=NoSync())
    found = [json.loads(line)["jsd"] for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert len(found) > 4 and found[-1] < 0.7 * found[0]


# ---- what is refused


def test_rows_must_name_a_teacher_of_the_run():
    names = {"a": "http://x", "b": "http://y"}
    check_rows(two_kinds().dataset, names)
    unnamed = two_kinds().dataset.remove_columns("teacher_id")
    check_rows(unnamed, {"default": "http://x"})  # one teacher needs no column
    with pytest.raises(ValueError, match="the dataset has no teacher_id.*needs the column"):
        check_rows(unnamed, names)
    for dataset in (two_kinds(["a", "c"]).dataset, [{"teacher_id": "c"}]):
        with pytest.raises(ValueError, match="names the teacher 'c'.*--teacher_server_urls, which has a, b"):
            check_rows(dataset, names)


def test_a_streamed_row_with_an_unknown_teacher_ends_the_run(model):
    with FakeServer() as fake, FakeServer() as teacher:
        with Run(distilled(model, fake, "test_teachers:stream", teachers={"a": teacher})) as run:
            with pytest.raises(ValueError, match="dataset row 0 names the teacher 'c'"):
                run.groups(1)


@pytest.mark.parametrize(
    "fault, options, text",
    [
        ({"tokenize": lambda text: [*text.encode()][::-1]}, {}, "must share a tokenizer"),
        ({"max_logprobs": 5}, {}, "greater than max allowed: 5: start it with --max-logprobs 8"),
        (
            {"teach": lambda t, p, k: teacher_entry(t, p, k) | {"9999": {"logprob": -1.0}}},
            {},
            "names token 9999.*has 264 rows",
        ),
        ({}, {"teacher_temperature": 2.0}, "answers the same at temperature 2.0 as at 1"),
        ({"replies": {"/health": (503, {"error": "dead"})}}, {}, "did not come up"),
        ({"replies": {"/v1/completions": (200, {"choices": [{}]})}}, {}, "is this a vLLM server"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_at_start(fault, options, text):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with FakeServer() as good, FakeServer() as teacher:
        good.tokenize = teacher.tokenize = lambda text: tokenizer(text).input_ids
        for name, value in fault.items():
            setattr(teacher, name, value)
        urls = {"good": good.url, "maths": teacher.url}
        settings = Options(model=TINY, objective="distill", teacher_server_urls=urls, vllm_server_timeout=0.2)
        settings = Options(**vars(settings) | options)
        with pytest.raises(OptionError, match=f"teacher .* at http.*{text}"):
            check_teachers(settings, tokenizer, 264)


def test_a_teacher_that_honours_its_temperature_may_have_one():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with FakeServer() as teacher:
        teacher.tokenize = lambda text: tokenizer(text).input_ids
        plain = teacher.scores

        def scores(body):
            status, answer = plain(body)
            for entry in filter(None, answer["choices"][0].get("prompt_logprobs") or []):
                for value in entry.values():
                    value["logprob"] /= body["temperature"]
            return status, answer

        teacher.scores = scores
        options = Options(model=TINY, objective="distill", teacher_temperature=2.0)
        options.teacher_server_urls = {"default": teacher.url}
        check_teachers(options, tokenizer, 264)
