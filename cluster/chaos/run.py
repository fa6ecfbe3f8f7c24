"""Injection of random faults into a running cluster."""

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

#: Seconds after the last fault during which drained workers are still replaced.
_LAST_S = 10.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Happened:
    """Attempt to inject the fault ``name`` at the time ``at``, in seconds since 1970.

    ``struck`` is what the fault affected: the id of a worker or router, or the ledger. It is empty
    if the attempt failed with an ``error``.
    """

    name: str
    at: float
    struck: str
    error: str = ""


async def run(
    client: AsyncClient, seconds: float, every_s: float, seed: int, console: Console
) -> list[Happened]:
    """Inject a random fault every ``every_s`` seconds for ``seconds``; return the attempts.

    Each attempt is printed. An attempt is skipped if the status call fails or no fault is possible.
    After the last fault the drained workers are replaced. Raises EverliftError if the first status
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
    """Return the connected workers, and kill those that are drained and have no requests left.

    A drained worker no longer accepts requests. If it is killed, the supervisor that restarts
    killed workers starts another one. The result includes the killed workers. Raises EverliftError
    if the status call fails.
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
    """Return the ids of the workers that accept requests, because they are not draining."""
    return [worker.worker_id for worker in workers if not worker.draining]


async def leave_none_drained(client: AsyncClient) -> None:
    """Wait, for at most ``_LAST_S`` seconds, until all drained workers are empty and killed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_S):
            while await _is_any_drained(client):
                pass


async def _is_any_drained(client: AsyncClient) -> bool:
    # The status does not yet show a drain whose notification is still in transit.
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
