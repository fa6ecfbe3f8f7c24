"""Changes of a two-rank worker's model, and back, while requests run and wait."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config, load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from everlift.errors import InvalidRequest, UnknownModel
from everlift.v1 import inference_pb2 as pb

PROMPT, TOKENS = "count from 1 to 99:", 150


@pytest.fixture
def config(tmp_path: Path) -> Config:
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    section = tmp_path / "two.yaml"
    section.write_text(
        f"model: {DEMO_MODEL}\nstate_dir: {tmp_path}/state\n"
        "router: {port: 0, http_port: 0, drain: 0.2}\n"
        "worker: {tensor_parallel: 2, num_threads: 1, device: cpu}\n"
        f"models:\n  other: {{model: {tmp_path}/other}}\n"
        "  single: {model: fake, worker: {tensor_parallel: 1}}\n"
    )
    return load(section, {})


async def until(condition: Callable[[pb.GetStatusResponse], bool], client: AsyncClient) -> None:
    async with asyncio.timeout(60.0):
        while not condition(await client.status()):
            await asyncio.sleep(0.05)


def workers(status: pb.GetStatusResponse) -> dict[str, int]:
    return {model.name: model.workers for model in status.models}


def worker_of(status: pb.GetStatusResponse, model: str) -> str:
    return next(it.worker_id for it in status.workers if it.alive and it.model == model)


@pytest.mark.long
async def test_worker_changes_its_model_and_back_under_load(config: Config, tmp_path: Path) -> None:
    async with ProcessCluster(config) as cluster, AsyncClient(cluster.addresses) as client:

        async def answer(model: str) -> str:
            return await client.generate(
                PROMPT, model=model, temperature=0.0, max_tokens=TOKENS
            ).text()

        expected = await answer("demo_model")
        with pytest.raises(UnknownModel, match="'nothing' is not served"):
            await client.change_model(worker_of(await client.status(), "fake"), "nothing")
        with pytest.raises(InvalidRequest, match="can change to no other model, not to 'other'"):
            await client.change_model(worker_of(await client.status(), "fake"), "other")

        first = worker_of(await client.status(), "demo_model")
        # A worker which cannot load the files keeps its model and reports the cause.
        (tmp_path / "other").rename(tmp_path / "gone")
        await client.change_model(first, "other")
        await until(lambda it: "other: " in "".join(w.change_error for w in it.workers), client)
        (tmp_path / "gone").rename(tmp_path / "other")
        assert await answer("demo_model") == expected

        running = [asyncio.create_task(answer("demo_model")) for _ in range(6)]
        await until(lambda it: it.running > 0, client)
        changed = await client.change_model(first, "other")
        assert changed.worker_id == first and changed.model == "other"
        await until(lambda it: workers(it) == {"demo_model": 0, "other": 2, "fake": 1}, client)
        # The desired number of workers of each model follows the change.
        await until(lambda it: not it.missing_workers, client)
        assert [await answer("other") for _ in range(2)] == [expected] * 2
        assert not any(it.done() for it in running), "no other model's worker takes them"

        changed = await client.change_model(worker_of(await client.status(), "other"), "demo_model")
        assert await asyncio.gather(*running) == [expected] * len(running)
        assert workers(await client.status()) == {"demo_model": 1, "other": 1, "fake": 1}
        assert await answer("other") == expected
