"""Kinds of devices, which have different defaults. Pure."""

from __future__ import annotations

from enum import Enum

_GIB = 1 << 30


class DeviceKind(Enum):
    """Kind of device, which determines the default maximum number of tokens of a step."""

    CPU = "cpu"
    GPU = "gpu"
    #: a data-centre GPU: H100, H200 or newer
    LARGE_GPU = "large gpu"

    @property
    def batched_tokens(self) -> int:
        """Default of the setting ``max_num_batched_tokens``, the maximum tokens of a step."""
        return _BATCHED_TOKENS[self]


#: Default of ``max_num_batched_tokens``; those of GPUs are the defaults of vLLM's server.
_BATCHED_TOKENS = {DeviceKind.CPU: 512, DeviceKind.GPU: 2048, DeviceKind.LARGE_GPU: 8192}
#: Minimum memory, in bytes, and minimum compute capability of a LARGE_GPU. An A100 with 80 GB has
#: the memory, but only a third of an H100's operations per second.
_MEMORY, _CAPABILITY = 70 * _GIB, (9, 0)


def kind_of_gpu(memory_bytes: float, capability: tuple[int, int]) -> DeviceKind:
    """Return the kind of a GPU from its memory and its CUDA compute capability.

    ``capability`` has the major and the minor number, such as (9, 0) for an H100.
    """
    is_large = memory_bytes >= _MEMORY and capability >= _CAPABILITY
    return DeviceKind.LARGE_GPU if is_large else DeviceKind.GPU
