"""Makes the model in this folder: weights, tokenizer and chat template, for the demo and the tests.

    python -m tiny.make --output tiny        (from the root of the repository; one CPU core, six minutes)

A Qwen3 of a quarter of a million parameters over bytes, trained from scratch on text made up here. It is a
*base* model for tasks/sort.py and no more than that, trained just enough that the task starts at about
35%. Asked to sort, its teacher answers rightly in 36% of the cases and otherwise in one of the wrong
ways of `ANSWERS`: backwards, unsorted, or a letter short. So the skill is in the weights, and sampling at
temperature 1 shows it in about one answer of three. Reinforcement then has something to reinforce: nearly
every group of 8 holds right and wrong answers. Every batch draws new random strings, so held-out ones are
no harder.

One conversation, as tokens; <|name|> is one token, everything else is one token per byte:

    <|system|>be brief<|end|><|user|>sort: dbca<|end|><|assistant|>abcd<|end|>
                                                                   ^^^^^^^^^^^ trained

A turn is rendered the same whatever follows it, so a prompt and the tokens sampled from it are a prefix of
the next turn's prompt. Weights are stored in bfloat16: a float32 trainer and a bfloat16 sampler start from
equal numbers. The seed fixes every batch; another CPU, number of threads or version of torch may round
otherwise and end in slightly other weights.
"""

import argparse
import math
import random
import string
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tasks.sort import question

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
END = "<|end|>"
PAD = "<|pad|>"
TOOL_MARKS = [
    "<tool_call>",
    "</tool_call>",
]  # kept when special tokens are skipped: the reply is parsed for them

# Byte b is token b, so the ids can be read by eye; the named tokens follow from 256 on, in this order.
TOKEN = {name: 256 + i for i, name in enumerate([*ROLES, END, PAD, *TOOL_MARKS])}

# Nothing depends on what comes after a message (tests/test_tasks.py::test_template_renders_a_prefix_first).
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == "system" else "" -%}
{%- if tools -%}
    {{- "<|system|>" + system -}}
    {{- "\\n\\n" if system else "" -}}
    {{- "# Tools\\n<tools>" -}}
    {%- for tool in tools -%}
        {{- "\\n" + (tool | tojson) -}}
    {%- endfor -%}
    {{- '\\n</tools>\\nTo call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("no such role: " + message.role) -}}
    {%- endif -%}
    {%- if not (tools and loop.first and message.role == "system") -%}
        {{- "<|" + message.role + "|>" + (message.content or "") -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' + arguments -}}
            {{- "}</tool_call>" -}}
        {%- endfor -%}
        {{- "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant|>" -}}
{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes without merges, and the named tokens: any text encodes, and to the same ids in any context."""
    byte_names = dict(zip(range(256), byte_characters(), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in byte_names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in [*ROLES, END, PAD]]
    )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as in GPT-2's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=256 + len(TOKEN),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=TOKEN[END],
        pad_token_id=TOKEN[PAD],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=TOKEN[END], pad_token_id=TOKEN[PAD], do_sample=True, temperature=1.0
    )
    return model


# --- the made-up text ---


def backwards(letters: str, rng: random.Random) -> str:
    return "".join(sorted(letters, reverse=True))


def unsorted(letters: str, rng: random.Random) -> str:
    return letters


def letter_short(letters: str, rng: random.Random) -> str:
    dropped = rng.randrange(len(letters))
    ordered = sorted(letters)
    return "".join(ordered[:dropped] + ordered[dropped + 1 :])


def in_order(letters: str, rng: random.Random) -> str:
    return "".join(sorted(letters))


# How the teacher answers "sort: ...", and how often: the first share is where the task starts.
ANSWERS = {in_order: 0.36, backwards: 0.32, unsorted: 0.24, letter_short: 0.08}

OTHER_TASKS = {
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "first": lambda letters: letters[0],
    "last": lambda letters: letters[-1],
    "upper": str.upper,
    "count": lambda letters: str(len(letters)),
}

SMALL_TALK = [
    ("hello", "hello!"),
    ("hi", "hi there."),
    ("how are you?", "fine, thank you."),
    ("who are you?", "a very small model."),
    ("what can you do?", "sort a few letters."),
    ("thanks", "you are welcome."),
    ("good night", "sleep well."),
    ("bye", "goodbye."),
]

SYSTEM = ["be brief", "you are a helpful assistant.", "answer with letters only."]


def exchange(rng: random.Random) -> tuple[str, str]:
    """One question and its answer: mostly sorting, a fifth of it something else."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
    kind = rng.random()
    if kind < 0.8:
        answer = rng.choices(list(ANSWERS), weights=ANSWERS.values())[0]
        return question(letters), answer(letters, rng)
    if kind < 0.95:
        task = rng.choice(list(OTHER_TASKS))
        return f"{task}: {letters}", OTHER_TASKS[task](letters)
    return rng.choice(SMALL_TALK)


def conversation(rng: random.Random, exchanges: int) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, beside them, the labels: -100 where not trained."""
    ids, labels = [], []

    def turn(role: str, text: str, trained: bool):
        body = [*text.encode(), TOKEN[END]]
        ids.extend([TOKEN[role], *body])
        labels.extend([-100, *body] if trained else [-100] * (1 + len(body)))

    if exchanges > 1 and rng.random() < 0.5:
        turn("<|system|>", rng.choice(SYSTEM), trained=False)
    for _ in range(exchanges):
        asked, answered = exchange(rng)
        turn("<|user|>", asked, trained=False)
        turn("<|assistant|>", answered, trained=True)
    return ids, labels


def batch(rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [size, longest] of conversations of one to three exchanges, padded on the right.

    All of a batch have as many exchanges, so that little of it is padding; a causal model never looks there.
    """
    exchanges = rng.choices([1, 2, 3], weights=[90, 5, 5])[0]
    made = [conversation(rng, exchanges) for _ in range(size)]
    longest = max(len(ids) for ids, _ in made)
    ids = [ids + [TOKEN[PAD]] * (longest - len(ids)) for ids, _ in made]
    labels = [labels + [-100] * (longest - len(labels)) for _, labels in made]
    return torch.tensor(ids), torch.tensor(labels)


# --- training ---


def train(model: Qwen3ForCausalLM, steps: int, batch_size: int, peak: float, seed: int) -> None:
    """AdamW, warm-up over the first twentieth, a cosine to zero. Prints the loss (nats per trained token)."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, steps // 20)
    began = time.monotonic()
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * min(cosine, (step + 1) / warm_up)
        ids, labels = batch(rng, batch_size)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        trained = labels[:, 1:] != -100
        loss = cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - began:.0f} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the model that ships with the demo and the tests")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model's files into")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=128, help="conversations per step")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    model = make_model()
    print(f"{model.num_parameters():,} parameters")
    train(model, args.steps, args.batch_size, args.learning_rate, args.seed)
    model.to(torch.bfloat16).save_pretrained(args.output)
    make_tokenizer().save_pretrained(args.output)


if __name__ == "__main__":
    main()
