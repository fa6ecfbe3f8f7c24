"""What GPUs can do. Pure.

Memory, bandwidth and operations are of NVIDIA's data sheets (SXM variants; dense bfloat16, which is
half of what is said with sparsity). Of these a program reaches a part. Measured on an H200: copies
4.3 of 4.8 TB/s, matrix products 790 of 989 TFLOP/s. Assumed: a decoder reaches 85 % of such
copies, since its reads are many small ones, and 75 % of such products; other GPUs reach the same
parts of their data sheets; and 0.7 ms a step pass in which the GPU waits.

With these an H100 decodes one sequence of Qwen3-8B in 6.7 ms a token. Published (gpustack's
performance lab): 7.2 with SGLang 0.5.3, 7.3 with vLLM 0.11, 7.7 with TensorRT-LLM 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.device.device_kind import DeviceKind, kind_of_gpu

#: Of the data sheet's figures.
REACHED_BANDWIDTH = 4.3 / 4.8 * 0.85
REACHED_FLOPS = 790 / 989 * 0.75
STEP_OVERHEAD_S = 0.7e-3
#: Assumed, of one sum over all ranks, apart from the time on the link.
SUM_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True)
class Gpu:
    """As its data sheet says. ``link_bandwidth`` is to other GPUs of its node, one way (NVLink, and
    PCIe where there is none)."""

    name: str
    memory_bytes: float
    #: bytes a second
    bandwidth: float
    #: operations a second
    flops: float
    #: bytes a second
    link_bandwidth: float
    #: of CUDA, which says what it computes with
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
