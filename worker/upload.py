"""Small tensors on their way to the device, without waiting for what it is busy with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


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
