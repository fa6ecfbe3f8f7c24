"""What requests take of their tenants' limits, and when they give it back: one or two gateways on
a ledger in memory."""

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
#: A request "hi" takes 2 tokens, and 8 for its output.
TEN = Limits(tokens_per_minute=10)
R = "acme/r"


class Counting(MemoryLedger):
    """``calls`` are those that have to do with limits."""

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

    async def hold(self, request_ids, lease_s):  # type: ignore[no-untyped-def]
        self._called("hold")
        await super().hold(request_ids, lease_s)

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
    """A gateway to which only "acme" has limits."""
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


async def test_tenants_without_limits_cost_the_ledger_nothing(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        for request_id in ("r", "other/r"):
            await finish(gateway, await gateway.submit(request_id=request_id))
    assert ledger.calls == []


async def test_limits_of_one_request_cost_the_ledger_nothing(ledger: Counting) -> None:
    async with limited(ledger, Limits(max_tokens=5, max_priority=3)) as gateway:
        await finish(gateway, await gateway.submit(request_id=R))
    assert ledger.calls == []


async def test_who_is_refused_is_not_in_the_ledger(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        await gateway.submit(request_id=R)
        assert await refused(gateway) == "tenant 'acme' has reached its max_concurrent (1)"
        assert len(gateway.requests) == 1
        await gateway.submit(request_id="other/r")


async def test_the_next_one_may_come_as_soon_as_the_end_is_seen(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        for number in range(20):
            live = await gateway.submit(request_id=f"acme/{number}")
            await finish(gateway, live)


async def test_what_is_not_used_is_given_back(ledger: Counting) -> None:
    async with limited(ledger, TEN) as gateway:
        await finish(gateway, await gateway.submit(request_id=R), "abc")
        assert "tokens_per_minute" in await refused(gateway, max_tokens=4)
        await gateway.submit(request_id="acme/2", max_tokens=3)
        assert "tokens_per_minute" in await refused(gateway, max_tokens=1)


async def test_all_choices_are_charged_and_given_back(ledger: Counting) -> None:
    async with limited(ledger, Limits(tokens_per_minute=34)) as gateway:
        live = await gateway.submit(request_id=R, n=4)
        assert "tokens_per_minute" in await refused(gateway, max_tokens=1)
        await gateway.requests.cancel(live.request_id)
        await gateway.submit(request_id="acme/2", n=4, max_tokens=7)


@pytest.mark.parametrize("way", ["cancel", "forget", "reader", "deadline"])
async def test_every_end_frees_the_slot(ledger: Counting, way: str) -> None:
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


async def test_a_worker_that_fails_it_frees_the_slot(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        for _ in range(CONFIG.max_losses):
            await gateway.lose(live, in_step=True)
        await until(lambda: live.is_over)
        await gateway.submit(request_id="acme/next")


async def test_who_finds_the_queue_full_pays_nothing(ledger: Counting) -> None:
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        live = await gateway.submit(request_id=R)
        gateway.requests.refused(session_pb2.Refusal(request_id=R, slug=QueueFull.slug))
        await until(lambda: live.is_over)
        assert isinstance(live.error, QueueFull)
        await gateway.submit(request_id="acme/next")


async def test_what_the_ledger_does_not_take_costs_nothing(
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


async def test_a_request_that_may_have_been_opened_is_charged(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost; sent again it is the same one, and charged once."""
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


# the same request again


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("at", ["here", "elsewhere"])
async def test_the_same_request_again_costs_nothing(
    ledger: Counting, at: str, is_over: bool
) -> None:
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


async def test_a_request_that_is_known_is_not_refused_for_a_limit(ledger: Counting) -> None:
    async with limited(ledger, Limits(requests_per_minute=1)) as gateway:
        live = await gateway.submit(request_id=R)
        await finish(gateway, live)
        gateway.requests._recent.discard(R)
        again = await gateway.submit(request_id=R)
        assert again.is_over and again.num_tokens == 3
        assert "requests_per_minute" in await refused(gateway)


async def test_another_body_under_a_known_id_costs_nothing(ledger: Counting) -> None:
    limits = Limits(requests_per_minute=2, max_concurrent=2)
    async with limited(ledger, limits) as gateway:
        live = await gateway.submit(request_id=R)
        await finish(gateway, live)
        gateway.requests._recent.discard(R)
        with pytest.raises(RequestConflict):
            await gateway.submit(request_id=R, text="other")
        await gateway.submit(request_id="acme/2")
        assert "requests_per_minute" in await refused(gateway)


# gateways that die, and a ledger that goes away


async def adopt(ledger: Counting, dead: Gateway, heir: Gateway) -> LiveRequest:
    await ledger.heartbeat(dead.name, "there:1", 0.0)
    return await heir.requests.attach(R)


async def test_an_heir_frees_what_it_took_over(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway, limited(ledger, ONE, "heir") as heir:
        await gateway.submit(request_id=R)
        live = await adopt(ledger, gateway, heir)
        assert "max_concurrent" in await refused(heir)
        await finish(heir, live)
        await heir.submit(request_id="acme/next")


async def test_who_cancels_what_nobody_has_frees_it(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway, limited(ledger, ONE, "other") as other:
        await gateway.submit(request_id=R)
        await ledger.heartbeat(gateway.name, "there:1", 0.0)
        entry = await other.requests.cancel(R)
        assert (entry.state, entry.error_slug) == (State.CANCELLED, Cancelled.slug)
        await other.submit(request_id="acme/next")


async def test_what_goes_on_is_held(ledger: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_HOLD_S", 0.01)
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        await until(lambda: ledger.calls.count("hold") > 2)
        await finish(gateway, live)
        await until(lambda: not ledger.slots)
        await gateway.submit(request_id="other/r")
        await gateway.requests.quotas._hold_all()
        assert not ledger.slots


async def test_an_heir_holds_what_it_took_over(
    ledger: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(ledger, ONE) as gateway:
        await gateway.submit(request_id=R)
        monkeypatch.setattr(quotas, "_HOLD_S", 0.01)
        async with limited(ledger, ONE, "heir") as heir:
            await adopt(ledger, gateway, heir)
            await until(lambda: "hold" in ledger.calls)


async def test_ends_are_told_when_the_ledger_is_back(ledger: Counting) -> None:
    async with limited(ledger, ONE) as gateway:
        live = await gateway.submit(request_id=R)
        ledger.is_away = True
        await finish(gateway, live)
        await until(lambda: ledger.calls.count("settle") > 1)
        assert ledger.slots == {R}
        ledger.is_away = False
        await until(lambda: not ledger.slots)


async def test_a_router_that_stops_tells_what_ended(ledger: Counting) -> None:
    gateway = Gateway(ledger, limits_of=lambda tenant: ONE)
    await gateway.submit(request_id=R)
    await gateway.requests.cancel(R)
    assert ledger.slots == {R}
    await gateway.requests.stop(0.0)
    assert not ledger.slots


async def test_a_full_bucket_saves_nothing_up() -> None:
    clock = Clock()
    ledger = MemoryLedger(clock)
    charges = (Charge(f"acme/{number}", 0, 10, tokens_per_minute=10) for number in range(9))
    assert await ledger.charge(next(charges), 60.0)
    clock.now += 1000.0
    assert await ledger.charge(next(charges), 60.0)
    with pytest.raises(RateLimited) as refusal:
        await ledger.charge(next(charges), 60.0)
    assert refusal.value.retry_after_s == 60.0
