"""A good stream beside what a test does to its cluster, which must cost nobody else anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everlift.client.client import AsyncClient
from everlift.client.stream import Stream

#: The demo model has an answer to it that is long enough, and the fake one to anything.
PROMPT, COUNT = "count from 17 to 99:", 120
#: What whoever answers may keep or need for a moment; the inputs of the tests ask for gigabytes.
_MOST_BYTES = 96 << 20
#: One turn of the event loop, in seconds of its thread's own CPU: other programs on the machine
#: cost it little. What is not refused in time takes minutes.
_MOST_CPU_S = 2.0


@asynccontextmanager
async def beside_a_good_stream(address: str, api_key: str | None = None) -> AsyncIterator[None]:
    """Check that the work inside does not disturb a stream that runs before, during and after it.

    The stream's tokens must not change, the event loop must not stall, and the memory must not grow
    beyond a bound.
    """
    async with AsyncClient(address, api_key=api_key) as client:
        alone = await _tokens(_good(client))
        assert len(alone) > 50
        stream = _good(client)
        first = await anext(stream)
        async with _turning(), _bounded():
            yield
        assert [*first.token_ids, *await _tokens(stream)] == alone
        assert stream.timing is not None and stream.timing.migrations == 0


def _good(client: AsyncClient) -> Stream:
    return client.generate(PROMPT, max_tokens=COUNT, temperature=0.0)


async def _tokens(stream: Stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


@asynccontextmanager
async def _turning() -> AsyncIterator[None]:
    longest = 0.0

    async def turn() -> None:
        nonlocal longest
        began = time.thread_time()
        while True:
            await asyncio.sleep(0)
            longest, began = max(longest, time.thread_time() - began), time.thread_time()

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    try:
        yield
        await asyncio.sleep(0)
    finally:
        turning.cancel()
    assert longest < _MOST_CPU_S


@asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    before = _resident("VmRSS")
    # The peak begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    yield
    assert _resident("VmHWM") - before < _MOST_BYTES


def _resident(name: str) -> int:
    """Bytes of this process."""
    [line] = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) << 10
