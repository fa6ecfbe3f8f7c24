"""Fork server: ranks are forked from a process that has imported what they need. Linux only.

A rank is one process of a worker.

    this process ── fork server ─┬─ worker-0
                                 └─ worker-1 ...

The ranks end with the fork server, which ends with this process. A rank runs its first statement
25 ms after it is requested. The forkserver of multiprocessing would run the `__main__` of the
parent again in every child, which takes 780 ms for the command line (medians of 5, two cores).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.errors import ClusterFailed
from cluster.local.launch import Launch
from cluster.local.launcher import Started, python_module, stdin_bytes
from everlift import logs
from worker.child_process import full_environment
from worker.config import WorkerConfig

log = logs.get_logger(__name__)

#: Maximum seconds until an answer. Before its first one, the fork server imports all modules of a
#: rank.
_LOAD_S = 120.0
#: Maximum size of a fork server's answer: a process id, or the reason why there is none.
_ANSWER_BYTES = 256
#: Number of bytes of reports that are read at a time.
_REPORT_BYTES = 1 << 16
#: Maximum number of fork servers that are asked for one rank.
_TRIES = 2


def is_possible() -> bool:
    """Return whether the platform has process descriptors and sequenced-packet sockets (Linux)."""
    return sys.platform == "linux"


class ForkServer:
    """Launcher of ranks that forks them from one process, the fork server.

    The fork server starts with ``load`` or the first rank. If it has ended, it is started again for
    the next rank.
    """

    def __init__(
        self, config: WorkerConfig, environment: Mapping[str, str], log_path: Path
    ) -> None:
        self._modules = _modules(config)
        self._environment = environment
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._readable = asyncio.Event()
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def load(self) -> None:
        """Start the fork server, and return when it can fork ranks. Raises ClusterFailed."""
        async with self._lock:
            await self._load()

    async def start(self, launch: Launch, log_path: Path) -> Started:
        """Fork a process for ``launch``, whose log is appended to ``log_path``.

        Raises ClusterFailed if the fork server is closed, or cannot start or fork.
        """
        starting = asyncio.ensure_future(self._start(launch, log_path))
        try:
            # If the caller is cancelled, the answer is still read. Otherwise the next caller would
            # read it as the answer to its own request.
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill)
            raise

    async def _start(self, launch: Launch, log_path: Path) -> Forked:
        async with self._lock:
            # The fork server may be about to end although it still seems to run. A rank that it
            # forks ends with it, so another fork server can be asked for the same rank.
            for _ in range(_TRIES):
                await self._load()
                if (forked := await self._fork(launch, log_path)) is not None:
                    return forked
                self._end()
        raise ClusterFailed(f"the fork server of workers has ended (log: {self._log_path})")

    def close(self) -> None:
        """Kill the fork server and the ranks that still run; ``start`` then always fails."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            # A caller that waits for an answer is woken and gets an empty one.
            asyncio.get_running_loop().remove_reader(self._control)
            self._readable.set()
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def _load(self) -> None:
        if self._is_closed:
            raise ClusterFailed("the fork server of workers is closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._spawn()
        word, _ = await self._answer()
        if word != b"ready":
            self._end()
            cause = f": {word.decode()}" if word else ""
            raise ClusterFailed(
                f"the fork server of workers does not start{cause} (log: {self._log_path})"
            )
        assert self._process is not None
        log.info("fork server ready", child_pid=self._process.pid)

    def _spawn(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        command = python_module("cluster.local.fork_server_process")
        with theirs, self._log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=[theirs.fileno()],
                env=full_environment(self._environment),
                # Ctrl-C must reach only the parent.
                start_new_session=True,
            )

    async def _answer(self) -> tuple[bytes, list[int]]:
        loop, control = asyncio.get_running_loop(), self._control
        assert control is not None
        self._readable.clear()
        loop.add_reader(control, self._readable.set)
        try:
            async with asyncio.timeout(_LOAD_S):
                await self._readable.wait()
            message, descriptors, _, _ = socket.recv_fds(control, _ANSWER_BYTES, 1)
            return message, list(descriptors)
        except (OSError, TimeoutError):
            return b"", []
        finally:
            if control is self._control:
                loop.remove_reader(control)

    async def _fork(self, launch: Launch, log_path: Path) -> Forked | None:
        assert self._process is not None and self._control is not None
        pipes = _Pipes.opened(stdin_bytes(self._process.pid, launch), log_path)
        try:
            # If the fork server has ended, sending fails, and the answer below is empty.
            with suppress(OSError):
                socket.send_fds(self._control, [launch.role.encode()], pipes.theirs)
        finally:
            _close(pipes.theirs)
        answer, descriptors = await self._answer()
        if descriptors:
            return await Forked.of(int(answer), descriptors[0], pipes)
        _close([pipes.reports, pipes.status])
        if answer:
            raise ClusterFailed(f"{launch.name} cannot be forked: {answer.decode()}")
        return None


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Descriptors of the pipes of one forked process.

    ``theirs`` go to the fork server: the process's standard input (a file in memory that contains
    its launch), output and error, and the pipe for its exit status. This process reads the output
    from ``reports`` and the exit status from ``status``.
    """

    theirs: list[int]
    reports: int
    status: int

    @classmethod
    def opened(cls, data: bytes, log_path: Path) -> Self:
        """Open the descriptors; ``data`` is the content of the standard input.

        Raises OSError if one of them cannot be opened; none is left open then.
        """
        opened: list[int] = []
        try:
            # A pipe without a reader would block the event loop, because it takes only 64 KiB.
            stdin = os.memfd_create("launch")
            opened.append(stdin)
            with open(stdin, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(stdin, 0, os.SEEK_SET)
            stderr = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            opened.append(stderr)
            reports, stdout = os.pipe()
            opened += (reports, stdout)
            status, ended = os.pipe()
        except OSError:
            _close(opened)
            raise
        return cls([stdin, stdout, stderr, ended], reports, status)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Forked:
    """Process that the fork server has forked, with the interface of ``Started``."""

    def __init__(self, pid: int, descriptor: int, pipes: _Pipes) -> None:
        """Create the object from the process's id and pidfd, and its pipes."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self._descriptor = descriptor
        self._status = pipes.status
        self._reports = os.fdopen(pipes.reports, "rb", buffering=0)
        self._transport: asyncio.ReadTransport | None = None
        self._ended = asyncio.Event()

    @classmethod
    async def of(cls, pid: int, descriptor: int, pipes: _Pipes) -> Self:
        forked, loop = cls(pid, descriptor, pipes), asyncio.get_running_loop()
        forked._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(forked.stdout), forked._reports
        )
        loop.add_reader(pipes.status, forked._end)
        return forked

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, number)

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        status = os.read(self._status, _ANSWER_BYTES)
        loop.remove_reader(self._status)
        os.close(self._status)
        if status:
            self._on_exit(int(status))
        else:
            # The pipe is closed without a status because the fork server itself was killed. The
            # kernel then kills this child too; its pidfd becomes readable when it has ended.
            loop.add_reader(self._descriptor, self._on_exit, -signal.SIGKILL)

    def _on_exit(self, returncode: int) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = returncode
        self._close_reports()
        self._ended.set()

    def _close_reports(self) -> None:
        """Read the rest of the process's output into ``stdout``, and close the pipe.

        Nothing is done if the transport has read the end of the file, because it has then closed
        the pipe itself. The end may be unread because the transport has not read that far yet, or
        because another process still holds the writing end.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            return
        while data := self._reports.read(_REPORT_BYTES):
            self.stdout.feed_data(data)
        self._transport.close()


def _kill(starting: asyncio.Future[Forked]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        with suppress(ProcessLookupError):
            starting.result().send_signal(signal.SIGKILL)


def _modules(config: WorkerConfig) -> Sequence[str]:
    if config.is_fake:
        return ["worker.serving.rank"]
    return [
        "worker.serving.rank",
        "worker.runner.build",
        "worker.parallel.group",
        "worker.grammar.compiler",
    ]
