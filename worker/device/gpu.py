"""Memory and utilisation of a rank's GPU."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Protocol

import torch

from everlift import logs
from worker.device.device import choose_device

log = logs.get_logger(__name__)

#: Seconds between two reports. NVML's figure covers about the last second.
_INTERVAL_S = 1.0


async def watch(device: str, report: Callable[[float], None]) -> None:
    """Report the fraction of recent time in which the GPU was busy, once a second until cancelled.

    ``report`` is called with a number from 0 to 1. ``device`` is the setting: ``auto``, ``cpu`` or
    ``cuda``. Returns at once if the device chosen by the setting is not a GPU. Returns also as soon
    as NVML (NVIDIA's management library) cannot be queried, for example because pynvml is missing.
    Raises ValueError if ``device`` is ``cuda`` and torch finds no CUDA device.
    """
    if (chosen := choose_device(device)).type != "cuda":
        return
    try:
        while True:
            report(await asyncio.to_thread(torch.cuda.utilization, chosen) / 100)
            await asyncio.sleep(_INTERVAL_S)
    except Exception as error:
        log.info("GPU utilisation unknown", cause=str(error))


class DeviceMemory(Protocol):
    """Memory of a GPU, in bytes."""

    @property
    def total(self) -> int: ...

    @property
    def used(self) -> int:
        """Memory used by all processes."""
        ...

    @property
    def reserved(self) -> int:
        """Memory reserved by torch in this process: tensors, and freed memory that torch caches."""
        ...

    @property
    def peak_reserved(self) -> int:
        """Maximum of ``reserved`` since the last ``release``, or since the process started."""
        ...

    def release(self) -> None:
        """Wait for all submitted work, then free the memory in torch's cache.

        ``peak_reserved`` restarts at the memory that is still reserved.
        """
        ...


class CudaMemory:
    """Memory of the CUDA device ``device``, in bytes (see DeviceMemory)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    @property
    def used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    @property
    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    @property
    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def release_cached_memory() -> None:
    """Release the GPU memory that torch has cached but does not use, if this process uses a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
