"""Limit of the lines in progress, and the shares of tenants."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from router.api.openai.batches import window as module
from router.api.openai.batches.window import Window


async def acquired(window: Window, tenant: str, most: int = 100) -> int:
    """Return how many lines of a tenant may start now."""
    for number in range(most):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await window.acquire(tenant)
                continue
        return number
    return most


async def test_window_limits_lines_in_progress() -> None:
    window = Window(lambda: 3)
    with window.batch("a"):
        assert await acquired(window, "a") == 3
        window.release("a")
        assert await acquired(window, "a") == 1


async def test_window_admits_a_line_without_workers() -> None:
    window = Window(lambda: 0)
    with window.batch("a"):
        assert await acquired(window, "a") == 1


async def test_window_follows_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECHECK_S", 0.005)
    sizes = [2]
    window = Window(lambda: sizes[0])
    with window.batch("a"):
        assert await acquired(window, "a") == 2
        waiting = asyncio.create_task(window.acquire("a"))
        await asyncio.sleep(0)
        sizes[0] = 3
        await asyncio.wait_for(waiting, 5)


async def test_tenants_have_equal_shares_of_the_window() -> None:
    window = Window(lambda: 8)
    with window.batch("a"), window.batch("a"):
        assert await acquired(window, "a") == 8
        # The lines of the first tenant may wait for its quota for long.
        with window.batch("b"):
            assert await acquired(window, "b") == 4
            for _ in range(5):
                window.release("a")
            assert await acquired(window, "a") == 1
        for _ in range(4):
            window.release("b")
        assert await acquired(window, "a") == 4


async def test_cancelled_wait_takes_no_line() -> None:
    window = Window(lambda: 1)
    with window.batch("a"):
        await window.acquire("a")
        waiting = [asyncio.create_task(window.acquire("a")) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        window.release("a")
        await asyncio.gather(*waiting, return_exceptions=True)
        taken = sum(not task.cancelled() for task in waiting)
        for _ in range(taken):
            window.release("a")
        assert await acquired(window, "a") == 1
    assert not window._batches


async def test_waiting_batches_of_a_tenant_take_turns() -> None:
    window, order = Window(lambda: 1), list[str]()

    async def run(name: str) -> None:
        for _ in range(3):
            await window.acquire("a")
            order.append(name)
            await asyncio.sleep(0)
            window.release("a")
            await asyncio.sleep(0)

    with window.batch("a"):
        await asyncio.gather(run("x"), run("y"))
    assert order.count("x") == order.count("y") == 3
