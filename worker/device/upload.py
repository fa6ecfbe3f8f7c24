"""Upload of small tensors to a device, without waiting for work submitted to it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Alignment of each array in bytes; kernels access aligned arrays faster.
_ALIGNED = 16


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return ``values`` as a tensor of ``dtype`` on ``device``.

    On a CPU the tensor may share the memory of ``values``.
    """
    return _copied(torch.as_tensor(values, dtype=dtype), device)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``tensor`` on a GPU, or ``tensor`` itself if ``device`` is the CPU.

    The copy is made from pinned memory, so that the host does not wait for earlier work of the
    device. torch keeps the pinned memory until the copy is complete.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Parcel:
    """Set of arrays that are copied to ``device`` in one copy, when the first of them is needed.

    If ``device`` is the CPU, the arrays are not copied: the tensors share their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[NDArray[Any]] = []
        self._tensors: list[Tensor] | None = None

    def add(self, array: NDArray[Any]) -> Callable[[], Tensor]:
        """Add an array, and return a function that returns it as a tensor on the device.

        The tensor has the array's shape and type. The first call of any returned function copies
        all arrays, unless ``unpack`` was called. No array can be added after the copy or after
        ``unpack``.
        """
        assert self._tensors is None, "the arrays have been copied already"
        self._arrays.append(array)
        index = len(self._arrays) - 1
        return lambda: self._unpacked()[index]

    def packed(self) -> NDArray[np.int32]:
        """Return all arrays as one int32 array; each begins at a multiple of 16 bytes."""
        together = np.empty(sum(map(_padded_bytes, self._arrays)), np.uint8)
        first = 0
        for array in self._arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            together[first : first + array.nbytes] = flat
            first += _padded_bytes(array)
        return together.view(np.int32)

    def unpack(self, packed: Tensor) -> None:
        """Use ``packed`` as the memory of all arrays' tensors, so that no other copy is made.

        ``packed`` must be a copy, on the device, of what the method ``packed`` returned: int32, and
        aligned to 16 bytes.
        """
        self._tensors, first = [], 0
        for array in self._arrays:
            part = packed[first : first + array.nbytes // packed.itemsize]
            self._tensors.append(part.view(_dtype(array)).view(array.shape))
            first += _padded_bytes(array) // packed.itemsize

    def _unpacked(self) -> list[Tensor]:
        if self._tensors is None and self._device.type == "cpu":
            self._tensors = [torch.as_tensor(array) for array in self._arrays]
        elif self._tensors is None:
            self.unpack(_copied(torch.from_numpy(self.packed()), self._device))
        assert self._tensors is not None
        return self._tensors


def _padded_bytes(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def _dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def upload_into(values: NDArray[np.int32], target: Tensor) -> None:
    """Copy ``values`` [n] to the first n elements of ``target``.

    On a GPU the copy is submitted to the current stream, and the host does not wait for it.
    """
    tensor = torch.from_numpy(values)
    if target.is_cuda:
        tensor = tensor.pin_memory()
    target[: len(values)].copy_(tensor, non_blocking=True)
