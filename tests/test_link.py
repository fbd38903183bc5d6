"""python -m pytest tests/test_link.py: releases of vLLM, the handshake, a server that falls silent."""

import threading
import time

import pytest
import torch
from stand_in import GPU, FakeNccl, StandIn, connected, holds, toy, update

import link as links
import stream
from client import ServerError
from link import SyncError

# ---- releases of vLLM, workers behind NCCL


@pytest.fixture
def fake_nccl(monkeypatch):
    ids = iter(bytes([number]) * 128 for number in range(1, 100))
    monkeypatch.setattr(stream, "NcclGroup", FakeNccl)
    monkeypatch.setattr(stream, "nccl_id", lambda: next(ids))
    monkeypatch.setattr(stream, "nccl_version", lambda: (2, 28, 9))
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
        ({"release": "0.26.0", "lora": {"max_loras": 3}}, "cpu", "start it without it"),
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
        raise stream.NcclError(
            "NCCL: invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a"
        )

    monkeypatch.setattr(stream, "NcclGroup", refuse)
    server = StandIn(backend="nccl")
    server.init_weight_transfer = lambda info: time.sleep(30)
    monkeypatch.setattr(links, "LAST_WORDS_S", 0.1)
    with pytest.raises(SyncError, match="one rank per GPU.*CUDA_VISIBLE_DEVICES.*NCCL_HOSTID"):
        connected(server, device=GPU)


def test_differences_of_nccl_are_told(fake_nccl, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # concerns one end
    system = {"pip_packages": "[pip3] nvidia-nccl-cu13==2.27.5", "env_vars": "NCCL_ALGO=Tree\nCUDA_HOME=/x\n"}
    version, variable = links.nccl_differences(system)
    assert "2.27" in version and "2.28" in version
    assert variable.startswith("NCCL_ALGO is Tree there and Ring here")
    assert links.nccl_differences({"pip_packages": None, "env_vars": "NCCL_ALGO=Ring"}) == []
    assert links.nccl_differences({}) == [], "a server that tells nothing differs in nothing"


# ---- what the server says, and when it does not


def test_the_servers_words_are_preferred_to_those_of_a_broken_stream(monkeypatch):
    server = StandIn()
    link = connected(server)

    def break_off(info):
        server.groups[0].close()
        time.sleep(0.3)
        raise ServerError("EngineCore encountered an issue", 500)

    server.update_weights = break_off
    link.links[0].group.broadcast = lambda *_: (_ for _ in ()).throw(
        RuntimeError("connection closed by peer")
    )
    with pytest.raises(SyncError, match="EngineCore"):
        update(link, toy())


def test_a_server_that_dies_without_an_answer_is_noticed_by_its_health(monkeypatch):
    """A vLLM whose engine was killed: the call stays open, new connections are refused."""
    monkeypatch.setattr(links, "LOOK_S", 0.1)
    monkeypatch.setattr(links, "LAST_WORDS_S", 0.1)
    server = StandIn()
    link = connected(server)
    server.loads_slowly.clear()
    threading.Timer(0.3, lambda: setattr(server, "dead", True)).start()
    started = time.monotonic()
    with pytest.raises(SyncError, match="the update failed: connection refused"):
        update(link, toy())
    assert time.monotonic() - started < 5
    server.loads_slowly.set()


def test_an_answer_that_comes_while_a_chunk_is_packed_is_noticed(monkeypatch):
    """The broadcasts are stuck then, and the server is in good health: nothing else would tell."""
    monkeypatch.setattr(links, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1)
    server, packing, ended = StandIn(), threading.Event(), threading.Event()
    link = connected(server)
    chunks = iter(range(5))

    def answer(info):
        packing.wait(20)
        raise ServerError("no such parameter", 500)

    def pack(chunk, pack=link.pack):
        if next(chunks) == 2:
            packing.set()
            time.sleep(0.3)
        return pack(chunk)

    def broadcast(*chunk):
        if packing.is_set():
            ended.wait(20)

    server.update_weights, link.pack, link.links[0].group.broadcast = answer, pack, broadcast
    started = time.monotonic()
    with pytest.raises(SyncError, match="the update failed: no such parameter"):
        update(link, toy(tied=False))
    assert time.monotonic() - started < 10
    ended.set()
