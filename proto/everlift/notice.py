"""Signal SIGUSR1, which notifies a process that its machine is about to be reclaimed."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable

from everlift import logs

log = logs.get_logger(__name__)


def on_signal(callback: Callable[[], None]) -> None:
    """Call ``callback`` in the running event loop at the first SIGUSR1.

    Call this function within the event loop, which may run in any thread. Later signals are
    ignored. The signal is received by faulthandler, which writes a traceback to a pipe that wakes
    the event loop. Python's own signal handlers can be installed only from the main thread, and
    the event loop of a Ray actor runs in another one.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def on_readable() -> None:
        # The reader is removed, because the traceback may arrive in several pieces.
        loop.remove_reader(reader)
        log.warning("stop requested", signal="SIGUSR1")
        callback()

    loop = asyncio.get_running_loop()
    loop.add_reader(reader, on_readable)
    faulthandler.register(signal.SIGUSR1, file=writer, all_threads=False)
