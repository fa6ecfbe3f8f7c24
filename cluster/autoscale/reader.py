"""What the leader says of the cluster's work, read from the ledger again and again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from everlift import logs
from everlift.errors import LedgerUnavailable
from router.ledger.base import LoadReport
from router.ledger.config import LedgerConfig, LedgerSetupError
from router.ledger.redis_ledger import connect

log = logs.get(__name__)

#: As often as the leader says it.
_EVERY_S = 0.2
#: Until a ledger that could not be reached is tried again.
_RETRY_S = 1.0


class LoadReader:
    """Reads in a thread of its own until ``stop``: whoever asks for the latest never waits.
    ``config`` is called there, before each connection."""

    def __init__(self, config: Callable[[], LedgerConfig]) -> None:
        self._config = config
        self._latest: tuple[LoadReport, float] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everlift-load", daemon=True)
        self._thread.start()

    def latest(self) -> LoadReport | None:
        """With its age by now; None as long as nothing was read."""
        if self._latest is None:
            return None
        report, read_at = self._latest
        return LoadReport(report.load, report.age_s + time.monotonic() - read_at)

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        asyncio.run(self._read_for_ever())

    async def _read_for_ever(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._read()
            except (LedgerUnavailable, LedgerSetupError, ValueError, OSError) as error:
                log.warning("load not read", cause=str(error))
            await self._pause(_RETRY_S)

    async def _read(self) -> None:
        ledger = await connect(self._config())
        try:
            while not self._stopping.is_set():
                report = await ledger.load()
                if report is not None:
                    self._latest = (report, time.monotonic())
                await self._pause(_EVERY_S)
        finally:
            with suppress(LedgerUnavailable):
                await ledger.close()

    async def _pause(self, seconds: float) -> None:
        if not self._stopping.is_set():
            await asyncio.sleep(seconds)
