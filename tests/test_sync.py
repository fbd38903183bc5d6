"""python -m pytest tests/test_sync.py: updates into stand-in servers, and what can fail."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stand_in import StandIn, connected, holds, toy, update
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.core_model_loading import WeightRenaming

import stream
import sync
from client import ServerError
from sync import ADVICE, SyncError, checkpoint_name, full_tensor, sent_parameters

CASES = Path(__file__).parent / "data/cases"


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer", [1, 100, 1 << 20])
def test_the_server_holds_the_trainers_weights_in_its_dtype(dtype, buffer, monkeypatch):
    monkeypatch.setattr(stream, "BUFFER_BYTES", buffer)
    servers = [StandIn(dtype), StandIn(dtype, number=2)]
    model, link = toy(), connected(*servers)
    for version in (1, 2):
        with torch.no_grad():
            model.module.model.norm.weight.add_(1)
        update(link, model, version)
    link.close()
    assert all(server.label == "2" and holds(server, model) for server in servers)


def test_plain_tensors_among_sharded_ones_are_sent_in_the_servers_dtype(alone):
    expected = json.loads((CASES / "A17_transfer_manifest.json").read_text())["expect"]["mixed"]["sent"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, model, server = init_device_mesh("cpu", (1,)), toy(), StandIn("bfloat16")
    plain = model.module.model
    layer = getattr(plain.layers, "0")._checkpoint_wrapped_module
    for owner in (plain.embed_tokens, layer.self_attn.q_proj, layer.mlp.up_proj):
        owner.weight = torch.nn.Parameter(distribute_tensor(owner.weight.detach(), mesh, [Shard(0)]))
    model.module.lm_head.weight = plain.embed_tokens.weight
    update(connected(server), model)
    assert [{"name": n, "shape": list(w.shape)} for n, w in server.weights.items()] == expected
    for name, parameter in sent_parameters(model):
        assert torch.equal(server.weights[name], full_tensor(parameter).bfloat16())


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
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1)
    server, happened = StandIn(), []
    link = connected(server)
    link.pack = lambda chunk, pack=link.pack: happened.append("pack") or pack(chunk)
    server.pause = lambda: happened.append("pause")
    group = link.links[0].group
    group.broadcast = lambda *chunk, send=group.broadcast: (send(*chunk), happened.append("sent"))
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
        link = connected(server)
        started = time.monotonic()  # to meet may take longer: the store looks up names
        update(link, toy())
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
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1)
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
    assert [each.server for each in link.links] == [one]
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
