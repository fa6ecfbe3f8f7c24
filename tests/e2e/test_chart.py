"""Serve configuration of the chart on a local Ray with the nodes of the chart's groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cluster.demo import prompts
from cluster.ray import local_ray
from everlift.client.client import AsyncClient
from router.ledger.config import URL_VARIABLE, LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from tests.conftest import leaving_nothing
from tests.support.chart import Rendered, running_helm
from tests.support.free_port import free_port

# Ray and Serve emit warnings of their own.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def release() -> Rendered:
    with running_helm() as helm:
        return helm.render(
            {
                "monitoring": {"port": free_port()},
                "routers": {"replicas": 1},
                "workers": {"device": "cpu"},
                "config": {"worker": {"dtype": "float32", "num_blocks": 256}},
            }
        )


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: it runs at the end of Ray, which starts processes."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a ledger server."""
    server = EmbeddedLedger(LedgerConfig(), listen=("127.0.0.1", free_port()))
    yield server.start(tmp_path_factory.mktemp("ledger"))
    server.stop()


@pytest.fixture(scope="module")
def nodes(release: Rendered, ledger: str, monkeypatch_module: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray cluster with a node for each pod, which has the pod's declared resources."""
    monkeypatch_module.setenv(URL_VARIABLE, ledger)
    local_ray.prepare()
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    with leaving_nothing():
        cluster = Cluster(
            initialize_head=True, head_node_args=resources(release.group("head"), True)
        )
        for name in ("routers", "workers"):
            for _ in range(release.group(name)["replicas"]):
                cluster.add_node(**resources(release.group(name), False))
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            runtime_env={"worker_process_setup_hook": local_ray.bind_replicas},
        )
        serve.start(proxy_location="Disabled")
        yield
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def resources(group: Any, is_head: bool) -> dict[str, Any]:
    """Return a group's resources, as Ray's autoscaler reads them."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _get_ray_resources_from_group_spec,
    )

    found = dict(_get_ray_resources_from_group_spec(group, is_head))
    del found["memory"]
    return {"num_cpus": found.pop("CPU"), "num_gpus": found.pop("GPU", 0), "resources": found}


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_chart_settings_serve_a_request(release: Rendered, nodes: None, tmp_path: Path) -> None:
    from ray import serve

    application = release.application
    module, _, function = application["import_path"].partition(":")
    settings = application["args"]
    # Listen on loopback only, at free ports.
    settings["state_dir"] = str(tmp_path)
    settings["worker"]["ready_dir"] = str(tmp_path / "ready")
    settings["router"] |= {
        "host": "127.0.0.1",
        "port": free_port(),
        "http_host": "127.0.0.1",
        "http_port": free_port(),
        "metrics_host": "127.0.0.1",
    }
    serve.run(
        getattr(import_module(module), function)(settings),
        name=application["name"],
        route_prefix=application["route_prefix"],
    )
    asyncio.run(serves(f"127.0.0.1:{settings['router']['port']}"))
    assert placed("router") == {"everlift_router"}
    # The pods' hook finds the processes to notify by these names (helm/files/leave.sh).
    assert {"ray::RankActor", "ray::ServeReplica:everlift:router"} <= titles()


def titles() -> set[str]:
    """Return the names of the actors' processes, without the name of the running method."""
    pids = [actor["Pid"] for actor in actors()]
    found = (Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in pids)
    return {title.decode().partition(".")[0] for title in found}


def actors() -> list[dict[str, Any]]:
    """Return the living actors from Ray's control plane, because the dashboard may have no port."""
    from ray._private import state

    return [actor for actor in state.actors().values() if actor["State"] == "ALIVE"]


async def serves(address: str) -> None:
    [task] = prompts.mixed(1, seed=3)
    async with AsyncClient(address) as client:
        text = ""
        async with client.generate(task.prompt, temperature=0) as stream:
            async for chunk in stream:
                text += chunk.text
        assert text == task.answer
        [worker] = (await client.status()).workers
        assert worker.worker_id


def placed(deployment: str) -> set[str]:
    """Return Everlift's custom resources on the nodes of a deployment's replicas."""
    import ray

    nodes = {actor["Address"]["NodeID"] for actor in actors() if f"#{deployment}#" in actor["Name"]}
    return {
        name
        for node in ray.nodes()
        if node["NodeID"] in nodes
        for name in node["Resources"]
        if name.startswith("everlift")
    }
