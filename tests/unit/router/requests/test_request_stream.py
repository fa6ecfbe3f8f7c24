"""Stream that follows its request to other routers: resumption, skipped repeats, time limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.errors import (
    DataLoss,
    EverliftError,
    ForgottenRequest,
    LedgerUnavailable,
    Moved,
    QueueFull,
    RouterStopping,
    UnknownRequest,
    Unreachable,
)
from everlift.hashes import token_digest
from everlift.v1 import inference_pb2 as pb
from router.api.service import Inference
from router.auth.caller import ANYONE
from router.ledger.memory.memory import MemoryLedger
from router.requests import request_stream
from router.requests.delivered import Delivered
from router.requests.request_stream import RequestStream
from router.requests.stream import Source
from tests.support.router.gateway_support import CONFIG, Gateway, started_gateway, until

STOP = pb.FINISH_REASON_STOP


def head(offset: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset)


def piece(
    offset: int, *tokens: int, choice: int = 0, ends: bool = False, is_last: bool = False
) -> pb.GenerateResponse:
    made = pb.GenerateResponse(request_id="r", choice=choice, offset=offset, token_ids=tokens)
    if ends:
        made.finish_reason = STOP
    if is_last:
        made.usage.output_tokens = 7
    return made


class Scripted(Source):
    """Source of pieces, followed by ``error`` or, if it is None, by the end."""

    resumable = (Moved, Unreachable, RouterStopping, LedgerUnavailable)

    def __init__(self, *pieces: pb.GenerateResponse, error: EverliftError | None = None) -> None:
        super().__init__()
        self._pieces = list(pieces)
        self._error = error
        self.is_closed = False

    @property
    def is_over(self) -> bool:
        return not self._pieces and self._error is None

    def poll(self) -> pb.GenerateResponse | None:
        if self._pieces:
            return self._pieces.pop(0)
        if self._error is not None:
            raise self._error
        return None

    async def aclose(self) -> None:
        self.is_closed = True


class Routers:
    """Scripted results of the attempts to find a request; records the messages."""

    def __init__(self, *found: Scripted | EverliftError) -> None:
        self._found = list(found)
        self.asked: list[pb.AttachRequest] = []

    async def reopen(self, message: pb.AttachRequest) -> Source:
        self.asked.append(message)
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        if isinstance(found, EverliftError):
            raise found
        return found


def stream(first: Scripted, routers: Routers, **options: bool) -> RequestStream:
    return RequestStream("r", first, routers.reopen, Delivered(), **options)


async def read(pieces: RequestStream) -> list[pb.GenerateResponse]:
    return [it async for it in pieces]


@pytest.mark.parametrize(
    "error", [Moved(), Unreachable(), RouterStopping(), LedgerUnavailable()], ids=lambda it: it.slug
)
async def test_stream_continues_behind_the_last_token(error: EverliftError) -> None:
    first = Scripted(head(), piece(0, 1, 2), piece(0, 5, choice=1), error=error)
    again = Scripted(head(2), piece(2, 3, ends=True), piece(1, 6, choice=1, is_last=True))
    routers = Routers(Moved("not yet"), LedgerUnavailable(), again)
    pieces = await read(stream(first, routers))
    assert [(it.choice, *it.token_ids) for it in pieces] == [
        (0,),
        (0, 1, 2),
        (1, 5),
        (0, 3),
        (1, 6),
    ]
    assert first.is_closed
    [*_, asked] = routers.asked
    assert asked == pb.AttachRequest(
        request_id="r",
        from_offsets=[2, 1],
        digests=[token_digest([1, 2]), token_digest([5])],
    )


async def test_repeated_end_is_skipped_but_for_its_usage() -> None:
    first = Scripted(head(), piece(0, 1, ends=True), piece(0, 5, choice=1), error=Moved())
    again = Scripted(head(1), piece(1, 6, choice=1, ends=True), piece(1, ends=True, is_last=True))
    *_, end, last = await read(stream(first, Routers(again)))
    assert (end.choice, [*end.token_ids], end.finish_reason) == (1, [6], STOP)
    assert (last.choice, [*last.token_ids], last.finish_reason) == (0, [], 0)
    assert last.usage.output_tokens == 7


@pytest.mark.parametrize("offset", [0, 1, 3])
async def test_source_that_does_not_continue_is_data_loss(offset: int) -> None:
    first = Scripted(head(), piece(0, 1, 2), error=Moved())
    with pytest.raises(DataLoss, match=f"at offset {offset} instead of 2"):
        await read(stream(first, Routers(Scripted(head(2), piece(offset, 9)))))


async def test_stream_ends_on_a_non_resumable_error() -> None:
    routers = Routers(Scripted())
    with pytest.raises(QueueFull):
        await read(stream(Scripted(head(), error=QueueFull()), routers))
    assert not routers.asked


@pytest.mark.parametrize("found", [Moved("still"), Scripted(error=Unreachable("dead"))])
async def test_search_for_the_owner_ends(
    found: Scripted | EverliftError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_stream, "_RESUME_S", 0.2)
    routers = Routers(found)
    with pytest.raises((Moved, Unreachable), match=r"first|dead"):
        await read(stream(Scripted(head(), piece(0, 1), error=Moved("first")), routers))
    assert 1 < len(routers.asked) <= 5


@pytest.mark.parametrize(
    ("pieces", "options", "error", "expected"),
    [
        ((head(), piece(0, 1)), {}, UnknownRequest(), DataLoss),
        ((head(),), {"had_output": True}, UnknownRequest(), DataLoss),
        ((head(),), {}, UnknownRequest(), UnknownRequest),
        ((head(),), {"was_submitted": True}, UnknownRequest(), Moved),
        ((head(), piece(0, 1)), {"was_submitted": True}, UnknownRequest(), DataLoss),
        ((head(), piece(0, 1)), {}, ForgottenRequest(), ForgottenRequest),
    ],
)
@pytest.mark.parametrize("is_found_first", [True, False])
async def test_stream_fails_for_a_request_no_router_knows(
    pieces: tuple[pb.GenerateResponse, ...],
    options: dict[str, bool],
    error: EverliftError,
    expected: type[EverliftError],
    is_found_first: bool,
) -> None:
    """The request is unknown to the ledger, or to the router that should own it."""
    found = Scripted(error=error) if is_found_first else error
    with pytest.raises(expected) as raised:
        await read(stream(Scripted(*pieces, error=Moved()), Routers(found), **options))
    assert raised.type is expected


async def test_failed_stream_delivers_pending_pieces_first() -> None:
    reading = stream(Scripted(head(), piece(0, 1)), Routers(Scripted()))
    reading._source._error = Moved()  # type: ignore[attr-defined]
    reading.fail(RouterStopping())
    assert reading.poll() == head()
    assert reading.poll() == piece(0, 1)
    with pytest.raises(RouterStopping):
        reading.poll()
    await reading.aclose()


async def test_closed_stream_stops_its_search() -> None:
    async def never(message: pb.AttachRequest) -> Source:
        await asyncio.Event().wait()
        raise AssertionError

    first = Scripted(head(), error=Moved())
    reading = RequestStream("r", first, never, Delivered())
    assert reading.poll() == head()
    assert reading.poll() is None
    assert reading._opening is not None
    await asyncio.sleep(0.1)
    await reading.aclose()
    assert first.is_closed
    assert len(asyncio.all_tasks()) == 1


async def test_search_cancelled_by_the_router_is_an_error() -> None:
    async def never(message: pb.AttachRequest) -> Source:
        await asyncio.Event().wait()
        raise AssertionError

    reading = RequestStream("r", Scripted(error=Moved()), never, Delivered())
    assert reading.poll() is None
    assert reading._opening is not None
    reading._opening.cancel()
    with pytest.raises(RouterStopping):
        await read(reading)


async def test_search_ends_though_no_router_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(message: pb.AttachRequest) -> Source:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(request_stream, "_RESUME_S", 0.2)
    reading = RequestStream("r", Scripted(error=Moved("first")), never, Delivered())
    with pytest.raises(Moved, match="first"):
        await read(reading)


async def test_search_ends_though_sources_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source with a first piece but no tokens is not progress."""
    asked = []

    async def moved(message: pb.AttachRequest) -> Source:
        asked.append(message)
        return Scripted(head(), error=Moved("second"))

    monkeypatch.setattr(request_stream, "_RESUME_S", 0.5)
    reading = RequestStream("r", Scripted(head(), error=Moved("first")), moved, Delivered())
    with pytest.raises(Moved, match="second"):
        await read(reading)
    assert len(asked) <= 5


async def moved_away(gateway: Gateway, ledger: MemoryLedger) -> Gateway:
    """Return another gateway that has taken request r over."""
    await ledger.end_lease("gateway")
    other = Gateway(ledger, "other", config=replace(CONFIG, grace=30.0))
    await other.requests._takeover.take_over("r")
    return other


async def test_local_stream_continues_at_the_new_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets and digests are those of the delivered tokens, not of all received ones."""
    async with started_gateway() as gateway:
        ledger = gateway.ledger
        inference = Inference(gateway.requests, gateway.models, None)  # type: ignore[arg-type]
        live = await gateway.submit()
        epoch = await gateway.dispatch()
        gateway.make(epoch, 0, "ab")
        await until(lambda: live.choices[0].stored == 2)
        opened = await inference.attach(ANYONE, pb.AttachRequest(request_id="r"))
        assert (await anext(opened.pieces)).token_ids == []
        assert (await anext(opened.pieces)).text == "ab"
        asked: list[pb.AttachRequest] = []

        async def attached(address: str, message: pb.AttachRequest):  # type: ignore[no-untyped-def]
            asked.append(message)
            yield head(2)
            yield piece(2, *b"c", ends=True, is_last=True)

        monkeypatch.setattr(inference._relay, "attach", attached)
        await moved_away(gateway, ledger)
        await ledger.heartbeat("other", "there:1", 1000.0)
        gateway.make(epoch, 2, "X")
        rest = [it async for it in opened.pieces]
        assert [[*it.token_ids] for it in rest] == [[*b"c"]]
        assert asked[0].from_offsets == [2]
        assert asked[0].digests == [token_digest([*b"ab"])]
        await opened.pieces.aclose()


def test_delivered_has_every_choice() -> None:
    delivered = Delivered()
    assert not delivered.has_output
    delivered.add_tokens(2, [7])
    asked = delivered.attach_request("r")
    assert asked.from_offsets == [0, 0, 1]
    assert asked.digests == [token_digest([]), token_digest([]), token_digest([7])]
    assert delivered.has_output
