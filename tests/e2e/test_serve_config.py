"""Actors that survive a new configuration through Serve's REST API, as KubeRay sends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import Config, load
from cluster.ray import local_ray
from cluster.ray.build import serve_yaml
from router.ledger.config import URL_VARIABLE, LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from router.ledger.redis.redis_ledger import connect
from tests.conftest import leaving_nothing
from tests.support.free_port import free_port
from tests.support.router import retrying
from tests.support.serve_api import call

# Ray and Serve emit warnings of their own.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

FIRST = [
    *("model=fake", "router.port=0", "router.http_port=0", "router.drain=0.5"),
    *("worker.num_threads=1", "worker.num_blocks=64"),
    *("autoscale.min_workers=1", "autoscale.max_workers=2", "log_level=warning"),
]
_TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: it runs at the end of Ray, which starts processes."""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = EmbeddedLedger(LedgerConfig(), listen=("127.0.0.1", free_port()))
    url = server.start(tmp_path / "ledger")
    monkeypatch.setenv(URL_VARIABLE, url)
    yield url
    server.stop()


@pytest.fixture
def api(ledger: str) -> Iterator[str]:
    """URL of Serve's REST API of a Ray cluster with two nodes."""
    local_ray.prepare()
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    port = free_port()
    with leaving_nothing():
        head = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": port}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield f"http://127.0.0.1:{port}/api/serve/applications/"
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


async def deploy(api: str, config: Config, routers: int) -> None:
    """Deploy a configuration, and wait until the application runs with ``routers`` routers."""
    body = yaml.safe_load(serve_yaml(config))
    [application] = body["applications"]
    # Listen on loopback only.
    hook = {"worker_process_setup_hook": "cluster.ray.local_ray.bind_replicas"}
    application["runtime_env"] = hook
    await asyncio.to_thread(call, api, body)

    async def is_there() -> bool:
        status = await asyncio.to_thread(call, api)
        application = status["applications"]["everlift"]
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return application["status"] == "RUNNING" and len(actors("router")) == routers

    await until(is_there)


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not await is_so():
            await asyncio.sleep(0.2)


def actors(deployment: str) -> set[str]:
    """Return the ids of the living actors of a deployment, for workers including their ranks."""
    from ray._private import state

    kinds = {"router": ("#router#",), "worker": ("#worker#",)}[deployment]
    return {
        actor["ActorID"]
        for actor in state.actors().values()
        if actor["State"] == "ALIVE"
        and (
            any(kind in actor["Name"] for kind in kinds)
            or (deployment == "worker" and actor["ActorClassName"] == "RankActor")
        )
    }


async def address() -> str:
    from ray import serve

    described = await serve.get_deployment_handle("router", "everlift").describe.remote()
    return str(described["address"])


async def test_serve_config_update_applies_without_restart(
    api: str, ledger: str, tmp_path: Path
) -> None:
    assignments = [*FIRST, f"state_dir={tmp_path}"]
    await deploy(api, load(None, {}, assignments), routers=1)
    before = actors("router") | actors("worker")
    assert len(before) == 3
    assert not events(tmp_path)
    changed = ["num_routers=2", "autoscale.max_workers=3", "autoscale.ttft_target=9"]
    changed += ["log_level=info", "router.order=shortest", "router.max_queued=77"]
    await deploy(api, load(None, {}, [*assignments, *changed]), routers=2)
    assert before <= actors("router") | actors("worker")
    await has_policy()
    await has_bounds(ledger)
    assert {("router", "policy"), ("worker.rank-0", "log level set")} <= events(tmp_path)
    # The opposite case: another setting of the worker requires another worker.
    await deploy(api, load(None, {}, [*assignments, *changed, "worker.max_num_seqs=7"]), routers=2)
    assert not before & actors("worker")


def events(state_dir: Path) -> set[tuple[str, str]]:
    """Return the components and the info events that routers and ranks have logged."""
    lines = (
        json.loads(line)
        for name in ("router-*.log", "worker.rank-*.log")
        for file in (state_dir / "logs").glob(name)
        for line in file.read_text().splitlines()
    )
    return {(line["component"], line["event"]) for line in lines if line["level"] == "info"}


async def has_policy() -> None:
    async with retrying.client(await address()) as client:
        policy = await client.set_policy()
    assert (policy.order, policy.max_queued, list(policy.overridden)) == ("shortest", 77, [])


async def has_bounds(url: str) -> None:
    """Wait until the ledger has the autoscaler's new limit and the leader's new target for it.

    The leader's load must also have the autoscaler's number of wanted workers.
    """
    connection = await connect(LedgerConfig(url=url))

    async def is_updated() -> bool:
        scaling, load = await connection.scaling(), await connection.load()
        return (
            load is not None
            and [it.scaling.max_workers for it in scaling] == [3]
            and dict(load.load.autoscale) == {"ttft_target": 9.0}
            and load.load.HasField("wanted_workers")
        )

    try:
        await until(is_updated)
    finally:
        await connection.close()
