"""Where the keepers come from: rank 0's handle of the nursery process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

from everlift import logs
from worker.child_process import full_environment
from worker.config import WorkerConfig
from worker.grammar.launch import Budget, Launch

log = logs.get(__name__)

#: It forks: it must find no threads. It needs no GPU.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class Nursery:
    """The process starts with the first keeper that is wanted, and again when it has ended."""

    def __init__(self, config: WorkerConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._starting = asyncio.Lock()

    async def keeper(self) -> socket.socket:
        """The socket to a keeper that is about to be born, non-blocking."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                async with self._starting:
                    if self._process is None or self._process.poll() is not None:
                        await asyncio.to_thread(self._start)
                assert self._control is not None
                socket.send_fds(self._control, [b"k"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """The process is gone when it returns, and with it every keeper that still compiles."""
        self._is_closed = True
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
            command = [sys.executable, "-P", "-m", "worker.grammar.nursery_process"]
            self._process = subprocess.Popen(
                [*command, self._launch(theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=full_environment(_ENVIRONMENT),
                # Ctrl-C is for the worker.
                start_new_session=True,
            )
        log.info("grammar nursery started", child_pid=self._process.pid)
        # In a thread of its own this may come too late to be seen by ``close``.
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
