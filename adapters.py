"""Adapters to the servers, in place of merged weights (--lora_sync adapter): files, and a name per version.

    every rank   gather A and B
    rank 0             write <output_dir>/.vllm_lora/v7 | every server loads it as lora-<run>-v7 | publish 7
    rollouts     begun at version 5: asks for lora-<run>-v5 until it ends      begun after that: ...-v7

Nothing pauses and no request changes its policy: all tokens of a rollout are of the version it began with.
The newest `max_staleness + 1` versions are kept; an older one leaves when the next update begins, so that
`max_staleness + 2` are loaded at most. A request for one that has left gets a 404: its rollout is too old to
be trained on (routing.py). A server that fails is left out as in sync.py; one that is back, restarted or not,
gets every version that is kept before it is asked for anything. Base weights are never sent.

Never: load two versions under one name. A server would answer from the keys and values of the first
(tests/test_adapters.py::test_every_version_has_a_name_and_a_folder_of_its_own).
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from client import ServerError
from link import Link, SyncError
from lora import RANKS_OF_VLLM, adapter_state, save_adapter
from options import OptionError, Options
from sync import Fleet


class AdapterSync(Fleet):
    """What train() calls `sync`, as WeightSync. Every rank has one; only rank 0's has servers and files."""

    def __init__(self, servers, options: Options, device="cpu"):
        super().__init__(servers, options.vllm_server_timeout, device)
        self.options = options
        self.folder = Path(options.output_dir).absolute() / ".vllm_lora"
        self.kept: list[int] = []  # versions, oldest first

    def init(self) -> None:
        """Take away what an earlier start of this run has left."""
        if self.links:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.each("the loading", self.join)

    def prepare(self, model) -> None:
        self.state = adapter_state(model)
        self.welcome()
        newest = self.options.max_staleness + 1
        old, self.kept = self.kept[:-newest], self.kept[-newest:]
        self.each("the loading", self.align)
        for version in old:
            shutil.rmtree(self.folder / f"v{version}", ignore_errors=True)

    def pause(self) -> None:
        """Requests go on: they keep the adapter they came with."""

    def send(self, model, version: int) -> None:
        if self.links:
            save_adapter(self.folder / f"v{version}", self.state, self.options)
            self.kept.append(version)
        self.each("the loading", self.align)
        self.version = version

    def join(self, link: Link) -> None:
        link.labels = True  # names tell versions apart: it never samples from another one unnoticed
        self.align(link)

    def align(self, link: Link) -> None:
        """Have a server hold the versions that are kept, and no other one of this run."""
        server, run = link.server, self.options.adapter("")
        wanted = {self.options.adapter(kept): str(self.folder / f"v{kept}") for kept in self.kept}
        loaded = {model["id"] for model in server.models() if model["id"].startswith(run)}
        for name in loaded - wanted.keys():
            with contextlib.suppress(ServerError):  # it may be gone already
                server.unload_adapter(name)
        for name in wanted.keys() - loaded:
            try:
                server.load_adapter(name, wanted[name])
            except ServerError as error:
                if error.status != 404:
                    raise
                do = "mount --output_dir there under that very path, or take --lora_sync merged"
                raise SyncError(f"it sees no {wanted[name]}: {do} ({error})") from error


def choose(servers, options: Options) -> str:
    """What --lora_sync means for these servers, merged or adapter. OptionError where they do not fit it."""
    if not options.lora_r or options.lora_sync == "merged":
        return "merged"
    limits = {server: server.server_info()["vllm_config"].get("lora_config") for server in servers}
    if options.lora_sync == "auto":
        without = [server.url for server, found in limits.items() if found is None]
        if without or options.lora_modules_to_save:
            why = f"{without[0]} runs without LoRA" if without else "--lora_modules_to_save trains more"
            print(f"note: servers get merged weights, not adapters: {why} (--lora_sync auto)", flush=True)
            return "merged"
    if problems := [f"{s.url} {line}" for s, found in limits.items() for line in misfits(s, found, options)]:
        flags = f"--enable-lora --max-loras {slots(options)} --max-lora-rank {served_rank(options)}"
        start = (
            f"VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {options.model} {flags}"
        )
        raise OptionError("\n".join([*problems, f"Start it with {start}, or take --lora_sync merged"]))
    held, folder = f"must hold the weights of --model {options.model}", Path(options.output_dir).absolute()
    print(f"note: servers get adapters alone (--lora_sync): they {held}, and read {folder}", flush=True)
    return "adapter"


def slots(options: Options) -> int:
    """Adapters that are loaded at once: those that may be trained on, and the next."""
    return options.max_staleness + 2


def served_rank(options: Options) -> int:
    """The least --max-lora-rank of vLLM's that holds --lora_r."""
    return next((rank for rank in RANKS_OF_VLLM if rank >= options.lora_r), options.lora_r)


def misfits(server, limits: dict | None, options: Options) -> list[str]:
    """What keeps a server from sampling with this run's adapters, a line each; `limits`: its lora_config."""
    if limits is None:
        return ["runs without LoRA"]
    found, wanted = [], slots(options)
    if limits["max_lora_rank"] < options.lora_r:
        found.append(f"takes adapters up to rank {limits['max_lora_rank']}, --lora_r is {options.lora_r}")
    if limits["max_loras"] < wanted:
        found.append(f"holds {limits['max_loras']} adapters, --max_staleness + 2 is {wanted}")
    if not server.takes_adapters():
        found.append("loads no adapters while it runs")
    root = server.models()[0].get("root") or options.model
    if Path(root).resolve() != Path(options.model).resolve():
        found.append(f"serves {root}; these adapters are trained for the weights of {options.model}")
    if server.is_paused() or server.weight_version() not in (None, "default"):
        found.append("holds, or waits for, weights that another run has sent; it has to be restarted")
    return found
