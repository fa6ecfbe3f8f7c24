"""Several requests over one call: each has its own pieces and its own end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import pytest

from everlift.errors import EverliftError, InvalidRequest, OutOfRange, QueueFull
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.api import generate_many
from router.api.opened import Opened
from router.requests.stream import RelayedSource
from tests.support.router.gateway_support import started_gateway, until

#: Source of one request's pieces.
Script = Callable[[], AsyncIterator[pb.GenerateResponse]]


def piece(offset: int, text: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(offset=offset, text=text)


class Requests:
    """Opener of requests, each with the pieces of its own script."""

    def __init__(self, *scripts: Script) -> None:
        self.messages = [pb.GenerateRequest(request_id=str(it)) for it in range(len(scripts))]
        self.opening: set[str] = set()
        self.most_opening = 0
        self.left: set[str] = set()
        self.made = Counter[str]()
        self._scripts = dict(zip((it.request_id for it in self.messages), scripts, strict=True))

    async def open(self, request: pb.GenerateRequest) -> Opened:
        name = request.request_id
        self.opening.add(name)
        self.most_opening = max(self.most_opening, len(self.opening))
        await asyncio.sleep(0)
        self.opening.remove(name)
        return Opened(name, None, RelayedSource(Relayed(self, name, self._scripts[name]())))

    def read(self) -> generate_many.MergedStream:
        return generate_many.MergedStream(self.messages, self.open)


class Relayed(AsyncIterator[pb.GenerateResponse]):
    """Pieces as relayed from another router; their number and the close are recorded."""

    def __init__(
        self, requests: Requests, name: str, pieces: AsyncIterator[pb.GenerateResponse]
    ) -> None:
        self._requests = requests
        self._name = name
        self._pieces = pieces

    async def __anext__(self) -> pb.GenerateResponse:
        it = await anext(self._pieces)
        self._requests.made[self._name] += 1
        return it

    async def aclose(self) -> None:
        assert self._name not in self._requests.left
        self._requests.left.add(self._name)


def pieces(count: int, text: str = "") -> Script:
    async def script() -> AsyncIterator[pb.GenerateResponse]:
        for offset in range(count):
            yield piece(offset, text)

    return script


def failing(error: Exception, after: int = 0) -> Script:
    async def script() -> AsyncIterator[pb.GenerateResponse]:
        for offset in range(after):
            yield piece(offset)
        raise error

    return script


def silent(until: asyncio.Event | None = None) -> Script:
    async def script() -> AsyncIterator[pb.GenerateResponse]:
        await (until or asyncio.Event()).wait()
        yield piece(0)

    return script


async def settled() -> None:
    for _ in range(2000):
        await asyncio.sleep(0)


def all_of(messages: list[pb.GenerateManyResponse]) -> Iterator[pb.ManyPiece]:
    return (it for message in messages for it in message.pieces)


async def test_generate_many_keeps_order_of_pieces_per_request() -> None:
    requests = Requests(pieces(3), pieces(0), pieces(500))
    read = [*all_of([it async for it in requests.read()])]
    for index, count in enumerate((3, 0, 500)):
        assert [it.piece.offset for it in read if it.index == index] == list(range(count))
    assert requests.left == {"0", "1", "2"}


async def test_generate_many_failed_request_leaves_others_intact() -> None:
    full = QueueFull("wait", retry_after_s=2.0)
    requests = Requests(pieces(3), failing(full), failing(OutOfRange("why"), after=1), pieces(3))
    read = [*all_of([it async for it in requests.read()])]
    assert [it.failure for it in read if it.HasField("failure")] == [
        pb.Failure(slug="queue_full", message="wait", retry_after_s=2.0),
        pb.Failure(slug="out_of_range", message="why"),
    ]
    assert [it.WhichOneof("what") for it in read if it.index == 2] == ["piece", "failure"]
    assert Counter(it.index for it in read) == {0: 3, 1: 1, 2: 2, 3: 3}


async def test_generate_many_open_failure_is_limited_to_its_request() -> None:
    requests = Requests(pieces(1), pieces(1))

    async def open_(request: pb.GenerateRequest) -> Opened:
        if request.request_id == "0":
            raise InvalidRequest("not this")
        return await requests.open(request)

    read = [*all_of([it async for it in generate_many.MergedStream(requests.messages, open_)])]
    assert [(it.index, it.failure.slug) for it in read] == [(0, "invalid_request"), (1, "")]


async def test_generate_many_reports_late_open_failure() -> None:
    async def open_(request: pb.GenerateRequest) -> Opened:
        await settled()
        raise InvalidRequest("not this")

    read = [*all_of([it async for it in generate_many.MergedStream([pb.GenerateRequest()], open_)])]
    assert [it.failure.slug for it in read] == ["invalid_request"]


async def test_generate_many_hides_message_of_unexpected_error() -> None:
    requests = Requests(failing(RuntimeError("a secret")))
    [only] = all_of([it async for it in requests.read()])
    assert only.failure.slug == EverliftError.slug
    assert "secret" not in only.failure.message


async def test_generate_many_batches_ready_pieces_in_one_message() -> None:
    begin = asyncio.Event()
    requests = Requests(*[silent(begin)] * 100)
    async with aclosing(requests.read()) as messages:
        first = asyncio.ensure_future(anext(messages))
        await settled()
        begin.set()
        assert [it.index for it in (await first).pieces] == list(range(100))


async def test_generate_many_sends_first_piece_immediately() -> None:
    requests = Requests(silent(), silent(), pieces(1), silent())
    async with aclosing(requests.read()) as messages:
        assert [it.index for it in (await anext(messages)).pieces] == [2]


async def test_generate_many_limits_concurrent_opens() -> None:
    requests = Requests(*[pieces(1)] * generate_many.MAX_REQUESTS)
    read = [*all_of([it async for it in requests.read()])]
    assert len(read) == generate_many.MAX_REQUESTS
    assert requests.most_opening == 32


async def test_generate_many_unread_stream_applies_backpressure() -> None:
    requests = Requests(*[pieces(1000)] * 10)
    async with aclosing(requests.read()) as messages:
        await anext(messages)
        await settled()
        assert requests.made.total() <= 20
        read = [*all_of([it async for it in messages])]
    assert requests.made.total() == 10_000
    assert max(it.piece.offset for it in read) == 999


async def test_generate_many_serves_requests_fairly() -> None:
    requests = Requests(pieces(100_000), *[pieces(3)] * 9)
    async with aclosing(requests.read()) as messages:
        read = [*all_of([await anext(messages) for _ in range(20)])]
    assert {it.index for it in read if it.piece.offset == 2} == set(range(10))


async def test_generate_many_builds_local_pieces_only_when_read() -> None:
    async with started_gateway() as gateway:
        live = await gateway.submit(max_tokens=6)
        made = Counter[int]()
        piece_of = live.piece
        live.piece = lambda choice, offset: made.update([offset]) or piece_of(choice, offset)  # type: ignore[method-assign]

        async def open_(request: pb.GenerateRequest) -> Opened:
            return Opened("r", None, gateway.requests.stream(live))

        async with aclosing(generate_many.MergedStream([pb.GenerateRequest()], open_)) as messages:
            [head] = (await anext(messages)).pieces
            assert not head.piece.token_ids
            epoch = await gateway.dispatch()
            for offset, text in enumerate("abcde"):
                gateway.make(epoch, offset, text)
                await until(lambda: live.choices[0].readable > offset)  # noqa: B023
            assert not made
            [only] = (await anext(messages)).pieces
            assert (only.index, only.piece.text) == (0, "abcde")
            gateway.make(epoch, 5, "f", stop=session_pb2.STOP_CAUSE_LENGTH)
            [last] = (await anext(messages)).pieces
            assert last.piece.HasField("usage")
            with pytest.raises(StopAsyncIteration):
                await anext(messages)
            assert not live._num_readers


async def test_generate_many_local_failure_follows_last_piece() -> None:
    async with started_gateway() as gateway:
        live = await gateway.submit(max_tokens=6)

        async def open_(request: pb.GenerateRequest) -> Opened:
            return Opened("r", None, gateway.requests.stream(live))

        async with aclosing(generate_many.MergedStream([pb.GenerateRequest()], open_)) as messages:
            await anext(messages)
            gateway.make(await gateway.dispatch(), 0, "ab")
            await until(lambda: live.choices[0].readable == 2)
            await gateway.requests.cancel("r")
            read = [*all_of([it async for it in messages])]
    assert [it.piece.text for it in read if it.HasField("piece")] == ["ab"]
    assert [it.failure.slug for it in read if it.HasField("failure")] == ["cancelled"]


async def test_generate_many_close_ends_reading_of_local_request() -> None:
    async with started_gateway() as gateway:
        live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CANCEL)

        async def open_(request: pb.GenerateRequest) -> Opened:
            return Opened("r", None, gateway.requests.stream(live))

        async with aclosing(generate_many.MergedStream([pb.GenerateRequest()], open_)) as messages:
            await anext(messages)
        await until(lambda: live.is_over)


async def test_generate_many_message_size_is_bounded() -> None:
    requests = Requests(*[pieces(10, "x" * 100_000)] * 10)
    sizes = [message.ByteSize() async for message in requests.read()]
    assert sum(sizes) > 10_000_000
    assert max(sizes) < (256 << 10) + 101_000


async def test_generate_many_close_closes_all_streams() -> None:
    requests = Requests(pieces(1), *[silent()] * 99)
    messages = requests.read()
    await anext(messages)
    await settled()
    await messages.aclose()
    assert len(requests.left) == 100
    assert len(asyncio.all_tasks()) == 1


async def test_generate_many_close_does_not_wait_for_pending_opens() -> None:
    async def open_(request: pb.GenerateRequest) -> Opened:
        await asyncio.Event().wait()
        raise AssertionError

    messages = generate_many.MergedStream([pb.GenerateRequest()] * 50, open_)
    await settled()
    async with asyncio.timeout(10):
        await messages.aclose()


def named(*names: str) -> list[pb.GenerateRequest]:
    return [pb.GenerateRequest(request_id=name) for name in names]


def test_generate_many_checks_request_count() -> None:
    for count in (1, generate_many.MAX_REQUESTS):
        generate_many.check_count(count)
    for count in (0, generate_many.MAX_REQUESTS + 1):
        with pytest.raises(OutOfRange, match="1 to 1024"):
            generate_many.check_count(count)


def test_generate_many_rejects_duplicate_request_ids() -> None:
    generate_many.check_names(named("a", "b", "", ""))
    with pytest.raises(InvalidRequest, match="same request_id"):
        generate_many.check_names(named("a", "", "a"))
