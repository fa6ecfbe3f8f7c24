"""Streams of a device, and copies of tensors to the host."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """Stream of device operations; no method makes the host wait."""

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def mark(self) -> Any:
        """Return an event that completes when all operations submitted so far are done."""
        ...

    def wait(self, mark: Any) -> None:
        """Make later operations of this stream wait for ``mark``, an event of another stream."""
        ...


class CopyStreams(NamedTuple):
    """Streams of a model, which may run at the same time.

    ``compute`` runs the model, ``out`` copies to the host, ``into`` copies from the host.
    """

    compute: Stream
    out: Stream
    into: Stream


class CudaStream:
    """CUDA stream ``stream`` or, if it is None, the current stream of the calling thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        if self._own is None:
            return torch.cuda.current_stream(self._device)
        return self._own

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)


def cuda_streams(device: torch.device) -> CopyStreams:
    out, into = (torch.cuda.Stream(device) for _ in range(2))
    return CopyStreams(CudaStream(device), CudaStream(device, out), CudaStream(device, into))


class HostCopy:
    """Copy of ``tensor`` to the host, submitted when this object is created.

    On a GPU the copy runs once ``tensor`` is computed; a CPU tensor is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Any]:
        """Wait until the copy is complete, and return the values as a list."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[Any] = self._host.tolist()
        return values
