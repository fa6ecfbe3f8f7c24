"""Small tensors on their way from the device, without waiting for what it does after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arriving:
    """``tensor``, which is copied to the host as soon as it is computed."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Any]:
        """What it holds, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[Any] = self._host.tolist()
        return values
