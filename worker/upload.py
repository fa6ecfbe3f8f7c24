"""Small tensors on their way to the device, without waiting for what it is busy with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Integers of int32 that 16 bytes hold.
_ALIGNED = 4


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """``values`` as a tensor of ``dtype`` on ``device``.

    A copy from ordinary memory would first wait until the device has done all that it was given;
    one from pinned memory takes its turn. torch keeps the pinned memory until then.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """``arrays`` of integers as tensors int32 of their shapes, in one copy. Each begins at a
    multiple of 16 bytes, as kernels like it."""
    sizes = [array.size for array in arrays]
    room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    together = np.empty(sum(room), np.int32)
    parts = np.split(together, np.cumsum(room)[:-1])
    for part, array in zip(parts, arrays, strict=True):
        part[: array.size] = array.reshape(-1)
    tensors = upload(together, device, torch.int32).split_with_sizes(room)
    return [
        tensor[:size].view(array.shape)
        for tensor, size, array in zip(tensors, sizes, arrays, strict=True)
    ]


def upload_into(values: NDArray[np.int32], target: Tensor) -> None:
    """``values`` [n] to the first n places of ``target``, in one copy that takes its turn."""
    tensor = torch.from_numpy(values)
    if target.is_cuda:
        tensor = tensor.pin_memory()
    target[: len(values)].copy_(tensor, non_blocking=True)
