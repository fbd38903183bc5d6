"""python -m pytest tests/test_nccl.py: what can be seen of NCCL without two GPUs."""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist

import nccl


def test_the_stores_id_is_a_pickle_of_vllms_own_structure(monkeypatch):
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    module = types.ModuleType(name)
    module.ncclUniqueId = type("ncclUniqueId", (nccl.UniqueId,), {"__module__": name})
    for number in range(1, 4):
        monkeypatch.setitem(sys.modules, name.rsplit(".", number)[0], types.ModuleType("parent"))
    monkeypatch.setitem(sys.modules, name, module)
    store, made = dist.HashStore(), bytes(range(128))
    nccl.publish(store, made)
    read = pickle.loads(store.get(nccl.STORE_KEY))
    assert type(read) is module.ncclUniqueId and bytes(read) == made


def test_without_cuda_nccl_says_where_it_comes_from():
    if torch.cuda.is_available():
        pytest.skip("this torch has NCCL")
    nccl.library.cache_clear()
    with pytest.raises(nccl.NcclError, match="CUDA builds of torch"):
        nccl.unique_id()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: NCCL has no CPU form")
def test_a_group_of_one_on_a_gpu_broadcasts_and_is_left():
    group = nccl.NcclGroup(nccl.unique_id(), 0, 1, torch.device("cuda", 0))
    data = torch.arange(1000, dtype=torch.uint8, device="cuda")
    group.broadcast(data)
    assert torch.equal(data.cpu(), torch.arange(1000, dtype=torch.uint8))
    group.close()
    with pytest.raises(nccl.NcclError, match="closed"):
        group.broadcast(data)
