"""Messages and waits during the start under Ray Serve; test_ray.py has more tests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.config import Config, load
from cluster.errors import ClusterFailed
from cluster.ray import local_ray
from cluster.ray.deployments import APPLICATION
from cluster.ray.ray_cluster import RayCluster
from everlift import logs
from tests.support.router.restored_logging import restored_logging

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray

#: Message of Serve 2.60, shortened in the middle.
TRACEBACK = """\
The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray::ServeReplica:everlift:router.initialize_and_get_metadata() (pid=31696, ip=127.0.0.1)
RuntimeError: Traceback (most recent call last):
  File "router/router.py", line 176, in _listen_to_clients
    raise OSError(f"{error}: is another router there?") from error
OSError: cannot listen on 127.0.0.1:36319: Address already in use
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(None, {}, ["model=fake", "ledger.url=redis://nowhere", f"state_dir={tmp_path}"])


@pytest.fixture
def cluster(config: Config, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr("ray.serve.RunTarget", lambda application, **options: application)
    monkeypatch.setattr("ray.serve.run_many", lambda targets, **options: None)
    monkeypatch.setattr("cluster.ray.ray_cluster._POLL_S", 0.0)
    return RayCluster(config)


def says(
    monkeypatch: pytest.MonkeyPatch,
    statuses: Iterable[str],
    message: str = "",
    **deployments: tuple[str, str],
) -> None:
    """Make Serve report one status after another, with ``deployments`` as (status, message)."""
    said = iter(statuses)
    found = {
        name: SimpleNamespace(status=status, message=message)
        for name, (status, message) in deployments.items()
    }

    def status() -> object:
        seen = SimpleNamespace(status=next(said), message=message, deployments=found)
        return SimpleNamespace(applications={APPLICATION: seen})

    monkeypatch.setattr("ray.serve.status", status)


async def started(cluster: RayCluster) -> None:
    cluster._deploy(SimpleNamespace())  # type: ignore[arg-type]
    await cluster._wait_until(lambda application: application.status == "RUNNING")


async def test_ray_cluster_start_waits_until_running(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, ["DEPLOYING", "DEPLOYING", "RUNNING"])
    await started(cluster)


async def test_ray_cluster_start_is_cancellable(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, iter(lambda: "DEPLOYING", ""))
    waiting = asyncio.create_task(started(cluster))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_ray_cluster_failed_start_has_a_one_line_cause(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "Deploying application everlift failed: Failed to update the deployments ['router']."
    statuses = {"router": ("DEPLOY_FAILED", TRACEBACK), "worker": ("UPDATING", "")}
    says(monkeypatch, ["DEPLOYING", "DEPLOY_FAILED"], error, **statuses)
    with restored_logging(), pytest.raises(ClusterFailed) as failed:
        logs.configure("up", path=tmp_path / "logs" / "up.log")
        await started(cluster)
    assert str(failed.value) == (
        "router: OSError: cannot listen on 127.0.0.1:36319: Address already in use "
        f"(logs: {tmp_path / 'logs'})"
    )
    [event] = map(json.loads, (tmp_path / "logs" / "up.log").read_text().splitlines())
    assert (event["error"], event["deployments"]) == (error, {"router": TRACEBACK})


async def test_ray_cluster_build_failure_has_its_cause(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "Deploying application everlift failed: Traceback (most recent call last):\n  File\n"
    says(monkeypatch, ["DEPLOY_FAILED"], f"{error}ValueError: two ingress deployments\n")
    with pytest.raises(ClusterFailed) as failed:
        await started(cluster)
    assert str(failed.value) == f"ValueError: two ingress deployments (logs: {tmp_path / 'logs'})"


async def test_ray_cluster_refuses_two_routers_on_one_node(tmp_path: Path) -> None:
    config = Config(model="fake", num_routers=2, state_dir=tmp_path / "state")
    with pytest.raises(
        ClusterFailed, match="num_routers is 2, but Ray places at most one router per node"
    ):
        await RayCluster(config).start()
    assert not (tmp_path / "state").exists()


def test_replicas_hook_allows_environments_without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment of vLLM has no Serve, because only ranks run in it.
    monkeypatch.setitem(sys.modules, "ray.serve._private", None)
    local_ray.bind_replicas()
