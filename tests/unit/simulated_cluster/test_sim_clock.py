"""Virtual time: waits end at once and in order of their due times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.simulated_cluster.clock import Clock, Endless, NothingHappens


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sim_clock_skips_an_hour_at_once(clock: Clock) -> None:
    began = time.monotonic()
    process = clock.process("p")
    clock.run(process.create_task(asyncio.sleep(3600)), limit=4000)
    assert clock.elapsed == 3600
    assert time.monotonic() - began < 60


def test_sim_clock_runs_timers_in_due_order(clock: Clock) -> None:
    process, seen = clock.process("p"), list[str]()
    for name, delay in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        process.call_later(delay, seen.append, name)
    clock.run_for(2.0)
    assert seen == ["a", "b", "c"]


def test_sim_clock_cancelled_timer_does_not_fire(clock: Clock) -> None:
    process, seen = clock.process("p"), list[str]()
    process.call_later(1.0, seen.append, "x").cancel()
    clock.run_for(2.0)
    assert not seen


def test_sim_clock_timeout_ends_a_wait(clock: Clock) -> None:
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return now()

    process = clock.process("p")
    began = clock.now
    assert clock.run(process.create_task(wait()), limit=10) == began + 5


def test_sim_clock_runs_threads_in_place(clock: Clock) -> None:
    process = clock.process("p")
    work = asyncio.to_thread(lambda: 7)
    assert clock.run(process.create_task(work), limit=1) == 7


def test_sim_clock_frozen_process_delays_only_itself(clock: Clock) -> None:
    frozen, other, seen = clock.process("frozen"), clock.process("other"), list[object]()

    async def tick(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append((name, round(clock.elapsed, 3)))

    frozen.create_task(tick("frozen"))
    other.create_task(tick("other"))
    clock.run_for(0.5)
    frozen.freeze(5.0)
    clock.run_for(10.0)
    assert seen == [
        *[("other", 1.0), ("other", 2.0), ("other", 3.0)],
        *[("frozen", 5.5), ("frozen", 6.5), ("frozen", 7.5)],
    ]


def test_sim_clock_killed_process_is_closed_silently(clock: Clock) -> None:
    process, seen = clock.process("p"), list[str]()

    async def live() -> None:
        try:
            await asyncio.sleep(10)
            seen.append("slept")
        finally:
            seen.append("taken apart")
            raise RuntimeError("of no interest any more")

    task = process.create_task(live())
    clock.run_for(1.0)
    process.kill()
    clock.run_for(20.0)
    assert seen == ["taken apart"]
    assert task.done()
    del task
    assert not clock.uncaught


def test_sim_clock_keeps_uncaught_errors(clock: Clock) -> None:
    async def fail() -> None:
        raise ValueError("seven")

    process = clock.process("p")
    process.create_task(fail())
    clock.run_for(1.0)
    [(name, error)] = clock.uncaught
    assert (name, str(error)) == ("p", "seven")


def test_sim_clock_closes_an_abandoned_generator_in_its_process(clock: Clock) -> None:
    seen = list[bool]()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1.0)
            seen.append(asyncio.get_running_loop() is process)

    async def read_one() -> int:
        async for number in numbers():
            return number
        return 0

    process = clock.process("p")
    assert clock.run(process.create_task(read_one()), limit=5) == 1
    clock.run_for(2.0)
    assert seen == [True]


def test_sim_clock_wait_without_any_event_is_an_error(clock: Clock) -> None:
    process = clock.process("p")
    with pytest.raises(NothingHappens):
        clock.run(process.create_task(asyncio.Event().wait()), limit=5)
    with pytest.raises(TimeoutError):
        clock.run(process.create_task(asyncio.sleep(9)), limit=5)


def test_sim_clock_endless_loop_without_progress_is_an_error(clock: Clock) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    clock.process("p").create_task(spin())
    with pytest.raises(Endless):
        clock.run_for(1.0)
