"""A process that this one has started, and that does not outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import ClusterFailed
from cluster.launch import Launch, Report, encode
from everlift import logs

log = logs.get(__name__)


class Child:
    """``environment`` is added to this process's own. Its log is appended to ``log_path``."""

    def __init__(self, launch: Launch, environment: Mapping[str, str], log_path: Path) -> None:
        self.name = launch.name
        self._launch = launch
        self._environment = environment
        self._log_path = log_path
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns at once; what it makes of its launch it reports.

        The event loop's thread must live as long as the child: the kernel ends the child with it.
        """
        with self._log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cluster.process",
                self._launch.role,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_file,
                env=self._full_environment(),
                # Ctrl-C is for the parent, which ends its children in good order.
                start_new_session=True,
            )
        log.info("process started", child=self.name, child_pid=self.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(b"%d\n%s\n" % (os.getpid(), encode(self._launch)))
            await self._process.stdin.drain()
            self._process.stdin.close()

    def _full_environment(self) -> dict[str, str]:
        # What this process can import, however it came to that, its children can too.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return {**os.environ, "PYTHONPATH": path, **self._environment}

    async def report(self) -> Report:
        """Its next report. Raises ClusterFailed when that is a failure, or when it has ended."""
        assert self._running.stdout is not None
        line = await self._running.stdout.readline()
        report: Report = json.loads(line) if line else {"error": await self._end()}
        if "error" in report:
            raise ClusterFailed(f"{self.name}: {report['error']} (its log: {self._log_path})")
        return report

    async def _end(self) -> str:
        return f"ended with status {await self._running.wait()}"

    async def wait(self) -> None:
        """Until it has ended."""
        await self._running.wait()

    async def stop(self, bound_s: float) -> None:
        """Ends it in good order, or after ``bound_s`` without asking."""
        if not self.is_running:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(bound_s):
                await self.wait()
        except TimeoutError:
            log.warning("process killed", child=self.name, child_pid=self.pid)
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(number)

    @property
    def _running(self) -> Process:
        assert self._process is not None, "start it first"
        return self._process
