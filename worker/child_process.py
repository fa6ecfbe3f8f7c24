"""Helpers for child processes: environment, OOM priority, and ending with the parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: Highest oom_score_adj: the OOM killer prefers such a process (proc(5)).
_MAX_OOM_SCORE_ADJ = "1000"


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process that can import what this process can.

    It is this process's environment with PYTHONPATH set to the import path in use. Entries of
    ``more`` are added to it, and replace entries of the same name.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **more}


def become_oom_victim() -> None:
    """Make the kernel's OOM killer choose this process first (Linux), and disable its core dump."""
    # If the file is missing or not writable, the kernel keeps its own order.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MAX_OOM_SCORE_ADJ)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent process, of pid ``parent``, ends.

    The kernel does so on Linux only. The thread that started this process must live as long as the
    parent, because the kernel kills this process as soon as that thread ends. This process is
    killed at once, on every system, if the parent has ended before the call. Raises OSError if the
    prctl call fails.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before prctl was called.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Cancel the effect of ``die_with_parent``, so that this process outlives its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
