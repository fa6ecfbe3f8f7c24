"""Notice to a process that its machine is about to be taken away."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable

from everlift import logs

log = logs.get_logger(__name__)


def on_signal(leave: Callable[[], None]) -> None:
    """Call ``leave`` in the running event loop at the first SIGUSR1, in any thread.

    Python installs handlers in the main thread only, and an actor's event loop runs in another one.

    faulthandler's is the exception. What it writes is a traceback, which nobody reads: that
    there is something to read is the notice.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def heard() -> None:
        # Once: a traceback may come in several pieces.
        loop.remove_reader(reader)
        log.warning("stop requested", signal="SIGUSR1")
        leave()

    loop = asyncio.get_running_loop()
    loop.add_reader(reader, heard)
    faulthandler.register(signal.SIGUSR1, file=writer, all_threads=False)
