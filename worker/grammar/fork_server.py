"""Rank 0's handle of the fork server of grammar processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

from everlift import logs
from worker.child_process import full_environment
from worker.config import WorkerConfig
from worker.grammar.launch import Budget, Launch

log = logs.get_logger(__name__)

#: Variables for the fork server: it must not start threads, because it forks, and needs no GPU.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class GrammarForkServer:
    """Handle of the fork server process.

    The process is started by ``prestart``, or else for the first grammar, and is started again for
    the next grammar if it has ended.
    """

    def __init__(self, config: WorkerConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._starting = asyncio.Lock()
        self._prestart_task: asyncio.Task[None] | None = None

    def prestart(self) -> None:
        """Start the process in the background.

        The process takes seconds to load llguidance and the vocabulary. Without an early start, a
        request that is migrated to a new worker would wait for that.
        """
        self._prestart_task = asyncio.get_running_loop().create_task(self._prestart())

    async def _prestart(self) -> None:
        try:
            await self._ensure_started()
        except OSError as error:
            log.warning("grammar fork server not started in advance", error=str(error))

    async def _ensure_started(self) -> None:
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await asyncio.to_thread(self._start)

    async def start_process(self) -> socket.socket:
        """Request a grammar process and return this end of its socket, which is non-blocking.

        The grammar process may not be running yet when this method returns. If the fork server is
        not running, it is started first; raises OSError if that fails.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                await self._ensure_started()
                assert self._control is not None
                socket.send_fds(self._control, [b"k"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """End the fork server and every grammar process that has not compiled its grammar yet."""
        self._is_closed = True
        if self._prestart_task is not None:
            self._prestart_task.cancel()
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "worker.grammar.fork_server_process"]
            self._process = subprocess.Popen(
                [*command, self._launch(theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=full_environment(_ENVIRONMENT),
                # Ctrl-C must interrupt only the worker.
                start_new_session=True,
            )
        log.info("grammar fork server started", child_pid=self._process.pid)
        # This runs in a thread, so ``close`` may have been called before the process existed.
        if self._is_closed:
            self._end()

    def _launch(self, control: socket.socket) -> str:
        settings = self._config.grammar
        return Launch(
            control=control.fileno(),
            model=self._config.model,
            revision=self._config.model_revision,
            vocab_size=self._vocab_size,
            budget=Budget(settings.compile_timeout, settings.step_budget),
            process_mib=settings.process_mib,
        ).encode()
