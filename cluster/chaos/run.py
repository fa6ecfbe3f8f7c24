"""Random faults in a running cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from cluster.chaos.dice import Dice, Happening
from everlift import AsyncClient
from everlift.errors import EverliftError
from everlift.v1 import chaos_pb2, inference_pb2

#: Drained workers are replaced for so long after the last fault.
_LAST_S = 10.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Happened:
    """Fault that was injected at ``at`` (seconds since 1970) into ``struck``.

    With an ``error`` nothing was struck.
    """

    name: str
    at: float
    struck: str
    error: str = ""


async def run(
    client: AsyncClient, seconds: float, every_s: float, seed: int, console: Console
) -> list[Happened]:
    """Inject random faults and return them.

    A fault that the cluster cannot take yet is skipped. Raises EverliftError if the first status
    call fails.
    """
    await client.status()
    console.print(f"[dim]seed {seed}[/]")
    dice, log, end = Dice(seed), list[Happened](), time.monotonic() + seconds
    while time.monotonic() < end:
        happening = await _thrown(dice, client)
        if happening is not None:
            log.append(await make(client, happening))
            console.print(described(log[-1]))
        await asyncio.sleep(every_s)
    await leave_none_drained(client)
    return log


def described(happened: Happened) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(happened.at))
    whom = f"[red]{escape(happened.error)}[/]" if happened.error else escape(happened.struck)
    return f"{moment}  {happened.name}  [dim]{whom}[/]"


async def _thrown(dice: Dice, client: AsyncClient) -> Happening | None:
    try:
        workers = await look(client)
    except EverliftError:
        return None
    return dice.throw(time.monotonic(), willing(workers))


async def look(client: AsyncClient) -> list[inference_pb2.WorkerStatus]:
    """Return the connected workers.

    Those that were drained, by us or by somebody else, and are empty by now are killed: they are
    there for nothing, and what starts killed workers anew starts others in their place. Raises
    EverliftError.
    """
    workers = [worker for worker in (await client.status()).workers if worker.alive]
    for worker in workers:
        if worker.draining and not worker.num_running + worker.num_waiting:
            await _replace(client, worker.worker_id)
    return workers


async def _replace(client: AsyncClient, worker_id: str) -> None:
    with suppress(EverliftError):
        fault = chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_KILL, target=worker_id)
        await client.inject(fault)


def willing(workers: Sequence[inference_pb2.WorkerStatus]) -> list[str]:
    """Return the workers that accept requests."""
    return [worker.worker_id for worker in workers if not worker.draining]


async def leave_none_drained(client: AsyncClient) -> None:
    """Wait after the last fault until the drained workers are empty and gone."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_S):
            while await _is_any_drained(client):
                pass


async def _is_any_drained(client: AsyncClient) -> bool:
    # A worker's word that it drains may be under way.
    await asyncio.sleep(_LOOK_S)
    try:
        return any(worker.draining for worker in await look(client))
    except EverliftError:
        return True


async def make(client: AsyncClient, happening: Happening) -> Happened:
    at = time.time()
    try:
        if happening.fault is None:
            struck = (await client.drain(happening.target)).worker_id
        else:
            struck = (await client.inject(happening.fault)).target
    except EverliftError as error:
        return Happened(happening.name, at, "", str(error))
    return Happened(happening.name, at, struck)
