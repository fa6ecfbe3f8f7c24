"""Exchange with the ledger: read the leader's load reports, write the autoscaler's decisions.

The leader is the router that places the requests of all routers.
"""

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

#: Seconds between reads of the load, which the leader reports equally often.
_READ_INTERVAL_S = 0.2
#: Minimum seconds between writes of decisions, which are only displayed.
_WRITE_INTERVAL_S = 1.0
#: Seconds until the next attempt to connect to a ledger that was unreachable.
_RETRY_S = 1.0


class LedgerExchange:
    """Background thread that reads the leader's load reports and writes decisions until ``stop``.

    No method blocks. Before each connection to the ledger the thread calls ``config``, which
    returns the ledger's settings.
    """

    def __init__(self, config: Callable[[], LedgerConfig]) -> None:
        self._config = config
        self._latest: tuple[LoadReport, float] | None = None
        self._replaced: session_pb2.ClusterLoad | None = None
        #: decisions to write next; None if there are none
        self._unwritten: session_pb2.Scaling | None = None
        self._written_at = -_WRITE_INTERVAL_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everlift-exchange", daemon=True)
        self._thread.start()

    def latest(self) -> LoadReport | None:
        """Return the last load report, with its present age; None if none was read yet."""
        if self._latest is None:
            return None
        report, read_at = self._latest
        return LoadReport(report.load, report.age_s + time.monotonic() - read_at)

    def replaced_load(self) -> session_pb2.ClusterLoad | None:
        """Return the load of the cluster that this cluster is about to replace.

        When the models are changed, a cluster with the old models and its own ledger serves clients
        until this cluster takes over. The result is None if there is no such cluster, or if the
        ledger has not been read yet.
        """
        return self._replaced

    def publish(self, scaling: session_pb2.Scaling) -> None:
        """Queue ``scaling`` for the thread to write; it replaces a queued one not yet written."""
        self._unwritten = scaling

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        asyncio.run(self._exchange_loop())

    async def _exchange_loop(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._exchange()
            except (LedgerUnavailable, LedgerSetupError, ValueError, OSError) as error:
                log.warning("ledger exchange failed: retrying", cause=str(error))
            await self._pause(_RETRY_S)

    async def _exchange(self) -> None:
        ledger = await connect(self._config())
        try:
            while not self._stopping.is_set():
                await self._read(ledger)
                await self._write(ledger)
                await self._pause(_READ_INTERVAL_S)
        finally:
            with suppress(LedgerUnavailable):
                await ledger.close()

    async def _read(self, ledger: Ledger) -> None:
        report = await ledger.load()
        if report is not None:
            self._latest = (report, time.monotonic())
        active = await ledger.active_load()
        self._replaced = active.load if active is not None else None

    async def _write(self, ledger: Ledger) -> None:
        scaling, now = self._unwritten, time.monotonic()
        if scaling is None or now - self._written_at < _WRITE_INTERVAL_S:
            return
        self._unwritten, self._written_at = None, now
        # A full ledger rejects writes but can still be read, so a failed write must not end the
        # connection: decisions depend on the reads.
        with suppress(LedgerUnavailable):
            await ledger.put_scaling(scaling)

    async def _pause(self, seconds: float) -> None:
        if not self._stopping.is_set():
            await asyncio.sleep(seconds)
