"""Detection of rank 0's end by a rank above 0 whose engine's thread is in a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from everlift.v1 import session_pb2
from worker.parallel.liveness import LivenessMonitor
from worker.parallel.step_log import StepLogListener, StepLogReader, StepLogWriter
from worker.parallel.watchdog import Watchdog

MANY_LOOKS = 6


class Counting(Watchdog):
    """Watchdog that reports when it has been queried MANY_LOOKS times."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60.0)
        self.was_asked_often = asyncio.Event()
        self._num_looks = 0

    def overdue(self, now: float) -> str | None:
        self._num_looks += 1
        if self._num_looks >= MANY_LOOKS:
            self.was_asked_often.set()
        return super().overdue(now)


class Bench:
    """Liveness monitor of rank 1, whose step never ends, and rank 0's writer of the step log."""

    def __init__(self, reader: StepLogReader, writer: StepLogWriter) -> None:
        self.writer = writer
        self.entries = iter(reader)
        self.watchdog = Counting()
        self.watchdog.begin_step(1, 1, time.monotonic())
        self.cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.monitor = LivenessMonitor(self.watchdog, reader, self._end, silence_s=1.0)

    def _end(self, cause: str) -> None:
        self.monitor.close()
        self.cause.set_result(cause)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    listener = StepLogListener("127.0.0.1", "model")
    reader = StepLogReader.connect(listener.address, 1, "model")
    writer = listener.accept(2, 10.0)
    listener.close()
    this = Bench(reader, writer)
    this.monitor.start()
    yield this
    this.monitor.close()
    reader.close()
    writer.close()


@pytest.mark.parametrize("unread", [0, 2], ids=["all is read", "entries are unread"])
async def test_liveness_monitor_detects_lost_rank_0_during_step(bench: Bench, unread: int) -> None:
    for _ in range(unread):
        bench.writer.write(session_pb2.StepLog(now=1.0))
    bench.writer.close()
    async with asyncio.timeout(5.0):
        assert await bench.cause == "rank 0 is gone"


async def test_liveness_monitor_ignores_live_rank_0(bench: Bench) -> None:
    bench.writer.write(session_pb2.StepLog(now=1.0))
    async with asyncio.timeout(20.0):
        await bench.watchdog.was_asked_often.wait()
    assert not bench.cause.done()


async def test_liveness_monitor_ignores_stopped_rank_0(bench: Bench) -> None:
    bench.writer.write(session_pb2.StepLog(stop=True))
    bench.writer.close()
    assert next(bench.entries).stop
    async with asyncio.timeout(20.0):
        await bench.watchdog.was_asked_often.wait()
    assert not bench.cause.done()
