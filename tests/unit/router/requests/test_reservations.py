"""Requests for which a worker is reserved before they are in the ledger, at their gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from everlift.errors import LedgerFull, LedgerUnavailable, RequestConflict
from everlift.messages import Request, Submission
from everlift.v1 import inference_pb2, session_pb2
from router.ledger.base import Opened
from router.ledger.entry import Dispatch, State
from router.ledger.memory.memory import MemoryLedger
from router.requests.request import Elsewhere, Phase
from tests.support.router.gateway_support import (
    TERM,
    Gateway,
    RecordedReservation,
    gateway_ledger,
    until,
)

EPOCH = 2**64 - 5


class Failing(MemoryLedger):
    error: Exception | None = None

    async def open(
        self,
        request: Request,
        gateway: str,
        timeout_s: float | None = None,
        dispatch: Dispatch | None = None,
    ) -> Opened:
        if self.error is not None:
            raise self.error
        return await super().open(request, gateway, timeout_s, dispatch)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway(await gateway_ledger(Failing(time.monotonic)))
    run = asyncio.create_task(gateway.requests.attempts.run())
    yield gateway
    await gateway.requests.stop(0.0)
    run.cancel()


def reserve(gateway: Gateway, term: int = TERM, **fields: bool) -> RecordedReservation:
    reservation = RecordedReservation(Dispatch("w", EPOCH, term), **fields)
    gateway.line.reservation = reservation
    return reservation


async def test_leader_receives_cached_and_uncached_tokens(gateway: Gateway) -> None:
    gateway.line.cached = 40
    await gateway.submit(text="a" * 60, max_tokens=8)
    for waiting in (*gateway.line.arriving, *gateway.line.enqueued):
        assert (waiting.prompt_tokens, waiting.cached_tokens) == (60, 40)
        assert (waiting.predicted_total, waiting.predicted_tokens) == (20 + 8, 8)
    assert len(gateway.line.arriving) == len(gateway.line.enqueued) == 1


async def test_reserved_request_starts_without_queueing(gateway: Gateway) -> None:
    reservation = reserve(gateway)
    live = await gateway.submit(timeout_s=9.0, max_tokens=8, priority=2)
    assert reservation.came == "begun"
    assert (live.phase, live.epoch, live.worker_id) == (Phase.RUNNING, EPOCH, "w")
    [start] = gateway.workers.started
    assert (start.epoch, bytes(start.prompt_ids)) == (EPOCH, b"hi")
    assert gateway.line.enqueued == []
    assert gateway.line.residences == []
    assert live.entry == await gateway.ledger.get("r")
    [entry] = gateway.line.arriving
    assert entry == session_pb2.Waiting(
        request_id="r",
        model="fake",
        arrived=1000.0,
        prompt_tokens=2,
        max_tokens=8,
        choices=1,
        priority=2,
        deadline=1009.0,
        moves_left=3,
        predicted_tokens=8,
        predicted_total=10,
        predicted_work_rank=0.5,
        least_tokens=8,
    )


async def test_reservation_describes_the_request_as_queued(gateway: Gateway) -> None:
    await gateway.submit(n=3, max_tokens=200, ttft_target_ms=500)
    [arriving], [waiting] = gateway.line.arriving, gateway.line.enqueued
    waiting.arrived, waiting.ttft_deadline = 1000.0, 1000.5
    assert arriving == waiting


async def test_reservation_names_the_adapter_version(gateway: Gateway) -> None:
    message = inference_pb2.GenerateRequest(text="hi", max_tokens=8)
    request = gateway.model.resolve(Submission.from_proto(message, "r", seed=1))
    request = replace(request, adapter="sql", adapter_digest="digest of sql")
    await gateway.requests.submit(request, None)
    [arriving], [waiting] = gateway.line.arriving, gateway.line.enqueued
    assert (arriving.adapter, arriving.adapter_digest) == ("sql", "digest of sql")
    assert (waiting.adapter, waiting.adapter_digest) == ("sql", "digest of sql")


async def test_reserved_request_runs_to_completion(gateway: Gateway) -> None:
    reserve(gateway)
    live = await gateway.submit()
    gateway.make(EPOCH, 0, "yes", session_pb2.STOP_CAUSE_EOS)
    pieces = await gateway.read(live)
    assert "".join(piece.text for piece in pieces) == "yes"
    assert await gateway.stored() == (State.FINISHED, b"yes")


async def test_reserved_request_is_reported_to_a_new_leader(gateway: Gateway) -> None:
    reserve(gateway, leader_knows=False)
    await gateway.submit()
    [running] = gateway.line.residences
    assert (running.request_id, running.worker_id, running.epoch) == ("r", "w", EPOCH)


async def test_reservation_of_a_former_leader_is_returned(gateway: Gateway) -> None:
    reservation = reserve(gateway, term=TERM + 1)
    live = await gateway.submit()
    assert reservation.came == "given back"
    assert live.phase is Phase.WAITING
    assert [waiting.request_id for waiting in gateway.line.enqueued] == ["r"]


async def test_reservation_for_a_known_request_is_returned(gateway: Gateway) -> None:
    await gateway.submit()
    other = Gateway(gateway.ledger, "other")
    reservation = reserve(other)
    with pytest.raises(Elsewhere):
        await other.submit()
    assert reservation.came == "given back"
    with pytest.raises(RequestConflict):
        await other.submit(text="another")
    assert reservation.came == "given back" * 2


@pytest.mark.parametrize("error", [LedgerFull("full"), LedgerUnavailable("away")])
async def test_reservation_is_returned_if_the_ledger_rejects(
    gateway: Gateway, error: Exception
) -> None:
    reservation = reserve(gateway)
    assert isinstance(gateway.ledger, Failing)
    gateway.ledger.error = error
    with pytest.raises(type(error)):
        await gateway.submit()
    assert reservation.came == "given back"


async def test_reserved_request_is_requeued_if_worker_unreachable(gateway: Gateway) -> None:
    reserve(gateway)
    gateway.workers.reachable = False
    await gateway.submit()
    await until(lambda: bool(gateway.line.enqueued))
    assert gateway.line.enqueued[0].avoid == "w"
