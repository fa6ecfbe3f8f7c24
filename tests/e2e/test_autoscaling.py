"""Autoscaling of workers by the queue, under Ray Serve."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import DEMO_MODEL, Config
from cluster.demo import prompts
from cluster.groups import ModelGroup
from cluster.ray.ray_cluster import RayCluster
from everlift.client.client import AsyncClient
from everlift.v1.inference_pb2 import SPAN_KIND_NO_WORKER
from everlift.v1.session_pb2 import Scaling
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import running_url
from router.ledger.redis.redis_ledger import connect
from tests.support.free_port import free_port
from tests.support.router import retrying
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens

# Ray and Serve emit warnings of their own.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MODEL = FakeModel(step_time=0.05)
_TIMEOUT_S = 120.0


def config(state_dir: Path) -> Config:
    return Config(
        model="fake",
        state_dir=state_dir,
        router=RouterConfig(port=free_port(), http_port=0),
        worker=WorkerConfig(max_num_seqs=4, num_blocks=256, num_threads=1, fake=MODEL),
        autoscale=AutoscaleConfig(
            min_workers=0, max_workers=2, ttft_target=1.0, down_delay=3.0, idle_delay=3.0
        ),
    )


async def until_workers(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while await num_workers(client, "fake") != count:
            await asyncio.sleep(0.1)


async def num_workers(client: AsyncClient, model: str) -> int:
    workers = (await client.status()).workers
    return sum(worker.alive and worker.model == model for worker in workers)


async def until_exported(text: str) -> None:
    """Wait until a line of Ray's metrics, which are updated every 10 s, begins with ``text``."""
    import ray

    node = next(node for node in ray.nodes() if node["Alive"])
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    async with asyncio.timeout(_TIMEOUT_S):
        while not any(line.startswith(text) for line in await asyncio.to_thread(read, url)):
            await asyncio.sleep(0.5)


def read(url: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode().splitlines()


async def scaling_report(state_dir: Path) -> Scaling:
    """Return the autoscaler's decisions from the cluster's ledger."""
    url = running_url(state_dir)
    assert url is not None
    ledger = await connect(LedgerConfig(url=url))
    try:
        [report] = await ledger.scaling()
    finally:
        await ledger.close()
    assert report.scaling.model == "fake"
    return report.scaling


async def check_some(client: AsyncClient, count: int) -> None:
    """Send ``count`` requests at once, and check their tokens."""

    async def ask(seed: int) -> None:
        prompt = [Random(seed).randrange(256) for _ in range(20)]
        request_id = f"{seed}-of-{count}"
        stream = client.generate(prompt, max_tokens=60, temperature=0.0, request_id=request_id)
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == expected_tokens(prompt, 60, MODEL)

    await asyncio.gather(*map(ask, range(count)))


async def test_autoscaler_follows_queue_from_zero_to_two_workers(tmp_path: Path) -> None:
    async with (
        RayCluster(config(tmp_path)) as cluster,
        retrying.client(cluster.addresses) as client,
    ):
        await until_workers(client, 0)
        # The request waits for a worker to start.
        await check_some(client, 1)
        kinds = {span.kind for span in (await client.explain("0-of-1")).spans}
        assert SPAN_KIND_NO_WORKER in kinds
        await until_workers(client, 0)
        crowd = asyncio.create_task(check_some(client, 40))
        await until_workers(client, 2)
        await crowd
        await until_workers(client, 0)
        await until_exported("ray_everlift_autoscaler_max_workers{")
        await until_exported("ray_everlift_autoscaler_reason{")
        changes = [(it.before, it.workers) for it in (await scaling_report(tmp_path)).changes]
        # The autoscaler begins with no worker, since there are no requests.
        assert changes[0][0] == changes[-1][1] == 0
        assert any(before < after == 2 for before, after in changes)


@pytest.mark.long
async def test_autoscaler_scales_only_the_model_with_a_queue(tmp_path: Path) -> None:
    demo = ModelGroup(
        model=str(DEMO_MODEL), worker=WorkerConfig(dtype="float32", num_blocks=256, num_threads=1)
    )
    [task] = prompts.mixed(1, seed=3)
    both = replace(config(tmp_path), models={"demo": demo})
    async with RayCluster(both) as cluster, retrying.client(cluster.addresses) as client:
        await until_workers(client, 0)
        assert await num_workers(client, "demo_model") == 1
        crowd = asyncio.create_task(check_some(client, 40))
        await until_workers(client, 2)
        stream = client.generate(task.prompt, model="demo_model", temperature=0)
        assert await stream.text() == task.answer
        await crowd
        assert await num_workers(client, "demo_model") == 1
        assert (await client.status()).missing_workers == ""
        assert list((tmp_path / "logs").glob("worker-demo-*.log"))
        # Only the policy of the autoscaled model reports decisions.
        assert (await scaling_report(tmp_path)).max_workers == 2
