"""A plugin for vLLM: weights over gloo, for servers without a GPU or on the trainer's own.

    pip install --no-deps tools/vllm_gloo          (into vLLM's environment)
    vllm serve ... --weight-transfer-config '{"backend":"gloo"}'

Routes, fields and packed stream are those of the backend "nccl" since vLLM 0.28; only the broadcast differs.
Every worker is a rank of the trainer's group. Bytes go through host memory: use NCCL where it can be used.

A tensor that cannot be loaded does not end the stream: what follows is received and thrown away, so that the
group stays in step and the next update can use it. After a broken stream it has to be formed again.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import reload

TIMEOUT = timedelta(seconds=600)  # for the trainer to come, and for each of its chunks


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2  # overlaps copies on a GPU; changes no byte


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(base.WeightTransferEngine):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    group = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if self.device.type == "cpu" and any(hasattr(m, "w13_weight") for m in self.model.modules()):
            raise RuntimeError(
                "vLLM on a CPU keeps packed copies of experts that no update reaches; use a GPU"
            )
        workers = self.parallel_config
        rank = workers.data_parallel_index * workers.world_size + workers.rank + init_info.rank_offset
        address, port, size = init_info.master_address, init_info.master_port, init_info.world_size
        self.shutdown()
        self.buffer_bytes = init_info.packed_buffer_size_bytes if init_info.packed else 0
        store = dist.TCPStore(address, port, size, False, TIMEOUT, use_libuv=False)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        if address.startswith("127."):
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        self.store, self.group = store, dist.ProcessGroupGloo(store, rank, size, options)
        self.group.allreduce([torch.zeros(1)]).wait()

    def start_weight_update(self) -> None:
        reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("gloo weight transfer not initialized. Call init_transfer_engine() first.")
        problem, chunk, sizes = None, [], []
        last = len(update_info.names) - 1
        parameters = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for number, (name, dtype_name, shape) in enumerate(parameters):
            dtype = getattr(torch, dtype_name)
            chunk.append((name, dtype, shape))
            sizes.append(math.prod(shape) * dtype.itemsize)
            if sum(sizes) > self.buffer_bytes or number == last:
                parts = zip(chunk, self.receive(sum(sizes)).split(sizes), strict=True)
                try:
                    if problem is None:
                        self.model.load_weights([(n, part.view(d).view(s)) for (n, d, s), part in parts])
                except Exception as error:
                    problem = error
                chunk, sizes = [], []
        if problem is not None:
            raise problem

    def receive(self, size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        how = dist.BroadcastOptions()
        how.rootRank = how.rootTensor = 0
        try:
            self.group.broadcast([data], how).wait()
        except RuntimeError:
            self.shutdown()  # this end no longer knows where in the stream the trainer is
            raise
        return data.to(self.device)

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():  # on a CPU a tied head keeps a packed copy that reloading forgets
            if module.__class__.__name__ in ("VocabParallelEmbedding", "ParallelLMHead"):
                if hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)

    def trainer_send_weights(self, *_, **__):  # abstract before 0.28
        raise NotImplementedError("the trainer has its own sender")

    def shutdown(self) -> None:
        self.group = self.store = None


def register() -> None:
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
