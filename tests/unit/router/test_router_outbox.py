"""Messages that wait for a stream."""

import asyncio

from everlift.v1 import session_pb2
from router import outbox
from router.outbox import Outbox


def frame(*epochs: int, num_bytes: int = 0) -> session_pb2.RouterFrame:
    salt = bytes(num_bytes)
    return session_pb2.RouterFrame(
        starts=[session_pb2.Start(epoch=epoch, salt=salt) for epoch in epochs]
    )


async def taken(this: Outbox[session_pb2.RouterFrame]) -> list[list[int]]:
    """Return the epochs of each message in the outbox."""
    messages: list[list[int]] = []

    async def take() -> None:
        async for message in this.messages():
            messages.append([start.epoch for start in message.starts])

    task = asyncio.create_task(take())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    return messages


async def test_additions_merge_until_they_are_taken() -> None:
    this = Outbox(session_pb2.RouterFrame())
    this.add(frame(1))
    this.add(frame(2))
    assert await taken(this) == [[1, 2]]
    this.add(frame(3))
    this.add(frame(4))
    assert await taken(this) == [[3, 4]]


async def test_frame_size_is_bounded_for_any_additions() -> None:
    size = outbox._COPIED_BYTES - 64
    this = Outbox(session_pb2.RouterFrame())
    for epoch in range(1, 21):
        this.add(frame(epoch, num_bytes=size))
    this.add(frame(21, num_bytes=2 * outbox._MERGED_BYTES))
    this.add(frame(22))
    assert await taken(this) == [[*range(1, 17)], [*range(17, 21)], [21], [22]]


async def test_outbox_never_merges_an_addition_that_is_large() -> None:
    this = Outbox(frame(1))
    this.add(frame(2), is_large=True)
    this.add(frame(3))
    assert await taken(this) == [[1], [2], [3]]


async def test_closed_outbox_sends_nothing() -> None:
    this = Outbox(frame(1))
    this.close()
    this.add(frame(2))
    assert await taken(this) == []


async def test_outbox_does_not_copy_large_messages() -> None:
    this = Outbox(frame(1))
    big = frame(2, num_bytes=outbox._COPIED_BYTES)
    this.add(big)
    this.add(frame(3))
    assert await taken(this) == [[1], [2, 3]]
    assert [start.epoch for start in big.starts] == [2, 3]
