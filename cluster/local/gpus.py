"""Assignment of GPUs to the ranks of a cluster without Ray.

NVML is asked for them: CUDA is not touched, and torch not imported.

    CUDA_VISIBLE_DEVICES of this process, where it is set    else all GPUs, as CUDA counts them
    rank r of worker w                                       number w * tensor_parallel + r of them
    more ranks than GPUs                                     in turn: some share one
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVML = "libnvidia-ml.so.1"
#: What ends CUDA's list.
_NONE = ("", "-1")


def gpus_of_ranks(config: Config, gpus: Sequence[str], worker: int = 0) -> list[str]:
    """Return the GPU of each rank of a worker; empty if CUDA decides."""
    ranks = range(config.worker.tensor_parallel)
    if len(gpus) < 2:
        return ["" for _ in ranks]
    return [gpus[(worker * len(ranks) + rank) % len(gpus)] for rank in ranks]


def visible_gpus(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; none if no rank would use one."""
    if config.worker.is_fake or config.worker.device == "cpu":
        return []
    if (visible := environment.get(VISIBLE)) is not None:
        return _listed(visible)
    try:
        return [str(number) for number in range(count_gpus(ctypes.CDLL(_NVML)))]
    except (OSError, AttributeError):
        return []


def _listed(visible: str) -> list[str]:
    names = [name.strip() for name in visible.split(",")]
    end = next((i for i, name in enumerate(names) if name in _NONE), len(names))
    return names[:end]


def count_gpus(nvml: Any) -> int:
    """Return the number of usable GPUs, by NVML: a container may not have all."""
    if nvml.nvmlInit_v2():
        return 0
    try:
        count, gpu = ctypes.c_uint(), ctypes.c_void_p()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
        found = (
            nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu))
            for number in range(count.value)
        )
        return sum(not failed for failed in found)
    finally:
        nvml.nvmlShutdown()
