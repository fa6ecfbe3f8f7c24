"""Run a command that ends with its parent: with_parent.py PARENT_PID COMMAND...

A program of its own: in a process with threads, Python code between fork and exec may deadlock. The
command takes its place, so that the process id is the command's. Where the kernel knows no death
signal (it is Linux's), the command simply runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            # It ended before it could be waited for.
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
