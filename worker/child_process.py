"""Processes and their parents: environment, priority, and a common end."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: The most that a process can ask for (proc(5)).
_FIRST = "1000"


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment updated with ``more``."""
    # What this process can import, however it came to that, its children can too.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **more}


def go_first() -> None:
    """Make the kernel end this process first if memory runs short, without a core dump."""
    # Where the kernel has no such file, or lets nobody write it, it chooses by itself.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its ``parent`` ends (Linux).

    The kernel watches the thread that started this process, which must live as long as its process.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have ended before it was watched.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take ``die_with_parent`` back."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
