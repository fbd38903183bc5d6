"""Claims about conversation.py: messages to tokens and back, and turns to samples.

Run: pytest tests/test_conversation.py
"""

from pathlib import Path

import numpy as np
import pytest
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_tasks import add, explode
from transformers.utils import get_json_schema

import conversation
from conversation import Call, Renderer, Rollout, RolloutError, Turn, probe, samples_of
from tiny.make import make_tokenizer

TEMPLATES = Path(__file__).parent.parent / "tasks" / "templates"
SCHEMAS = [get_json_schema(add), get_json_schema(explode)]

# ---- turns -> samples


def turn(prompt, output, **more) -> Turn:
    return Turn(prompt, output, [-0.1 * (i + 1) for i in range(len(output))], **more)


def samples(*turns, version=3):
    return samples_of(Rollout([], [], list(turns), rollout_id=5), group_id=1, row_index=0, version=version)


def test_rerendered_history_starts_a_new_sample():
    given, expect = case("A04_rerendered_history")["given"], case("A04_rerendered_history")["expect"]
    turns = [Turn(t["prompt_ids"], t["output_ids"], t["output_log_probs"]) for t in given["turns"]]
    made, drift = samples(*turns)
    assert len(made) == expect["samples_per_rollout"]
    for sample, wanted in zip(made, expect["samples"], strict=True):
        assert sample.input_ids.tolist() == wanted["input_ids"]
        assert sample.trained.astype(int).tolist() == wanted["completion_mask"]
        np.testing.assert_allclose(sample.sampler_logp, wanted["old_log_probs"], atol=1e-7)
    assert drift == [expect["drift_tokens_max"]]
    assert sum(int(s.trained.sum()) for s in made) == expect["trained_tokens_total"]


def test_turn_that_repeats_all_held_tokens_continues_the_sample():
    (sample,), drift = samples(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9, 9], [5, 6]))
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 5, 6]
    assert sample.trained.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert drift == [0] and sample.rollout_id == 5 and sample.group_id == 1


def test_one_token_of_drift_is_enough_to_fork():
    made, drift = samples(turn([1, 2], [3, 4]), turn([1, 2, 3, 7, 9], [5]))
    assert len(made) == 2 and drift == [1]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), min_size=1)
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_every_generated_token_is_trained_in_exactly_one_sample(plan):
    turns, held = [], []
    for continues, context, output in plan:
        prompt = held + context if continues else context
        turns.append(turn(prompt, output))
        held = prompt + output
    made, drift = samples(*turns)
    trained = [token for s in made for token in s.input_ids[s.trained].tolist()]
    assert trained == [token for t in turns for token in t.output_ids]
    assert len(drift) == len(turns) - 1 and len(made) == 1 + sum(d > 0 for d in drift)


def test_masked_tokens_are_context_and_a_sample_without_trained_ones_is_not_made():
    (sample,), _ = samples(turn([1], [3, 4], output_mask=[0, 1]), turn([8], [9], output_mask=[0]))
    assert sample.trained.tolist() == [False, False, True]


def test_first_token_is_never_trained():
    (sample,), _ = samples(turn([], [3, 4]))
    assert sample.trained.tolist() == [False, True]


def test_candidates_and_top_lists_stay_with_their_tokens():
    first = turn([1, 2], [3, 4], candidate_ids=[[3, 8], [4]], topk=[{3: -0.1, 8: -0.5}, {4: -0.2}])
    arrays = (np.array([[5, 7, 6]], np.int32), np.array([[-0.1, -0.2, -0.3]], np.float32))
    second = turn([1, 2, 3, 4, 9], [5], candidate_ids=(np.array([5, 6]), np.array([0, 2])), topk=arrays)
    third = turn([1, 2, 3, 4, 9, 5], [6])
    (sample,), _ = samples(first, second, third)
    values, offsets = sample.candidate_ids
    lists = [values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    assert lists == [[], [], [3, 8], [4], [], [5, 6], []]
    assert sample.topk_ids[[2, 3, 5]].tolist() == [[3, 8, -1], [4, -1, -1], [5, 7, 6]]
    assert (sample.topk_ids[[0, 1, 4, 6]] == -1).all() and np.isneginf(sample.topk_logp[6]).all()
    assert sample.topk_logp[2, 1] == np.float32(-0.5)


def test_empty_top_lists_are_no_error():
    (sample,), _ = samples(turn([1, 2], [3], topk=[{}]), turn([1, 2, 3], [], topk=[]))
    assert sample.topk_ids.shape == (3, 0)


def test_sample_carries_the_oldest_version_of_its_own_tokens():
    one, two = samples(
        turn([1], [3, 4], versions=np.array([6, 7], np.int32)),
        turn([9], [5, 6], versions=np.array([8, 8], np.int32)),
        version=6,
    )[0]
    assert (one.version, two.version) == (6, 8)
    assert one.token_version[one.trained].tolist() == [6, 7]
    assert samples(turn([1], [3]), version=4)[0][0].version == 4


def test_log_probabilities_that_do_not_fit_the_tokens_are_an_error():
    with pytest.raises(RolloutError, match="rollout 5: 2 tokens but 1 log-probabilities"):
        samples(Turn([1], [3, 4], [-0.1]))


# ---- tool calls in a text

ADD = Call("add", {"a": 2, "b": 3})
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    "form, text, said, calls",
    [
        ("tagged", "hm <tool_call>{JSON}</tool_call>", "hm ", [ADD]),
        (
            "tagged",
            "<tool_call>\n{JSON}\n</tool_call>\n<tool_call>{JSON}</tool_call> so",
            "\n so",
            [ADD, ADD],
        ),
        ("tagged", "2 + 3 is 5", "2 + 3 is 5", []),
        ("mistral", "[TOOL_CALLS][{JSON}, {JSON}]", "", [ADD, ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]add{"a": 2, "b": 3}', "", [ADD, ADD]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 2, "b": 3}', "", [ADD]),
        ("mistral", "no", "no", []),
        ("llama", '{"name": "add", "parameters": {"a": 2, "b": 3}}', "", [ADD]),
        ("llama", "<|python_tag|>{JSON}; {JSON}", "", [ADD, ADD]),
        ("llama", 'the JSON is {"name": "add"}', 'the JSON is {"name": "add"}', []),
        ("llama", '{"answer": 5}', '{"answer": 5}', []),
        ("deepseek", f'so {BEGIN}add{SEPARATOR}{{"a": 2, "b": 3}}{END}', "so ", [ADD]),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>"
            + f'{BEGIN}function{SEPARATOR}add\n```json\n{{"a": 2, "b": 3}}\n```{END}' * 2
            + "<｜tool▁calls▁end｜>",
            "",
            [ADD, ADD],
        ),
    ],
)
def test_calls_are_read_in_the_forms_that_models_write(form, text, said, calls):
    text = text.replace("{JSON}", '{"name": "add", "arguments": {"a": 2, "b": 3}}')
    assert getattr(conversation, f"{form}_calls")(text) == (said, calls)


@pytest.mark.parametrize(
    "form, text, name, error",
    [
        ("tagged", '<tool_call>{"name": "add", "argu', "", "not JSON"),
        ("tagged", "<tool_call>add(2, 3)</tool_call>", "", "not JSON"),
        ("tagged", "<tool_call>[1]</tool_call>", "", "a call must be"),
        (
            "tagged",
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            "add",
            "must be a JSON object",
        ),
        ("mistral", "[TOOL_CALLS][{", "", "not JSON"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": ', "add", "not JSON"),
        ("llama", '{"name": "add", "parameters": {"a"', "", "not JSON"),
        ("deepseek", f'{BEGIN}add{SEPARATOR}{{"a": 2', "add", "not JSON"),
        ("deepseek", f"{BEGIN}add{SEPARATOR}2, 3{END}", "add", "not JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(form, text, name, error):
    _, (call,) = getattr(conversation, f"{form}_calls")(text)
    assert call.name == name and error in call.error and call.arguments != {}


@given(st.text(alphabet='{}[]":,;<>/ntoal_cARGS｜▁ \n', max_size=60), st.sampled_from(conversation.FORMATS))
@settings(max_examples=300, deadline=None)
def test_nothing_a_model_writes_raises(text, form):
    for start in ("<tool_call>", "[TOOL_CALLS]", BEGIN, '{"name"'):
        _, calls = form[1](start + text)
        assert all(call.error or isinstance(call.arguments, dict) for call in calls)


# ---- messages -> tokens -> messages


def renderer_of(chat_template: str | None = None, specials: str = "", **template_kwargs) -> Renderer:
    """The shipped tokenizer under another template; `specials` are further tokens, by white space."""
    tokenizer = make_tokenizer()
    if specials:
        tokenizer.add_special_tokens({"additional_special_tokens": specials.split()})
        tokenizer.eos_token = specials.split()[0]
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    return Renderer(tokenizer, template_kwargs, {tokenizer.eos_token_id})


def said(renderer: Renderer, text: str, prompt=()) -> Turn:
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    return turn(list(prompt), ids + [renderer.tokenizer.eos_token_id])


QUESTION = [{"role": "user", "content": "2 + 3?"}]
TEXT_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def test_reply_becomes_a_message_with_calls():
    renderer = renderer_of()
    message, calls = renderer.reply(said(renderer, f"let me see {TEXT_CALL}"), SCHEMAS)
    assert calls == [ADD] and message["content"] == "let me see"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    message, calls = renderer.reply(said(renderer, " 5 "), SCHEMAS)
    assert (message, calls) == ({"role": "assistant", "content": " 5 "}, [])
    assert renderer.reply(said(renderer, TEXT_CALL), None)[1] == [], "without tools it is a text"


def test_calls_that_are_only_thought_of_are_not_made():
    renderer = renderer_of()
    assert renderer.reply(said(renderer, f"<think>{TEXT_CALL}?</think>5"), SCHEMAS)[1] == []
    assert renderer.reply(said(renderer, f"<think>{TEXT_CALL}"), SCHEMAS)[1] == []
    message, calls = renderer.reply(said(renderer, f"<think>hm</think>{TEXT_CALL}"), SCHEMAS)
    assert calls == [ADD] and message["content"] == "<think>hm</think>"


def test_sampled_tokens_are_kept_even_where_the_tokenizer_would_split_otherwise():
    renderer = renderer_of()
    mark = renderer.tokenizer.convert_tokens_to_ids("<tool_call>")
    spelled = list(b"<tool_call>")  # the same text, in tokens that the tokenizer would never choose
    prompt = renderer.prompt(QUESTION, SCHEMAS)
    one = said(renderer, TEXT_CALL, prompt)
    one.output_ids = spelled + one.output_ids[1:]
    message, calls = renderer.reply(one, SCHEMAS)
    result = {"role": "tool", "name": "add", "content": "5"}
    following = renderer.next_prompt(prompt + one.output_ids, [*QUESTION, message], [result], SCHEMAS)
    assert calls == [ADD] and following[: len(prompt) + len(one.output_ids)] == prompt + one.output_ids
    assert renderer.tokenizer.decode(following[-14:]).endswith("<|end|><|tool|>5<|end|><|assistant|>")
    renderer.keeps_turns = False
    rewritten = renderer.next_prompt(prompt + one.output_ids, [*QUESTION, message], [result], SCHEMAS)
    assert mark in rewritten[len(prompt) :] and rewritten[: len(prompt)] == prompt


def test_malformed_calls_can_be_rendered():
    items = "{% for name, value in c.function.arguments.items() %}{{ name }}{% endfor %}"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + items + "{% endfor %}"
    renderer = renderer_of("{% for m in messages %}" + calls + "{{ m.content }}{% endfor %}")
    for call in (Call("", "{", "not JSON"), Call("add", [1], "no object"), Call("add", None, "no object")):
        message = {"role": "assistant", "content": "", "tool_calls": [conversation.entry(call)]}
        assert renderer.ids([message], None, False)


def test_messages_that_the_template_does_not_take_are_named():
    with pytest.raises(
        RolloutError, match="no such role: wizard, says the chat template of .*'content': 'hi'"
    ):
        renderer_of().prompt([{"role": "wizard", "content": "hi"}])


def test_half_a_surrogate_pair_that_a_model_escaped_is_rendered():
    renderer = renderer_of()
    message, (call,) = renderer.reply(said(renderer, TEXT_CALL.replace("2", '"\\ud83d"')), SCHEMAS)
    assert call.arguments == {"a": "\ud83d", "b": 3}
    assert renderer.ids([*QUESTION, message], SCHEMAS, False)


def test_replies_are_parsed_by_transformers_where_the_tokenizer_says_how():
    renderer = renderer_of()
    renderer.tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open": "!call ",
                "close": "!end",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    renderer = Renderer(renderer.tokenizer, {}, renderer.eos_ids)
    prompt = renderer.prompt(QUESTION, SCHEMAS)
    text = 'so !call {"name": "add", "arguments": {"a": 2, "b": 3}}!end'
    message, calls = renderer.reply(said(renderer, text, prompt), SCHEMAS)
    assert calls == [ADD] and message["role"] == "assistant" and "so" in message["content"]
    message, (call,) = renderer.reply(said(renderer, "!call {oh!end", prompt), SCHEMAS)
    assert "could not be parsed" in call.error and call.arguments == "!call {oh!end"


# ---- templates

QWEN = "<|im_end|> <|im_start|>"
DEEPSEEK = (
    "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    f"{BEGIN} {END} {SEPARATOR} <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{{ m.content if loop.last else m.content.split("</think>")[-1].strip() }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% for t in tools or [] %}{% if loop.first %}{{ t | tojson }}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    "name, specials, template_kwargs",
    [
        ("qwen3", QWEN, {}),
        ("qwen3", QWEN, {"enable_thinking": False}),
        ("deepseek", DEEPSEEK, {}),
        ("deepseek", DEEPSEEK, {"thinking": True}),
    ],
)
def test_shipped_templates_leave_earlier_turns_alone(name, specials, template_kwargs):
    renderer = renderer_of((TEMPLATES / f"{name}.jinja").read_text(), specials, **template_kwargs)
    assert probe(renderer, SCHEMAS) is None and renderer.keeps_turns and renderer.format


def test_shipped_qwen_template_writes_its_models_format():
    renderer = renderer_of((TEMPLATES / "qwen3.jinja").read_text(), QWEN)
    call = conversation.entry(ADD)
    results = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso", "tool_calls": [call, call]},
        *results,
    ]
    text = renderer.tokenizer.decode(renderer.ids(messages, None, True))
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nso\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    shown = renderer.tokenizer.decode(renderer.ids(messages, SCHEMAS, True))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and shown.count("Be brief.") == 1
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in shown


def test_shipped_deepseek_template_goes_on_after_a_result():
    renderer = renderer_of((TEMPLATES / "deepseek.jinja").read_text(), DEEPSEEK)
    message = {"role": "assistant", "content": "", "tool_calls": [conversation.entry(ADD)]}
    text = renderer.tokenizer.decode(
        renderer.ids([*QUESTION, message, {"role": "tool", "content": "5"}], None, True)
    )
    assert text == (
        f"<｜User｜>2 + 3?<｜Assistant｜></think><｜tool▁calls▁begin｜>{BEGIN}add{SEPARATOR}"
        f'{{"a": 2, "b": 3}}{END}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁output▁begin｜>5<｜tool▁output▁end｜>"
    )


def test_probe_finds_a_template_that_drops_earlier_thoughts():
    renderer = renderer_of(FORGETFUL, QWEN)
    warning = probe(renderer, SCHEMAS)
    assert not renderer.keeps_turns and "a new sample (a fork)" in warning
    assert "--chat_template tasks/templates/qwen3.jinja" in warning


def test_probe_refuses_a_template_that_cannot_carry_tools():
    with pytest.raises(ValueError, match="does not show tools"):
        probe(renderer_of("{% for m in messages %}{{ m.content }}{% endfor %}"), SCHEMAS)
    with pytest.raises(ValueError, match="cannot render tools: no tools here"):
        probe(renderer_of("{{ raise_exception('no tools here') }}"), SCHEMAS)
    assert probe(renderer_of(), SCHEMAS) is None
