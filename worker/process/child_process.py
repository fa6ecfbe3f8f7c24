"""What a process that this one starts is given, and what it gives up there."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: The most that a process can ask for (proc(5)).
_FIRST = "1000"


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's, and ``more``."""
    # What this process can import, however it came to that, its children can too.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **more}


def go_first() -> None:
    """From now on, where memory is short this process is ended before others (Linux), and nothing
    of it is dumped."""
    # Where the kernel has no such file, or lets nobody write it, it chooses by itself.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
