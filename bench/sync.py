"""What sending the weights costs, without any server: python bench/sync.py [--shape 0.6b] [--json FILE]

    pack    every weight cast from float32 to bf16 and copied into chunks; nothing is sent
    update  a WeightSync, as the trainer runs it, into a passive receiver: a process that takes the stream
            into one buffer and loads nothing; `send` is the part of it that a server is paused for
    plain   one broadcast of as many bytes that lie ready

Over NCCL from GPU 0 to GPU 1 where there is one, over gloo otherwise (loopback; from a GPU through host
memory). Shapes: tiny (this project's), 0.6b and 8b (Qwen3's; 8b has 33 GB of float32 weights). Medians.
"""

import argparse
import base64
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path = [str(Path(__file__).resolve().parents[1]), *sys.path[1:]]  # this script has the module's name
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config  # noqa: E402

from stream import GlooGroup, NcclGroup  # noqa: E402
from sync import WeightSync  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}


def make(shape: str, device):
    """A model of that shape in float32; its weights are whatever the memory held."""
    if shape == "tiny":
        config = AutoConfig.from_pretrained(ROOT / "tiny")
    else:
        common = dict(
            vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=shape == "0.6b"
        )
        config = Qwen3Config(**SHAPES[shape], **common)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device=device)
    model.tie_weights()
    return model.requires_grad_(True)


def receive(pipe, device: str) -> None:
    """The receiver's process: joins a group, then takes the chunks whose sizes it is told."""
    if device != "cpu":
        torch.cuda.set_device(device)
    group = None
    while (told := pipe.recv()) is not None:
        if isinstance(told, dict):
            size = told["world_size"]
            if "nccl_id" in told:
                group = NcclGroup(told["nccl_id"], 1, size, torch.device(device))
            else:
                group = GlooGroup(told["master_address"], told["master_port"], 1, size, 300)
        else:
            buffer = torch.empty(max(told), dtype=torch.uint8, device=device)
            for nbytes in told:
                end = group.broadcast(buffer[:nbytes])
            group.wait(end)
        pipe.send("done")


class Passive:
    """A server that holds nothing: what WeightSync asks of client.Server, told to the receiver by a pipe."""

    url = "http://127.0.0.1:0"

    def __init__(self, backend: str, device: str):
        self.backend = backend
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs, device), daemon=True)
        self.process.start()

    def tell(self, what) -> None:
        self.pipe.send(what)
        self.pipe.recv()

    def server_info(self):
        transfer = {"weight_transfer_config": {"backend": self.backend}}
        return {"vllm_config": transfer | {"model_config": {"dtype": "torch.bfloat16"}}}

    def init_weight_transfer(self, info):
        if "nccl_unique_id_b64" in info:
            info = info | {"nccl_id": base64.b64decode(info["nccl_unique_id_b64"])}
        self.tell(info)

    def update_weights(self, info):
        self.tell(self.sizes)

    version = lambda self: "0.33.0"  # noqa: E731
    weight_version = lambda self: "default"  # noqa: E731
    is_paused = lambda self: False  # noqa: E731
    world_size = lambda self: 1  # noqa: E731
    health = start_update = finish_update = lambda self, _=None: None  # noqa: E731


def median_s(run, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first one warms up


def pack_alone(model, repeats: int, device) -> tuple[float, list[int]]:
    sync = WeightSync([], 60, device)
    sync.links, sync.dtype_name = [None], "bfloat16"  # as if there were a server
    sizes = []

    def run():
        sizes.clear()
        sync.prepare(model)
        while sync.packed:
            sizes.append(sync.packed.pop(0)[0].numel())
            if len(sizes) + len(sync.packed) < len(sync.update[2]):
                sync.packed.append(sync.pack(sync.update[2][len(sizes) + len(sync.packed)]))
        if device.type == "cuda":
            torch.cuda.synchronize()

    return median_s(run, repeats), sizes


def over(backend: str, model, sizes: list[int], repeats: int, device, receiver: str) -> dict:
    """Seconds of an update, of the sending in it, and of a plain broadcast of the same bytes."""
    server = Passive(backend, receiver)
    server.sizes = sizes
    sync = WeightSync([server], 300, device)
    sync.init()
    group, sending = sync.links[0].group, []

    def update():
        sync.prepare(model)
        started = time.perf_counter()
        sync.send(model, 1)
        sending.append(time.perf_counter() - started)
        sync.version = None  # the stand-in labels nothing

    def plain():
        server.pipe.send([len(ready)])
        group.wait(group.broadcast(ready))
        server.pipe.recv()

    found = {"update_s": median_s(update, repeats), "send_s": statistics.median(sending[1:])}
    ready = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    found["plain_s"] = median_s(plain, repeats)
    sync.close()
    server.pipe.send(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="0.6b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    model = make(options.shape, device)
    seconds, sizes = pack_alone(model, options.repeats, device)
    total = sum(sizes)
    result = {"shape": options.shape, "device": str(device), "bytes": total, "chunks": len(sizes)}
    result["pack_s"] = seconds
    way, receiver = ("nccl", "cuda:1") if gpus >= 2 else ("gloo", "cpu")
    result |= over(way, model, sizes, options.repeats, device, receiver)
    print(f"{options.shape}: {total / 1e9:.3f} GB in {len(sizes)} chunks from {device}, over {way}")
    for name, value in result.items():
        if name.endswith("_s"):
            share = f"{100 * result['plain_s'] / value:6.0f} % of the plain broadcast"
            rate = f"{value * 1e3:9.2f} ms  {total / value / 1e9:7.1f} GB/s"
            print(f"  {name.removesuffix('_s'):7} {rate}  {share}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
