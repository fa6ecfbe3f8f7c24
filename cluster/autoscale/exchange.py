"""Exchange with the ledger: the leader's load reports, and the autoscaler's decisions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from everlift import logs
from everlift.errors import LedgerUnavailable
from everlift.v1 import session_pb2
from router.ledger.base import Ledger, LoadReport
from router.ledger.config import LedgerConfig, LedgerSetupError
from router.ledger.redis.redis_ledger import connect

log = logs.get_logger(__name__)

#: As often as the leader says what work there is.
_READ_S = 0.2
#: What was decided is told less often: people read it.
_TELL_S = 1.0
#: Until a ledger that could not be reached is tried again.
_RETRY_S = 1.0


class LedgerExchange:
    """Thread that reads the load and reports decisions until ``stop``.

    Callers never wait for it. ``config`` is called there, before each connection.
    """

    def __init__(self, config: Callable[[], LedgerConfig]) -> None:
        self._config = config
        self._latest: tuple[LoadReport, float] | None = None
        self._replaced = 0
        #: what was said last, until it is told
        self._said: session_pb2.Scaling | None = None
        self._told_at = -_TELL_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everlift-exchange", daemon=True)
        self._thread.start()

    def latest(self) -> LoadReport | None:
        """Latest load report with its current age; None if none was read."""
        if self._latest is None:
            return None
        report, read_at = self._latest
        return LoadReport(report.load, report.age_s + time.monotonic() - read_at)

    def replaced_workers(self) -> int:
        """Return the number of workers of the cluster of another model that serves clients now."""
        return self._replaced

    def say(self, scaling: session_pb2.Scaling) -> None:
        """Report decisions, in place of those that are not written yet."""
        self._said = scaling

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        asyncio.run(self._exchange_for_ever())

    async def _exchange_for_ever(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._exchange()
            except (LedgerUnavailable, LedgerSetupError, ValueError, OSError) as error:
                log.warning("ledger not reachable", cause=str(error))
            await self._pause(_RETRY_S)

    async def _exchange(self) -> None:
        ledger = await connect(self._config())
        try:
            while not self._stopping.is_set():
                await self._read(ledger)
                await self._tell(ledger)
                await self._pause(_READ_S)
        finally:
            with suppress(LedgerUnavailable):
                await ledger.close()

    async def _read(self, ledger: Ledger) -> None:
        report = await ledger.load()
        if report is not None:
            self._latest = (report, time.monotonic())
        active = await ledger.active_load()
        self._replaced = active.load.workers if active is not None else 0

    async def _tell(self, ledger: Ledger) -> None:
        said, now = self._said, time.monotonic()
        if said is None or now - self._told_at < _TELL_S:
            return
        self._said, self._told_at = None, now
        # A ledger that is full takes no more, and can be read all the same: decisions need that.
        with suppress(LedgerUnavailable):
            await ledger.put_scaling(said)

    async def _pause(self, seconds: float) -> None:
        if not self._stopping.is_set():
            await asyncio.sleep(seconds)
