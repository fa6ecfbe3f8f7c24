"""LoRA adapters that operators load into a running cluster and unload from it, by every API."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEMO_MODEL
from everlift.client.client import AsyncClient
from everlift.errors import InvalidRequest, NoWorker, UnknownModel
from everlift.sampling import SamplingParams
from tests.support.in_process import ROUTER, Cluster, cluster, until
from tests.support.router.http_client import ask, get
from tests.support.worker.lora_files import write_adapter
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.config import WorkerConfig
from worker.engine.plan import Plan
from worker.serving.rank import Rank

MODEL = str(DEMO_MODEL)
ROUTED = replace(ROUTER, model=MODEL)
PROMPT = [5, 6, 7, 8] * 10


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, DEMO_MODEL, seed=seed, scale=2.0)
    return tmp_path


@pytest.fixture
async def parts(adapters: Path) -> AsyncIterator[Cluster]:
    config = WorkerConfig(
        model=MODEL,
        dtype="float32",
        num_threads=1,
        num_blocks=60,
        max_loaded_adapters=2,
        adapter_dir=str(adapters),
    )
    async with cluster(2, 1, ROUTED, config) as started:
        yield started


def expected(adapters: Path, name: str, count: int) -> list[int]:
    engine = TorchEngine(DEMO_MODEL, 100, adapters=(f"{name}={adapters / name}",))
    engine._eos = frozenset()
    return engine.serve([Job(PROMPT, count, SamplingParams(temperature=0.0, seed=0), name)])[0]


async def tokens(client: AsyncClient, name: str, count: int = 20) -> list[int]:
    stream = client.generate(PROMPT, model=name, max_tokens=count, temperature=0.0, ignore_eos=True)
    return [token async for chunk in stream for token in chunk.token_ids]


async def names(parts: Cluster, router: int) -> list[str]:
    listed = await get(parts.routers[router].http_address, "/v1/models")
    return [each["id"] for each in listed.json["data"]]


async def test_loaded_adapter_is_served_by_all_routers(parts: Cluster, adapters: Path) -> None:
    one, two = (router.address for router in parts.routers)
    async with AsyncClient(one) as client, AsyncClient(two) as other:
        loaded = await client.load_adapter("sql", str(adapters / "a"))
        assert (loaded.name, loaded.source) == ("sql", str(adapters / "a"))
        assert "sql" in await names(parts, 0)
        assert await tokens(client, "sql") == expected(adapters, "a", 20)
        await until(lambda: "sql" in parts.routers[1]._models.names)
        assert await tokens(other, "sql") == expected(adapters, "a", 20)
        router = await parts.add_router()
        async with AsyncClient(router.address) as newcomer:
            assert await tokens(newcomer, "sql") == expected(adapters, "a", 20)
        [listed] = (await other.adapters()).adapters
        assert (listed.digest, listed.configured) == (loaded.digest, False)
        [worker] = (await other.status()).workers
        assert [*listed.workers] == [worker.worker_id] and [*worker.loaded_adapters] == ["sql"]
        await other.unload_adapter("sql")
        await until(lambda: "sql" not in parts.routers[0]._models.names)
        with pytest.raises(UnknownModel, match="'sql' is not served"):
            await tokens(client, "sql")
        assert not (await client.adapters()).adapters
        with pytest.raises(UnknownModel, match="no adapter 'sql' is loaded"):
            await client.unload_adapter("sql")


async def test_load_names_the_cause_of_a_refusal(parts: Cluster, adapters: Path) -> None:
    async with AsyncClient(parts.address) as client:
        for name, source, cause in (
            ("sql", "/etc", "must be an absolute path below"),
            ("sql", str(adapters / "none"), "adapter_config.json is missing there"),
            ("s q l", str(adapters / "a"), "must be NAME=DIRECTORY"),
            (parts.routers[0]._models.first.name, str(adapters / "a"), "belongs to a model"),
        ):
            with pytest.raises(InvalidRequest, match=cause):
                await client.load_adapter(name, source)
        await parts.kill_worker(parts.workers[0])
        links = parts.routers[0]._sessions.links
        await until(lambda: not any(link.is_up for link in links))
        with pytest.raises(NoWorker, match="is connected that could check the adapter"):
            await client.load_adapter("sql", str(adapters / "a"))


async def test_http_paths_load_and_unload_like_vllm(parts: Cluster, adapters: Path) -> None:
    address = parts.routers[0].http_address
    body = {"lora_name": "sql", "lora_path": str(adapters / "a")}
    answer = await ask(address, "/v1/load_lora_adapter", body)
    assert (answer.status, answer.body.decode()) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    listed = (await get(address, "/v1/models/sql")).json
    assert (listed["root"], listed["parent"]) == ("a", parts.routers[0]._models.first.name)
    bad = await ask(address, "/v1/load_lora_adapter", {**body, "lora_path": "/etc"})
    assert (bad.status, bad.json["error"]["param"]) == (400, "lora_path")
    for status in (200, 404):
        answer = await ask(address, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert answer.status == status
    assert "sql" not in await names(parts, 0)


def slow_down(rank: Rank) -> None:
    """Lengthen a worker's steps, so that a request outlasts a pause of this process by seconds."""
    assert rank._thread is not None
    runner: Any = rank._thread.ready.result()._runner
    execute = runner.execute

    def execute_later(plan: Plan) -> object:
        time.sleep(0.03)
        return execute(plan)

    runner.execute = execute_later


async def test_new_version_serves_later_requests_only(parts: Cluster, adapters: Path) -> None:
    """A running request keeps its version after a worker loss, even if the version is unloaded."""
    slow_down(parts.workers[0])
    new = expected(adapters, "b", 20)
    async with AsyncClient(parts.address) as client:
        await client.load_adapter("sql", str(adapters / "a"))
        old = asyncio.create_task(tokens(client, "sql", 200))
        await until(lambda: parts.routers[0]._requests.counters.output_tokens > 20)
        await client.load_adapter("sql", str(adapters / "b"))
        assert await tokens(client, "sql") == new
        await client.unload_adapter("sql")
        await parts.kill_worker(parts.workers[0])
        assert not old.done()
        await parts.add_worker()
        assert await old == expected(adapters, "a", 200)
        assert parts.routers[0]._requests.counters.migrated > 0


async def test_request_fails_if_the_files_of_its_version_changed(
    parts: Cluster, adapters: Path
) -> None:
    slow_down(parts.workers[0])
    async with AsyncClient(parts.address) as client:
        await client.load_adapter("sql", str(adapters / "a"))
        old = asyncio.create_task(tokens(client, "sql", 200))
        await until(lambda: parts.routers[0]._requests.counters.output_tokens > 20)
        shutil.rmtree(adapters / "a")
        write_adapter(adapters / "a", DEMO_MODEL, seed=9, scale=2.0)
        await parts.kill_worker(parts.workers[0])
        assert not old.done()
        await parts.add_worker()
        with pytest.raises(UnknownModel, match=r"files of the adapter 'sql' .* have changed"):
            await old
        await client.load_adapter("sql", str(adapters / "a"))
        assert await tokens(client, "sql") == expected(adapters, "a", 20)


async def test_explanation_has_the_wait_for_an_adapter(parts: Cluster, adapters: Path) -> None:
    async with AsyncClient(parts.address) as client:
        for name in "abc":
            await client.load_adapter(name, str(adapters / name))
        waits = []
        for name in "abc" * 2:
            stream = client.generate(PROMPT, model=name, max_tokens=4, ignore_eos=True)
            await stream.text()
            explanation = await client.explain(stream.request_id)
            waits += [attempt.adapter_s for attempt in explanation.attempts]
        assert sum(wait > 0 for wait in waits) >= 3
        await client.generate(PROMPT, max_tokens=4).text()
    metrics = (await get(parts.routers[0].http_address, "/metrics")).body.decode()
    if "everlift_worker_loaded_adapters{" not in metrics:
        metrics = (await get(parts.routers[1].http_address, "/metrics")).body.decode()
    assert 'everlift_worker_loaded_adapters{worker_id="' in metrics
    assert "everlift_worker_adapter_loads_total{" in metrics
