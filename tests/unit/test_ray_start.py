"""What is waited for while Serve starts a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from cluster.config import Config
from cluster.errors import ClusterFailed
from cluster.ray_cluster import APPLICATION, RayCluster

# Of Ray's own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr("ray.serve.RunTarget", lambda application, **options: application)
    monkeypatch.setattr("ray.serve.run_many", lambda targets, **options: None)
    monkeypatch.setattr("cluster.ray_cluster._POLL_S", 0.0)
    return RayCluster(Config())


def says(monkeypatch: pytest.MonkeyPatch, statuses: Iterable[str]) -> None:
    said = iter(statuses)

    def status() -> object:
        found = SimpleNamespace(status=next(said), message="no room for a worker")
        return SimpleNamespace(applications={APPLICATION: found})

    monkeypatch.setattr("ray.serve.status", status)


async def test_it_waits_until_all_of_it_runs(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, ["DEPLOYING", "DEPLOYING", "RUNNING"])
    await cluster._run(SimpleNamespace())  # type: ignore[arg-type]


async def test_who_waits_can_be_stopped(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, iter(lambda: "DEPLOYING", ""))
    waiting = asyncio.create_task(cluster._run(SimpleNamespace()))  # type: ignore[arg-type]
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_fails_says_why(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, ["DEPLOYING", "DEPLOY_FAILED"])
    with pytest.raises(ClusterFailed, match=r"no room for a worker \(logs: "):
        await cluster._run(SimpleNamespace())  # type: ignore[arg-type]
