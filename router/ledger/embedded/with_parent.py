"""Run a command that ends with its parent process: with_parent.py PARENT_PID COMMAND...

This is a separate program, because Python code between fork and exec may deadlock in a process with
threads. The command replaces this program and so has its process id. On Linux it receives SIGTERM
when the parent ends; on other systems it receives no signal.
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
            # The parent ended before the signal for its end was requested.
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
