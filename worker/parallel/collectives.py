"""Collectives of the ranks of one host through memory that they share (collectives.cpp).

That they share it is tried: rank 0 makes a file in shared memory, and every rank says what it reads
there. The name is removed as soon as all have it open, so that nothing is left behind however they
end. They tell each other over the store by which they meet. Nothing here knows torch: what is
summed lies at an address.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Protocol

from everlift import logs
from worker.native import native

log = logs.get_logger(__name__)

_SOURCE = Path(__file__).with_name("collectives.cpp")
_DIRECTORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEY = "everlift/collectives"
_PROOF_BYTES = 16
#: What goes through at once.
_SLOT_BYTES = 256 << 10
#: What a call returns when a rank does not come in time; 1 + r when rank r is gone.
_LATE = -1


class Store(Protocol):
    """The used part of torch's TCPStore. ``get`` waits for the key."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


class Collectives:
    """The end of one rank.

    All ranks make the same calls in the same order, with the same sizes. Each raises RuntimeError
    when a rank is gone or does not come, and no other can follow then.
    """

    def __init__(
        self, library: ctypes.CDLL, file: int, rank: int, size: int, timeout: timedelta
    ) -> None:
        """Take over ``file``, which this object then owns. Raises OSError."""
        timeout_ns = int(timeout.total_seconds() * 1e9)
        self._library = library
        self._memory = library.collectives_open(file, rank, size, _SLOT_BYTES, timeout_ns)
        if self._memory is None:
            raise OSError("the memory cannot be mapped, or its file not be locked")

    def all_reduce(self, address: int, count: int, kind: int) -> None:
        """Replace ``count`` numbers by their sums over the ranks, the same bits on each of them.

        They are fp32, bf16, fp16 or int64 by ``kind``, 0 to 3; bf16 and fp16 are summed in fp32.
        """
        self._call(self._library.collectives_all_reduce, address, count, kind)

    def broadcast(self, address: int, num_bytes: int) -> None:
        """Replace bytes by rank 0's."""
        self._call(self._library.collectives_broadcast, address, num_bytes)

    def gather(self, address: int, num_bytes: int, width: int, out: int) -> None:
        """Put the ranks' rows, each of ``width`` bytes, side by side to rank 0's ``out``."""
        self._call(self._library.collectives_gather, address, num_bytes, width, out)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._call(self._library.collectives_barrier)

    def close(self) -> None:
        """Leave the group: for the other ranks this one is gone. May be called again."""
        if self._memory is not None:
            self._library.collectives_close(self._memory)
            self._memory = None

    def _call(self, function: Callable[..., int], *arguments: int) -> None:
        if self._memory is None:
            raise RuntimeError("this rank has closed its end")
        status = function(self._memory, *arguments)
        if status == _LATE:
            raise RuntimeError("a rank has not come to a collective in time")
        if status:
            raise RuntimeError(f"rank {status - 1} is gone")


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> Collectives | None:
    """Join as ``rank`` of ``size``; None on every rank if one has no compiler or shares no memory.

    ``timeout`` is that of a collective. Raises what the store does.
    """
    library = _library()
    if not _unanimous(store, "host", rank, size, _host() if library is not None else ""):
        return None
    assert library is not None
    num_bytes = library.collectives_bytes(size, _SLOT_BYTES)
    with ExitStack() as unless_agreed:
        with _file(store, rank, num_bytes) as path:
            proof = ""
            try:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                collectives = Collectives(library, file, rank, size, timeout)
                unless_agreed.callback(collectives.close)
                proof = os.pread(file, _PROOF_BYTES, num_bytes - _PROOF_BYTES).hex()
            except OSError as error:
                log.warning(
                    "shared memory with the other ranks unavailable", rank=rank, error=str(error)
                )
            if not _unanimous(store, "proof", rank, size, proof):
                return None
        unless_agreed.pop_all()
    return collectives


def _unanimous(store: Store, subject: str, rank: int, size: int, word: str) -> bool:
    store.set(f"{_KEY}/{subject}/{rank}", word)
    words = {store.get(f"{_KEY}/{subject}/{each}") for each in range(size)}
    return len(words) == 1 and b"" not in words


def _host() -> str:
    """Return an id of this boot of this kernel; empty if unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@contextmanager
def _file(store: Store, rank: int, num_bytes: int) -> Iterator[Path]:
    if rank:
        yield Path(store.get(f"{_KEY}/file").decode())
        return
    path = _DIRECTORY / f"everlift-{secrets.token_hex(16)}"
    try:
        _make(path, num_bytes)
        store.set(f"{_KEY}/file", str(path))
        yield path
    finally:
        path.unlink(missing_ok=True)


def _make(path: Path, num_bytes: int) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Memory that is lacking only when it is written to would be the end of the process.
            os.posix_fallocate(file, 0, num_bytes)
            os.pwrite(file, secrets.token_bytes(_PROOF_BYTES), num_bytes - _PROOF_BYTES)
        finally:
            os.close(file)
    except OSError as error:
        log.warning("shared memory unavailable", path=str(path), error=str(error))


@cache
def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = native.compiled(_SOURCE)
    if library is None:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.collectives_bytes.argtypes = [number, size]
    library.collectives_bytes.restype = size
    library.collectives_open.argtypes = [number, number, number, size, ctypes.c_int64]
    library.collectives_open.restype = pointer
    library.collectives_close.argtypes = [pointer]
    library.collectives_close.restype = None
    library.collectives_all_reduce.argtypes = [pointer, pointer, size, number]
    library.collectives_broadcast.argtypes = [pointer, pointer, size]
    library.collectives_gather.argtypes = [pointer, pointer, size, size, pointer]
    library.collectives_barrier.argtypes = [pointer]
    return library
