"""Core affinity, CPU time and memory of processes, on Linux."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def split() -> tuple[int, int]:
    """Return a core for the measured process, and one for all others.

    If there is only one core, return it twice.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others[0] if others else first


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process to a core, which their later threads and children inherit."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads, including ended ones, in nanosecond resolution."""
    return time.clock_gettime(_cpu_clock(pid))


def _cpu_clock(pid: int) -> int:
    """Return the id of the process's CPU clock, as clock_getcpuclockid(3) does."""
    return (~pid << 3) | 2


def waited_seconds(pid: int) -> float:
    """Return the seconds in which the first thread was ready to run, but others had its core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
