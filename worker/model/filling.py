"""Filling of parameters from stored tensors of any type, with a small buffer for each thread.

A parameter in CPU memory which has the stored type is usually read from the file directly. All
other parameters are read a few rows at a time into the buffer and copied from there, which converts
their type. The buffer is also used if only parts of rows are needed but whole rows are read,
because skipping short gaps would take longer. Memory never holds a second copy of a whole tensor.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from everlift.progress import Progress
from worker.model.piece import Piece
from worker.model.sharing import Run, runs

#: Reads runs of a stored tensor into a flat tensor, in order and without gaps.
Read = Callable[[Iterable[Run], Tensor], None]

_BUFFER_BYTES = 4 << 20
#: Bytes that a Writer converts at a time; it needs several times this memory.
_CONVERTED_BYTES = 128 << 10
#: Maximum number of unneeded bytes that are read along. Reading them takes no longer than starting
#: a second read after them.
_GAP_BYTES = 16 << 10


def read_exactly(descriptor: int, into: memoryview, place: int) -> bool:
    """Fill ``into`` with a file's bytes from offset ``place`` on, and return True.

    Return False if the file ends before ``into`` is full.
    """
    while into:
        count = os.preadv(descriptor, [into], place)
        if not count:
            return False
        into, place = into[count:], place + count
    return True


class _Buffer(threading.local):
    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


class Filler:
    """Filler of the parameters that ``pieces`` contain, from the tensors of a checkpoint.

    Its methods may be called by several threads. ``progress`` is called with the number of bytes
    filled so far and the total of all pieces.
    """

    def __init__(self, pieces: Iterable[Piece], progress: Progress) -> None:
        self.total_bytes = sum(piece.into.nbytes for piece in pieces)
        self._done_bytes = 0
        self._progress = progress
        self._progress_lock = threading.Lock()
        self._buffer = _Buffer()

    def fill(self, piece: Piece, dtype: torch.dtype, read: Read) -> None:
        """Fill ``piece.into`` from a stored tensor with elements of type ``dtype``.

        ``read`` reads given runs of the stored tensor's elements into a flat tensor.
        """
        bounds, stored = piece.bounds, piece.view or piece.shape
        most = _BUFFER_BYTES if piece.writer is None else _CONVERTED_BYTES
        inner = _ranges_to_read(bounds[1:], stored[1:], dtype.itemsize)
        needed = [_within(part, whole) for part, whole in zip(bounds[1:], inner, strict=True)]
        for rows in _batches((bounds[0], *inner), dtype.itemsize, most):
            shape = len(rows), *map(len, inner)
            if piece.writer is not None:
                target = self._in_buffer(shape, dtype, piece.into.device)
                read(runs(stored, (rows, *inner)), target.view(-1))
                piece.writer.write(target[:, *needed].to(piece.into.device), rows.start)
                done, total = (
                    piece.into.nbytes * (end - bounds[0].start) // len(bounds[0])
                    for end in (rows.start, rows.stop)
                )
                self._report(total - done)
                continue
            into = piece.into[_within(rows, bounds[0])]
            target = self._read_target(into, shape, dtype)
            read(runs(stored, (rows, *inner)), target.view(-1))
            if target is not into:
                into.copy_(target[:, *needed])
            self._report(into.nbytes)

    def _report(self, more_bytes: int) -> None:
        with self._progress_lock:
            self._done_bytes += more_bytes
            self._progress(self._done_bytes, self.total_bytes)

    def _read_target(self, into: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        is_fit = into.dtype == dtype and into.shape == shape
        is_row_major = into.is_contiguous() and into.stride(-1) == 1
        if is_fit and into.device.type == "cpu" and is_row_major:
            return into
        return self._in_buffer(shape, dtype, into.device)

    def _in_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised tensor in this thread's buffer, for a transfer to ``device``.

        The buffer is in pinned memory if ``device`` is a GPU. The tensor is valid until the
        next call in this thread.
        """
        size = math.prod(shape) * dtype.itemsize
        if len(self._buffer.bytes) < size:
            on_gpu = device.type == "cuda"
            self._buffer.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        return self._buffer.bytes[:size].view(dtype).view(shape)


def _ranges_to_read(
    needed: tuple[range, ...], shape: tuple[int, ...], item_size: int
) -> tuple[range, ...]:
    unneeded = math.prod(shape) - math.prod(map(len, needed))
    return tuple(map(range, shape)) if unneeded * item_size <= _GAP_BYTES else needed


def _within(inner: range, outer: range) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)


def _batches(bounds: tuple[range, ...], item_size: int, most_bytes: int) -> Iterator[range]:
    row_bytes = item_size * math.prod(map(len, bounds[1:]))
    if not row_bytes:
        return
    count = max(1, most_bytes // row_bytes)
    first, end = bounds[0].start, bounds[0].stop
    for start in range(first, end, count):
        yield range(start, min(start + count, end))
