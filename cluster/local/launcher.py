"""Start of the processes of a cluster without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cluster.errors import ClusterFailed
from cluster.local.launch import Launch, RankLaunch, Report, encode
from everlift import logs
from worker.child_process import full_environment


class Started(Protocol):
    """Started process, with the interface of ``asyncio.subprocess.Process``.

    ``stdout`` carries its reports. ``returncode`` is negative if a signal ended the process.
    """

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None:
        """Send a signal. May raise ProcessLookupError if the process has ended."""
        ...


class Launcher(Protocol):
    async def start(self, launch: Launch, log_path: Path) -> Started:
        """Start a process, send it ``launch``, and return it; its log is appended to ``log_path``.

        The thread of the event loop must outlive the process, because the kernel kills the process
        when that thread ends.
        """
        ...


class SubprocessLauncher:
    """Launcher that starts a new Python interpreter for each process.

    ``environment`` is added to this process's own environment.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    async def start(self, launch: Launch, log_path: Path) -> Started:
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *python_module("cluster.local.process", interpreter(launch)),
                launch.role,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_file,
                env=full_environment(self._environment),
                # Ctrl-C must reach only the parent, which stops its children in order.
                start_new_session=True,
            )
        assert process.stdin is not None
        await write_stdin(process.stdin, stdin_bytes(os.getpid(), launch))
        return process


async def write_stdin(stdin: asyncio.StreamWriter, data: bytes) -> None:
    """Write ``data`` to the standard input of a process, and close it.

    A process that has already ended raises no error here, because the caller reads its exit status.
    """
    # Writing to a pipe that is already closed raises RuntimeError in uvloop, not in asyncio.
    if stdin.is_closing():
        return
    with suppress(ConnectionError):
        stdin.write(data)
        await stdin.drain()
        stdin.close()


def stdin_bytes(parent: int, launch: Launch) -> bytes:
    """Return the bytes that a new process reads: the id of its parent, and its start parameters."""
    return b"%d\n%s\n" % (parent, encode(launch))


def interpreter(launch: Launch) -> str:
    """Return the path of a process's Python interpreter; empty if it is this process's own."""
    return launch.worker.python if isinstance(launch, RankLaunch) else ""


def python_module(name: str, python: str = "") -> list[str]:
    """Return the command that runs the module ``name`` with the interpreter ``python``.

    An empty ``python`` means the interpreter of this process. The option -P keeps files in the
    working directory from shadowing modules.
    """
    return [python or sys.executable, "-P", "-m", name]


log = logs.get_logger(__name__)

#: Number of bytes of an invalid report that an error shows.
_SHOWN_BYTES = 80


class Child:
    """Child process, whose log is appended to ``log_path``.

    ``pid``, ``report`` and ``wait`` need a started process.
    """

    def __init__(self, launch: Launch, launcher: Launcher, log_path: Path) -> None:
        self.name = launch.name
        self._launch = launch
        self._launcher = launcher
        self._log_path = log_path
        self._process: Started | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process, without waiting for a report. Raises ClusterFailed or OSError."""
        self._process = await self._launcher.start(self._launch, self._log_path)
        log.info("process started", child=self.name, child_pid=self.pid)

    async def report(self) -> Report:
        """Wait for the next report of the process, and return it.

        Raises ClusterFailed if it reports a failure, or if the process has ended without a report.
        """
        assert self._running.stdout is not None
        line = await self._running.stdout.readline()
        report = _read(line) if line else {"error": await self._exit_reason()}
        if "error" in report:
            raise ClusterFailed(f"{self.name}: {report['error']} (its log: {self._log_path})")
        return report

    async def _exit_reason(self) -> str:
        return f"ended with status {await self._running.wait()}"

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await self._running.wait()

    async def stop(self, bound_s: float) -> None:
        """Stop the process with SIGTERM, and with SIGKILL if it still runs after ``bound_s``."""
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
        """Kill the process with SIGKILL if it was started, and return when it has ended."""
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
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {"error": f"invalid report {line[:_SHOWN_BYTES]!r}"}
