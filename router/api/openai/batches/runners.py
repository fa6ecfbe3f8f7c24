"""Batches of the cluster that this router runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from everlift import logs
from everlift.errors import EverliftError, UnknownObject
from router.api.openai.batches.run import BatchRun, NotRunner, Parts
from router.api.openai.batches.stored import StoredBatch
from router.auth.caller import Caller, Scope
from router.auth.limits import Limits
from router.ledger.base import Ledger
from router.ledger.objects import ObjectConflict

log = logs.get_logger(__name__)

#: Seconds between two times at which a router looks for batches whose router was lost.
_SCAN_S = 2.0


class Runners:
    """Runs of batches in one router.

    A batch belongs to the router that has written its id into the batch's record. If that router
    has no lease any more, another one takes the batch over.
    """

    def __init__(
        self, parts: Parts, ledger: Ledger, router_id: str, limits_of: Callable[[str], Limits]
    ) -> None:
        self._parts = parts
        self._ledger = ledger
        self._router_id = router_id
        self._limits_of = limits_of
        self._runs: dict[str, asyncio.Task[None]] = {}
        #: routers of other batches, as they were last read
        self._others: dict[str, str] = {}
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
                await asyncio.wait_for(self._wake.wait(), _SCAN_S)

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
        for batch_id, tenant in unfinished.items():
            if batch_id not in self._runs and self._others.get(batch_id) not in living:
                caller = Caller(tenant, frozenset({Scope.INFER}), self._limits_of(tenant))
                try:
                    batch = await self._parts.batches.get(caller, batch_id)
                except UnknownObject:
                    await self._parts.batches.drop_unfinished(batch_id)
                    continue
                if batch.record.runner in living:
                    self._others[batch_id] = batch.record.runner
                else:
                    await self._claim(caller, batch)

    async def _claim(self, caller: Caller, batch: StoredBatch) -> None:
        try:
            claimed = batch.record.claimed(self._router_id)
            # A batch that has ended is only removed from the list of unfinished ones.
            batch = await self._parts.batches.put(caller, batch, claimed)
        except ObjectConflict:
            return
        if batch.record.is_final or self._is_stopping:
            return
        log.info("batch taken", batch_id=batch.batch_id, status=batch.record.status)
        run = BatchRun(self._parts, caller, batch, self._router_id)
        self._runs[batch.batch_id] = asyncio.create_task(self._run(batch.batch_id, run))

    async def _run(self, batch_id: str, run: BatchRun) -> None:
        try:
            await run.run()
        except (NotRunner, ObjectConflict) as error:
            log.info("batch left to another router", batch_id=batch_id, cause=error)
        except EverliftError as error:
            # The next scan continues it.
            log.warning("batch interrupted", batch_id=batch_id, cause=error)
        except Exception:
            log.exception("batch interrupted by an unexpected error", batch_id=batch_id)
        finally:
            del self._runs[batch_id]
