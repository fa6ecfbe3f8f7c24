"""Which core a process runs on, what it takes of it, and of memory. Linux."""

from __future__ import annotations

import os
import time
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


def _cpu_clock(pid: int) -> int:
    """What clock_getcpuclockid(3) answers: the clock that the scheduler counts of a process."""
    return (~pid << 3) | 2


def waited_seconds(pid: int) -> float:
    """For how long its first thread was ready to go on while others had the core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
