"""Kind of device, as far as defaults depend on it. Pure."""

from __future__ import annotations

from enum import Enum

_GIB = 1 << 30


class DeviceKind(Enum):
    """Kind by the time and the memory of a long step."""

    CPU = "cpu"
    GPU = "gpu"
    #: of data centres: an H100, an H200 and what came after them
    LARGE_GPU = "large gpu"

    @property
    def batched_tokens(self) -> int:
        """Tokens of a step where ``max_num_batched_tokens`` is not set."""
        return _BATCHED_TOKENS[self]


#: Those of GPUs are the ones of vLLM's server.
_BATCHED_TOKENS = {DeviceKind.CPU: 512, DeviceKind.GPU: 2048, DeviceKind.LARGE_GPU: 8192}
#: Of a large one. An A100 of 80 GB has the memory, and a third of the operations.
_MEMORY, _CAPABILITY = 70 * _GIB, (9, 0)


def kind_of_gpu(memory_bytes: float, capability: tuple[int, int]) -> DeviceKind:
    """Return the kind of a GPU; ``capability`` is CUDA's, (9, 0) for an H100."""
    is_large = memory_bytes >= _MEMORY and capability >= _CAPABILITY
    return DeviceKind.LARGE_GPU if is_large else DeviceKind.GPU
