"""Check that a load on a router does not disturb a concurrent stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everlift.client.client import AsyncClient
from everlift.client.stream import Stream

#: Prompt whose answer by the demo model is long enough; the fake model's answers always are.
PROMPT, COUNT = "count from 17 to 99:", 120
#: Most additional memory of the process; the tests' inputs ask for gigabytes.
_MOST_BYTES = 96 << 20
#: Longest turn of the event loop, in CPU seconds of its thread, which other programs hardly affect.
#: A request that is not refused in time takes minutes.
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
    # Reset the peak, VmHWM.
    Path("/proc/self/clear_refs").write_text("5")
    yield
    assert _resident("VmHWM") - before < _MOST_BYTES


def _resident(name: str) -> int:
    """Return a memory size of this process in bytes."""
    [line] = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) << 10
