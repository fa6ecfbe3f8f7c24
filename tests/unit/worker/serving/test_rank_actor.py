"""The actor of a rank under Ray, with ranks that do nothing."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everlift import heap
from everlift.v1 import session_pb2
from worker.serving.rank_actor import RankActor


class StubRank:
    """Rank of one model; ``successors`` are the ranks of the models to which it changes."""

    def __init__(self, *successors: StubRank) -> None:
        self._successors = successors
        self.was_reclaimed = asyncio.Event()

    async def start(self) -> session_pb2.WorkerInfo:
        return session_pb2.WorkerInfo(worker_id="w")

    async def wait(self) -> None:
        if not self._successors:
            await self.was_reclaimed.wait()

    async def successor(self) -> StubRank | None:
        if not self._successors:
            return None
        successor, *others = self._successors
        successor._successors = (*others,)
        return successor

    def reclaim(self) -> None:
        self.was_reclaimed.set()


@pytest.fixture
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heap, "freeze_heap", lambda: None)
    yield
    faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.usefixtures("_signals")
async def test_rank_actor_reclaims_the_rank_of_its_latest_model() -> None:
    first, second, third = StubRank(), StubRank(), StubRank()
    first._successors = (second, third)
    actor = object.__new__(RankActor)
    actor._rank, actor._info, actor._is_stopping = first, b"", False
    await actor.start()
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    waiting = asyncio.create_task(actor.wait())
    while actor._rank is not third:
        await asyncio.sleep(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_descriptors
    os.kill(os.getpid(), signal.SIGUSR1)
    async with asyncio.timeout(10):
        await waiting
    assert third.was_reclaimed.is_set()
    assert not first.was_reclaimed.is_set()
