"""Faults of a soak: one every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random

from cluster.chaos.fault_generator import FaultGenerator
from cluster.chaos.run import (
    Injection,
    accepting_workers,
    inject,
    poll_workers,
    replace_drained_workers,
)
from everlift import AsyncClient
from everlift.errors import EverliftError

_LOOK_S = 3.0


class Faults:
    def __init__(
        self, routers: Sequence[str], seed: int, names: Sequence[str], every_s: tuple[float, float]
    ) -> None:
        self.log: list[Injection] = []
        self._routers = routers
        self._fault_generator = FaultGenerator(seed, names)
        self._rng = Random(seed)
        self._every_s = every_s

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with AsyncClient(self._routers, retry_s=0) as client:
            while time.monotonic() < end:
                await asyncio.sleep(self._rng.uniform(*self._every_s))
                await self._make_one(client)
            await replace_drained_workers(client)

    async def _make_one(self, client: AsyncClient) -> None:
        try:
            async with asyncio.timeout(_LOOK_S):
                workers = accepting_workers(await poll_workers(client))
        except (EverliftError, TimeoutError):
            # No router answers with its workers; faults of other targets are still possible.
            workers = []
        event = self._fault_generator.next_event(time.monotonic(), workers)
        if event is not None:
            self.log.append(await inject(client, event))
