"""Does a server sample from the weights it is sent? python tools/check_vllm.py URL MODEL [--syncs 3] [--json]

Sends MODEL with noise in every weight to a server of that shape, again and again, while requests are in
flight, and compares the log-probabilities of what is sampled with those of the trainer's own model: of
requests between the updates, and of those in flight over one. There every token before some point must be the
old weights' and every token after it the new weights', over the whole prefix. A MODEL without weights (a
directory with a config.json alone) gets random ones.

Prints the differences before the first update, after each one and in flight, and the seconds of each step.
Ends with 1 where a difference after an update is above --limit (0.2 suits bf16, 1e-3 float32).
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from client import Server  # noqa: E402
from sync import WeightSync  # noqa: E402

PROMPT, TOGETHER = 24, 8  # tokens, requests


def load(path: str, dtype: torch.dtype, device):
    torch.manual_seed(0)
    if any(Path(path).glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    return model.to(device).eval()


@torch.no_grad()
def add_noise(model, scale: float) -> None:
    """Every weight moves by `scale` of its tensor's spread (a norm's weights: of their size)."""
    for parameter in model.parameters():
        spread = parameter.float().std() if parameter.dim() > 1 else parameter.float().abs().mean()
        parameter.add_(torch.randn_like(parameter) * (scale * spread))


@torch.no_grad()
def differences(model, asked) -> list[torch.Tensor]:
    """|server's - trainer's| log-probability of each sampled token [L], of every (prompt, answer)."""
    rows = [torch.tensor([*prompt, *answer.token_ids.tolist()]) for prompt, answer in asked]
    ids = pad_sequence(rows, batch_first=True).to(model.device)  # [B, P + L], padded where nothing looks
    logits = model(ids, logits_to_keep=ids.shape[1] - PROMPT + 1).logits  # from the last of the prompt on
    found = []
    for row, (_, answer) in enumerate(asked):
        length = len(answer.token_ids)
        ours = logits[row, :length].float().log_softmax(-1)  # [L, V]
        ours = ours.gather(-1, ids[row, PROMPT : PROMPT + length, None])[:, 0]
        found.append((ours.cpu() - torch.from_numpy(answer.logp)).abs())
    return found


class Requests:
    """Requests in flight; `answers` once they are done."""

    def __init__(self, server: Server, vocabulary: int, tokens: int, salt: str, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.prompts = torch.randint(3, vocabulary, (TOGETHER, PROMPT), generator=draw).tolist()
        self.found = [None] * TOGETHER

        def ask(number):
            self.found[number] = server.complete(
                self.prompts[number], max_tokens=tokens, seed=seed + number, cache_salt=salt
            )

        self.threads = [threading.Thread(target=ask, args=(number,)) for number in range(TOGETHER)]
        for thread in self.threads:
            thread.start()

    def answers(self) -> list:
        for thread in self.threads:
            thread.join()
        if None in self.found:
            raise SystemExit("a request was lost")
        return list(zip(self.prompts, self.found, strict=True))


def change_over(old: torch.Tensor, new: torch.Tensor) -> tuple[float, int]:
    """Differences [L] to two models -> the largest one under the best point of change, and that point."""
    worst = [float(torch.cat([old[:at], new[at:]]).max()) for at in range(len(old) + 1)]
    return min((value, at) for at, value in enumerate(worst))


def one_update(sync: WeightSync, model, version: int) -> dict[str, float]:
    seconds, steps = {}, {"prepare": lambda: sync.prepare(model), "pause": sync.pause}
    steps |= {"send": lambda: sync.send(model, version), "resume": sync.resume}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        seconds[name] = round(time.perf_counter() - started, 4)
    return seconds


def main() -> None:
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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    server = Server(options.url, timeout=300)
    server.wait_until_ready()
    served = server.server_info()["vllm_config"]["model_config"]
    model = load(options.model, getattr(torch, served["dtype"].removeprefix("torch.")), device)
    vocabulary = model.get_input_embeddings().num_embeddings
    sync = WeightSync([server], 120, device)
    sync.init()

    def compare(salt: str) -> dict[str, float]:
        found = Requests(server, vocabulary, options.tokens, salt, 1000).answers()
        apart = torch.cat(differences(model, found))
        return {"max": round(float(apart.max()), 6), "mean": round(float(apart.mean()), 6)}

    add_noise(model, options.noise)
    result = {"vllm": server.version(), "dtype": served["dtype"], "updates": []}
    if server.is_paused():
        one_update(sync, model, 0)  # before that it would answer nothing
        add_noise(model, options.noise)
    result["before"] = compare("0")
    for version in range(1, options.syncs + 1):
        flying = Requests(server, vocabulary, options.tokens, f"{version}f", version)
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        add_noise(model, options.noise)
        time.sleep(options.lead)
        seconds = one_update(sync, model, version)
        flying = flying.answers()
        new = differences(model, flying)
        line = {"seconds": seconds, "after": compare(str(version))}
        if version > 1:  # before that the server's weights are its own
            keep = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(old)
            changes = [change_over(*pair) for pair in zip(differences(model, flying), new, strict=True)]
            model.load_state_dict(keep)
            over = sum(0 < at < len(n) for (_, at), n in zip(changes, new, strict=True))
            line |= {"in_flight": round(max(worst for worst, _ in changes), 6), "over_the_update": over}
            line["without_the_change"] = round(max(float(n.max()) for n in new), 6)
        result["updates"].append(line)
        if not options.json:
            print(version, line, flush=True)
    sync.close()
    worst = max(max(u["after"]["max"], u.get("in_flight", 0.0)) for u in result["updates"])
    spent = [list(u["seconds"].values()) for u in result["updates"]]  # prepare, pause, send, resume
    result["median_s"] = {"all": median(map(sum, spent)), "paused": median(sum(s[1:]) for s in spent)}
    result |= {"worst": worst, "requests_lost": 0}
    print(json.dumps(result) if options.json else {k: v for k, v in result.items() if k != "updates"})
    sys.exit(worst > options.limit)


if __name__ == "__main__":
    main()
