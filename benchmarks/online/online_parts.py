"""CPU time by part of a system: sums over the descendants of a process, on Linux.

A part is a set of processes, or only their first threads, or only their other threads.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cores import cpu_seconds

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
#: Fields of a line of /proc/stat that count as busy: all but idle and iowait, including steal.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    #: arguments, each followed by a space
    command: str


#: Maps a process to the name of its part, and the name of the part of its first thread.
PartsOf = Callable[[Process], tuple[str, str]]


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end (child subreaper)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[Process]:
    """Return all descendants of the process with the pid ``ancestor``, without itself."""
    every = [process for entry in os.listdir("/proc") if (process := _process(entry)) is not None]
    found, family = [], {ancestor}
    # A child may have a smaller pid than its parent, so one pass is not enough.
    while more := [each for each in every if each.parent in family and each.pid not in family]:
        found += more
        family.update(each.pid for each in more)
    return found


def _process(entry: str) -> Process | None:
    if not entry.isdecimal():
        return None
    with suppress(OSError):
        place = Path("/proc") / entry
        # The name in parentheses may contain spaces and parentheses.
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return Process(int(entry), int(fields[1]), command)
    return None


def cpu_seconds_by_part(ancestor: int, parts_of: PartsOf) -> dict[str, float]:
    """Return the CPU seconds by part of the living descendants of ``ancestor`` since they started.

    ``parts_of`` names the parts of a process. Processes that have ended are not included.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in descendants(ancestor):
        with suppress(OSError):
            whole, first_thread = cpu_seconds(process.pid), _first_thread_seconds(process.pid)
            rest, first = parts_of(process)
            seconds[first] += first_thread
            seconds[rest] += whole - first_thread
    return seconds


def _first_thread_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def machine_busy_seconds() -> float:
    """Return the busy seconds of all processors since boot, for whichever process."""
    with open("/proc/stat") as lines:
        fields = next(lines).split()[1:]
    return sum(int(fields[place]) for place in _BUSY) / _TICKS
