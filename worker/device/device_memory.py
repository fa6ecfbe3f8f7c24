"""A GPU's memory: how much there is, and who has it."""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """One GPU's, in bytes."""

    @property
    def total(self) -> int: ...

    @property
    def used(self) -> int:
        """By whomever."""
        ...

    @property
    def held(self) -> int:
        """For this process's tensors; what torch keeps for later ones counts."""
        ...

    @property
    def most_held(self) -> int:
        """Since ``release``."""
        ...

    def release(self) -> None:
        """Gives back what torch keeps, once all that was begun is done."""
        ...


class CudaMemory:
    """The DeviceMemory of a CUDA device."""

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
    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    @property
    def most_held(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
