"""The shipped model, its tokenizer and template, and the task it is made for.

pytest tests/test_tasks.py
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from tasks import sort, sums, two_orders
from tiny import make

TINY = Path(__file__).parent.parent / "tiny"

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "sort: dbca"},
    {"role": "assistant", "content": "abcd"},
    {"role": "user", "content": "and now: zyx — ünïcode 🙂\n\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "é"}}}],
    },
    {"role": "tool", "name": "look_up", "content": '{"found": true}'},
    {"role": "assistant", "content": " xyz "},
]


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return word


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def render(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


# --- the files ---


def test_weights_fit_in_git_and_load_as_float32(model):
    assert sum(path.stat().st_size for path in TINY.iterdir() if path.is_file()) < 1_500_000
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(w, w.to(torch.bfloat16).float()) for w in model.parameters())


def test_ids_of_tokenizer_and_configs_agree(tokenizer, model):
    assert tokenizer.is_fast
    assert len(tokenizer) == model.config.vocab_size == model.lm_head.weight.shape[0]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == end
    assert tokenizer.pad_token_id == model.config.pad_token_id != end
    assert all(tokenizer.convert_tokens_to_ids(name) == token for name, token in make.TOKEN.items())


def test_shipped_tokenizer_and_template_are_those_of_the_script(tokenizer):
    made = make.make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template == (TINY / "chat_template.jinja").read_text()


# --- the tokenizer ---


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    if "<" not in text:
        assert ids == list(text.encode())


def test_special_tokens_are_one_token_and_skipped_on_request_but_tool_marks_stay(tokenizer):
    text = "<|assistant|>a<tool_call>b</tool_call><|end|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 6
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>b</tool_call>"


# --- the template ---


@pytest.mark.parametrize("tools", [None, [get_json_schema(look_up)]], ids=["no tools", "tools"])
@pytest.mark.parametrize("first", [0, 1], ids=["system", "no system"])
def test_template_renders_a_prefix_first(tokenizer, tools, first):
    messages = CONVERSATION[first:]
    whole = render(tokenizer, messages, tools=tools)
    for i in range(1, len(messages)):
        begun = render(tokenizer, messages[:i], tools=tools)
        assert whole[: len(begun)] == begun
        if messages[i]["role"] == "assistant":
            prompt = render(tokenizer, messages[:i], tools=tools, add_generation_prompt=True)
            assert whole[: len(prompt)] == prompt
            answer = render(tokenizer, messages[: i + 1], tools=tools)[len(prompt) :]
            assert answer[-1] == tokenizer.eos_token_id and answer.count(tokenizer.eos_token_id) == 1


def test_template_shows_schemas_calls_and_results(tokenizer):
    text = render(tokenizer, CONVERSATION, tools=[get_json_schema(look_up)], tokenize=False)
    system = text[: text.index("<|end|>")]
    assert system.startswith("<|system|>be brief\n") and '"name": "look_up"' in system
    assert (
        '<|assistant|><tool_call>{"name": "look_up", "arguments": {"word": "é"}}</tool_call><|end|>' in text
    )
    assert '<|tool|>{"found": true}<|end|>' in text


def test_template_takes_arguments_that_are_already_json(tokenizer):
    call = {"name": "look_up", "arguments": '{"word":1}'}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = render(tokenizer, messages, tokenize=False)
    assert text.endswith('<tool_call>{"name": "look_up", "arguments": {"word":1}}</tool_call><|end|>')


def test_template_refuses_a_role_without_a_token(tokenizer):
    with pytest.raises(Exception, match="no such role: developer"):
        render(tokenizer, [{"role": "developer", "content": "x"}])


# --- the task ---


def test_dataset_is_the_same_for_the_same_seed():
    one, two, other = (sort.dataset(size=50, seed=seed) for seed in (1, 1, 2))
    assert one[:] == two[:]
    assert one["prompt"] != other["prompt"]
    assert one.column_names == ["prompt", "answer"]
    assert one[0]["prompt"] == [{"role": "user", "content": one[0]["prompt"][0]["content"]}]


def test_answers_are_the_letters_in_order():
    for length in (1, 5):
        for row in sort.dataset(size=20, length=length):
            letters = row["prompt"][0]["content"].removeprefix("sort: ")
            assert len(letters) == length and row["answer"] == "".join(sorted(letters))


def test_two_orders_asks_for_either_in_turn():
    rows = two_orders.dataset(size=4)
    assert rows["teacher_id"] == ["sort", "tros"] * 2
    for row, plain in zip(rows, sort.dataset(size=4), strict=True):
        letters = plain["prompt"][0]["content"].removeprefix("sort: ")
        assert row["prompt"][0]["content"] == f"{row['teacher_id']}: {letters}"
        assert row["answer"] == "".join(sorted(letters, reverse=row["teacher_id"] == "tros"))
    assert set(two_orders.dataset(kinds=["tros"], size=3)["teacher_id"]) == {"tros"}
    with pytest.raises(ValueError, match="kinds is"):
        two_orders.dataset(kinds=["up"])


@pytest.mark.parametrize("options", [{"size": 0}, {"length": 0}])
def test_dataset_refuses_nothing_to_sort(options):
    with pytest.raises(ValueError, match="at least 1"):
        sort.dataset(**options)


def test_only_the_exact_answer_is_rewarded():
    replies = ["abcd", " abcd\n", "dcba", "abc", "abcdd", "abcd!", "the answer is abcd", "ABCD", "", None]
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    completions.append([{"role": "assistant", "content": "dcba"}, {"role": "assistant", "content": "abcd"}])
    completions.append([])
    answer = ["abcd"] * len(completions)
    (reward,) = sort.rewards
    values = reward(prompts=None, completions=completions, completion_ids=None, answer=answer, row_index=[0])
    assert values == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert all(type(value) is float for value in values)


def test_each_rollout_is_held_against_its_own_answer():
    completions = [[{"role": "assistant", "content": text}] for text in ("ab", "cd", "cd")]
    assert sort.is_sorted(None, completions, None, ["ab", "ab", "cd"]) == [1, 0, 1]


def test_no_held_out_sum_is_trained_on_and_the_last_number_counts():
    asked = [row["prompt"][-1]["content"] for row in sums.dataset()]
    held_out = [row["prompt"][-1]["content"] for row in sums.held_out()]
    assert len({*asked, *held_out}) == len(asked) + len(held_out) == 8192 + 64
    assert all(row["answer"] == str(eval(row["prompt"][-1]["content"][8:-1])) for row in sums.held_out())
    texts = ["7 + 5 = 12", "12, or is it 13", "1,200", "none", ""]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    scores = sums.is_right(texts, [*answers, []], None, ["12", "12", "1200", "12", "12", "12"])
    assert scores == [1, 0, 1, 0, 0, 0]


# --- the model on the task ---


@torch.no_grad()
def answers(model, tokenizer, prompts: list[list[dict]], longest: int = 12) -> list[str]:
    """Sampled at temperature 1 from one seed; the prompts are of one length."""
    torch.manual_seed(0)
    ids = torch.tensor([render(tokenizer, prompt, add_generation_prompt=True) for prompt in prompts])
    output = model.generate(ids, max_new_tokens=longest)
    return tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)


def test_task_starts_between_a_fifth_and_a_half_on_held_out_strings(model, tokenizer):
    for options in ({}, {"length": 4}):
        rows = sort.dataset(size=600, seed=12345, **options)
        texts = answers(model, tokenizer, rows["prompt"])
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        assert 0.2 < np.mean(sort.is_sorted(None, completions, None, rows["answer"])) < 0.5


def test_nearly_every_group_has_right_and_wrong_answers(model, tokenizer):
    rows = sort.dataset(size=60, seed=54321)
    prompts = [prompt for prompt in rows["prompt"] for _ in range(8)]
    right = [answer for answer in rows["answer"] for _ in range(8)]
    completions = [[{"content": text}] for text in answers(model, tokenizer, prompts)]
    groups = np.reshape(sort.is_sorted(None, completions, None, right), (60, 8))
    assert np.mean(groups.max(axis=1) > groups.min(axis=1)) > 0.85


# --- the script ---


def test_training_text_is_rendered_as_the_template_would(tokenizer):
    rng = random.Random(0)
    for exchanges in (1, 2, 3):
        ids, labels = make.conversation(rng, exchanges)
        text = tokenizer.decode(ids)
        turns = [turn.split("|>", 1) for turn in text.removesuffix("<|end|>").split("<|end|>")]
        messages = [{"role": role.removeprefix("<|"), "content": content} for role, content in turns]
        assert render(tokenizer, messages) == ids
        trained = tokenizer.decode([token for token in labels if token != -100])
        assert trained == "".join(m["content"] + "<|end|>" for m in messages if m["role"] == "assistant")


def test_a_short_run_of_the_script_makes_a_loadable_model_twice_the_same(tmp_path):
    for name in ("one", "two"):
        make.main(["--output", str(tmp_path / name), "--steps", "2", "--batch-size", "4", "--seed", "3"])
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        path.name for path in TINY.iterdir() if path.is_file() and path.suffix != ".py"
    }
