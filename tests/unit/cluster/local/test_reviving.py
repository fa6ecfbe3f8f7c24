"""Restarts of processes that end by themselves, including failed restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.errors import ClusterFailed
from cluster.local import own_ledger, processes
from cluster.local.launch import Launch, RankLaunch
from cluster.local.own_ledger import OwnLedger
from cluster.local.replica import WorkerReplica
from worker.config import WorkerConfig

LAUNCH = RankLaunch("worker-0", "info", WorkerConfig(model="fake"))


class FailingLauncher:
    def __init__(self, error: Exception) -> None:
        self._error = error
        self.tries = 0

    async def start(self, launch: Launch, log_path: Path) -> None:
        self.tries += 1
        raise self._error


async def test_replica_start_failure_has_its_cause(tmp_path: Path) -> None:
    replica = WorkerReplica(
        LAUNCH, FailingLauncher(ClusterFailed("no fork server")), tmp_path, [""]
    )  # type: ignore[arg-type]
    with pytest.raises(ClusterFailed, match="no fork server"):
        await replica.start()


@pytest.mark.parametrize("error", [ClusterFailed("no fork server"), BlockingIOError("no process")])
async def test_replica_start_is_retried_after_failures(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_RESTART_S", 0.001)
    launcher = FailingLauncher(error)
    replica = WorkerReplica(LAUNCH, launcher, tmp_path, [""])  # type: ignore[arg-type]
    keeping = asyncio.create_task(processes._keep_alive(replica))
    await _until(lambda: launcher.tries >= 3)
    await _cancel(keeping)


async def test_own_ledger_start_is_retried_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_ledger, "_POLL_S", 0.001)
    monkeypatch.setattr(own_ledger, "_RESTART_S", 0.001)
    ledger, tries = OwnLedger(Config(model="fake", state_dir=tmp_path)), 0

    def start(state_dir: Path) -> str:
        nonlocal tries
        tries += 1
        raise BlockingIOError("no process")

    monkeypatch.setattr(ledger._server, "start", start)
    watching = asyncio.create_task(ledger._watch())
    await _until(lambda: tries >= 3)
    await _cancel(watching)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def _cancel(task: asyncio.Task[None]) -> None:
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
