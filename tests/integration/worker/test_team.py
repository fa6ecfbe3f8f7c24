"""Threads that share loops: each part runs once, and consecutive loops do not overlap."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from worker.native import native

_SOURCE = Path(__file__).with_name("team_loops.cpp")
_LOOPS = 2000


@cache
def wrong_loops() -> Callable[[int, int, int, int], int]:
    library = native.compiled(_SOURCE)
    if library is None:
        pytest.skip("no compiler")
    find = library.wrong_loops
    find.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    find.restype = ctypes.c_int64
    return find


@contextmanager
def neighbours() -> Iterator[None]:
    """Run two threads with other calls, which repeatedly occupy a core for a short time."""
    find, over = wrong_loops(), threading.Event()

    def work() -> None:
        while not over.is_set():
            find(1, 20, 64, 8)
            time.sleep(0.002)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("threads", [1, 2, 3, 2 * (os.cpu_count() or 1) + 1])
@pytest.mark.parametrize(("number", "together"), [(1, 1), (2, 4), (7, 2), (40, 1), (64, 8)])
def test_team_runs_every_part_once_per_loop(threads: int, number: int, together: int) -> None:
    assert wrong_loops()(threads, _LOOPS, number, together) == 0


def test_team_finishes_every_part_once_on_busy_cores() -> None:
    with neighbours():
        assert wrong_loops()(os.cpu_count() or 1, _LOOPS, 40, 1) == 0
