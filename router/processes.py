"""Killing and pausing of local processes, for fault injection."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from router.faults import pause


class Processes(Protocol):
    def kill(self, pid: int) -> None:
        """Send SIGKILL to a process; do nothing if it does not exist."""
        ...

    def pause(self, pid: int, seconds: float) -> Coroutine[Any, Any, None]:
        """Return a coroutine that stops a process with SIGSTOP, and resumes it after ``seconds``.

        The coroutine returns when it has sent SIGCONT. It may return earlier if the process ends,
        and returns at once if the process does not exist.
        """
        ...


class RealProcesses:
    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def pause(self, pid: int, seconds: float) -> None:
        script = str(Path(pause.__file__))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", script, str(pid), str(seconds), start_new_session=True
        )
        await process.wait()
