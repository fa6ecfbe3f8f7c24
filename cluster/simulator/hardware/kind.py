"""Kinds of workers: their step times, and their capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.errors import ForecastFailed
from cluster.simulator.hardware.model_size import ModelSize
from everlift.hashes import BLOCK_SIZE
from everlift.step_time import Roofline
from worker.device.device_kind import DeviceKind, kind_of_gpu

#: Shares of the data sheet's bandwidth and operations that a step reaches.
REACHED_BANDWIDTH = 4.3 / 4.8 * 0.85
REACHED_FLOPS = 790 / 989 * 0.75
STEP_OVERHEAD_S = 0.7e-3
#: Assumed latency of one sum over all ranks, without the transfer time on the link.
ALL_REDUCE_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU with the figures of its data sheet.

    ``bandwidth`` (memory) and ``link_bandwidth`` are in bytes per second, ``flops`` in operations
    per second. ``link_bandwidth`` is the one-way bandwidth to other GPUs of the node (NVLink or
    PCIe). ``capability`` is the CUDA compute capability. Capability and memory determine ``kind``,
    the kind of device.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    capability: tuple[int, int]

    @property
    def kind(self) -> DeviceKind:
        return kind_of_gpu(self.memory_bytes, self.capability)


GPUS: Mapping[str, Gpu] = {
    each.name: each
    for each in (
        Gpu("h100", 80e9, 3.35e12, 989e12, 450e9, (9, 0)),
        Gpu("h200", 141e9, 4.8e12, 989e12, 450e9, (9, 0)),
        Gpu("a100", 80e9, 2.039e12, 312e12, 300e9, (8, 0)),
        Gpu("l4", 24e9, 300e9, 121e12, 32e9, (8, 9)),
    )
}


#: Share of a GPU's memory for weights and KV cache; the rest is for intermediate results of a step.
_USED_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of worker: the time of its steps, and its default worker settings by name."""

    name: str
    step_time: Roofline
    worker: Mapping[str, object] = field(default_factory=dict)


def on_gpus(gpu: Gpu, model: ModelSize, tensor_parallel: int = 1) -> Kind:
    """Return the kind of a worker with ``tensor_parallel`` ranks, each on one GPU.

    Each rank has an equal part of the weights and the KV cache. Twice per layer a ring all-reduce
    over the n ranks sends 2 (n - 1) / n of the bytes of the hidden states. Raises ForecastFailed if
    the model does not fit into the memory of these GPUs.
    """
    name = gpu.name if tensor_parallel == 1 else f"{gpu.name}x{tensor_parallel}"
    num_blocks = _num_blocks(gpu, model, tensor_parallel)
    if num_blocks < 1:
        raise ForecastFailed(
            f"{name}: the {model.stored_bytes / 1e9:.0f} GB of weights of {model.name} do not fit"
        )
    worker = {
        "num_blocks": num_blocks,
        "max_model_len": min(model.max_model_len, num_blocks * BLOCK_SIZE),
        "max_num_batched_tokens": gpu.kind.batched_tokens,
    }
    compute_only = roofline(
        model,
        bandwidth=gpu.bandwidth * REACHED_BANDWIDTH * tensor_parallel,
        flops=gpu.flops * REACHED_FLOPS * tensor_parallel,
    )
    return Kind(name, _with_all_reduces(compute_only, gpu, model, tensor_parallel), worker)


def roofline(model: ModelSize, bandwidth: float, flops: float) -> Roofline:
    """Return the roofline of a model on hardware with this bandwidth and arithmetic rate.

    ``bandwidth`` is in bytes per second, ``flops`` in operations per second.
    """
    return Roofline(
        overhead_s=STEP_OVERHEAD_S,
        weights_s=model.read_bytes / bandwidth,
        token_s=model.token_flops / flops,
        kv_token_s=model.kv_token_bytes / bandwidth,
        pair_s=model.pair_flops / flops,
        row_s=model.row_flops / flops,
    )


def _with_all_reduces(compute_only: Roofline, gpu: Gpu, model: ModelSize, ranks: int) -> Roofline:
    all_reduces = 2 * model.num_layers if ranks > 1 else 0
    sent_bytes = model.hidden_size * model.element_bytes * 2 * (ranks - 1) / ranks
    sent_s = all_reduces * sent_bytes / gpu.link_bandwidth
    return replace(
        compute_only,
        overhead_s=compute_only.overhead_s + all_reduces * ALL_REDUCE_LATENCY_S,
        token_s=compute_only.token_s + sent_s,
        # Reading the weights hides the time of a decoding row's products, but not this time.
        row_s=compute_only.row_s + sent_s,
    )


def _num_blocks(gpu: Gpu, model: ModelSize, ranks: int) -> int:
    free_bytes = gpu.memory_bytes * _USED_MEMORY * ranks - model.stored_bytes
    return int(free_bytes / (model.kv_token_bytes * BLOCK_SIZE))
