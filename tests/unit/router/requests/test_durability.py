"""Delivery of tokens before or after the ledger has them, and during a ledger outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from everlift.errors import LedgerFull, LedgerUnavailable
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.base import Membership
from router.ledger.entry import Append, Appended
from router.ledger.memory.memory import MemoryLedger
from router.requests import token_writer
from router.requests.request import LiveRequest
from tests.support.router.gateway_support import (
    CONFIG,
    Gateway,
    gateway_ledger,
    started_gateway,
    until,
)

EOS = session_pb2.STOP_CAUSE_EOS


class SlowLedger(MemoryLedger):
    """Ledger that appends only while ``let`` is set, or is away; records the calls."""

    def __init__(self) -> None:
        super().__init__(lambda: 1000.0)
        self.let = asyncio.Event()
        self.is_away = False
        self.calls: list[list[Append]] = []

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        self.calls.append(list(appends))
        if self.is_away:
            raise LedgerUnavailable("away")
        await self.let.wait()
        return await super().append(appends)


@pytest.fixture
async def ledger() -> SlowLedger:
    return await gateway_ledger(SlowLedger())


async def read_now(
    gateway: Gateway, live: LiveRequest, stop_after: float = 0.05
) -> list[pb.GenerateResponse]:
    """Return the pieces that can be read without further events."""
    pieces: list[pb.GenerateResponse] = []

    async def read() -> None:
        async for piece in gateway.requests.stream(live):
            pieces.append(piece)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), stop_after)
    return [piece for piece in pieces if piece.token_ids]


@pytest.fixture
async def behind(ledger: SlowLedger) -> AsyncIterator[Gateway]:
    config = replace(CONFIG, durability="behind", grace=5.0, unledgered=0.0)
    async with started_gateway(ledger, config) as gateway:
        yield gateway


async def begin(gateway: Gateway, text: str) -> tuple[LiveRequest, int]:
    live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE, max_tokens=64)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, text)
    return live, epoch


async def test_before_delivery_shows_only_stored_tokens(
    ledger: SlowLedger,
) -> None:
    async with started_gateway(ledger) as gateway:
        live, epoch = await begin(gateway, "ab")
        assert not await read_now(gateway, live)
        ledger.let.set()
        gateway.make(epoch, 2, "c", EOS)
        pieces = await gateway.read(live)
    assert not any(piece.unledgered for piece in pieces)


async def test_behind_shows_tokens_at_once_and_marks_unstored_ones(
    ledger: SlowLedger, behind: Gateway
) -> None:
    live, epoch = await begin(behind, "ab")
    assert [(p.text, p.unledgered) for p in await read_now(behind, live)] == [("ab", True)]
    ledger.let.set()
    await until(lambda: live.choices[0].stored == 2)
    ledger.let.clear()
    behind.make(epoch, 2, "c")
    assert [p.unledgered for p in await read_now(behind, live)] == [True]
    ledger.let.set()
    await until(lambda: live.choices[0].stored == 3)
    assert [(p.text, p.unledgered) for p in await read_now(behind, live)] == [("abc", False)]


async def test_behind_shows_the_end_only_once_stored(ledger: SlowLedger, behind: Gateway) -> None:
    live, epoch = await begin(behind, "ab")
    behind.make(epoch, 2, "c", EOS)
    reading = asyncio.create_task(behind.read(live))
    await asyncio.sleep(0.01)
    assert not reading.done()
    ledger.let.set()
    assert (await reading)[-1].usage.output_tokens == 3


async def test_behind_gathers_tokens_into_one_append(
    ledger: SlowLedger, behind: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.let.set()
    behind.requests.attempts.writer._appender._gather_s = 5.0
    live, epoch = await begin(behind, "a")
    for offset in range(1, 8):
        behind.make(epoch, offset, "b")
        await asyncio.sleep(0)
    assert not ledger.calls
    # An end is appended at once.
    behind.make(epoch, 8, "c", EOS)
    await until(lambda: live.is_over)
    assert [bytes(append.tokens) for call in ledger.calls for append in call] == [b"abbbbbbbc"]


class WithoutReplica(SlowLedger):
    """Ledger that stores appends at once, but those with an end only while ``let`` is set."""

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        if not any(append.finish_reason for append in appends):
            return await MemoryLedger.append(self, appends)
        return await super().append(appends)


async def test_tokens_do_not_await_the_ends_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_writer, "_LATE_S", 0.03)
    ledger = await gateway_ledger(WithoutReplica())
    config = replace(CONFIG, unledgered=0.0)
    async with started_gateway(ledger, config) as gateway:
        live, epoch = await begin(gateway, "ab")
        other = await gateway.submit(request_id="other")
        its_epoch = await gateway.dispatch("other")
        gateway.make(epoch, 2, "c", EOS)
        await until(lambda: ledger.calls and gateway.requests.ledger_status().away)
        gateway.make(its_epoch, 0, "xyz")
        await until(lambda: other.choices[0].stored == 3)
        # Answers to other appends do not show that the ledger can store ends.
        assert gateway.requests.ledger_status().away
        assert "".join(piece.text for piece in await read_now(gateway, live)) == "ab"
        ledger.let.set()
        await until(lambda: live.is_over)
        assert not gateway.requests.ledger_status().away


@pytest.mark.parametrize("is_away", [False, True])
async def test_end_follows_unanswered_tokens_of_its_choice(
    ledger: SlowLedger, is_away: bool
) -> None:
    ledger.is_away = is_away
    async with started_gateway(ledger) as gateway:
        live, epoch = await begin(gateway, "ab")
        await until(lambda: ledger.calls)
        gateway.make(epoch, 2, "c", EOS)
        await asyncio.sleep(0.01)
        sent = [append for call in ledger.calls for append in call]
        assert not any(append.finish_reason for append in sent)
        ledger.is_away = False
        ledger.let.set()
        await until(lambda: live.is_over)
        [last] = ledger.calls[-1]
        assert bytes(last.tokens) == (b"abc" if is_away else b"c")
        assert bytes(ledger._records["r"].choices[0].tokens) == b"abc"


@pytest.mark.parametrize(
    ("durability", "on_loss", "unledgered", "seen"),
    [
        ("before_delivery", "available", 9.0, "ab"),
        ("before_delivery", "available", 0.0, ""),
        ("before_delivery", "strict", 9.0, ""),
        ("behind", "available", 9.0, "abcd"),
        ("behind", "available", 0.0, "ab"),
        ("behind", "strict", 9.0, "ab"),
    ],
)
async def test_streams_continue_or_pause_during_ledger_outage(
    ledger: SlowLedger, durability: str, on_loss: str, unledgered: float, seen: str
) -> None:
    """The text includes what arrives before and after the outage is detected."""
    config = replace(
        CONFIG,
        durability=durability,  # type: ignore[arg-type]
        on_ledger_loss=on_loss,  # type: ignore[arg-type]
        unledgered=unledgered,
    )
    ledger.is_away = True
    async with started_gateway(ledger, config) as gateway:
        live, epoch = await begin(gateway, "ab")
        await until(lambda: gateway.requests.ledger_status().away)
        if durability == "behind":
            gateway.make(epoch, 2, "cd")
        pieces = await read_now(gateway, live)
        assert "".join(piece.text for piece in pieces) == seen
        assert all(piece.unledgered for piece in pieces)
        ledger.is_away = False
        ledger.let.set()
        await until(lambda: live.choices[0].stored)
        assert not gateway.requests.ledger_status().away


async def test_end_of_a_choice_releases_no_withheld_tokens(ledger: SlowLedger) -> None:
    ledger.is_away = True
    async with started_gateway(ledger, replace(CONFIG, unledgered=0.05)) as gateway:
        live, epoch = await begin(gateway, "ab")
        await until(lambda: live.choices[0].readable == 2)
        await asyncio.sleep(0.1)
        gateway.make(epoch, 2, "c", EOS)
        await until(lambda: True in gateway.requests.attempts.writer._away_since)
        assert live.choices[0].readable == 2
        ledger.is_away = False
        ledger.let.set()
        await until(lambda: live.is_over)


async def test_requests_are_rejected_during_ledger_outage(ledger: SlowLedger) -> None:
    async with started_gateway(ledger) as gateway:
        live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        gateway.requests.ledger_failed()
        assert gateway.requests.ledger_status().away
        with pytest.raises(LedgerUnavailable):
            await gateway.submit(request_id="another")
        assert await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE) is live
        gateway.requests.ledger_answered(MEMBERSHIP)
        await gateway.submit(request_id="another")


MEMBERSHIP = Membership(0.0, "", "", 0, 0)


async def test_ledger_nearly_full_rejects_new_requests(ledger: SlowLedger) -> None:
    async with started_gateway(ledger) as gateway:
        live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        gateway.requests.ledger_answered(replace(MEMBERSHIP, memory_used=0.81))
        with pytest.raises(LedgerFull, match="81%") as full:
            await gateway.submit(request_id="another")
        assert full.value.retry_after_s
        assert await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE) is live
        gateway.requests.ledger_answered(replace(MEMBERSHIP, memory_used=0.8))
        await gateway.submit(request_id="another")


async def test_ledger_status_reports_server_and_memory(ledger: SlowLedger) -> None:
    async with started_gateway(ledger) as gateway:
        gateway.requests.ledger_answered(replace(MEMBERSHIP, memory_used=0.25))
        assert gateway.requests.ledger_status() == pb.LedgerStatus(
            server="memory",
            durability_class="memory",
            durability="before_delivery",
            memory_used=0.25,
        )
