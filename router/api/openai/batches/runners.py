"""Batches of the cluster that this router runs."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

from everlift import logs
from everlift.errors import EverliftError, UnknownObject
from router.api.openai.batches.run import BatchRun, NotRunner, Parts
from router.api.openai.batches.stored import StoredBatch
from router.ledger.base import Ledger
from router.ledger.objects import ObjectConflict

log = logs.get_logger(__name__)

#: Seconds between two times at which a router looks for batches whose router was lost.
_SCAN_S = 2.0


class Runners:
    """Runs of batches in one router.

    A batch belongs to the router whose id is in the batch's record. Another router takes the batch
    over after the owner's lease, which ``Ledger.heartbeat`` renews, has ended.
    """

    def __init__(self, parts: Parts, ledger: Ledger, router_id: str) -> None:
        self._parts = parts
        self._ledger = ledger
        self._router_id = router_id
        self._runs: dict[str, asyncio.Task[None]] = {}
        #: routers of other batches, as they were last read; none for a batch that this router has
        #: claimed, even if its run was interrupted
        self._others: dict[str, str] = {}
        #: batches that this version of the program cannot read
        self._unreadable: set[str] = set()
        self._wake = asyncio.Event()
        self._is_stopping = False

    def notify(self) -> None:
        """Look for a new batch at once."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until ``stop``."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                await self._scan()
            except EverliftError as error:
                log.info("unfinished batches not read", cause=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SCAN_S):
                    await self._wake.wait()

    async def stop(self) -> None:
        """Stop all runs. Their requests continue, and another router takes the batches over."""
        self._is_stopping = True
        self._wake.set()
        runs = [*self._runs.values()]
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def _scan(self) -> None:
        unfinished = await self._parts.batches.unfinished()
        self._others = {name: it for name, it in self._others.items() if name in unfinished}
        if not unfinished.keys() - self._runs.keys():
            return
        living = (await self._ledger.gateways()).keys() - {self._router_id}
        self._unreadable &= unfinished.keys()
        for batch_id, tenant in unfinished.items():
            is_run = batch_id in self._runs or self._others.get(batch_id) in living
            if not is_run and batch_id not in self._unreadable:
                await self._take(batch_id, tenant, living)

    async def _take(self, batch_id: str, tenant: str, living: Container[str]) -> None:
        """Run a batch unless a router of ``living`` does."""
        batches = self._parts.batches
        try:
            batch = await batches.get(self._parts.caller(tenant), batch_id)
        except UnknownObject:
            await batches.drop_unfinished(batch_id, tenant)
        except (KeyError, TypeError, ValueError):
            self._unreadable.add(batch_id)
            log.exception("batch left to other routers: unreadable record", batch_id=batch_id)
        else:
            if batch.record.runner in living:
                self._others[batch_id] = batch.record.runner
            else:
                await self._claim(tenant, batch)

    async def _claim(self, tenant: str, batch: StoredBatch) -> None:
        try:
            claimed = batch.record.claimed(self._router_id)
            # A batch that has ended is only removed from the list of unfinished ones.
            batch = await self._parts.batches.put(self._parts.caller(tenant), batch, claimed)
        except ObjectConflict:
            return
        self._others.pop(batch.batch_id, None)
        if batch.record.is_final or self._is_stopping:
            return
        log.info("batch taken", batch_id=batch.batch_id, status=batch.record.status)
        run = BatchRun(self._parts, tenant, batch, self._router_id)
        self._runs[batch.batch_id] = asyncio.create_task(self._run(batch.batch_id, run))

    async def _run(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except NotRunner as error:
            log.info("batch left to another router", batch_id=batch_id, cause=error)
        except (EverliftError, ObjectConflict) as error:
            # The next scan continues it, unless another router has taken it over.
            log.warning("batch interrupted", batch_id=batch_id, cause=error)
        except Exception:
            log.exception("batch interrupted by an unexpected error", batch_id=batch_id)
        finally:
            del self._runs[batch_id]
