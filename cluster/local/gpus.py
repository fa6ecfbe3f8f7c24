"""Assignment of GPUs to the ranks of a cluster without Ray.

NVML counts the GPUs, so that CUDA is not initialised and torch is not imported.

    available GPUs         CUDA_VISIBLE_DEVICES of this process if set, else all in CUDA's order
    order of assignment    workers 0, 1, ... of the first model, then those of the next model, ...
    GPUs of a worker       the next tensor_parallel GPUs: one for each rank; with vLLM, all of them
                           for the only rank
    more ranks than GPUs   the GPUs are assigned in turn, so that some ranks share one
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.groups import WorkerGroup

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVML = "libnvidia-ml.so.1"
#: Entries that end CUDA's list of devices.
_NONE = ("", "-1")


def gpus_of_ranks(
    groups: Sequence[WorkerGroup], group: WorkerGroup, gpus: Sequence[str], worker: int = 0
) -> list[str]:
    """Return the name of the GPU of each rank of worker number ``worker`` of ``group``.

    vLLM has a single rank; its element has the names of all GPUs of the worker, separated by
    commas. ``groups`` are all groups that share the machine, including ``group``. ``gpus`` are the
    names of the visible GPUs. All elements are empty, so that CUDA chooses, if there are fewer than
    two visible GPUs or ``group`` uses no GPU.
    """
    size, num_ranks = group.worker.tensor_parallel, group.worker.num_ranks
    if len(gpus) < 2 or not uses_gpus(group):
        return [""] * num_ranks
    first = ranks_with_gpus(groups[: groups.index(group)]) + worker * size
    assigned = [gpus[(first + number) % len(gpus)] for number in range(size)]
    return assigned if num_ranks == size else [",".join(dict.fromkeys(assigned))]


def ranks_with_gpus(groups: Iterable[WorkerGroup]) -> int:
    """Return the largest number of GPUs that all workers of ``groups`` can use without sharing.

    A worker counts as tensor_parallel GPUs, also with vLLM; a group that uses no GPU counts as 0.
    The number of workers is the maximum of autoscaling, or the fixed number without it.
    """
    return sum(each.most_ranks for each in groups if uses_gpus(each))


def uses_gpus(group: WorkerGroup) -> bool:
    """Return whether the group's workers use GPUs on a machine that has GPUs."""
    return not group.worker.is_fake and group.worker.device != "cpu"


def visible_gpus(groups: Iterable[WorkerGroup], environment: Mapping[str, str]) -> list[str]:
    """Return the names of the available GPUs, such as ``0``, for use in CUDA_VISIBLE_DEVICES.

    The result is always empty if the workers of ``groups`` use no GPU. Otherwise ``environment``
    decides: the names in its CUDA_VISIBLE_DEVICES before the first empty or -1 entry are returned.
    An unset variable means all GPUs that NVML finds, numbered from 0.
    """
    if not any(map(uses_gpus, groups)):
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
    """Return the number of GPUs that NVML can open; 0 if NVML fails.

    A container may not have access to all GPUs that NVML lists.
    """
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
