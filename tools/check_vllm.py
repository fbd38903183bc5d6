r"""Does a server sample from the weights it is sent?

    python tools/check_vllm.py URL MODEL [--syncs 3] [--lora_r 16 --lora_sync merged|adapter] [--json]

Sends MODEL with noise in every weight to a server of that shape, again and again, while requests are in
flight, and compares the log-probabilities of what is sampled with those of the trainer's own model: of
requests between the updates, and of those in flight over one. There every token before some point must be the
old weights' and every token after it the new weights', over the whole prefix; with adapters sent alone all of
them are the old one's. A MODEL without weights (a directory with a config.json alone) gets random ones.
With --lora_r adapters move in place of the weights; sent alone, the server must serve MODEL itself.

Prints the differences before the first update, after each one and in flight, the seconds of each step, and
the tokens/s of --burst requests at once. Ends with 1 where a difference after an update is above --limit
(0.2 suits bf16, 1e-3 float32).
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from adapters import AdapterSync  # noqa: E402
from client import Server  # noqa: E402
from lora import adapted_layers, add_adapters, reset_adapters  # noqa: E402
from options import Options  # noqa: E402
from sync import WeightSync  # noqa: E402

PROMPT, TOGETHER = 24, 8  # tokens, requests


def load(path: str, dtype: torch.dtype, device, run: Options):
    torch.manual_seed(0)
    if any(Path(path).glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    if run.lora_r:
        add_adapters(model, run)
        reset_adapters(model, 0)
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B, std=0.02)
    return model.to(device, dtype).eval()


@torch.no_grad()
def add_noise(model, scale: float) -> None:
    """Every trained weight moves by `scale` of its tensor's spread (a norm's weights: of their size)."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            spread = parameter.float().std() if parameter.dim() > 1 else parameter.float().abs().mean()
            parameter.add_(torch.randn_like(parameter) * (scale * spread))


@torch.no_grad()
def differences(model, asked) -> list[torch.Tensor]:
    """|server's - trainer's| log-probability of each sampled token [L], of every (prompt, answer)."""
    rows = [torch.tensor([*prompt, *answer.token_ids.tolist()]) for prompt, answer in asked]
    ids = pad_sequence(rows, batch_first=True).to(model.device)  # [B, P + L], padded where nothing looks
    logits = model(ids, logits_to_keep=ids.shape[1] - PROMPT + 1).logits  # from the prompt's last token on
    found = []
    for row, (_, answer) in enumerate(asked):
        length = len(answer.token_ids)
        ours = logits[row, :length].float().log_softmax(-1)  # [L, V]
        ours = ours.gather(-1, ids[row, PROMPT : PROMPT + length, None])[:, 0]
        found.append((ours.cpu() - torch.from_numpy(answer.logp)).abs())
    return found


def change_over(old: torch.Tensor, new: torch.Tensor) -> tuple[float, int]:
    """Differences [L] to two models -> the largest one under the best point of change, and that point."""
    worst = [float(torch.cat([old[:at], new[at:]]).max()) for at in range(len(old) + 1)]
    return min((value, at) for at, value in enumerate(worst))


class Check:
    """A server, the model that it gets, and what carries it there."""

    def __init__(self, options, device):
        self.options = options
        self.server = Server(options.url, timeout=300)
        self.server.wait_until_ready()
        served = self.server.server_info()["vllm_config"]["model_config"]["dtype"].removeprefix("torch.")
        self.run = Options(
            model=options.model,
            output_dir=tempfile.mkdtemp(),
            bf16=served == "bfloat16",
            lora_r=options.lora_r,
            max_staleness=1,
        )
        self.model = load(options.model, getattr(torch, served), device, self.run)
        self.adapters = options.lora_sync == "adapter"
        self.sync = AdapterSync if self.adapters else WeightSync
        self.sync = self.sync([self.server], self.run if self.adapters else 120, device)
        self.sync.init()
        self.version = 0  # 0: the server's own weights
        self.facts = {"vllm": self.server.version(), "dtype": served, "device": str(device)}

    def ask(self, seed: int, count: int = TOGETHER):
        """Send `count` requests; returns what waits for their answers: (prompt, answer) of each."""
        asked = {"max_tokens": self.options.tokens, "cache_salt": f"{self.version} {seed}"}
        if self.adapters and self.version:
            asked["model"] = self.run.adapter(self.version)
        draw = torch.Generator().manual_seed(seed)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        prompts = torch.randint(3, vocabulary, (count, PROMPT), generator=draw).tolist()
        ask = ThreadPoolExecutor(count).submit
        answers = [ask(self.server.complete, p, seed=seed + n, **asked) for n, p in enumerate(prompts)]
        return lambda: [(p, answer.result()) for p, answer in zip(prompts, answers, strict=True)]

    def compare(self) -> dict[str, float]:
        apart = torch.cat(differences(self.model, self.ask(1000)()))
        return {"max": round(float(apart.max()), 6), "mean": round(float(apart.mean()), 6)}

    def tokens_per_s(self, count: int) -> float:
        self.ask(1, count)()  # whatever compiles at a first time
        started = time.perf_counter()
        found = self.ask(10_000, count)()
        return sum(len(answer.token_ids) for _, answer in found) / (time.perf_counter() - started)

    def send(self) -> dict[str, float]:
        """One update; the seconds of its steps."""
        self.version += 1
        seconds, steps = {}, {"prepare": lambda: self.sync.prepare(self.model), "pause": self.sync.pause}
        steps |= {"send": lambda: self.sync.send(self.model, self.version), "resume": self.sync.resume}
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name] = round(time.perf_counter() - started, 4)
        return seconds

    def over_an_update(self) -> dict:
        """New weights while requests are in flight: seconds, and differences in flight and after it."""
        answers, old = self.ask(self.version), copy.deepcopy(self.model)
        add_noise(self.model, self.options.noise)
        time.sleep(self.options.lead)
        line, flying = {"seconds": self.send()}, answers()
        line["after"] = self.compare()
        if self.version == 1:  # until now the server's weights were its own
            return line
        before, after = differences(old, flying), differences(self.model, flying)
        if self.adapters:  # all of it is the old one's
            changes = [(float(each.max()), 0) for each in before]
        else:
            changes = [change_over(*pair) for pair in zip(before, after, strict=True)]
        line["in_flight"] = round(max(worst for worst, _ in changes), 6)
        line["over_the_update"] = sum(
            0 < at < len(each) for (_, at), each in zip(changes, after, strict=True)
        )
        line["without_the_change"] = round(max(float(each.max()) for each in after), 6)
        return line


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--noise", type=float, default=0.1, help="of every weight, in each version")
    parser.add_argument("--limit", type=float, default=1e-3)
    parser.add_argument("--lead", type=float, default=0.3, help="seconds that requests run before an update")
    parser.add_argument("--lora_r", type=int, default=0, help="rank of adapters on all linear layers")
    parser.add_argument("--lora_sync", choices=["merged", "adapter"], default="merged")
    parser.add_argument("--burst", type=int, default=0, help="requests at once of which the rate is taken")
    parser.add_argument("--json", action="store_true", help="of everything, at the end")
    return parser.parse_args(words)


def main() -> None:
    options = arguments(sys.argv[1:])
    check = Check(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    add_noise(check.model, options.noise)
    if check.server.is_paused():
        check.send()  # before that it would answer nothing
        add_noise(check.model, options.noise)
    result = check.facts | {"before": check.compare(), "updates": []}
    for number in range(options.syncs):
        result["updates"].append(check.over_an_update())
        if not options.json:
            print(number + 1, result["updates"][-1], flush=True)
    if options.burst:
        result["tokens_per_s"] = round(check.tokens_per_s(options.burst))
    check.sync.close()
    worst = max(max(u["after"]["max"], u.get("in_flight", 0.0)) for u in result["updates"])
    spent = [list(u["seconds"].values()) for u in result["updates"]]  # prepare, pause, send, resume
    stopped = median(sum(seconds[1:]) for seconds in spent)
    result["median_s"] = {"all": median(map(sum, spent)), "from_pause_to_resume": stopped}
    result["worst"] = worst
    print(json.dumps(result) if options.json else {k: v for k, v in result.items() if k != "updates"})
    sys.exit(worst > options.limit)


if __name__ == "__main__":
    main()
