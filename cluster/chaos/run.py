"""Injection of random faults into a running cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from cluster.chaos.fault_generator import ChaosEvent, FaultGenerator
from everlift import AsyncClient
from everlift.errors import EverliftError
from everlift.v1 import chaos_pb2, inference_pb2

#: Seconds after the last fault during which drained workers are still replaced.
_REPLACE_TIMEOUT_S = 10.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Injection:
    """Attempt to inject the fault ``name`` at the time ``at``, in seconds since 1970.

    ``target`` is what the fault affected: the id of a worker or router, or the ledger. It is empty
    if the attempt failed with an ``error``.
    """

    name: str
    at: float
    target: str
    error: str = ""


async def run(
    client: AsyncClient, seconds: float, every_s: float, seed: int, console: Console
) -> list[Injection]:
    """Inject random faults for ``seconds`` seconds, ``every_s`` apart; return the attempts.

    Each attempt is printed. An attempt is skipped if the status call fails or no fault is possible.
    After the last fault the drained workers are replaced. Raises EverliftError if the first status
    call fails.
    """
    await client.status()
    console.print(f"[dim]seed {seed}[/]")
    generator, log, end = FaultGenerator(seed), list[Injection](), time.monotonic() + seconds
    while time.monotonic() < end:
        event = await _next_event(generator, client)
        if event is not None:
            log.append(await inject(client, event))
            console.print(describe(log[-1]))
        await asyncio.sleep(every_s)
    await replace_drained_workers(client)
    return log


def describe(injection: Injection) -> str:
    timestamp = time.strftime("%H:%M:%S", time.localtime(injection.at))
    detail = f"[red]{escape(injection.error)}[/]" if injection.error else escape(injection.target)
    return f"{timestamp}  {injection.name}  [dim]{detail}[/]"


async def _next_event(generator: FaultGenerator, client: AsyncClient) -> ChaosEvent | None:
    try:
        workers = await poll_workers(client)
    except EverliftError:
        return None
    return generator.next_event(time.monotonic(), accepting_workers(workers))


async def poll_workers(client: AsyncClient) -> list[inference_pb2.WorkerStatus]:
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


def accepting_workers(workers: Sequence[inference_pb2.WorkerStatus]) -> list[str]:
    """Return the ids of the workers that accept requests, because they are not draining."""
    return [worker.worker_id for worker in workers if not worker.draining]


async def replace_drained_workers(client: AsyncClient) -> None:
    """Kill drained workers as soon as they have no requests, until none is left.

    Return without an error after at most ``_REPLACE_TIMEOUT_S`` seconds.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_REPLACE_TIMEOUT_S):
            while await _is_any_drained(client):
                pass


async def _is_any_drained(client: AsyncClient) -> bool:
    # The status does not yet show a drain whose notification is still in transit.
    await asyncio.sleep(_POLL_S)
    try:
        return any(worker.draining for worker in await poll_workers(client))
    except EverliftError:
        return True


async def inject(client: AsyncClient, event: ChaosEvent) -> Injection:
    at = time.time()
    try:
        if event.fault is None:
            target = (await client.drain(event.target)).worker_id
        else:
            target = (await client.inject(event.fault)).target
    except EverliftError as error:
        return Injection(event.name, at, "", str(error))
    return Injection(event.name, at, target)
