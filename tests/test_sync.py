"""python -m pytest tests/test_sync.py: the packed stream, and updates into a stand-in server."""

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sync
from sync import GlooGroup, SyncError, WeightSync, checkpoint_name, packed_chunks, sent_parameters

CASES = Path(__file__).parent / "data/cases"


class StandIn:
    """A server that joins the group and loads what it receives; `calls` is what it was asked, in order."""

    url = "http://127.0.0.1:1"

    def __init__(self, dtype="float32", update_error=None, start_error=None, lose_trainer=False):
        self.dtype, self.update_error, self.start_error = dtype, update_error, start_error
        self.stuck = lose_trainer
        self.calls, self.weights, self.group = [], {}, None

    def server_info(self):
        model, transfer = {"dtype": f"torch.{self.dtype}"}, {"backend": "gloo"}
        return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer}}

    def world_size(self):
        return 1

    def is_paused(self):
        return False

    def init_weight_transfer(self, info):
        self.buffer = info["packed_buffer_size_bytes"]
        self.group = GlooGroup(info["master_address"], info["master_port"], 1, info["world_size"], 5)

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def start_update(self):
        self.calls.append("start_update")
        if self.start_error:
            raise RuntimeError(self.start_error)

    def update_weights(self, info):
        self.calls.append("update")
        if self.update_error:
            raise RuntimeError(self.update_error)
        if self.stuck:
            time.sleep(3600)
        for chunk in packed_chunks(info["names"], info["dtype_names"], info["shapes"], self.buffer):
            data = torch.empty(sum(spec.nbytes for spec in chunk), dtype=torch.uint8)
            self.group.broadcast(data)
            for spec, part in zip(chunk, data.split([spec.nbytes for spec in chunk]), strict=True):
                self.weights[spec.name] = part.clone().view(spec.dtype).view(spec.shape)

    def finish_update(self, version):
        self.calls.append("finish_update")
        self.version = version


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


@pytest.mark.parametrize("case", ["tied", "untied"])
def test_every_trainable_parameter_is_sent_once_under_its_checkpoint_name(case):
    expected = json.loads((CASES / "A17_transfer_manifest.json").read_text())["expect"][case]["sent"]
    sent = [{"name": n, "shape": list(p.shape)} for n, p in sent_parameters(toy(tied=case == "tied"))]
    assert sent == expected


def test_wrapper_prefixes_are_taken_out_of_names():
    assert checkpoint_name("module.model._orig_mod.norm.weight") == "model.norm.weight"


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
    servers, model = [StandIn(dtype), StandIn(dtype)], toy()
    link = WeightSync(servers, 5)
    link.init()
    for version in (1, 2):
        link.send(model, version)
    link.close()
    for server in servers:
        assert server.version == "2"
        assert list(server.weights) == [name for name, _ in sent_parameters(model)]
        for name, parameter in sent_parameters(model):
            assert torch.equal(server.weights[name], parameter.to(getattr(torch, dtype))), name


def update(link, model):
    link.pause()
    link.send(model, 1)
    link.resume()


def test_an_update_calls_the_server_in_this_order():
    expected = json.loads((CASES / "A18_transfer_order_and_version.json").read_text())
    server = StandIn()
    link = WeightSync([server], 5)
    link.init()
    update(link, toy())
    assert server.calls + ["publish_version"] == expected["expect"]["good_transfer"]["call_order"]


@pytest.mark.parametrize(
    "fault, text",
    [
        ({"update_error": "CUDA out of memory"}, "CUDA out of memory"),
        ({"start_error": "weight transfer engine is not initialized"}, "not initialized"),
        ({"lose_trainer": True}, "took more than"),
    ],
)
def test_a_failed_update_is_an_error_in_bounded_time_and_never_resumes(fault, text):
    server = StandIn(**fault)
    link = WeightSync([server], 1.5)
    link.init()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        update(link, toy())
    assert time.monotonic() - start < 10
    assert "resume" not in server.calls and "finish_update" not in server.calls


def test_a_failed_update_says_what_to_do():
    link = WeightSync([StandIn(update_error="CUDA out of memory")], 2)
    link.init()
    with pytest.raises(SyncError, match="do not resume it"):
        update(link, toy())


def test_a_server_that_takes_weights_another_way_is_refused_with_the_flag(monkeypatch):
    server = StandIn()
    info = server.server_info()
    info["vllm_config"]["weight_transfer_config"] = None
    monkeypatch.setattr(server, "server_info", lambda: info)
    with pytest.raises(SyncError, match="--weight-transfer-config"):
        WeightSync([server], 2).init()
