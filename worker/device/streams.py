"""Streams of a device: what is put into one is done in its order, and beside what is in others."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """Nothing here waits on the host."""

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def mark(self) -> Any:
        """When all that was put in so far is done."""
        ...

    def wait(self, mark: Any) -> None:
        """What is put in from here on is done after another stream's ``mark``."""
        ...


class CopyStreams(NamedTuple):
    """In ``compute`` is all that the model does; ``out`` leads to the host, ``into`` from it."""

    compute: Stream
    out: Stream
    into: Stream


class CudaStream:
    """Without a ``stream`` of its own it is the thread's current one."""

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
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)


def cuda_streams(device: torch.device) -> CopyStreams:
    out, into = (
        torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return CopyStreams(CudaStream(device), CudaStream(device, out), CudaStream(device, into))
