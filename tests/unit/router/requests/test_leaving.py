"""Requests that end in the queue ask the leader for the causes of their wait."""

from __future__ import annotations

import asyncio
import time

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.memory.memory import MemoryLedger
from tests.support.router.gateway_support import Gateway, gateway_ledger


async def kinds(gateway: Gateway) -> set[pb.SpanKind.ValueType]:
    """Return the kinds of spans that were stored with the end."""
    explanation = (await gateway.ledger.read("r")).explanation
    return {span.kind for span in pb.Explanation.FromString(explanation).spans}


async def waiting() -> Gateway:
    gateway = Gateway(await gateway_ledger(MemoryLedger(time.monotonic)))
    gateway.line.is_quiet = False
    await gateway.submit()
    return gateway


async def test_withdrawal_answer_is_stored_with_the_end() -> None:
    gateway = await waiting()
    cancelling = asyncio.create_task(gateway.requests.cancel("r"))
    while not gateway.line.withdrawn:
        await asyncio.sleep(0)
    message = session_pb2.Withdrawn(
        request_id="r", queue_wait=session_pb2.QueueWait(no_worker_s=1e-6)
    )
    gateway.requests.withdrawn(message)
    gateway.requests.withdrawn(message)
    await cancelling
    gateway.requests.withdrawn(message)
    assert pb.SPAN_KIND_NO_WORKER in await kinds(gateway)
    assert pb.SPAN_KIND_QUEUE not in await kinds(gateway)


async def test_withdrawal_without_answer_counts_as_queue_time() -> None:
    gateway = await waiting()
    await gateway.requests.cancel("r")
    assert pb.SPAN_KIND_QUEUE in await kinds(gateway)


async def test_cancel_awaits_the_leader_only_for_queued_requests() -> None:
    for is_running in (False, True):
        gateway = await waiting()
        gateway.line.is_quiet = not is_running
        if is_running:
            await gateway.dispatch()
        assert not await asked(gateway)
    assert await asked(await waiting())


async def asked(gateway: Gateway) -> bool:
    """Return whether an end waits for the leader."""
    cancelling = asyncio.create_task(gateway.requests.cancel("r"))
    while not gateway.line.withdrawn:
        await asyncio.sleep(0)
    waits = bool(gateway.requests.attempts._withdrawals)
    await cancelling
    return waits
