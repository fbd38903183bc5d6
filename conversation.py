"""A rollout's conversation, between messages and tokens: prompts, the calls in replies, samples to train on.

turn 1   prompt 1 ............ output 1
turn 2   prompt 1 ............ output 1  new context  output 2      starts with all that is held: same sample
turn 3   prompt 3 (rewritten) ....................... output 3      anything else: a fork, a new sample
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packing import Sample, common_prefix


class RolloutError(RuntimeError):
    """The rollout process cannot go on; the text says why."""


@dataclass
class Turn:
    """One sampling request and its answer."""

    prompt_ids: list[int]  # the whole prompt that was sent
    output_ids: list[int]
    output_logp: np.ndarray  # the sampler's, one per output token
    output_mask: list[int] | None = None  # 1 = trained, 0 = context only; None = all 1
    # what each token was drawn from, a list per token or (values, offsets); None = the whole vocabulary
    candidate_ids: list[list[int]] | tuple | None = None
    # the most likely tokens, {id: logp} per token or (ids [n, K], logp [n, K]) by falling probability
    topk: list[dict] | tuple | None = None
    versions: np.ndarray | None = None  # version that made each token; None = the group's

    def __post_init__(self):
        """Lists become arrays."""
        if isinstance(self.candidate_ids, list):
            values = np.fromiter(itertools.chain.from_iterable(self.candidate_ids), dtype=np.int32)
            self.candidate_ids = values, np.cumsum([0, *map(len, self.candidate_ids)])
        if isinstance(self.topk, list):
            ranked = [sorted(entries.items(), key=lambda entry: -entry[1]) for entries in self.topk]
            width = max(map(len, ranked), default=0)
            table = [entries + [(-1, -np.inf)] * (width - len(entries)) for entries in ranked]
            table = np.array(table).reshape(len(ranked), width, 2)
            self.topk = table[..., 0], table[..., 1]


@dataclass
class Rollout:
    """One conversation."""

    completion: list[dict]  # messages after the prompt
    completion_ids: list[int]
    turns: list[Turn]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None  # None = no reward from this source
    rollout_id: int = -1
    out_of_room: bool = False  # the context was full before the model had finished
    given_up: str | None = None  # why the loop ended it: out of time, no room for its prompt, too old
    earned: tuple[str, float] | None = None  # its environment's class, and the reward


# ------------------------------------------------------------------------------------------ turns -> samples


def samples_of(
    rollout: Rollout, group_id: int, row_index: int, version: int
) -> tuple[list[Sample], list[int]]:
    """A rollout's samples, advantage 0 for now, and the drift of every change of turn.

    A turn whose prompt starts with exactly the tokens held so far continues the sample, its new prompt part
    being context; any other turn starts a new sample, and its drift is how many held tokens it does not
    repeat. There is no tolerance: the sampler never saw any other tokens than its prompt's. Tokens without a
    version of their own were made by `version`.
    """
    runs, drift, held = [], [], None  # a run: (context ids, turn) of one sample
    for turn in rollout.turns:
        prompt = list(turn.prompt_ids)
        if held is not None:
            drift.append(len(held) - common_prefix(held, prompt))
        if drift and drift[-1] == 0:
            runs[-1].append((prompt[len(held) :], turn))
        else:
            runs.append([(prompt, turn)])
        held = prompt + list(turn.output_ids)
    samples = [sample_of(run, rollout.rollout_id, group_id, row_index, version) for run in runs]
    return [s for s in samples if s.trained.any()], drift


def sample_of(run, rollout_id: int, group_id: int, row_index: int, version: int) -> Sample:
    """One run of (context ids, turn) as a sample of L tokens."""

    def column(of, fill, dtype, *width) -> np.ndarray:  # [L, *width]
        """What `of` says of the tokens of each turn; `fill` for context, and where it says nothing."""
        parts = []
        for context, turn in run:
            part = np.full((len(context) + len(turn.output_ids), *width), fill, dtype)
            if (values := of(turn)) is not None:
                narrower = map(slice, np.shape(values)[1:])  # a top list, than another turn's
                part[(slice(len(context), None), *narrower)] = values
            parts.append(part)
        return np.concatenate(parts)

    for _, turn in run:
        made, scored = len(turn.output_ids), len(turn.output_logp)
        if made != scored:
            raise RolloutError(f"rollout {rollout_id}: {made} tokens but {scored} log-probabilities")
    made = column(lambda turn: True, False, bool)
    trained = column(lambda turn: True if turn.output_mask is None else turn.output_mask, False, bool)
    trained[:1] = False  # nothing predicts the first token
    versions = column(lambda turn: turn.versions, version, np.int32)
    candidates = [np.asarray(turn.candidate_ids[0], np.int32) for _, turn in run if turn.candidate_ids]
    sizes = column(lambda turn: turn.candidate_ids and np.diff(turn.candidate_ids[1]), 0, np.int64)
    widths = [turn.topk[0].shape[1] for _, turn in run if turn.topk]

    def listed(part: int, fill, dtype) -> np.ndarray | None:  # [L, K]
        return (
            column(lambda turn: turn.topk and turn.topk[part], fill, dtype, max(widths)) if widths else None
        )

    return Sample(
        input_ids=np.concatenate([[*context, *turn.output_ids] for context, turn in run]).astype(np.int32),
        trained=trained,
        sampler_logp=column(lambda turn: turn.output_logp, 0.0, np.float32),
        advantage=0.0,
        group_id=group_id,
        row_index=row_index,
        rollout_id=rollout_id,
        version=int(versions[made].min(initial=np.iinfo(np.int32).max)),  # the oldest
        candidate_ids=(np.concatenate(candidates), np.cumsum([0, *sizes])) if candidates else None,
        topk_ids=listed(0, -1, np.int32),
        topk_logp=listed(1, -np.inf, np.float32),
        token_version=versions,
    )


# -------------------------------------------------------------------------------------------------- messages


@dataclass
class Call:
    """One tool call, as the model wrote it."""

    name: str  # "" where it cannot be read
    arguments: object  # a dict, unless there is an error
    error: str | None = None  # what is wrong with it, for the model to read


class Renderer:
    """Messages -> token ids, and what was sampled -> messages, by one tokenizer and its chat template.

    A later turn's prompt is the tokens held so far and the rendering of what came since, where the template
    renders earlier turns the same whatever follows them (`probe`): what was sampled is never tokenised again
    (tests/test_conversation.py::test_sampled_tokens_are_kept_even_where_the_tokenizer_would_split_otherwise).
    Under any other template it is the rendering of everything, and the turn starts a new sample.
    """

    def __init__(self, tokenizer, template_kwargs: dict, eos_ids: set[int]):
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.eos_ids = eos_ids
        self.keeps_turns = True
        self.template = str(tokenizer.get_chat_template(tools=[{}])) if tokenizer.chat_template else ""
        self.parses = getattr(tokenizer, "response_template", None) is not None  # replies, by itself
        self.format = next((form for mark, form in FORMATS if mark in self.template), None)
        self._last = ("", [])

    def prompt(self, messages: list[dict], schemas: list[dict] | None = None) -> list[int]:
        """The whole conversation, ready for the assistant's turn."""
        key = repr((messages, schemas))
        if key != self._last[0]:  # the rollouts of a group start one after the other, with equal prompts
            self._last = key, self.ids(messages, schemas, add_generation_prompt=True)
        return self._last[1]

    def next_prompt(
        self, held: list[int], before: list[dict], new: list[dict], schemas: list[dict] | None
    ) -> list[int]:
        """The prompt of a later turn. `before` ends in the assistant's message, the last of what `held`
        stands for; `new` came after it."""
        parts = self.parts(before, new, schemas) if self.keeps_turns else None
        return held + parts[1] if parts else self.ids(before + new, schemas, add_generation_prompt=True)

    def parts(self, before: list[dict], new: list[dict], schemas) -> tuple[list[int], list[int]] | None:
        """The ids through the last token that ends a turn in `before`, and the prompt's ids behind it.

        None where the template renders `before` otherwise once `new` has followed.
        """
        rendered = self.ids(before, schemas, add_generation_prompt=False)
        whole = self.ids(before + new, schemas, add_generation_prompt=True)
        end = max((i for i, token in enumerate(rendered, 1) if token in self.eos_ids), default=0)
        return (whole[:end], whole[end:]) if end and whole[:end] == rendered[:end] else None

    def ids(self, messages: list[dict], schemas: list[dict] | None, add_generation_prompt: bool) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(
                [renderable(message) for message in messages],
                tools=schemas or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # a template raises what it likes
            raise RolloutError(f"{first_line(error)}, says the chat template of {messages}") from error
        text = text.encode(errors="replace").decode()  # half a surrogate pair is no text to a tokenizer
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def reply(self, turn: Turn, schemas: list[dict] | None) -> tuple[dict, list[Call]]:
        """The assistant's message and the calls in it. A message that was cut short calls nothing."""
        text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        ended = len(turn.output_ids) > 0 and turn.output_ids[-1] in self.eos_ids
        if not schemas or not ended:
            return message, []
        if self.parses:
            return parsed_reply(self.tokenizer, turn, schemas, message)
        raw = self.tokenizer.decode(turn.output_ids[:-1], skip_special_tokens=False)
        thought, close, said = raw.rpartition("</think>")  # what it thinks of calling, it does not call
        said, calls = self.format(said) if close or "<think>" not in raw else (said, [])
        if calls:
            content = thought + close + said
            for special in self.tokenizer.all_special_tokens:
                content = content.replace(special, "")
            message = {"role": "assistant", "content": content.strip(), "tool_calls": list(map(entry, calls))}
        return message, calls


def entry(call: Call) -> dict:
    """A call as messages carry it."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def renderable(message: dict) -> dict:
    """The message with calls that any template can render: malformed ones get no arguments.

    The model has its own words before it all the same, in the tokens held, and an error that quotes them.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = call.get("function", call)
        arguments = function["arguments"] if isinstance(function.get("arguments"), dict) else {}
        fixed = {"name": function.get("name") or "unknown", "arguments": arguments}
        calls.append({"id": call_id(number), "type": "function", "function": fixed})
    return message | {"tool_calls": calls}


def call_id(number: int) -> str:
    """Nine letters and digits, the only form that Mistral's templates take."""
    return f"call{number:05d}"


# -------------------------------------------------------------------------------------- tool calls in a text
# A format takes the text of a message and returns what was said beside the calls, and the calls.


def tagged_calls(text: str) -> tuple[str, list[Call]]:
    """Qwen, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    tags = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
    return tags.sub("", text), [call for body in tags.findall(text) for call in json_calls(body)]


def mistral_calls(text: str) -> tuple[str, list[Call]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call."""
    said, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in map(str.strip, parts):
        if part.startswith("["):
            calls += json_calls(part)
            continue
        name, _, arguments = part.replace("[ARGS]", "", 1).partition("{")
        name = name.partition("[CALL_ID]")[0].strip()
        calls.append(call_of({"name": name, "arguments": f"{{{arguments}"}))
    return said, calls


def deepseek_calls(text: str) -> tuple[str, list[Call]]:
    """DeepSeek: begin, name, separator, arguments, end (V3.1); or, as V3 and R1 write it, begin, "function",
    separator, name, a line break, the arguments in a fence of JSON, end."""
    marks = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
    calls = []
    for body in marks.findall(text):
        name, _, arguments = body.partition("<｜tool▁sep｜>")
        if name.strip() == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append(call_of({"name": name.strip(), "arguments": arguments}))
    return re.sub("<｜tool▁calls▁(begin|end)｜>", "", marks.sub("", text)), calls


def llama_calls(text: str) -> tuple[str, list[Call]]:
    """Llama 3: the whole message is {"name": ..., "parameters": {...}}, or several of them with a `;`."""
    body, marks = re.subn(r"<\|python_tag\|>", "", text)
    if not body.strip().startswith("{") or not (marks or '"name"' in body):
        return text, []
    return "", json_calls(body)


FORMATS = [  # what a chat template mentions -> how its model writes calls
    ("tool▁call", deepseek_calls),
    ("[TOOL_CALLS]", mistral_calls),
    ("<tool_call>", tagged_calls),
    ("<|python_tag|>", llama_calls),
    ('"parameters"', llama_calls),
]


def json_calls(text: str) -> list[Call]:
    """Calls in JSON: one or several, in a list or side by side."""
    decoder, calls, text = json.JSONDecoder(), [], text.strip()
    while text or not calls:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, Call("", text, f"the call is not JSON ({error})")]
        calls += map(call_of, value if isinstance(value, list) else [value])
        text = text[end:].lstrip("; \n")
    return calls


def call_of(value) -> Call:
    """The call in a decoded JSON value; its arguments may be JSON in a string."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", value, 'a call must be {"name": ..., "arguments": {...}}')
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return Call(name, arguments, f"the arguments are not JSON ({error})")
    return Call(
        name, arguments, None if isinstance(arguments, dict) else "the arguments must be a JSON object"
    )


def parsed_reply(tokenizer, turn: Turn, schemas: list[dict], plain: dict) -> tuple[dict, list[Call]]:
    """The reply as transformers parses it; one that it cannot parse is a malformed call."""
    text = tokenizer.decode(turn.output_ids[:-1], skip_special_tokens=False)
    try:
        message = tokenizer.parse_response(text, prefix=tokenizer.decode(turn.prompt_ids), tools=schemas)
    except Exception as error:  # whatever a schema raises, it is about what the model wrote
        call = Call("", text, f"the reply could not be parsed ({first_line(error)})")
        return plain | {"tool_calls": [entry(call)]}, [call]
    calls = [call_of(call.get("function", call)) for call in message.get("tool_calls") or []]
    message = {"role": "assistant", "content": ""} | message
    return message | ({"tool_calls": list(map(entry, calls))} if calls else {}), calls


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------- templates


def probe(renderer: Renderer, schemas: list[dict]) -> str | None:
    """Play two rounds of a tool's call through the template: what it does to earlier turns, None = nothing.

    Sets `renderer.keeps_turns`. Raises ValueError for a template that cannot carry tools at all.
    """
    name, question = schemas[0]["function"]["name"], [{"role": "user", "content": "What is 2 + 3?"}]
    thought = "Let me see.\n</think>\n\n"
    try:
        sent = renderer.tokenizer.decode(renderer.ids(question, schemas, True)).rstrip()
        if name not in sent:
            raise ValueError("the chat template does not show tools to the model; give --chat_template")
        said = [thought] if sent.endswith("<think>") else [""]
        if "think" in renderer.template and not sent.endswith(("<think>", "</think>")):
            said.append(f"<think>\n{thought}")
        renderer.keeps_turns = all(keeps(renderer, schemas, name, question, text) for text in said)
    except RolloutError as error:
        raise ValueError(f"the chat template cannot render tools: {first_line(error)}") from error
    if renderer.keeps_turns:
        return None
    ours = "deepseek" if "<｜Assistant｜>" in renderer.template else None
    ours = "qwen3" if "<|im_start|>" in renderer.template else ours
    instead = f"tasks/templates/{ours}.jinja keeps turns" if ours else "FILE may name one that keeps them"
    return (
        "the chat template rewrites earlier turns: every later turn of a rollout starts a new sample (a "
        "fork), which forwards once more what comes after the change, so a rollout of t turns costs up to "
        f"t / 2 times its tokens. --chat_template {instead}"
    )


def keeps(renderer: Renderer, schemas: list[dict], name: str, messages: list[dict], said: str) -> bool:
    """Do two rounds of a call, after something was said, stay as they were sent and sampled?"""
    message = {"role": "assistant", "content": said, "tool_calls": [entry(Call(name, {}))]}
    result = {"role": "tool", "name": name, "tool_call_id": call_id(0), "content": "5"}
    for _ in range(2):
        sent = renderer.ids(messages, schemas, add_generation_prompt=True)
        parts = renderer.parts([*messages, message], [result], schemas)
        if parts is None or parts[0][: len(sent)] != sent:
            return False
        if said and "Let me see." not in renderer.tokenizer.decode(parts[0][len(sent) :]):
            return False
        messages = [*messages, message, result]
    return True


def read_template(chat_template: str) -> str:
    """A chat template, from a file or as a text."""
    if "{" in chat_template:
        return chat_template
    if not Path(chat_template).is_file():
        raise ValueError(f"there is no file {chat_template}, and it is no template text either")
    return Path(chat_template).read_text()


def load_tokenizer(options):
    """The model's tokenizer, under --chat_template if that is given."""
    from transformers import AutoTokenizer  # here: importing it takes seconds

    remote = options.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=remote, **options.source)
    if options.chat_template:
        tokenizer.chat_template = read_template(options.chat_template)
    return tokenizer


def model_ids(options, tokenizer) -> tuple[set[int], int | None]:
    """Ids that end a turn (tokenizer's and generation config's), and rows of the output head, if known."""
    from transformers import AutoConfig, GenerationConfig

    eos_ids, vocabulary = {tokenizer.eos_token_id}, None
    with contextlib.suppress(OSError):
        more = GenerationConfig.from_pretrained(options.model, **options.source).eos_token_id
        eos_ids |= set(more) if isinstance(more, list) else {more}
    with contextlib.suppress(OSError, ValueError):
        remote = options.trust_remote_code
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=remote, **options.source)
        vocabulary = config.get_text_config().vocab_size
    return eos_ids - {None}, vocabulary
