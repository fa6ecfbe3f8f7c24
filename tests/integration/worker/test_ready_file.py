"""The file by which a readiness probe detects that a rank serves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from worker.config import WorkerConfig
from worker.serving.rank import Rank, RankFailed

CONFIG = WorkerConfig(model="fake", num_blocks=64)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    return tmp_path / "ready" / str(os.getpid())


@pytest.fixture
async def rank(ready: Path) -> AsyncIterator[Rank]:
    rank = Rank(replace(CONFIG, ready_dir=str(ready.parent)))
    yield rank
    await rank.stop()


async def test_rank_is_ready_from_start_to_stop(rank: Rank, ready: Path) -> None:
    assert not ready.exists()
    await rank.start()
    assert ready.exists()
    await rank.stop()
    assert not ready.exists()


async def test_draining_rank_is_not_ready(rank: Rank, ready: Path) -> None:
    await rank.start()
    await rank.drain()
    assert not ready.exists()


async def test_reclaimed_rank_is_not_ready(rank: Rank, ready: Path) -> None:
    await rank.start()
    rank.reclaim()
    assert not ready.exists()


async def test_rank_reclaimed_before_start_never_becomes_ready(rank: Rank, ready: Path) -> None:
    rank.reclaim()
    await rank.start()
    assert not ready.exists()


async def test_failed_rank_is_not_ready(rank: Rank, ready: Path) -> None:
    await rank.start()
    rank._fail("a cause")
    with pytest.raises(RankFailed):
        await rank.wait()
    assert not ready.exists()
