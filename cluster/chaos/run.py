"""Random faults in a running cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from cluster.chaos.dice import Dice, Happening
from cluster.operating import Operator, operating
from everlift import AsyncClient
from everlift.errors import EverliftError


@dataclass(frozen=True, slots=True)
class Happened:
    """``at`` is seconds since 1970. ``struck`` is whom it struck; with an ``error`` nobody."""

    name: str
    at: float
    struck: str
    error: str = ""


async def run(
    routers: Sequence[str], seconds: float, every_s: float, seed: int, console: Console
) -> list[Happened]:
    """What has happened. A fault that the cluster does not take, since it has not got over the last
    one yet, is no reason to end."""
    dice, log, end = Dice(seed), list[Happened](), time.monotonic() + seconds
    async with AsyncClient(routers) as client, operating(routers) as operator:
        while time.monotonic() < end:
            happening = await _thrown(dice, client)
            if happening is not None:
                log.append(await make(operator, happening))
                console.print(described(log[-1]))
            await asyncio.sleep(every_s)
    return log


def described(happened: Happened) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(happened.at))
    whom = f"[red]{happened.error}[/]" if happened.error else happened.struck
    return f"{moment}  {happened.name}  [dim]{whom}[/]"


async def _thrown(dice: Dice, client: AsyncClient) -> Happening | None:
    try:
        workers = await willing(client)
    except EverliftError:
        return None
    return dice.throw(time.monotonic(), workers)


async def willing(client: AsyncClient) -> list[str]:
    """Workers that are alive and take requests. Raises EverliftError."""
    workers = (await client.status()).workers
    return [worker.worker_id for worker in workers if worker.alive and not worker.draining]


async def make(operator: Operator, happening: Happening) -> Happened:
    at = time.time()
    try:
        if happening.fault is None:
            struck = (await operator.drain(happening.target)).worker_id
        else:
            struck = await operator.inject(happening.fault)
    except EverliftError as error:
        return Happened(happening.name, at, "", str(error))
    return Happened(happening.name, at, struck)
