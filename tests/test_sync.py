"""python -m pytest tests/test_sync.py: the packed stream, updates into stand-in servers, what can fail."""

import base64
import json
import queue
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import WeightRenaming

import nccl
import sync
from client import ServerError
from sync import ADVICE, GlooGroup, SyncError, WeightSync, checkpoint_name, packed_chunks, sent_parameters

CASES = Path(__file__).parent / "data/cases"
GPU = torch.device("cuda")  # no tensor is put there: it only says that the trainer has NCCL


class FakeNccl:
    """NcclGroup inside one process: members meet under an id, rank 0's bytes go through queues."""

    rooms: dict = defaultdict(dict)

    def __init__(self, made: bytes, rank: int, world_size: int, device):
        self.room, self.rank = self.rooms[made], rank
        self.room[rank] = queue.SimpleQueue()
        deadline = time.monotonic() + 5
        while len(self.room) < world_size:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def broadcast(self, chunk):
        if self.rank:
            chunk.copy_(self.room[self.rank].get(timeout=5))
        for rank in self.room:
            if self.rank == 0 != rank:
                self.room[rank].put(chunk.clone())

    def close(self):
        pass


class StandIn:
    """A server whose workers join the group and load what they receive. `calls` is what it was asked.

    `faults` maps a call to what it raises; an update's is raised after the first chunk.
    """

    def __init__(self, dtype="float32", release="0.32.0", backend="gloo", workers=1, number=1, **faults):
        self.url = f"http://127.0.0.1:{number}"
        self.dtype, self.release, self.backend, self.workers = dtype, release, backend, workers
        self.faults, self.calls, self.weights, self.groups = faults, [], {}, []
        self.label, self.dead, self.loads_slowly = "default", False, threading.Event()
        self.loads_slowly.set()

    def ask(self, call):
        self.calls.append(call)
        if self.dead:
            raise ServerError("connection refused")
        if call in self.faults:
            raise self.faults[call]

    def health(self, timeout=None):
        if self.dead:
            raise ServerError("connection refused")

    def version(self):
        return self.release

    def weight_version(self):
        self.health()
        if self.label is None:
            raise ServerError("no such route", 404)
        return self.label

    def server_info(self):
        model, transfer = {"dtype": f"torch.{self.dtype}"}, {"backend": self.backend}
        return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer}}

    def world_size(self):
        return self.workers

    def is_paused(self):
        return False

    def init_weight_transfer(self, info):
        self.ask("init")
        self.info, size = info, info["world_size"]
        self.buffer = info.get("packed_buffer_size_bytes")
        if self.backend == "gloo":
            join = lambda rank: GlooGroup(info["master_address"], info["master_port"], rank, size, 30)  # noqa: E731
        else:
            made = self.shared_id(info)
            join = lambda rank: FakeNccl(made, rank, size, None)  # noqa: E731
        self.groups = [None] * self.workers
        self.on_each_worker(
            lambda worker: self.groups.__setitem__(worker, join(info["rank_offset"] + worker))
        )

    def shared_id(self, info) -> bytes:
        """As vLLM's workers learn the id: from the call, or from the store that the trainer hosts."""
        if "nccl_unique_id_b64" in info:
            return base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], False)
        return store.get("broadcast_from/0/0")[-128 - 4 : -4]

    def on_each_worker(self, run):
        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def pause(self):
        self.ask("pause")

    def resume(self):
        self.ask("resume")

    def start_update(self):
        self.ask("start_update")

    def update_weights(self, info):
        self.calls.append("update")
        self.update_info = info
        buffer = info.get("packed_buffer_size_bytes", self.buffer)
        chunks = packed_chunks(info["names"], info["dtype_names"], info["shapes"], buffer)
        self.received = [{} for _ in range(self.workers)]
        self.on_each_worker(lambda worker: self.receive(chunks, worker))
        if "update" in self.faults:
            raise self.faults["update"]
        self.weights = self.received[-1]

    def receive(self, chunks, worker):
        for number, chunk in enumerate(chunks):
            if "update" in self.faults and number == 1:
                return
            self.loads_slowly.wait(30)
            data = torch.empty(sum(spec.nbytes for spec in chunk), dtype=torch.uint8)
            self.groups[worker].broadcast(data)
            for spec, part in zip(chunk, data.split([spec.nbytes for spec in chunk]), strict=True):
                self.received[worker][spec.name] = part.clone().view(spec.dtype).view(spec.shape)

    def finish_update(self, version):
        self.ask("finish_update")
        self.label = None if self.label is None else version


def toy(tied=True):
    """The parameters of case A17, by their names in the trainer."""
    shapes = {
        "module.model.embed_tokens.weight": (8, 4),
        "module.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight": (4, 4),
        "module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight": (6, 4),
        "module.model.visual.patch_embed.weight": (3, 3),
        "module.model.norm.weight": (4,),
    }
    model = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(torch.randn(shape), "visual" not in name))
    head = torch.nn.Module()
    model.module.add_module("lm_head", head)
    embedding = model.module.model.embed_tokens.weight
    head.register_parameter("weight", embedding if tied else torch.nn.Parameter(torch.randn(8, 4)))
    return model


def connected(*servers, timeout=60, device=torch.device("cpu")):  # noqa: B008
    link = WeightSync(servers, timeout, device)
    link.init()
    return link


def update(link, model, version=1):
    link.prepare(model)
    link.pause()
    link.send(model, version)
    link.resume()


def holds(server, model) -> bool:
    """Does the server hold the model, in its own dtype, and nothing else?"""
    sent = sent_parameters(model)
    same = (torch.equal(server.weights[name], p.to(getattr(torch, server.dtype))) for name, p in sent)
    return list(server.weights) == [name for name, _ in sent] and all(same)


# ---- what is sent


@pytest.mark.parametrize("case", ["tied", "untied"])
def test_every_trainable_parameter_is_sent_once_under_its_checkpoint_name(case):
    expected = json.loads((CASES / "A17_transfer_manifest.json").read_text())["expect"][case]["sent"]
    sent = [{"name": n, "shape": list(p.shape)} for n, p in sent_parameters(toy(tied=case == "tied"))]
    assert sent == expected


def test_wrapper_prefixes_are_taken_out_of_names():
    assert checkpoint_name("module.model._orig_mod.norm.weight") == "model.norm.weight"


def test_a_frozen_part_of_a_trained_block_goes_along():
    """A server fuses q, k and v: a window that brings one of them leaves the others to chance."""
    block = torch.nn.ModuleDict(
        {n: torch.nn.Linear(2, 2, bias=False) for n in ("q_proj", "k_proj", "o_proj")}
    )
    model = torch.nn.ModuleDict(
        {"self_attn": block, "vision": torch.nn.ModuleDict({"p": torch.nn.Linear(2, 2)})}
    )
    block["k_proj"].requires_grad_(False)
    model["vision"].requires_grad_(False)
    names = [name for name, _ in sent_parameters(model)]
    assert names == [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "o_proj")]


def test_a_name_that_loading_changed_is_changed_back():
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"visual": torch.nn.Linear(1, 1, bias=False)})})
    model._weight_conversions = [WeightRenaming("^visual", "model.visual")]
    assert [name for name, _ in sent_parameters(model)] == ["visual.weight"]


@given(st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), max_size=12), st.integers(1, 200))
def test_chunks_hold_every_tensor_in_order_and_close_once_past_the_buffer(shapes, buffer):
    names = [f"p{i}" for i in range(len(shapes))]
    chunks = packed_chunks(names, ["bfloat16"] * len(names), shapes, buffer)
    assert [spec.name for chunk in chunks for spec in chunk] == names
    assert all(chunk for chunk in chunks)
    for chunk in chunks[:-1]:
        sizes = [spec.nbytes for spec in chunk]
        assert sum(sizes) > buffer >= sum(sizes[:-1])


def test_mixed_dtypes_that_would_misalign_are_refused_by_name():
    with pytest.raises(ValueError, match="second"):
        packed_chunks(["first", "second"], ["bfloat16", "float32"], [[3], [2]], 1000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer", [1, 100, 1 << 20])
def test_the_server_holds_the_trainers_weights_in_its_dtype(dtype, buffer, monkeypatch):
    monkeypatch.setattr(sync, "BUFFER_BYTES", buffer)
    servers = [StandIn(dtype), StandIn(dtype, number=2)]
    model, link = toy(), connected(*servers)
    for version in (1, 2):
        with torch.no_grad():
            model.module.model.norm.weight.add_(1)
        update(link, model, version)
    link.close()
    assert all(server.label == "2" and holds(server, model) for server in servers)


# ---- when


def test_an_update_calls_the_server_in_this_order():
    expected = json.loads((CASES / "A18_transfer_order_and_version.json").read_text())
    server = StandIn()
    link = connected(server)
    server.calls.clear()
    update(link, toy())
    assert server.calls + ["publish_version"] == expected["expect"]["good_transfer"]["call_order"]


def test_two_chunks_are_packed_before_the_pause_and_each_later_one_while_another_is_sent(monkeypatch):
    """And never more than two exist: the third is made when the first has left."""
    monkeypatch.setattr(sync, "BUFFER_BYTES", 1)
    server, happened = StandIn(), []
    link = connected(server)
    link.pack = lambda chunk, pack=link.pack: happened.append("pack") or pack(chunk)
    server.pause = lambda: happened.append("pause")
    group = link.links[0].group
    group.broadcast = lambda chunk, send=group.broadcast: (send(chunk), happened.append("sent"))
    update(link, toy())
    assert happened[:3] == ["pack", "pack", "pause"] and happened.count("sent") == 4
    for number in (
        2,
        3,
    ):  # chunk `number` is packed after chunk number - 2 was sent, with number - 1 on its way
        packed = [i for i, what in enumerate(happened) if what == "pack"][number]
        assert happened[:packed].count("sent") >= number - 1
    server.loads_slowly.clear()  # now it takes nothing
    happened.clear()
    link.prepare(toy())
    threading.Timer(0.5, server.loads_slowly.set).start()
    threading.Timer(0.3, lambda: happened.append("0.3 s later")).start()
    link.send(toy(), 2)
    assert happened[:3] == ["pack", "pack", "0.3 s later"]


# ---- releases of vLLM, workers behind NCCL


@pytest.fixture
def fake_nccl(monkeypatch):
    ids = iter(bytes([number]) * 128 for number in range(1, 100))
    monkeypatch.setattr(nccl, "NcclGroup", FakeNccl)
    monkeypatch.setattr(nccl, "unique_id", lambda: next(ids))
    monkeypatch.setattr(nccl, "version", lambda: (2, 28, 9))
    FakeNccl.rooms.clear()


@pytest.mark.parametrize(
    "release, by_id, packed_at_init",
    [
        ("0.26.0", False, False),
        ("0.27.1", False, False),
        ("0.28.0", False, True),
        ("0.29.0", False, True),
        ("0.30.1", True, True),
        ("0.33.0+cu130", True, True),
        ("0.1.dev8+gabc", True, True),
    ],
)
def test_each_release_is_spoken_to_in_its_own_way(release, by_id, packed_at_init, fake_nccl):
    server = StandIn("bfloat16", release, "nccl", workers=3)
    server.label = "default" if packed_at_init else None
    model, link = toy(), connected(server, device=GPU)
    update(link, model)
    assert holds(server, model)
    assert ("nccl_unique_id_b64" in server.info) == by_id == ("master_port" not in server.info)
    where, other = (server.info, server.update_info)[:: 1 if packed_at_init else -1]
    assert where["packed"] is True and where["packed_buffer_size_bytes"] == 256 << 20
    assert "packed" not in other
    assert server.info["world_size"] == 4 and server.info["rank_offset"] == 1
    for part in server.received:  # every worker of a server that is split over devices gets the same bytes
        assert all(torch.equal(part[name], server.weights[name]) for name in server.weights)


# ---- the handshake


@pytest.mark.parametrize(
    "change, device, text",
    [
        ({"backend": None}, "cpu", '--weight-transfer-config \'{"backend":"gloo"}\''),
        ({"backend": "nccl"}, "cpu", "sends by 'gloo'"),
        ({"backend": "ipc"}, "cuda", '--weight-transfer-config \'{"backend":"nccl"}\''),
        ({"release": "0.25.3"}, "cpu", "0.26 and later"),
    ],
)
def test_a_server_that_cannot_be_sent_to_is_refused_in_a_line(change, device, text):
    with pytest.raises(SyncError, match="127.0.0.1") as refused:
        connected(StandIn(**change), device=torch.device(device))
    assert text in str(refused.value)


def test_servers_of_different_dtypes_are_refused():
    with pytest.raises(SyncError, match="--dtype"):
        connected(StandIn("float32"), StandIn("bfloat16", number=2))


def test_two_ranks_on_one_gpu_are_explained(fake_nccl, monkeypatch):
    def refuse(*_):
        raise nccl.NcclError(
            "NCCL: invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a"
        )

    monkeypatch.setattr(nccl, "NcclGroup", refuse)
    server = StandIn(backend="nccl")
    server.init_weight_transfer = lambda info: time.sleep(30)
    monkeypatch.setattr(sync, "LAST_WORDS_S", 0.1)
    with pytest.raises(SyncError, match="one rank per GPU.*CUDA_VISIBLE_DEVICES.*gloo"):
        connected(server, device=GPU)


def test_differences_of_nccl_are_told(fake_nccl, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # concerns one end
    system = {"pip_packages": "[pip3] nvidia-nccl-cu13==2.27.5", "env_vars": "NCCL_ALGO=Tree\nCUDA_HOME=/x\n"}
    version, variable = sync.nccl_differences(system)
    assert "2.27" in version and "2.28" in version
    assert variable.startswith("NCCL_ALGO is Tree there and Ring here")
    assert sync.nccl_differences({"pip_packages": None, "env_vars": "NCCL_ALGO=Ring"}) == []


# ---- what fails: one server


@pytest.mark.parametrize(
    "call, step",
    [
        ("init", "the rendezvous"),
        ("pause", "the pause"),
        ("start_update", "the start"),
        ("update", "the update"),
        ("finish_update", "the finish"),
        ("resume", "the resume"),
    ],
)
def test_a_failed_step_says_what_the_server_holds_and_what_to_do(call, step):
    server = StandIn(**{call: ServerError("CUDA out of memory", 500)})
    started = time.monotonic()
    with pytest.raises(SyncError) as failed:
        update(connected(server), toy())
    assert time.monotonic() - started < 5
    for text in (server.url, f"{step} failed", "CUDA out of memory", ADVICE[step]):
        assert text in str(failed.value)
    assert server.calls[-1] == call, "nothing is asked of it after that, least of all to resume"


def test_a_restarted_server_stops_the_run_with_its_text():
    case = json.loads((CASES / "A18_transfer_order_and_version.json").read_text())
    expect = case["expect"]["restarted_server"]
    server = StandIn(start_update=ServerError("weight transfer engine is not initialized", 500))
    link = connected(server)
    with pytest.raises(SyncError, match=expect["error_text_contains"]):
        update(link, toy())
    assert link.version is None and "resume" not in server.calls


def test_a_server_that_takes_nothing_is_given_up(monkeypatch):
    server = StandIn()
    link = connected(server)
    link.links[0].timeout_s = 1
    server.loads_slowly.clear()
    with pytest.raises(SyncError, match="the update took more than 1 s"):
        update(link, toy())
    server.loads_slowly.set()
    assert "resume" not in server.calls


def test_the_servers_words_are_preferred_to_those_of_a_broken_stream(monkeypatch):
    server = StandIn()
    link = connected(server)

    def break_off(info):
        server.groups[0].close()
        time.sleep(0.3)
        raise ServerError("EngineCore encountered an issue", 500)

    server.update_weights = break_off
    link.links[0].group.broadcast = lambda chunk: (_ for _ in ()).throw(
        RuntimeError("connection closed by peer")
    )
    with pytest.raises(SyncError, match="EngineCore"):
        update(link, toy())


def test_a_server_that_dies_without_an_answer_is_noticed_by_its_health(monkeypatch):
    """A vLLM whose engine was killed: the call stays open, new connections are refused."""
    monkeypatch.setattr(sync, "LOOK_S", 0.1)
    monkeypatch.setattr(sync, "LAST_WORDS_S", 0.1)
    server = StandIn()
    link = connected(server)
    server.loads_slowly.clear()
    threading.Timer(0.3, lambda: setattr(server, "dead", True)).start()
    started = time.monotonic()
    with pytest.raises(SyncError, match="the update failed: connection refused"):
        update(link, toy())
    assert time.monotonic() - started < 5
    server.loads_slowly.set()


def test_an_update_that_a_dead_trainer_left_open_is_filled():
    server = StandIn(start_update=ServerError("a weight update is already active. Call finish first", 500))
    model, link = toy(), connected(server)
    update(link, model)
    assert holds(server, model) and server.calls[-2:] == ["finish_update", "resume"]


# ---- what fails: one of several


@pytest.fixture
def pair(monkeypatch):
    """Two servers that hold version 1, their sync, and the model."""
    monkeypatch.setattr(sync, "RETRY_S", 0.02)
    monkeypatch.setattr(sync, "BUFFER_BYTES", 1)
    one, two, model = StandIn(), StandIn(number=2), toy()
    link = connected(one, two)
    update(link, model, 1)
    yield one, two, link, model
    link.close()


@pytest.mark.parametrize("call", ["pause", "start_update", "update", "finish_update", "resume"])
def test_the_others_go_on_without_a_server_that_fails_and_it_is_taken_back(pair, call, capsys):
    one, two, link, model = pair
    with torch.no_grad():
        model.module.model.norm.weight.add_(1)
    two.faults[call] = ServerError("CUDA out of memory", 500)
    update(link, model, 2)
    assert one.label == "2" and holds(one, model) and one.calls[-1] == "resume"
    assert [server.server for server in link.in_use()] == [one]
    assert "CUDA out of memory" in capsys.readouterr().out
    two.faults.clear()
    deadline = time.monotonic() + 5
    while link.returned.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    update(link, model, 3)
    assert one.label == two.label == "3" and holds(two, model) and two.calls[-1] == "resume"


def test_a_dead_server_is_taken_back_only_once_it_answers(pair):
    one, two, link, model = pair
    two.dead = True
    update(link, model, 2)
    time.sleep(0.1)
    update(link, model, 3)
    assert (one.label, two.label) == ("3", "1") and link.returned.empty()
    two.dead, two.label, two.weights = False, "default", {}
    deadline = time.monotonic() + 5
    while link.returned.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    update(link, model, 4)
    assert two.label == "4" and holds(two, model)


def test_the_run_stops_when_the_last_server_fails(pair):
    one, two, link, model = pair
    one.dead = True
    update(link, model, 2)
    two.dead = True
    with pytest.raises(SyncError, match="127.0.0.1:2"):
        update(link, model, 3)


def test_a_server_that_was_restarted_between_two_updates_gets_everything_at_the_next(pair):
    one, two, link, model = pair
    two.label, two.weights, two.groups = "default", {}, []
    update(link, model, 2)
    assert (one.label, two.label) == ("2", "2") and holds(two, model)
    assert one.calls.count("init") == 1 and two.calls.count("init") == 2


def test_a_live_server_that_labels_nothing_is_never_left_out_quietly(monkeypatch):
    """Nobody could tell its answers from those of the new weights."""
    one, two = StandIn(), StandIn(number=2)
    one.label = two.label = None
    link = connected(one, two)
    update(link, toy(), 1)
    two.faults["update"] = ServerError("CUDA out of memory", 500)
    with pytest.raises(SyncError, match="out of memory"):
        update(link, toy(), 2)
