"""Processes of a cluster with several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config, load
from cluster.errors import ClusterFailed
from cluster.local import processes
from cluster.local.launch import RouterLaunch, decode, encode
from cluster.local.launcher import SubprocessLauncher
from cluster.local.processes import ProcessCluster


class FakeForkServer:
    made: list[FakeForkServer]

    def __init__(self, *args: Any) -> None:
        self.is_closed = False
        self.made.append(self)

    async def load(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def fork_servers(monkeypatch: pytest.MonkeyPatch) -> list[FakeForkServer]:
    FakeForkServer.made = []
    monkeypatch.setattr(processes, "ForkServer", FakeForkServer)
    monkeypatch.setattr(processes, "is_possible", lambda: True)
    return FakeForkServer.made


def config(tmp_path: Path, *assignments: str) -> Config:
    some = ["worker.num_threads=1", "models.a.model=org/a", "models.a.num_workers=2"]
    return load(None, {}, ["model=org/big", *some, f"state_dir={tmp_path}", *assignments])


async def test_models_with_equal_threads_share_a_fork_server(
    tmp_path: Path, fork_servers: list[FakeForkServer]
) -> None:
    cluster = ProcessCluster(config(tmp_path, "models.b.model=fake"), revive=True)
    await cluster._load_fork_servers()
    big, a, b = cluster.config.groups
    launchers = [cluster._ranks(group, 0) for group in (big, a, b)]
    assert launchers[0] is launchers[1] is not launchers[2]
    assert len(fork_servers) == 2
    await cluster.stop()
    assert all(server.is_closed for server in fork_servers)


@pytest.mark.parametrize("own", ["engine=vllm", "python=python3", "num_threads=2"])
async def test_model_with_other_processes_has_its_own_launcher(
    tmp_path: Path, fork_servers: list[FakeForkServer], own: str
) -> None:
    cluster = ProcessCluster(config(tmp_path, f"models.a.worker.{own}"), revive=True)
    await cluster._load_fork_servers()
    big, a = cluster.config.groups
    assert cluster._ranks(big, 0) is not cluster._ranks(a, 0)
    is_forked = own.startswith("num_threads")
    assert isinstance(cluster._ranks(a, 0), SubprocessLauncher) is not is_forked
    assert len(fork_servers) == 1 + is_forked


async def test_workers_are_named_after_their_model_group(tmp_path: Path) -> None:
    cluster = ProcessCluster(config(tmp_path))
    big, a = cluster.config.groups
    workers = [cluster._worker(big, 0), cluster._worker(a, 0), cluster._worker(a, 1)]
    assert [worker.name for worker in workers] == ["worker-0", "worker-a-0", "worker-a-1"]
    assert [worker._launch.worker.model for worker in workers] == ["org/big", "org/a", "org/a"]


async def test_router_launch_has_the_workers_of_every_model(tmp_path: Path) -> None:
    cluster = ProcessCluster(config(tmp_path))
    launch = cluster._router(0, cluster.config.ledger)._launch
    assert launch.num_workers == {"org/big": 1, "org/a": 2}
    decoded = decode("router", encode(launch))
    assert isinstance(decoded, RouterLaunch) and decoded == launch
    assert [model.model for model in decoded.router.models] == ["org/big", "org/a"]


async def test_autoscaled_model_needs_ray(tmp_path: Path) -> None:
    scaled = config(tmp_path, "models.a.num_workers=1", "models.a.autoscale.max_workers=3")
    with pytest.raises(ClusterFailed, match=r"^models\.a\.autoscale\.max_workers needs Ray"):
        await ProcessCluster(scaled).start()
