"""Workers of a simulated cluster that an autoscaler starts and drains."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count, pairwise

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.policy import Autoscaler, Decision
from everlift.errors import LedgerUnavailable
from tests.simulated_cluster.cluster import SimCluster

_DECIDES_EVERY_S = 0.2
#: Seconds that a worker has to drain.
_LEAVES_IN_S = 1.5


class SimReplicas:
    """Replacement of Ray Serve: a requested worker is available ``start_s`` seconds later.

    Initially there are none.
    """

    def __init__(self, cluster: SimCluster, config: AutoscaleConfig, start_s: float) -> None:
        self.decisions: list[tuple[float, Decision]] = []
        self._cluster = cluster
        self._autoscaler = Autoscaler(config)
        self._start_s = start_s
        self._process = cluster.clock.process("controller")
        self._ledger = cluster.ledger.view(self._process)
        self._names = count()
        #: requested workers, the oldest first; a worker is available when its task has ended
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._process.create_task(self._run())

    @property
    def target(self) -> int:
        return len(self._asked)

    @property
    def reversals(self) -> int:
        """Number of changes of direction, from more workers to fewer or vice versa."""
        counts = [decision.workers for _, decision in self.decisions]
        steps = [after - before for before, after in pairwise(counts)]
        turns = [step > 0 for step in steps if step]
        return sum(one != other for one, other in pairwise(turns))

    async def _run(self) -> None:
        while True:
            with suppress(LedgerUnavailable):
                await self._decide()
            await asyncio.sleep(_DECIDES_EVERY_S)

    async def _decide(self) -> None:
        report = await self._ledger.load()
        load, age_s = (report.load, report.age_s) if report else (None, 0.0)
        now = self._process.time()
        decision = self._autoscaler.decide(load, age_s, self.target, now)
        self.decisions.append((now, decision))
        while self.target < decision.workers:
            index = next(self._names)
            self._asked[index] = self._process.create_task(self._start(index))
        while self.target > decision.workers:
            self._leave(*self._asked.popitem())

    async def _start(self, index: int) -> None:
        await asyncio.sleep(self._start_s)
        self._cluster.network.call_soon(self._cluster.start_worker, index)

    def _leave(self, index: int, starting: asyncio.Task[None]) -> None:
        if not starting.done():
            starting.cancel()
        else:
            self._process.create_task(self._drain(index))

    async def _drain(self, index: int) -> None:
        self._cluster.network.call_soon(self._cluster.drain_worker, index)
        await asyncio.sleep(_LEAVES_IN_S)
        self._cluster.network.call_soon(self._cluster.kill_worker, index)
