"""Images of requests: in the messages to workers and to the leader, and in the router's memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everlift.errors import QueueFull
from everlift.images import Image
from everlift.v1 import session_pb2
from router.requests import submission
from tests.support.images import png
from tests.support.router.gateway_support import Gateway, started_gateway

IMAGES = [png(1), png(2)]
DIGESTS = [Image.checked(data, "image").digest for data in IMAGES]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as gateway:
        yield gateway


async def test_attempt_sends_the_files_once(gateway: Gateway) -> None:
    await gateway.submit(images=IMAGES, n=3)
    await gateway.dispatch()
    starts = gateway.workers.started
    assert [[it.digest for it in start.images] for start in starts] == [DIGESTS] * 3
    assert [[it.data for it in start.images] for start in starts] == [IMAGES, [b""] * 2, [b""] * 2]


async def test_incomplete_start_is_sent_with_the_files(gateway: Gateway) -> None:
    await gateway.submit(images=IMAGES, n=2)
    epoch = await gateway.dispatch()
    gateway.workers.started.clear()
    lacking = [session_pb2.IncompleteStart(epoch=epoch, choice=1)]
    gateway.requests.attempts.incomplete_starts("w", lacking)
    [start] = gateway.workers.started
    assert (start.choice, [it.data for it in start.images]) == (1, IMAGES)


async def test_leader_receives_no_images(gateway: Gateway) -> None:
    await gateway.submit(images=IMAGES)
    [waiting] = gateway.line.enqueued
    assert IMAGES[0] not in waiting.SerializeToString()
    assert DIGESTS[0] not in waiting.SerializeToString()


async def test_images_beyond_the_memory_limit_are_rejected(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_MAX_IMAGE_BYTES", sum(map(len, IMAGES)))
    await gateway.submit(images=IMAGES)
    with pytest.raises(QueueFull, match="images") as full:
        await gateway.submit(request_id="s", images=IMAGES[:1])
    assert full.value.retry_after_s
    await gateway.submit(request_id="t")
    await gateway.requests.cancel("r")
    await gateway.submit(request_id="s", images=IMAGES)
