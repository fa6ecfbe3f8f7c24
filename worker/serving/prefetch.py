"""Prefetch of a model's weights: the kernel reads them while Python still imports torch."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from everlift import model_files

_CHUNK_BYTES = 8 << 20


def start(model: str, revision: str, rank: int, ranks: int) -> None:
    """Start a thread that asks the kernel to read this rank's part of every weight file.

    ``model`` and ``revision`` are the settings of the worker. ``ranks`` is the number of ranks;
    each reads a part, because the ranks of a node share the page cache. Nothing is read if the
    files together exceed half of the memory. Missing or unreadable files are ignored; the loader
    reports them.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    thread = threading.Thread(
        target=_prefetch, args=(model, revision, rank, ranks), name="prefetch", daemon=True
    )
    thread.start()


def _prefetch(model: str, revision: str, rank: int, ranks: int) -> None:
    with suppress(OSError, ValueError):
        files = model_files.weight_files(model_files.locate(model, revision, weights=True))
        if sum(path.stat().st_size for path in files) <= _max_bytes():
            for path in files:
                _advise(path, rank, ranks)


def _max_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _advise(path: Path, rank: int, ranks: int) -> None:
    with path.open("rb") as file:
        size = path.stat().st_size
        begin, end = size * rank // ranks, size * (rank + 1) // ranks
        for start in range(begin, end, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, end - start)
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)
