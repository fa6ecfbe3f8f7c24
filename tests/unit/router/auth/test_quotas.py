"""Charges to tenants' limits and their settlement: one or two gateways on a ledger in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from everlift.errors import (
    Cancelled,
    LedgerFull,
    LedgerUnavailable,
    QueueFull,
    RateLimited,
    RequestConflict,
)
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.auth import quotas
from router.auth.limits import NO_LIMITS, Limits
from router.ledger.base import Opened
from router.ledger.entry import State
from router.ledger.memory.memory import MemoryLedger
from router.ledger.quota import Charge
from router.requests.request import Elsewhere, LiveRequest
from tests.support.ledger.ledgers import Clock
from tests.support.router.gateway_support import CONFIG, Gateway, gateway_ledger, until

STOP = session_pb2.STOP_CAUSE_EOS
ONE = Limits(max_concurrent=1)
#: Charge of one request "hi": 2 prompt tokens and 8 output tokens.
TEN = Limits(tokens_per_minute=10)
R = "acme/r"


class Counting(MemoryLedger):
    """Ledger that records the calls that concern limits."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.calls: list[str] = []
        self.is_away = False

    async def charge(self, charge: Charge, lease_s: float) -> bool:
        self._called("charge")
        return await super().charge(charge, lease_s)

    async def settle_charges(self, ends):  # type: ignore[no-untyped-def]
        self._called("settle")
        await super().settle_charges(ends)

    async def renew_charges(self, request_ids, lease_s):  # type: ignore[no-untyped-def]
        self._called("renew_charges")
        await super().renew_charges(request_ids, lease_s)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.is_away:
            raise LedgerUnavailable("away")

    @property
    def slots(self) -> set[str]:
        accounts = self._quotas._accounts.values()
        return {request_id for account in accounts for request_id in account.slots}


@pytest.fixture
async def ledger() -> Counting:
    return await gateway_ledger(Counting())


@asynccontextmanager
async def limited(
    ledger: Counting, limits: Limits, name: str = "gateway"
) -> AsyncIterator[Gateway]:
    """Run a gateway at which only the tenant "acme" has limits."""
    gateway = Gateway(
        ledger, name, CONFIG, lambda tenant: limits if tenant == "acme" else NO_LIMITS
    )
    works = [gateway.requests.attempts.run(), gateway.requests.quotas.run()]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield gateway
    finally:
        await gateway.requests.stop(0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(gateway: Gateway, live: LiveRequest, text: str = "abc") -> None:
    epoch = await gateway.dispatch(live.request_id)
    gateway.make(epoch, 0, text, STOP)
    await until(lambda: live.is_over)


async def refused(gateway: Gateway, request_id: str = "acme/refused", **fields: object) -> str:
    with pytest.raises(RateLimited) as refusal:
        await gateway.submit(request_id=request_id, **fields)
    return str(refusal.value)


async def test_refused_background_response_is_refunded(ledger: Counting) -> None:
    fields = {"attachment": b"R", "on_disconnect": pb.ON_DISCONNECT_CONTINUE}
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        live = await gateway.submit(request_id=R, **fields)
        gateway.requests.refused(session_pb2.Refusal(request_id=R, slug="queue_full"))
        await until(lambda: live.is_over)
        assert (await ledger.get(R)).state is State.FAILED
        await gateway.submit(request_id="acme/s")


async def test_unlimited_tenants_cause_no_ledger_calls(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        for request_id in ("r", "other/r"):
            await finish(gateway, await gateway.submit(request_id=request_id))
    assert ledger.calls == []


async def test_per_request_limits_cause_no_ledger_calls(ledger: Counting) -> None:
    async with limited(ledger, Limits(max_tokens=5, max_priority=3)) as gateway:
        await finish(gateway, await gateway.submit(request_id=R))
    assert ledger.calls == []


async def test_rate_limited_request_is_not_in_the_ledger(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        await gateway.submit(request_id=R)
        assert await refused(gateway) == "tenant 'acme' has reached its max_concurrent (1)"
        assert len(gateway.requests) == 1
        await gateway.submit(request_id="other/r")


async def test_slot_is_free_as_soon_as_the_end_is_seen(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        for number in range(20):
            live = await gateway.submit(request_id=f"acme/{number}")
            await finish(gateway, live)


async def test_unused_tokens_are_refunded(ledger: Counting) -> None:
    async with limited(ledger, TEN) as gateway:
        await finish(gateway, await gateway.submit(request_id=R), "abc")
        assert "tokens_per_minute" in await refused(gateway, max_tokens=4)
        await gateway.submit(request_id="acme/2", max_tokens=3)
        assert "tokens_per_minute" in await refused(gateway, max_tokens=1)


async def test_choices_are_all_charged_and_refunded(ledger: Counting) -> None:
    async with limited(ledger, Limits(tokens_per_minute=34)) as gateway:
        live = await gateway.submit(request_id=R, n=4)
        assert "tokens_per_minute" in await refused(gateway, max_tokens=1)
        await gateway.requests.cancel(live.request_id)
        await gateway.submit(request_id="acme/2", n=4, max_tokens=7)


async def test_unopened_request_is_refunded(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant's shard of the ledger answers, that of the request does not."""

    async def open_request(*arguments: object) -> Opened:
        raise LedgerUnavailable("away")

    async with limited(ledger, ONE) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "open", open_request)
            with pytest.raises(LedgerUnavailable):
                await gateway.submit(request_id=R)
        await until(lambda: not ledger.slots)
        await gateway.submit(request_id="acme/next")


@pytest.mark.parametrize("way", ["cancel", "forget", "reader", "deadline"])
async def test_slot_is_freed_by_any_end(ledger: Counting, way: str) -> None:
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(timeout_s=0.02 if way == "deadline" else None, request_id=R)
        match way:
            case "cancel":
                await gateway.requests.cancel(R)
            case "forget":
                await gateway.requests.forget(R)
            case "reader":
                reading = gateway.requests.stream(live)
                await anext(reading)
                await reading.aclose()
        await until(lambda: live.is_over)
        await gateway.submit(request_id="acme/next")


async def test_slot_is_freed_when_attempts_are_exhausted(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        for _ in range(CONFIG.max_losses):
            await gateway.lose(live, in_step=True)
        await until(lambda: live.is_over)
        await gateway.submit(request_id="acme/next")


async def test_request_rejected_by_a_full_queue_is_not_charged(ledger: Counting) -> None:
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        live = await gateway.submit(request_id=R)
        gateway.requests.refused(session_pb2.Refusal(request_id=R, slug=QueueFull.slug))
        await until(lambda: live.is_over)
        assert isinstance(live.error, QueueFull)
        await gateway.submit(request_id="acme/next")


async def test_request_rejected_by_a_full_ledger_is_not_charged(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        with monkeypatch.context() as patch:

            async def full(*args: object) -> Opened:
                raise LedgerFull("full")

            patch.setattr(ledger, "open", full)
            with pytest.raises(LedgerFull):
                await gateway.submit(request_id=R)
        await gateway.submit(request_id=R)


async def test_request_whose_open_answer_was_lost_is_charged_once(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client retries with the same request id."""
    opening = ledger.open

    async def lost(*args: object) -> Opened:
        await opening(*args)  # type: ignore[arg-type]
        raise LedgerUnavailable("lost")

    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "open", lost)
            with pytest.raises(LedgerUnavailable):
                await gateway.submit(request_id=R)
        await gateway.submit(request_id=R)
        assert "requests_per_minute" in await refused(gateway)


# duplicate requests


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("at", ["here", "elsewhere"])
async def test_duplicate_request_is_not_charged(ledger: Counting, at: str, is_over: bool) -> None:
    limits = Limits(requests_per_minute=2, max_concurrent=2)
    async with limited(ledger, limits) as gateway, limited(ledger, limits, "other") as other:
        live = await gateway.submit(request_id=R)
        if is_over:
            await finish(gateway, live)
        for _ in range(3):
            with suppress(Elsewhere):
                await (gateway if at == "here" else other).submit(request_id=R)
        await other.requests.quotas.flush()
        await gateway.submit(request_id="acme/2")
        await refused(gateway)


async def test_known_request_is_not_rate_limited(ledger: Counting) -> None:
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        live = await gateway.submit(request_id=R)
        await finish(gateway, live)
        gateway.requests._recent.discard(R)
        again = await gateway.submit(request_id=R)
        assert again.is_over and again.num_tokens == 3
        assert "requests_per_minute" in await refused(gateway)


async def test_conflicting_request_is_not_charged(ledger: Counting) -> None:
    limits = Limits(requests_per_minute=2, max_concurrent=2)
    async with limited(ledger, limits) as gateway:
        live = await gateway.submit(request_id=R)
        await finish(gateway, live)
        gateway.requests._recent.discard(R)
        with pytest.raises(RequestConflict):
            await gateway.submit(request_id=R, text="other")
        await gateway.submit(request_id="acme/2")
        assert "requests_per_minute" in await refused(gateway)


# dead gateways and ledger outages


async def adopt(ledger: Counting, dead: Gateway, successor: Gateway) -> LiveRequest:
    await ledger.heartbeat(dead.name, "there:1", 0.0)
    return await successor.requests.attach(R)


async def test_successor_frees_the_slot_of_an_adopted_request(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway, limited(ledger, ONE, "successor") as successor:
        await gateway.submit(request_id=R)
        live = await adopt(ledger, gateway, successor)
        assert "max_concurrent" in await refused(successor)
        await finish(successor, live)
        await successor.submit(request_id="acme/next")


async def test_cancel_of_an_ownerless_request_frees_its_slot(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway, limited(ledger, ONE, "other") as other:
        await gateway.submit(request_id=R)
        await ledger.heartbeat(gateway.name, "there:1", 0.0)
        entry = await other.requests.cancel(R)
        assert (entry.state, entry.error_slug) == (State.CANCELLED, Cancelled.slug)
        await other.submit(request_id="acme/next")


async def test_slot_is_held_while_its_request_runs(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "_RENEW_INTERVAL_S", 0.01)
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        await until(lambda: ledger.calls.count("renew_charges") > 2)
        await finish(gateway, live)
        await until(lambda: not ledger.slots)
        await gateway.submit(request_id="other/r")
        await gateway.requests.quotas._renew_all()
        assert not ledger.slots


async def test_successor_holds_the_slot_of_an_adopted_request(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(ledger, ONE) as gateway:
        await gateway.submit(request_id=R)
        monkeypatch.setattr(quotas, "_RENEW_INTERVAL_S", 0.01)
        async with limited(ledger, ONE, "successor") as successor:
            await adopt(ledger, gateway, successor)
            await until(lambda: "renew_charges" in ledger.calls)


async def test_ends_are_settled_when_the_ledger_returns(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        ledger.is_away = True
        await finish(gateway, live)
        await until(lambda: ledger.calls.count("settle") > 1)
        assert ledger.slots == {R}
        ledger.is_away = False
        await until(lambda: not ledger.slots)


async def test_stopping_router_settles_ended_requests(ledger: Counting) -> None:
    gateway = Gateway(ledger, limits_of=lambda tenant: ONE)
    await gateway.submit(request_id=R)
    await gateway.requests.cancel(R)
    assert ledger.slots == {R}
    await gateway.requests.stop(0.0)
    assert not ledger.slots


async def test_full_rate_bucket_accumulates_nothing() -> None:
    clock = Clock()
    ledger = MemoryLedger(clock)
    charges = (Charge(f"acme/{number}", 0, 10, tokens_per_minute=10) for number in range(9))
    assert await ledger.charge(next(charges), 60.0)
    clock.now += 1000.0
    assert await ledger.charge(next(charges), 60.0)
    with pytest.raises(RateLimited) as refusal:
        await ledger.charge(next(charges), 60.0)
    assert refusal.value.retry_after_s == 60.0
