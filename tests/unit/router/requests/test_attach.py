"""Attach with a digest of the client's tokens: the stream continues exactly there, or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from everlift.errors import Cancelled, DataLoss, OffsetOutOfRange
from everlift.hashes import token_digest
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.requests.request import LiveRequest
from tests.support.router.gateway_support import Gateway, started_gateway, texts, until

EOS = session_pb2.STOP_CAUSE_EOS


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as gateway:
        yield gateway


async def read(
    gateway: Gateway, live: LiveRequest, *seen: str, offsets: tuple[int, ...] = ()
) -> list[pb.GenerateResponse]:
    """Return the pieces for a client that has seen a part of each choice."""
    digests = [token_digest([*text.encode()]) for text in seen]
    offsets = offsets or tuple(map(len, seen))
    return [piece async for piece in gateway.requests.stream(live, offsets, digests)]


@pytest.mark.parametrize("seen", ["", "a", "ab", "abc"])
async def test_attach_with_matching_digest_continues_behind_it(gateway: Gateway, seen: str) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc")
    await until(lambda: live.choices[0].stored == 3)
    reading = asyncio.create_task(read(gateway, live, seen))
    await asyncio.sleep(0)
    gateway.make(epoch, 3, "d", EOS)
    assert texts(await reading) == "abcd"[len(seen) :]
    again = await gateway.requests.attach("r")
    assert texts(await read(gateway, again, seen)) == "abcd"[len(seen) :]


@pytest.mark.parametrize("has_ended", [False, True])
async def test_attach_with_other_digest_is_data_loss_at_its_offset(
    gateway: Gateway, has_ended: bool
) -> None:
    live = await gateway.submit(n=2, on_disconnect=pb.ON_DISCONNECT_CONTINUE)
    epoch = await gateway.dispatch()
    for choice in range(2):
        gateway.make(epoch, 0, "abc", EOS if has_ended else 0, choice=choice)
    await until(lambda: all(choice.stored == 3 for choice in live.choices))
    live = await gateway.requests.attach("r")
    with pytest.raises(DataLoss, match=r"choice 1 .* offset 2: the tokens before it differ"):
        await read(gateway, live, "ab", "a?")


async def test_attach_ahead_of_the_output_waits_for_it(gateway: Gateway) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab")
    await until(lambda: live.choices[0].stored == 2)
    with pytest.raises(OffsetOutOfRange):
        await gateway.read(live, 4)
    stream = gateway.requests.stream(live, [4], [token_digest([*b"abcd"])])
    assert (await anext(stream)).offset == 4
    following = asyncio.create_task(anext(stream))
    gateway.make(epoch, 2, "c")
    await until(lambda: live.choices[0].stored == 3)
    await asyncio.sleep(0)
    assert not following.done()
    gateway.make(epoch, 3, "de", EOS)
    piece = await following
    assert (piece.offset, piece.text) == (4, "e")


async def test_attach_ahead_is_data_loss_if_regenerated_otherwise(gateway: Gateway) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    reading = asyncio.create_task(read(gateway, live, "abc"))
    await asyncio.sleep(0)
    gateway.make(epoch, 0, "ab?")
    with pytest.raises(DataLoss, match="offset 3: the tokens before it differ"):
        await reading


async def test_attach_ahead_is_data_loss_if_output_ends_earlier(gateway: Gateway) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    reading = asyncio.create_task(read(gateway, live, "abcd"))
    await asyncio.sleep(0)
    gateway.make(epoch, 0, "ab", EOS)
    for again in (reading, read(gateway, await gateway.requests.attach("r"), "abcd")):
        with pytest.raises(DataLoss, match="offset 4: it ended after 2 tokens"):
            await again


async def test_attach_ahead_reports_cancellation(gateway: Gateway) -> None:
    live = await gateway.submit()
    reading = asyncio.create_task(read(gateway, live, "abc"))
    await asyncio.sleep(0)
    await gateway.requests.cancel("r")
    with pytest.raises(Cancelled):
        await reading


async def test_attach_rejects_an_unreachable_offset_with_digest(gateway: Gateway) -> None:
    live = await gateway.submit(max_tokens=8)
    for offset in (9, -1):
        with pytest.raises(OffsetOutOfRange):
            await read(gateway, live, "x" * 9, offsets=(offset,))


async def test_attach_reads_one_choice_while_awaiting_another(gateway: Gateway) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    reading = asyncio.create_task(read(gateway, live, "ab", ""))
    gateway.make(epoch, 0, "xyz", EOS, choice=1)
    await until(lambda: live.choices[1].is_complete)
    gateway.make(epoch, 0, "abc", EOS)
    pieces = await reading
    assert [texts([p for p in pieces if p.choice == c]) for c in range(2)] == ["c", "xyz"]
