"""python -m pytest tests/test_stream.py: how tensors are cut into chunks; what one process shows of NCCL."""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import stream
from stream import packed_chunks


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


def test_the_stores_id_is_a_pickle_of_vllms_own_structure(monkeypatch):
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    module = types.ModuleType(name)
    module.ncclUniqueId = type("ncclUniqueId", (stream.UniqueId,), {"__module__": name})
    for number in range(1, 4):
        monkeypatch.setitem(sys.modules, name.rsplit(".", number)[0], types.ModuleType("parent"))
    monkeypatch.setitem(sys.modules, name, module)
    store, made = dist.HashStore(), bytes(range(128))
    stream.publish_nccl_id(store, made)
    read = pickle.loads(store.get(stream.STORE_KEY))
    assert type(read) is module.ncclUniqueId and bytes(read) == made


def test_without_cuda_nccl_says_where_it_comes_from():
    if torch.cuda.is_available():
        pytest.skip("this torch has NCCL")
    stream.nccl_library.cache_clear()
    with pytest.raises(stream.NcclError, match="CUDA builds of torch"):
        stream.nccl_id()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: NCCL has no CPU form")
def test_a_group_of_one_on_a_gpu_broadcasts_and_is_left():
    group = stream.NcclGroup(stream.nccl_id(), 0, 1, torch.device("cuda", 0))
    data = torch.arange(1000, dtype=torch.uint8, device="cuda")
    group.broadcast(data)
    assert torch.equal(data.cpu(), torch.arange(1000, dtype=torch.uint8))
    group.close()
    with pytest.raises(stream.NcclError, match="closed"):
        group.broadcast(data)
