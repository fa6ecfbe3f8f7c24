"""The faults of a soak: one every few seconds, and what is done so that the game can go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random

from cluster.chaos.dice import DRAIN, Dice
from cluster.chaos.run import Happened, make, willing
from cluster.operating import Operator, operating
from everlift import AsyncClient
from everlift.errors import EverliftError
from everlift.v1 import chaos_pb2 as pb

_EMPTY_S = 10.0
_LOOK_S = 3.0


class Faults:
    def __init__(
        self, routers: Sequence[str], seed: int, names: Sequence[str], every_s: tuple[float, float]
    ) -> None:
        self.log: list[Happened] = []
        self._routers = routers
        self._dice = Dice(seed, names)
        self._rng = Random(seed)
        self._every_s = every_s
        self._cleaning: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with AsyncClient(self._routers) as client, operating(self._routers) as operator:
            while time.monotonic() < end:
                await asyncio.sleep(self._rng.uniform(*self._every_s))
                await self._make_one(client, operator)
            await asyncio.gather(*self._cleaning)

    async def _make_one(self, client: AsyncClient, operator: Operator) -> None:
        try:
            async with asyncio.timeout(_LOOK_S):
                workers = await willing(client)
        except (EverliftError, TimeoutError):
            # No router can say who is there: what strikes no worker is still possible.
            workers = []
        happening = self._dice.throw(time.monotonic(), workers)
        if happening is None:
            return
        self.log.append(await make(operator, happening))
        if happening.name == DRAIN and not self.log[-1].error:
            self._clean(client, operator, self.log[-1].struck)

    def _clean(self, client: AsyncClient, operator: Operator, worker_id: str) -> None:
        task = asyncio.create_task(_replace(client, operator, worker_id))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)


async def _replace(client: AsyncClient, operator: Operator, worker_id: str) -> None:
    """A drained worker ends when it is empty, as its operator would have it."""
    with suppress(EverliftError, TimeoutError):
        async with asyncio.timeout(_EMPTY_S):
            while await _has_work(client, worker_id):
                await asyncio.sleep(0.2)
    with suppress(EverliftError):
        await operator.inject(pb.Fault(kind=pb.FAULT_KIND_KILL, target=worker_id))


async def _has_work(client: AsyncClient, worker_id: str) -> bool:
    with suppress(EverliftError):
        for worker in (await client.status()).workers:
            if worker.worker_id == worker_id and worker.alive:
                return not worker.draining or worker.num_running + worker.num_waiting > 0
        return False
    return True
