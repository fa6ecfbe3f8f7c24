"""A process that this one has started, and that does not outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path

from cluster.errors import ClusterFailed
from cluster.local.launch import Launch, Report
from cluster.local.starter import Started, Starter
from everlift import logs

log = logs.get(__name__)

#: Of what is no report, so much is shown.
_SHOWN_BYTES = 80


class Child:
    """Its log is appended to ``log_path``."""

    def __init__(self, launch: Launch, starter: Starter, log_path: Path) -> None:
        self.name = launch.name
        self._launch = launch
        self._starter = starter
        self._log_path = log_path
        self._process: Started | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns at once; what it makes of its launch it reports. Raises ClusterFailed."""
        self._process = await self._starter.start(self._launch, self._log_path)
        log.info("process started", child=self.name, child_pid=self.pid)

    async def report(self) -> Report:
        """Its next report. Raises ClusterFailed when that is a failure, or when it has ended."""
        assert self._running.stdout is not None
        line = await self._running.stdout.readline()
        report = _read(line) if line else {"error": await self._how_it_ended()}
        if "error" in report:
            raise ClusterFailed(f"{self.name}: {report['error']} (its log: {self._log_path})")
        return report

    async def _how_it_ended(self) -> str:
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
        """SIGKILL; returns when it is gone. May not have been started."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(number)

    @property
    def _running(self) -> Started:
        assert self._process is not None, "start it first"
        return self._process


def _read(line: bytes) -> Report:
    """What is no report is a failure as well: something else writes to its standard output."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {"error": f"it said {line[:_SHOWN_BYTES]!r} in the place of a report"}
