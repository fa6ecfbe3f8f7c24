"""What the parts of a system take of the processors: CPU seconds of the processes below this one,
and of the threads of some of them. Linux."""

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
#: Of a line of /proc/stat: what the processors did but for idling and waiting for a disk.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    #: with spaces between
    command: str


#: Which part of a system a process is, and which one its first thread alone is.
PartsOf = Callable[[Process], tuple[str, str]]


def adopt_orphans() -> None:
    """From now on a process whose parent below this one has ended stays below it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(ancestor: int) -> list[Process]:
    """Return all descendants of the process with the pid ``ancestor``, without itself."""
    every = [process for entry in os.listdir("/proc") if (process := _process(entry)) is not None]
    found, family = [], {ancestor}
    # Parents do not always have the smaller numbers.
    while more := [each for each in every if each.parent in family and each.pid not in family]:
        found += more
        family.update(each.pid for each in more)
    return found


def _process(entry: str) -> Process | None:
    if not entry.isdecimal():
        return None
    with suppress(OSError):
        place = Path("/proc") / entry
        # A name may have spaces and brackets.
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return Process(int(entry), int(fields[1]), command)
    return None


def taken(ancestor: int, parts_of: PartsOf) -> dict[str, float]:
    """CPU seconds so far by part, of what is still there."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in below(ancestor):
        with suppress(OSError):
            whole, first_thread = cpu_seconds(process.pid), _first_thread_seconds(process.pid)
            rest, first = parts_of(process)
            seconds[first] += first_thread
            seconds[rest] += whole - first_thread
    return seconds


def _first_thread_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def machine_busy_seconds() -> float:
    """Of all processors since they started, whoever had them."""
    with open("/proc/stat") as lines:
        fields = next(lines).split()[1:]
    return sum(int(fields[place]) for place in _BUSY) / _TICKS
