"""Every option of a run, in one dataclass: defaults, help, and the checks made before a model is loaded.

    python train.py --model tiny --task tasks/sort.py --vllm_server_base_url embedded
    python train.py run.yaml --learning_rate 3e-6    a YAML or JSON file gives defaults, the command line wins
    python train.py run.yaml --dry_run               looks at the inputs, prints the options, stops

Never: an option that has no effect in the mode chosen (it is refused, with the reason). --rollout_only and
--replay alone take a run's options as they are, those of the half they leave out too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import requests


class OptionError(ValueError):
    """A value or combination of options that cannot work; the text names the option and says what to do."""


def refuse(wrong, why: str) -> None:
    if wrong:
        raise OptionError(why)


# the decaying schedules of the learning rate, and what they take
SOURCE = ("revision", "subfolder", "token", "cache_dir", "local_files_only")  # where from, not how
SCHEDULE_KWARGS = {
    "linear": set(),
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"},
}


def option(default, help: str, interval: str | None = None, **metadata):
    metadata |= {"help": help, "interval": interval}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: str, choices: list[str], help: str):
    return option(default, help, choices=choices)


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
    num_generations: int = option(8, "rollouts per prompt (a group)", "[1, inf)")
    max_completion_length: int = option(2048, "most tokens of one turn", "[1, inf)")
    max_tool_calling_iterations: int | None = option(None, "rounds of tool calls (none = all)", "[1, inf)")
    temperature: float = option(1.0, "sampling temperature, on both sides of the ratio", "[0.01, inf)")
    top_p: float = option(1.0, "nucleus sampling; below 1 it needs top_k", "(0, 1]")
    top_k: int = option(0, "sample among the k most likely tokens (0 = all)", "[0, inf)")
    min_p: float = option(0.0, "least share of the likeliest's probability; needs top_k", "[0, 1)")
    vllm_server_base_url: list[str] = option(["http://localhost:8000"], "URLs, or embedded: start serve.py")
    vllm_server_timeout: float = option(1800.0, "seconds: a start, a request, a weight update", "(0, 1e8)")
    embedded_max_model_len: int = option(1024, "context length of the embedded server", "[8, inf)")
    embedded_max_num_seqs: int = option(64, "sequences it decodes at once", "[1, inf)")
    max_concurrent_rollouts: int = option(512, "most rollouts in flight", "[1, inf)")
    rollout_timeout: float | None = option(
        None, "seconds for one whole rollout (none = no limit)", "(0, inf)"
    )
    rollout_worker_timeout: float = option(300.0, "seconds of its silence that end a run", "(0, inf)")
    on_reward_error: str = choice("stop", ["stop", "skip"], "what a reward that fails does to the run")
    max_staleness: int = option(4, "weight updates generation may run ahead of training", "[0, inf)")
    overlap: bool = option(True, "false: generate a step, train it, update the servers, in turn (a baseline)")
    eval_dataset: str | None = option(None, "held-out prompts: path.py:function, or .jsonl or .parquet file")
    eval_steps: int | None = option(None, "steps between evaluations; the first is at the start", "[1, inf)")
    record: str | None = option(None, "write every group that is generated to this file")
    replay: str | None = option(None, "train from a recorded file instead of servers, one pass over it")
    rollout_only: bool = option(False, "generate and score num_train_epochs passes, train nothing")
    log_completions: bool = option(False, "write all completions, print a group's of every version")
    num_completions_to_print: int | None = option(None, "how many of them (none = all)", "[1, inf)")

    # Objective
    objective: str = choice("grpo", ["grpo", "distill"], "train on rewards, or on a teacher's opinion")
    score_centering: bool = option(True, "subtract the expected score under the sampler at every term")
    score_centering_tail: str = choice("rescaled", ["rescaled", "drop"], "tokens outside the top list")
    num_sampler_logprobs: int = option(8, "the sampler's top list, for score centering", "[1, inf)")
    epsilon: float = option(0.2, "clipped surrogate: lower clip is 1 - epsilon", "[0, 1)")
    epsilon_high: float | None = option(None, "upper clip is 1 + epsilon_high (none = epsilon)", "[0, inf)")
    vllm_importance_sampling_clip_min: float | None = option(0.5, "no token below this ratio", "[0, inf)")
    vllm_importance_sampling_clip_max: float | None = option(5.0, "nor above this one", "(0, inf)")
    router_aux_loss_coef: float | None = option(None, "balances experts (none = the model's)", "[0, inf)")
    loss_normalization: str = choice("step", ["step", "microbatch"], "what the loss is divided by")

    # Distillation
    teacher_server_urls: list[str] | None = option(None, "words name=url (none = port 8001 on localhost)")
    teacher_top_k: int = option(8, "most likely tokens a teacher names at every position", "[1, inf)")
    max_concurrent_scorings: int = option(64, "samples a teacher is asked about at once", "[1, inf)")
    teacher_temperature: float = option(
        1.0, "of both in the divergence, if the teacher's server can", "(0, inf)"
    )
    beta: float = option(0.0, "0 = KL(teacher || student), 1 = KL(student || teacher), else JSD", "[0, 1]")
    add_tail_bucket: bool = option(True, "the tokens a teacher does not name are one more outcome")
    distill_coef: float = option(0.0, "weight of the divergence beside --objective grpo", "[0, inf)")

    # Low-rank adapters
    lora_r: int = option(0, "rank of the adapters that are trained (0 = the whole model is)", "[0, inf)")
    lora_alpha: float = option(32.0, "an adapter's output is scaled by lora_alpha / lora_r", "(0, inf)")
    lora_rslora: bool = option(False, "scale it by lora_alpha / sqrt(lora_r) instead")
    lora_dropout: float = option(0.0, "dropout before the adapters", "[0, 1)")
    lora_target_modules: list[str] = option(["all-linear"], "layers, by ends of names or regular expressions")
    lora_modules_to_save: list[str] = option([], "modules that are trained whole beside the adapters")
    lora_sync: str = choice("auto", ["auto", "merged", "adapter"], "what servers get; auto: what they take")
    merge_on_save: bool = option(False, "checkpoints hold the merged model, and the adapters in adapter/")

    # Packing and optimisation
    token_budget: int | None = option(None, "most of a row (none = max_model_len; 0 = by count)", "[0, inf)")
    share_prefixes: bool = option(True, "forward a prefix that samples share once")
    per_device_train_batch_size: int = option(8, "samples per row when token_budget is 0", "[1, inf)")
    gradient_accumulation_steps: int = option(1, "micro-batches (a row per rank) of a step", "[1, inf)")
    gradient_checkpointing: str = choice("auto", ["auto", "true", "false"], "recompute activations")
    attention: str = choice("auto", ["auto", "triton", "flash", "reference"], "attention backend")
    compile: bool | None = option(None, "torch.compile the layers (none = on CUDA)")
    learning_rate: float = option(1e-6, "peak learning rate", "[0, inf)")
    lr_scheduler_type: str = choice("constant", ["constant", *SCHEDULE_KWARGS], "after the warm-up")
    lr_scheduler_kwargs: dict | str | None = option(None, "JSON of a cosine: num_cycles, min_lr, min_lr_rate")
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", "[0, inf)")
    weight_decay: float = option(0.0, "AdamW weight decay", "[0, inf)")
    adam_beta1: float = option(0.9, "AdamW beta1", "[0, 1)")
    adam_beta2: float = option(0.999, "AdamW beta2", "[0, 1)")
    adam_epsilon: float = option(1e-8, "AdamW epsilon", "(0, inf)")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm", "(0, inf)")
    num_train_epochs: float = option(3.0, "passes over the prompts", "(0, inf)")
    max_steps: int = option(-1, "optimizer steps; when set it replaces num_train_epochs", "[-1, inf)")
    weight_sync_steps: int = option(1, "optimizer steps between updates of the servers", "[1, inf)")
    seed: int = option(42, "seed of sampling and of the trainer", "[0, 9e18]")
    shard_size: int | None = option(None, "ranks that share a copy of the weights (none = all)", "[1, inf)")
    ddp_timeout: int = option(1800, "seconds before a collective of the ranks gives up", "(0, 1e8)")

    # Logging and saving
    output_dir: str = option("outputs", "checkpoints, options.json, metrics.jsonl, report.html go here")
    report_to: str = choice("none", ["none", "tensorboard", "trackio"], "where metrics go besides")
    run_name: str | None = option(None, "the run's name there (none = that of output_dir)")
    logging_steps: int = option(1, "optimizer steps of a logging window", "[1, inf)")
    save_steps: int = option(500, "optimizer steps between checkpoints (0 = only at the end)", "[0, inf)")
    save_total_limit: int | None = option(None, "checkpoints kept (none = all)", "[1, inf)")
    save_only_model: bool = option(False, "leave out what a resume needs")
    resume_from_checkpoint: str | None = option(None, "a checkpoint, or true for the newest in output_dir")
    dry_run: bool = option(False, "look at the inputs, print the resolved options and stop")

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
    def source(self) -> dict:
        """The part of model_init_kwargs that says which revision of which place."""
        return {name: value for name, value in self.model_init_kwargs.items() if name in SOURCE}

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


def check(options: Options) -> Options:
    """Refuse what cannot work, before anything expensive starts. Raises OptionError; returns the options."""
    refuse(not options.model, "--model is required: a hub name or a directory with config.json and weights")
    for f in dataclasses.fields(Options):
        value, interval = getattr(options, f.name), f.metadata.get("interval")
        empty = value in ("", []) and f.name not in ("task", "lora_modules_to_save")
        refuse(empty, f"--{f.name} is empty; give it a value or leave it out")
        wrong = interval and value is not None and not lies_in(interval, value)
        refuse(wrong, f"--{f.name} is {value}; it must be in {interval}")
    check_effects(options)
    check_objective(options)
    check_schedule(options)
    check_ends(options)
    return options


def lies_in(interval: str, value: float) -> bool:
    """Is the value in an interval like [0, 1)?"""
    low, high = map(float, interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    return above and (value <= high if interval[-1] == "]" else value < high)


def check_objective(o: Options) -> None:
    low, high = o.vllm_importance_sampling_clip_min, o.vllm_importance_sampling_clip_max
    crossed = low is not None and high is not None and low >= high
    refuse(crossed, f"--vllm_importance_sampling_clip_min {low} must be below ..._clip_max {high}")
    refuse(
        (o.top_p < 1 or o.min_p > 0) and o.top_k == 0 and not o.distills,
        "--top_p below 1 and --min_p above 0 need --top_k, e.g. 64: log-probabilities are renormalised over "
        "the set it bounds; without it an unchanged policy has a ratio other than 1",
    )
    refuse(
        o.num_generations < 2 and not o.distills,
        "--num_generations is 1; it must be at least 2: an advantage compares rollouts of one prompt. One "
        "will do for --objective distill",
    )
    refuse(
        o.has_teachers and o.beta == 1 and not o.add_tail_bucket,
        "--beta 1 needs --add_tail_bucket true: the one token of its support would be renormalised to 1 on "
        "both sides, and nothing would be learnt",
    )
    for target in o.lora_target_modules:
        try:
            re.compile(target)
        except re.error as error:
            raise OptionError(f"--lora_target_modules {target} is no regular expression: {error}") from None


def check_schedule(o: Options) -> None:
    kind, given, name = (
        o.lr_scheduler_type,
        o.lr_scheduler_kwargs,
        f"--lr_scheduler_type {o.lr_scheduler_type}",
    )
    allowed = SCHEDULE_KWARGS.get(kind, set())
    refuse(kind != "constant" and o.max_steps < 0, f"{name} decays over --max_steps; set it")
    refuse(o.max_steps == 0, "--max_steps is 0; it must be at least 1, or -1 for --num_train_epochs")
    refuse(
        0 < o.max_steps <= o.warmup_steps, f"--warmup_steps {o.warmup_steps} leaves nothing of --max_steps"
    )
    for key, value in given.items():
        takes = ", ".join(sorted(allowed)) or "none"
        refuse(key not in allowed, f"--lr_scheduler_kwargs: {key} has no effect, {name} takes {takes}")
        number = type(value) in (int, float) and lies_in("[0, inf)", value)
        refuse(not number, f"--lr_scheduler_kwargs: {key} is {value!r}; it must be a number, 0 or more")
    refuse(
        kind == "cosine_with_min_lr" and len(given.keys() & {"min_lr", "min_lr_rate"}) != 1,
        f"{name} needs one of min_lr and min_lr_rate: --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'",
    )


def check_ends(o: Options) -> None:
    """Servers, files, and how often something is done."""
    servers = [] if o.embedded else o.vllm_server_base_url
    refuse("embedded" in servers, "--vllm_server_base_url embedded stands alone, without other servers")
    named = [("vllm_server_base_url", url) for url in servers]
    named += [("teacher_server_urls", url) for url in (o.teacher_server_urls or {}).values()]
    for name, url in named:
        refuse(not is_url(url), f"--{name} {url}: a URL starts with http:// or https:// and names a host")
    twice = len({url.rstrip("/") for url in servers}) < len(servers)
    refuse(twice, f"--vllm_server_base_url names a server twice: {' '.join(servers)}")
    alone = (o.eval_dataset is None) != (o.eval_steps is None)
    refuse(alone, "--eval_dataset and --eval_steps have an effect only together")
    refuse(
        (o.eval_steps or 0) % o.weight_sync_steps,
        f"--eval_steps {o.eval_steps} must be a multiple of --weight_sync_steps {o.weight_sync_steps}: "
        "servers evaluate the weights they have",
    )
    refuse(o.record and Path(o.record).is_dir(), f"--record {o.record} is a directory; name a file")
    absent = o.replay and not Path(o.replay).is_file()
    refuse(absent, f"--replay {o.replay}: there is no such file; --record FILE writes one")
    unbounded = o.replay and o.token_budget is None
    refuse(unbounded, "--replay needs --token_budget: no server tells its max_model_len")


def is_url(url) -> bool:
    try:
        return requests.Request("GET", url).prepare().url.startswith(("http://", "https://"))
    except ValueError:
        return False


# options that do something only in some mode: a pattern of their names, when they do nothing, and why
IDLE = [
    (
        "teacher_.*|max_concurrent_scorings|beta|add_tail_bucket",
        lambda o: not o.has_teachers,
        "without --objective distill or --distill_coef",
    ),
    (
        "score_centering.*|num_sampler_logprobs|epsilon.*|distill_coef|vllm_importance_sampling_.*",
        lambda o: o.distills,
        "with --objective distill, which has no policy term",
    ),
    ("on_reward_error", lambda o: o.distills and not o.eval_dataset, "with --objective distill: no rewards"),
    (
        "teacher_server_urls|teacher_top_k|max_concurrent_scorings",
        lambda o: o.replay,
        "with --replay: a recording holds what the teachers said",
    ),
    ("lora_..+|merge_on_save", lambda o: not o.lora_r, "without --lora_r"),
    ("lora_sync", lambda o: o.replay or o.rollout_only, "where nothing is sent: --replay, --rollout_only"),
    (
        "record|rollout_only|log_completions|eval_.*",
        lambda o: o.replay,
        "with --replay: nothing is generated",
    ),
    (
        "max_steps|eval_.*",
        lambda o: o.rollout_only,
        "with --rollout_only, as long as --num_train_epochs says",
    ),
    (
        "score_centering_tail|num_sampler_logprobs",
        lambda o: not o.score_centering,
        "without --score_centering",
    ),
    ("per_device_train_batch_size", lambda o: o.token_budget != 0, "without --token_budget 0"),
    ("embedded_.*", lambda o: not o.embedded, "without --vllm_server_base_url embedded"),
    ("run_name", lambda o: o.report_to != "trackio", "without --report_to trackio"),
    ("num_completions_to_print", lambda o: not o.log_completions, "without --log_completions"),
    ("num_train_epochs", lambda o: o.max_steps > 0, "with --max_steps, which replaces it"),
]


def check_effects(options: Options) -> None:
    """Refuse an option that was set and does nothing in this mode; say so where it only feeds a metric."""
    defaults = Options()
    for pattern, idle, why in IDLE:
        for name, value in vars(options).items() if idle(options) else ():
            does_nothing = re.fullmatch(pattern, name) and value != getattr(defaults, name)
            refuse(does_nothing, f"--{name} has no effect {why}; leave it out")
    refuse(
        options.lora_sync == "adapter" and options.lora_modules_to_save,
        "--lora_sync adapter sends adapters alone, and --lora_modules_to_save trains more: leave one out",
    )
    if options.lora_dropout:
        shared = "branches of a prefix tree share what is dropped above them"
        print(f"note: under --lora_dropout the ratio of an unchanged policy is not 1; {shared}", flush=True)
    if options.score_centering and not options.epsilon == options.epsilon_high == defaults.epsilon:
        print("note: under score centering --epsilon only feeds the clip_ratio metrics", flush=True)


def parse(arguments: list[str]) -> Options:
    """Options of a command line. Its first word may be a YAML or JSON file of defaults; none = unset."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO over prefix trees.", allow_abbrev=False)
    parser.error = partial(refuse, True)  # a line, where argparse would print every option
    defaults = Options()
    for f in dataclasses.fields(Options):
        takes = {"bool": {"nargs": "?", "const": True}, "list": {"nargs": "*"}}.get(kind_of(f), {})
        takes |= {"choices": f.metadata.get("choices"), "default": argparse.SUPPRESS}
        text = f"{f.metadata['help']} [{as_word(getattr(defaults, f.name))}]"
        parser.add_argument(f"--{f.name}", type=reader(f), help=text, **takes)
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = file_arguments(Path(arguments[0])) + arguments[1:]
    given, unknown = parser.parse_known_args(arguments)
    refuse(unknown, f"no such option: {' '.join(unknown)}; --help lists them all")
    return Options(**{name: None if value == [None] else value for name, value in vars(given).items()})


def kind_of(f: dataclasses.Field) -> str:
    """The first word of an option's type: str, int, float, bool, list or dict."""
    return re.match(r"\w+", f.type)[0]


def reader(f: dataclasses.Field):
    """A function from a word to a value of the option."""
    kinds = {"int": int, "float": float, "bool": lambda word: bool(["false", "true"].index(word.lower()))}

    def read(word: str):
        if word.lower() != "none" or word in f.metadata.get("choices", ()):
            return kinds.get(kind_of(f), str)(word)
        if "None" not in f.type:
            raise argparse.ArgumentTypeError("it needs a value, not none")
        return None

    read.__name__ = kind_of(f)  # argparse says "invalid int value"
    return read


def file_arguments(path: Path) -> list[str]:
    """A YAML or JSON file of options, as words of a command line: checked as if they had been typed."""
    import yaml  # transformers brings it

    refuse(not path.is_file(), f"no such file of options: {path}")
    try:
        values = yaml.safe_load(path.read_text())  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    refuse(not isinstance(values, dict), f"{path} must hold one mapping of option names to values")
    words = []
    for name, value in values.items():  # a single value may begin with a dash
        several = isinstance(value, list)
        words += [f"--{name}", *map(as_word, value)] if several else [f"--{name}={as_word(value)}"]
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
