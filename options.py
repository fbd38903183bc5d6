"""Every option of a run, in one dataclass: defaults, help, and the checks made before a model is loaded.

    python train.py --model tiny --task tasks/sort.py --vllm_server_base_url embedded
    python train.py run.yaml --learning_rate 3e-6    a YAML or JSON file gives defaults, the command line wins
    python train.py run.yaml --dry_run               prints the resolved options and stops

Never: an option that has no effect in the mode chosen (it is refused, with the reason). --rollout_only and
--replay alone take a run's options as they are, those of the half they leave out too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


class OptionError(ValueError):
    """A value or combination of options that cannot work; the text names the option and says what to do."""


def option(default, help: str, **metadata):
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default, metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def choice(default, choices: list[str], help: str):
    return option(default, f"{help} ({', '.join(choices)})", choices=choices)


@dataclass
class Options:
    # Model and task
    model: str = option("", "hub name or directory of the model to train")
    model_init_kwargs: dict | str | None = option(None, "JSON for from_pretrained, e.g. a revision")
    dtype: str = choice("float32", ["auto", "float32", "bfloat16", "float16"], "how the weights are loaded")
    bf16: bool = option(True, "compute in bfloat16 (master weights stay float32); false = float32")
    fp16: bool = option(False, "compute in float16, the loss scaled, in place of bf16")
    trust_remote_code: bool = option(False, "run modelling code that comes with the model")
    task: str = option("", "the task module: a path (tasks/sort.py), or module:function that returns one")
    task_kwargs: dict | str | None = option(None, "JSON object handed to the task's dataset()")
    rollout_loop: str | None = option(None, "a RolloutLoop subclass, as path.py:Class or module:Class")
    chat_template: str | None = option(None, "a file or a text that replaces the tokenizer's chat template")
    chat_template_kwargs: dict | str | None = option(None, "JSON object handed to the chat template")

    # Generation
    num_generations: int = option(8, "rollouts per prompt (a group)")
    max_completion_length: int = option(2048, "most tokens of one turn")
    max_tool_calling_iterations: int | None = option(None, "rounds of tool calls of a rollout (none = all)")
    temperature: float = option(1.0, "sampling temperature, on both sides of the ratio")
    top_p: float = option(1.0, "nucleus sampling; below 1 it needs top_k")
    top_k: int = option(0, "sample among the k most likely tokens (0 = all)")
    min_p: float = option(0.0, "drop tokens below this share of the likeliest's probability; needs top_k")
    vllm_server_base_url: list[str] = option(
        ["http://localhost:8000"],
        "one or more server URLs, or the word embedded: start serve.py beside the trainer",
    )
    vllm_server_timeout: float = option(1800.0, "seconds: a server's start, one request, one weight update")
    embedded_max_model_len: int = option(1024, "context length of the embedded server")
    embedded_max_num_seqs: int = option(64, "sequences the embedded server decodes at once")
    max_concurrent_rollouts: int = option(512, "most rollouts in flight")
    rollout_timeout: float | None = option(None, "seconds for one whole rollout (none = no limit)")
    rollout_worker_timeout: float = option(300.0, "seconds of silence of the rollout process that end a run")
    on_reward_error: str = choice("stop", ["stop", "skip"], "what a reward that fails does to the run")
    max_staleness: int = option(4, "weight updates generation may run ahead of training")
    overlap: bool = option(True, "false: generate a step, train it, update the servers, in turn (a baseline)")
    eval_dataset: str | None = option(None, "held-out prompts: path.py:function, or .jsonl or .parquet file")
    eval_steps: int | None = option(None, "optimizer steps between evaluations; the first is at the start")
    record: str | None = option(None, "write every group that is generated to this file")
    replay: str | None = option(None, "train from a recorded file instead of servers, one pass over it")
    rollout_only: bool = option(False, "generate and score num_train_epochs passes, train nothing")
    log_completions: bool = option(False, "write all completions, print a group's of every version")
    num_completions_to_print: int | None = option(None, "how many of them (none = all)")

    # Objective
    objective: str = choice(
        "grpo", ["grpo", "distill"], "what is trained on: rewards, or what a teacher thinks of the samples"
    )
    score_centering: bool = option(True, "subtract the expected score under the sampler at every term")
    score_centering_tail: str = choice("rescaled", ["rescaled", "drop"], "tokens outside the top list")
    num_sampler_logprobs: int = option(8, "the sampler's top list, for score centering")
    epsilon: float = option(0.2, "clipped surrogate: lower clip is 1 - epsilon")
    epsilon_high: float | None = option(None, "upper clip is 1 + epsilon_high (none = epsilon)")
    vllm_importance_sampling_clip_min: float | None = option(0.5, "below this ratio a token is left out")
    vllm_importance_sampling_clip_max: float | None = option(5.0, "above it a token is left out")
    router_aux_loss_coef: float | None = option(None, "balances experts (none = the model's own, 0 = off)")
    loss_normalization: str = choice("step", ["step", "microbatch"], "what the loss is divided by")

    # Distillation
    teacher_server_urls: list[str] | None = option(
        None, "words name=url, or JSON (none = default=http://localhost:8001)"
    )
    teacher_top_k: int = option(8, "most likely tokens a teacher names at every position")
    max_concurrent_scorings: int = option(64, "most samples that one teacher is asked about at once")
    teacher_temperature: float = option(
        1.0, "temperature of both in the divergence, if the teacher's server can"
    )
    beta: float = option(0.0, "divergence: 0 = KL(teacher || student), 1 = KL(student || teacher), else JSD")
    add_tail_bucket: bool = option(True, "the tokens a teacher does not name are one more outcome")
    distill_coef: float = option(0.0, "weight of the divergence from a teacher beside --objective grpo")

    # Low-rank adapters
    lora_r: int = option(0, "rank of the adapters that are trained (0 = the whole model is)")
    lora_alpha: float = option(32.0, "an adapter's output is scaled by lora_alpha / lora_r")
    lora_rslora: bool = option(False, "scale it by lora_alpha / sqrt(lora_r) instead")
    lora_dropout: float = option(0.0, "dropout before the adapters")
    lora_target_modules: list[str] = option(
        ["all-linear"], "linear layers to adapt: all-linear, ends of names, or regular expressions"
    )
    lora_modules_to_save: list[str] = option([], "modules that are trained whole beside the adapters")
    lora_sync: str = choice(
        "auto",
        ["auto", "merged", "adapter"],
        "what servers get: merged weights, or adapters beside theirs; auto: adapters where they take them",
    )
    merge_on_save: bool = option(False, "checkpoints hold the merged model, and the adapters in adapter/")

    # Packing and optimisation
    token_budget: int | None = option(None, "most tokens of a row (none = max_model_len; 0 = by count)")
    share_prefixes: bool = option(True, "forward a prefix that samples share once")
    per_device_train_batch_size: int = option(8, "samples per row when token_budget is 0")
    gradient_accumulation_steps: int = option(1, "micro-batches (a row per rank) of a step")
    gradient_checkpointing: str = choice(
        "auto", ["auto", "true", "false"], "recompute activations in the backward; auto: where memory asks"
    )
    attention: str = choice("auto", ["auto", "triton", "flash", "reference"], "attention backend")
    compile: bool | None = option(None, "torch.compile the layers (none = on CUDA)")
    learning_rate: float = option(1e-6, "peak learning rate")
    lr_scheduler_type: str = choice(
        "constant", ["constant", "linear", "cosine", "cosine_with_min_lr"], "schedule after the warm-up"
    )
    lr_scheduler_kwargs: dict | str | None = option(None, "JSON of a cosine: num_cycles, min_lr, min_lr_rate")
    warmup_steps: int = option(0, "optimizer steps of linear warm-up")
    weight_decay: float = option(0.0, "AdamW weight decay")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_epsilon: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    num_train_epochs: float = option(3.0, "passes over the prompts")
    max_steps: int = option(-1, "optimizer steps; when set it replaces num_train_epochs")
    weight_sync_steps: int = option(1, "optimizer steps between updates of the servers")
    seed: int = option(42, "seed of sampling and of the trainer")
    shard_size: int | None = option(None, "ranks that share a copy of the weights (none = all)")
    ddp_timeout: int = option(1800, "seconds before a collective of the ranks gives up")

    # Logging and saving
    output_dir: str = option("outputs", "checkpoints, options.json, metrics.jsonl, report.html go here")
    report_to: str = choice("none", ["none", "tensorboard", "trackio"], "where metrics go besides")
    run_name: str | None = option(None, "the run's name there (none = that of output_dir)")
    logging_steps: int = option(1, "optimizer steps of a logging window")
    save_steps: int = option(500, "optimizer steps between checkpoints (0 = only at the end)")
    save_total_limit: int | None = option(None, "checkpoints kept (none = all)")
    save_only_model: bool = option(False, "leave out what a resume needs")
    resume_from_checkpoint: str | None = option(None, "a checkpoint, or true for the newest in output_dir")
    dry_run: bool = option(False, "print the resolved options and stop")

    def __post_init__(self):
        for name in ("model_init_kwargs", "task_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs"):
            setattr(self, name, parse_object(name, getattr(self, name)))
        if isinstance(self.vllm_server_base_url, str):
            self.vllm_server_base_url = [self.vllm_server_base_url]
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        self.gradient_checkpointing = str(self.gradient_checkpointing).lower()
        self.teacher_server_urls = parse_teachers(self.teacher_server_urls)
        if self.has_teachers and not self.replay:
            self.teacher_server_urls = self.teacher_server_urls or {"default": "http://localhost:8001"}

    @property
    def embedded(self) -> bool:
        return self.vllm_server_base_url == ["embedded"]

    def adapter(self, version: int) -> str:
        """What servers call the adapter of a version: no other run's name, nor another version's."""
        place = str(Path(self.output_dir).absolute())
        return f"lora-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}-v{version}"

    @property
    def distills(self) -> bool:
        """Is the divergence from a teacher all that is trained on?"""
        return self.objective == "distill"

    @property
    def has_teachers(self) -> bool:
        return self.distills or self.distill_coef != 0

    @property
    def compute_dtype(self) -> str:
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"


def parse_object(name: str, value) -> dict:
    """A dict, or the JSON text of one."""
    if value is None or isinstance(value, dict):
        return value or {}
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise OptionError(f"--{name} must be a JSON object, e.g. '{{\"size\": 100}}': {error}") from None
    if not isinstance(parsed, dict):
        raise OptionError(f"--{name} must be a JSON object, not {value!r}")
    return parsed


def parse_teachers(value) -> dict[str, str] | None:
    """Name -> URL, from such a dict, its JSON text, or words name=url."""
    if not value or isinstance(value, dict):
        return value or None
    words = [value] if isinstance(value, str) else value
    if words[0].startswith("{"):
        return parse_object("teacher_server_urls", " ".join(words))
    pairs = [word.partition("=") for word in words]
    if len({name for name, _, _ in pairs}) < len(pairs) or not all(name and url for name, _, url in pairs):
        raise OptionError(f"--teacher_server_urls: words name=url, each name once, not {' '.join(words)}")
    return {name: url for name, _, url in pairs}


SCHEDULE_KWARGS = {"cosine": {"num_cycles"}, "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"}}
# what a value must be, if it is not none: in words, in Python, and of which options
RANGES = [
    (
        "at least 1",
        lambda v: v >= 1,
        "num_generations max_completion_length max_tool_calling_iterations embedded_max_num_seqs "
        "max_concurrent_rollouts eval_steps num_completions_to_print num_sampler_logprobs teacher_top_k "
        "max_concurrent_scorings per_device_train_batch_size gradient_accumulation_steps weight_sync_steps "
        "shard_size logging_steps save_total_limit",
    ),
    ("at least 8", lambda v: v >= 8, "embedded_max_model_len"),
    (
        "0 or more",
        lambda v: v >= 0,
        "top_k token_budget epsilon_high vllm_importance_sampling_clip_min router_aux_loss_coef "
        "max_staleness distill_coef lora_r learning_rate warmup_steps weight_decay save_steps",
    ),
    (
        "above 0",
        lambda v: v > 0,
        "rollout_timeout rollout_worker_timeout vllm_importance_sampling_clip_max teacher_temperature "
        "lora_alpha adam_epsilon max_grad_norm num_train_epochs",
    ),
    ("in [0, 1]", lambda v: 0 <= v <= 1, "beta"),
    ("in [0, 1)", lambda v: 0 <= v < 1, "min_p epsilon lora_dropout adam_beta1 adam_beta2"),
    ("in (0, 1]", lambda v: 0 < v <= 1, "top_p"),
    ("above 0 and below 1e8", lambda v: 0 < v < 1e8, "vllm_server_timeout ddp_timeout"),
    ("0 to 2**63 - 1", lambda v: 0 <= v < 2**63, "seed"),
    ("at least 1, or -1 for num_train_epochs", lambda v: v == -1 or v >= 1, "max_steps"),
    (
        "0.01 or more: vLLM samples at no lower one, and greedily at 0",
        lambda v: v >= 0.01,
        "temperature",
    ),
]


def check(options: Options) -> Options:
    """Refuse what cannot work, before anything expensive starts. Raises OptionError; returns the options."""
    if not options.model:
        raise OptionError("--model is required: a hub name or a directory with config.json and weights")
    for name, value in vars(options).items():
        if value == "" and name != "task":
            raise OptionError(f"--{name} is empty; give it a value or leave it out")
    for must, allowed, names in RANGES:
        for name in names.split():
            value = getattr(options, name)
            if value is not None and not (allowed(value) and math.isfinite(value)):
                raise OptionError(f"--{name} is {value}; it must be {must}")
    low, high = options.vllm_importance_sampling_clip_min, options.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise OptionError(f"--vllm_importance_sampling_clip_min {low} must be below ..._clip_max {high}")
    if (options.top_p < 1 or options.min_p > 0) and options.top_k == 0 and not options.distills:
        raise OptionError(
            "--top_p below 1 and --min_p above 0 need --top_k, which bounds the candidate set that "
            "log-probabilities are renormalised over: without it an unchanged policy has a ratio other "
            "than 1. Add e.g. --top_k 64"
        )
    check_schedule(options)
    if options.max_steps > 0 and options.warmup_steps >= options.max_steps:
        raise OptionError(f"--warmup_steps {options.warmup_steps} leaves nothing of --max_steps")
    check_effects(options)
    if (options.eval_dataset is None) != (options.eval_steps is None):
        raise OptionError("--eval_dataset and --eval_steps have an effect only together")
    if options.eval_steps is not None and options.eval_steps % options.weight_sync_steps:
        raise OptionError(
            f"--eval_steps {options.eval_steps} must be a multiple of --weight_sync_steps "
            f"{options.weight_sync_steps}: servers evaluate the weights they have"
        )
    if options.replay is not None:
        check_replay(options)
    if options.rollout_only and (options.max_steps > 0 or options.eval_dataset):
        raise OptionError(
            "--max_steps and --eval_dataset have no effect with --rollout_only: nothing is trained, and "
            "--num_train_epochs bounds it"
        )
    check_objective(options)
    check_urls(options)
    for target in options.lora_target_modules:
        try:
            re.compile(target)
        except re.error as error:
            raise OptionError(f"--lora_target_modules {target} is no regular expression: {error}") from None
    if options.record is not None and Path(options.record).is_dir():
        raise OptionError(f"--record {options.record} is a directory; name a file")
    return options


def check_urls(options: Options) -> None:
    servers, teachers = options.vllm_server_base_url, options.teacher_server_urls or {}
    if options.embedded:
        servers = []
    elif "embedded" in servers:
        raise OptionError(
            "--vllm_server_base_url embedded stands alone: it cannot be mixed with other servers"
        )
    for name, url in [
        *(("vllm_server_base_url", url) for url in servers),
        *(("teacher_server_urls", url) for url in teachers.values()),
    ]:
        if not is_url(url):
            raise OptionError(f"--{name} {url}: a URL starts with http:// or https:// and names a host")
    if len({url.rstrip("/") for url in servers}) < len(servers):
        raise OptionError(f"--vllm_server_base_url names a server twice: {' '.join(servers)}")


def is_url(url) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and parts.port != 0
            and parts.hostname.split() == [parts.hostname]
        )
    except (ValueError, AttributeError):  # a port out of range; not a text
        return False


def check_objective(options: Options) -> None:
    if options.num_generations < 2 and not options.distills:
        raise OptionError(
            "--num_generations is 1; it must be at least 2: an advantage compares rollouts of one prompt. "
            "One will do for --objective distill"
        )
    if options.has_teachers and options.beta == 1 and not options.add_tail_bucket:
        raise OptionError(
            "--beta 1 needs --add_tail_bucket true: the one token of its support would be renormalised to 1 "
            "on both sides, and nothing would be learnt"
        )


def check_schedule(options: Options) -> None:
    kind, given = options.lr_scheduler_type, options.lr_scheduler_kwargs.keys()
    if kind != "constant" and options.max_steps < 0:
        raise OptionError(f"--lr_scheduler_type {kind} decays over --max_steps; set it")
    allowed = SCHEDULE_KWARGS.get(kind, set())
    if unknown := ", ".join(sorted(given - allowed)):
        takes = f"takes {', '.join(sorted(allowed))}" if allowed else "takes none"
        raise OptionError(
            f"--lr_scheduler_kwargs: {unknown} has no effect, --lr_scheduler_type {kind} {takes}"
        )
    for name, value in options.lr_scheduler_kwargs.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise OptionError(f"--lr_scheduler_kwargs: {name} is {value!r}; it must be a number, 0 or more")
    if kind == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        raise OptionError(
            f"--lr_scheduler_type {kind} needs one of min_lr and min_lr_rate: --lr_scheduler_kwargs "
            "'{\"min_lr_rate\": 0.1}'"
        )


# options that do something only in some mode: which, when they do nothing, and why
IDLE = [
    (
        "teacher_server_urls teacher_top_k max_concurrent_scorings teacher_temperature beta add_tail_bucket",
        lambda o: not o.has_teachers,
        "without --objective distill or --distill_coef",
    ),
    (
        "score_centering score_centering_tail num_sampler_logprobs epsilon epsilon_high distill_coef "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max",
        lambda o: o.distills,
        "with --objective distill, which has no policy term",
    ),
    ("on_reward_error", lambda o: o.distills and not o.eval_dataset, "with --objective distill: no rewards"),
    (
        "teacher_server_urls teacher_top_k max_concurrent_scorings",
        lambda o: o.replay,
        "with --replay: a recording holds what the teachers said",
    ),
    (
        "lora_alpha lora_rslora lora_dropout lora_target_modules lora_modules_to_save lora_sync "
        "merge_on_save",
        lambda o: not o.lora_r,
        "without --lora_r",
    ),
    ("lora_sync", lambda o: o.replay or o.rollout_only, "where nothing is sent: --replay, --rollout_only"),
    (
        "score_centering_tail num_sampler_logprobs",
        lambda o: not o.score_centering,
        "with --score_centering false",
    ),
    ("per_device_train_batch_size", lambda o: o.token_budget != 0, "without --token_budget 0"),
    (
        "embedded_max_model_len embedded_max_num_seqs",
        lambda o: not o.embedded,
        "without --vllm_server_base_url embedded",
    ),
    ("run_name", lambda o: o.report_to != "trackio", "without --report_to trackio"),
    ("num_completions_to_print", lambda o: not o.log_completions, "without --log_completions"),
    ("num_train_epochs", lambda o: o.max_steps > 0, "with --max_steps, which replaces it"),
]


def check_effects(options: Options) -> None:
    """Refuse an option that was set and does nothing in this mode; say so where it only feeds a metric."""
    defaults = Options()
    for names, idle, why in IDLE:
        for name in names.split() if idle(options) else []:
            if getattr(options, name) != getattr(defaults, name):
                raise OptionError(f"--{name} has no effect {why}; leave it out")
    if options.lora_sync == "adapter" and options.lora_modules_to_save:
        raise OptionError(
            "--lora_sync adapter sends adapters alone, and --lora_modules_to_save trains more: leave one out"
        )
    if options.lora_dropout:
        print(
            "note: under --lora_dropout the ratio of an unchanged policy is not 1, and samples that share a "
            "token share what is dropped there",
            flush=True,
        )
    if options.score_centering and not options.epsilon == options.epsilon_high == defaults.epsilon:
        print("note: under score centering --epsilon only feeds the clip_ratio metrics", flush=True)


def check_replay(options: Options) -> None:
    """A replay has no servers, no rollout process and no prompts of its own."""
    if not Path(options.replay).is_file():
        raise OptionError(f"--replay {options.replay}: there is no such file; --record FILE writes one")
    if options.token_budget is None:
        raise OptionError("--replay needs --token_budget: no server tells its max_model_len")
    for name in ("record", "rollout_only", "log_completions", "eval_dataset"):
        if getattr(options, name):
            raise OptionError(f"--{name} has no effect with --replay: nothing is generated; leave it out")


def parse(arguments: list[str]) -> Options:
    """Options of a command line. Its first word may be a YAML or JSON file of defaults; none = unset."""
    from transformers import HfArgumentParser

    def refuse(message: str):
        raise OptionError(message)

    parser = HfArgumentParser(Options, description="Asynchronous GRPO over prefix trees.", allow_abbrev=False)
    parser.error = refuse  # a line, where argparse would print every option
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = file_arguments(Path(arguments[0])) + arguments[1:]
    words, unset = without_none(arguments)
    options, unknown = parser.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
    if unknown:
        raise OptionError(f"no such option: {' '.join(unknown)}; --help lists them all")
    return dataclasses.replace(options, **dict.fromkeys(unset))


def without_none(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line without its `--option none` pairs, and the options whose last value that is."""
    kinds = typing.get_type_hints(Options)
    words, unset = [], []
    for word in arguments:
        name = words[-1][2:] if words and words[-1].startswith("--") else ""
        if word.lower() == "none" and name in kinds and word not in choices(name):
            if type(None) not in typing.get_args(kinds[name]):
                raise OptionError(f"--{name} needs a value, not none")
            unset.append(name)
            words.pop()
        else:
            if word.startswith("--") and word[2:] in unset:
                unset.remove(word[2:])
            words.append(word)
    return words, unset


def choices(name: str) -> list[str]:
    return Options.__dataclass_fields__[name].metadata.get("choices", [])


def file_arguments(path: Path) -> list[str]:
    """A YAML or JSON file of options, as words of a command line: checked as if they had been typed."""
    import yaml  # transformers brings it

    if not path.is_file():
        raise OptionError(f"no such file of options: {path}")
    try:
        values = yaml.safe_load(path.read_text())  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise OptionError(f"{path} must hold one mapping of option names to values")
    known = {f.name for f in dataclasses.fields(Options)}
    if unknown := sorted(set(map(str, values)) - known):
        raise OptionError(f"{path} holds options that do not exist: {', '.join(unknown)}")
    words, defaults = [], Options()
    for name, value in values.items():
        if value == getattr(defaults, name):  # an empty list could not be typed
            continue
        if value is None or isinstance(value, list):
            words += [f"--{name}", *map(as_word, value or ["none"])]
        else:
            words.append(f"--{name}={as_word(value)}")  # it may begin with a dash
    return words


def as_word(value) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def describe(options: Options) -> str:
    """The resolved options as JSON, the form that is printed and saved in output_dir."""
    return json.dumps(dataclasses.asdict(options), indent=2)


def parse_or_exit(arguments: list[str]) -> Options:
    """`parse` and `check`; a bad option is one line on stderr and exit code 2."""
    try:
        options = check(parse(arguments))
        if not options.task and options.replay is None:
            raise OptionError("--task is required: a module with dataset() and rewards, e.g. tasks/sort.py")
        return options
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
