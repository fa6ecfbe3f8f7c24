"""Collective operations of the ranks of one host, over memory that they share (collectives.cpp).

The ranks test at the start whether they share memory: rank 0 creates a file in shared memory, and
every rank reports what it reads from the file. The ranks exchange the reports through a key-value
store that rank 0 hosts. The file's name is removed as soon as all ranks have opened it, so that no
file is left behind, no matter how the ranks end later. This module does not depend on torch:
tensors are passed as addresses.
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
#: Number of bytes that are transferred at once; larger tensors are split.
_SLOT_BYTES = 256 << 10
#: Status of a call for which a rank did not arrive in time. The status 1 + r means that rank r is
#: gone.
_TIMED_OUT = -1


class Store(Protocol):
    """Key-value store that all ranks can reach, such as torch's TCPStore.

    ``get`` waits until the key is set.
    """

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


class Collectives:
    """Collective operations as one rank calls them.

    All ranks must make the same calls in the same order, with the same sizes. A call raises
    RuntimeError if a rank is gone or does not arrive in time; no other call is possible after that.
    """

    def __init__(
        self, library: ctypes.CDLL, file: int, rank: int, size: int, timeout: timedelta
    ) -> None:
        """Map the shared memory.

        ``timeout`` is the longest time of a single wait for one rank; a call may wait several
        times. ``file`` is the file descriptor of the shared memory, which this object owns from now
        on. Raises OSError if the file cannot be mapped or locked, or if there are more than 64
        ranks.
        """
        timeout_ns = int(timeout.total_seconds() * 1e9)
        self._library = library
        self._memory = library.collectives_open(file, rank, size, _SLOT_BYTES, timeout_ns)
        if self._memory is None:
            raise OSError("the shared memory cannot be mapped, or its file cannot be locked")

    def all_reduce(self, address: int, count: int, kind: int) -> None:
        """Replace ``count`` numbers at ``address`` by their sums over the ranks.

        All ranks get the same bits. The numbers are fp32, bf16, fp16 or int64 if ``kind`` is 0, 1,
        2 or 3; bf16 and fp16 are summed in fp32.
        """
        self._call(self._library.collectives_all_reduce, address, count, kind)

    def broadcast(self, address: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` bytes at ``address`` of rank 0 to ``address`` of every other rank."""
        self._call(self._library.collectives_broadcast, address, num_bytes)

    def gather(self, address: int, num_bytes: int, width: int, out: int) -> None:
        """Copy rows of all ranks, ``width`` bytes each, to the address ``out`` of rank 0.

        Each rank has ``num_bytes`` bytes of rows at ``address``. At ``out``, row i of rank 0 is
        followed by row i of rank 1, and so on. ``out`` is used on rank 0 only.
        """
        self._call(self._library.collectives_gather, address, num_bytes, width, out)

    def barrier(self) -> None:
        """Wait until every rank has called ``barrier``."""
        self._call(self._library.collectives_barrier)

    def close(self) -> None:
        """Leave the group; calls of the other ranks then raise RuntimeError.

        May be called again.
        """
        if self._memory is not None:
            self._library.collectives_close(self._memory)
            self._memory = None

    def _call(self, function: Callable[..., int], *arguments: int) -> None:
        if self._memory is None:
            raise RuntimeError("this rank has closed its end")
        status = function(self._memory, *arguments)
        if status == _TIMED_OUT:
            raise RuntimeError("a rank has not joined a collective in time")
        if status:
            raise RuntimeError(f"rank {status - 1} is gone")


def init_collectives(store: Store, rank: int, size: int, timeout: timedelta) -> Collectives | None:
    """Set up the shared memory with the other ranks, and return this rank's Collectives.

    The result is None on every rank if one has no compiled library or shares no memory with the
    others, or if there are more than 64 ranks. ``size`` is the number of ranks. ``timeout`` is the
    longest time of a single wait for one rank; a collective may wait several times. Errors of
    ``store`` and of ``native.compiled`` are not caught.
    """
    library = _library()
    if not _all_equal(store, "host", rank, size, _host() if library is not None else ""):
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
            if not _all_equal(store, "proof", rank, size, proof):
                return None
        unless_agreed.pop_all()
    return collectives


def _all_equal(store: Store, subject: str, rank: int, size: int, value: str) -> bool:
    store.set(f"{_KEY}/{subject}/{rank}", value)
    values = {store.get(f"{_KEY}/{subject}/{other}") for other in range(size)}
    return len(values) == 1 and b"" not in values


def _host() -> str:
    """Return an id of this machine and its last boot; empty if unknown."""
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
        _create_file(path, num_bytes)
        store.set(f"{_KEY}/file", str(path))
        yield path
    finally:
        path.unlink(missing_ok=True)


def _create_file(path: Path, num_bytes: int) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Allocate the memory now: if there were too little at a later write, the write would
            # kill the process.
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
