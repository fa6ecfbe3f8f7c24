"""Program that pauses a process for a while: pause.py PID SECONDS.

A separate program is needed because a stopped process cannot resume itself. On a kernel with
process descriptors (Linux), this program ends early if the paused process ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress


def main(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        _sleep(pid, seconds)
        os.kill(pid, signal.SIGCONT)


def _sleep(pid: int, seconds: float) -> None:
    if not hasattr(os, "pidfd_open"):
        time.sleep(seconds)
        return
    descriptor = os.pidfd_open(pid)
    select.select([descriptor], [], [], seconds)
    os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
