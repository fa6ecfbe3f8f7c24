"""A part of a benchmark in a process of its own."""

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
    """``serve`` is called there with the arguments and its end of the pipe, and has to return when
    ours is closed. What it sends first can be received. Raises EOFError if it ends before that."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(*arguments, theirs))
    process.start()
    # Or an end that we hold too would never be seen as closed.
    theirs.close()
    try:
        assert process.pid is not None
        yield Child(process.pid, ours)
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()
