"""Autoscaling of routers by the number of requests, under Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.ray import local_ray
from cluster.ray.deployments import APPLICATION
from cluster.ray.ray_cluster import RayCluster
from everlift.client.client import AsyncClient
from router.config import RouterConfig
from tests.conftest import leaving_nothing
from tests.support.router import retrying
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens

# Ray and Serve emit warnings of their own.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MODEL = FakeModel(step_time=0.05)
ROUTER_RESOURCE = "everlift_router"
_TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: it runs at the end of Ray, which starts processes."""


def config(state_dir: Path, address: str) -> Config:
    return Config(
        model="fake",
        state_dir=state_dir,
        ray_address=address,
        router_resource=ROUTER_RESOURCE,
        # Both routers are on this machine, so their ports must differ.
        router=RouterConfig(port=0, http_port=0),
        worker=WorkerConfig(max_num_seqs=16, num_blocks=512, num_threads=1, fake=MODEL),
        autoscale=AutoscaleConfig(max_routers=2, requests_per_router=4.0, down_delay=3.0),
    )


def num_routers() -> int:
    from ray import serve
    from ray.serve._private.common import ReplicaState

    router = serve.status().applications[APPLICATION].deployments["router"]
    return int(router.replica_states.get(ReplicaState.RUNNING, 0))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.2)


async def ask(client: AsyncClient, seed: int) -> None:
    prompt = [seed, 2, 3]
    stream = client.generate(prompt, max_tokens=400, temperature=0.0)
    tokens = [token async for chunk in stream for token in chunk.token_ids]
    assert tokens == expected_tokens(prompt, 400, MODEL)


async def test_router_autoscaler_adds_and_removes_router_with_load(tmp_path: Path) -> None:
    local_ray.prepare()
    from ray.cluster_utils import Cluster

    with leaving_nothing():
        node = {"num_cpus": 2, "resources": {ROUTER_RESOURCE: 1.0}}
        nodes = Cluster(initialize_head=True, head_node_args=node)
        nodes.add_node(**node)
        try:
            async with RayCluster(config(tmp_path, nodes.address)) as cluster:
                assert num_routers() == 1
                async with retrying.client(cluster.addresses) as client:
                    crowd = asyncio.gather(*(ask(client, seed) for seed in range(12)))
                    await until(lambda: num_routers() == 2)
                    await crowd
                await until(lambda: num_routers() == 1)
                # Either router may have been removed.
                await cluster._find_router()
                async with retrying.client(cluster.addresses) as client:
                    await ask(client, 99)
        finally:
            nodes.shutdown()
