"""Child process for a part of a benchmark, connected by a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_END_S = 30.0


@dataclass(frozen=True)
class Child:
    pid: int
    pipe: Connection


@contextmanager
def child(serve: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """Start a process that calls ``serve(*arguments, pipe)``, and yield it.

    ``serve`` must return when the parent closes its end of the pipe; after _END_S seconds the
    process is killed. If ``serve`` ends early, receiving from the pipe raises EOFError.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(*arguments, theirs))
    process.start()
    # While this process holds the child's end, a closed pipe would not be noticed.
    theirs.close()
    try:
        assert process.pid is not None
        yield Child(process.pid, ours)
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()
