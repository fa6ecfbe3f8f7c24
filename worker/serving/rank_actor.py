"""Ray actor that runs one rank of a worker.

This module does not import Ray Serve, because that takes a second and no rank needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ray import get_runtime_context
from ray.util import get_node_ip_address

from everlift import heap, logs
from everlift.notice import on_signal
from worker.config import WorkerConfig
from worker.serving.rank import Rank

log = logs.get_logger(__name__)


class RankActor:
    """Ray actor of one rank, which listens at the address of its node.

    Its methods call those of ``Rank``; ``stop`` drains the rank first.
    """

    def __init__(
        self,
        config: WorkerConfig,
        rank: int,
        rendezvous: str,
        log_level: str,
        log_dir: Path,
        models: Sequence[WorkerConfig],
    ) -> None:
        logs.configure(
            f"worker.rank-{rank}", log_level, log_dir / f"worker.rank-{rank}-{os.getpid()}.log"
        )
        host = get_node_ip_address()
        self._rank = Rank(
            replace(config, host=host),
            rank,
            rendezvous,
            ray_cluster=get_runtime_context().get_session_name(),
            models={it.name: replace(it, host=host) for it in models},
        )
        self._info, self._is_stopping = b"", False

    async def set_log_level(self, level: str) -> None:
        logs.set_level(level)
        log.info("log level set", log_level=level)

    async def open(self) -> str:
        return await self._rank.open()

    async def fetch(self) -> None:
        await self._rank.fetch()

    async def start(self) -> None:
        """Start the rank, and return when it is ready."""
        # A change of the worker's model replaces the rank, and the signal is for the latest one.
        on_signal(lambda: self._rank.reclaim())
        await self._start()

    async def _start(self) -> None:
        self._info = (await self._rank.start()).SerializeToString()
        heap.freeze_heap()

    async def info(self) -> bytes:
        """Return the rank's serialised WorkerInfo."""
        return self._info

    async def wait(self) -> None:
        """Wait until the rank has ended and no rank of another model follows.

        A change of the worker's model ends the rank too, but the rank of the next model is then
        started, and the wait continues. Raises RankFailed if a rank fails, and the errors of
        ``Rank.successor`` and ``Rank.start``.
        """
        while True:
            await self._rank.wait()
            # The worker has no info to announce until the next model is loaded.
            self._info = b""
            if self._is_stopping or (successor := await self._rank.successor()) is None:
                return
            self._rank = successor
            await self._start()

    async def has_no_router(self) -> bool:
        """Return whether no router is connected to the ready worker; perhaps none knows it."""
        return bool(self._info) and self._rank.has_no_router

    async def stop(self) -> None:
        self._is_stopping = True
        await self._rank.drain()
        await self._rank.stop()
