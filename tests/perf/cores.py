"""Which core a process runs on, what it takes of it, and of memory. Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def split() -> tuple[int, int]:
    """A core for what is measured and one for everything else; the same where there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others[0] if others else first


def pin(pid: int, core: int) -> None:
    """All threads of a process; what they start later stays there too."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def cpu_seconds(pid: int) -> float:
    """Of all threads, also of those that have ended, in nanosecond resolution."""
    return time.clock_gettime(_cpu_clock(pid))


def total_cpu_seconds(pids: Iterable[int]) -> float:
    return sum(map(cpu_seconds, pids))


def _cpu_clock(pid: int) -> int:
    """What clock_getcpuclockid(3) answers: the clock that the scheduler counts of a process."""
    return (~pid << 3) | 2


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
