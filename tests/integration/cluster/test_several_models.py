"""A cluster of plain processes that serves two models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config, load
from cluster.demo import prompts
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient

DEMO, FAKE = "demo_model", "fake"
TOKENS = 200


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = {
        "model": str(DEMO_MODEL),
        "state_dir": str(tmp_path),
        "num_routers": 2,
        "router": {"port": 0, "http_port": 0, "drain": 0.2},
        "worker": {"device": "cpu", "dtype": "float32", "num_blocks": 256},
        "models": {
            "quick": {
                "model": FAKE,
                "num_workers": 2,
                "served_model_names": ["quick"],
                "worker": {"fake": {"step_time": 0.005}},
            }
        },
    }
    return load(None, {}, options=settings)


async def fake_text(client: AsyncClient, model: str) -> str:
    return await client.generate("x", model=model, temperature=0.0, max_tokens=TOKENS).text()


@pytest.mark.long
async def test_routers_all_serve_every_model(config: Config) -> None:
    [task] = prompts.mixed(1, seed=3)
    async with ProcessCluster(config, revive=True) as cluster:
        names = [worker.name for worker in cluster.workers]
        assert names == ["worker-0", "worker-quick-0", "worker-quick-1"]
        texts = set()
        for address in cluster.addresses:
            async with AsyncClient(address) as client:
                assert {model.name for model in (await client.models()).models} >= {DEMO, FAKE}
                models = {w.worker_id: w.model for w in (await client.status()).workers}
                expected = [DEMO, FAKE, FAKE]
                assert [models[worker.worker_id] for worker in cluster.workers] == expected
                for model in ("", DEMO):
                    stream = client.generate(task.prompt, model=model, temperature=0)
                    assert await stream.text() == task.answer
                texts |= {await fake_text(client, model) for model in (FAKE, "quick")}
        assert len(texts) == 1


@pytest.mark.long
async def test_killed_worker_is_replaced_by_one_of_its_model(config: Config) -> None:
    tasks = prompts.mixed(4, seed=5)
    async with ProcessCluster(config) as cluster, AsyncClient(cluster.address) as client:
        expected = await fake_text(client, FAKE)
        streams = [asyncio.create_task(fake_text(client, FAKE)) for _ in range(6)]
        await asyncio.sleep(0.2)
        await cluster.kill_worker(1)
        answers = [client.generate(task.prompt, temperature=0).text() for task in tasks]
        assert await asyncio.gather(*answers) == [task.answer for task in tasks]
        assert set(await asyncio.gather(*streams)) == {expected}


@pytest.mark.long
async def test_model_without_a_worker_does_not_block_another(config: Config) -> None:
    [task] = prompts.mixed(1, seed=3)
    async with ProcessCluster(config) as cluster, AsyncClient(cluster.address) as client:
        await asyncio.gather(cluster.kill_worker(1), cluster.kill_worker(2))
        waiting = asyncio.create_task(fake_text(client, FAKE))
        assert await client.generate(task.prompt, temperature=0).text() == task.answer
        assert not waiting.done()
        await cluster.restart_worker(2)
        assert await waiting
