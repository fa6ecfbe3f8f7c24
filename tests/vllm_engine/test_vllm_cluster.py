"""Cluster whose workers run vLLM, in an environment of its own.

Run by make test-vllm, which names the interpreter of that environment in EVERLIFT_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config
from cluster.llm.completion import gather
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, InvalidRequest
from router.config import RouterConfig
from tests.chaos.support import ROUTER, Cluster, running
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

PYTHON = os.environ.get("EVERLIFT_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="run by make test-vllm")

_REQUESTS, _KILLS = 64, 10
_LENGTH = 200
Result = tuple[tuple[int, ...], object]


def config(tmp_path: Path, **worker: Any) -> Config:
    fields = {"max_num_seqs": 16, "num_blocks": 1024, "num_threads": 1, **worker}
    return Config(
        model=str(DEMO_MODEL),
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER | {"model": str(DEMO_MODEL)}),
        worker=WorkerConfig(
            model=str(DEMO_MODEL), engine="vllm", python=PYTHON, dtype="float32", **fields
        ),
    )


async def generate(client: AsyncClient, number: int) -> Result:
    """Return the tokens and finish reason of a request; half of them are greedy."""
    options: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"seed": number}
    stream = client.generate(
        f"count from {number} to 400:", max_tokens=_LENGTH, frequency_penalty=0.1, **options
    )
    [choice] = (await gather(stream)).choices
    return choice.token_ids, choice.finish_reason


async def results(cluster: Cluster) -> list[Result]:
    async with AsyncClient(*cluster.addresses) as client:
        return await asyncio.gather(*(generate(client, number) for number in range(_REQUESTS)))


async def test_killed_workers_lose_and_change_no_token(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        undisturbed = await results(cluster)
        for kill in range(_KILLS):
            disturbed = asyncio.create_task(results(cluster))
            await asyncio.sleep(0.5)
            assert not disturbed.done()
            await cluster.kill_worker(kill % 2)
            assert await disturbed == undisturbed
            await cluster.restart_worker(kill % 2)


async def test_drained_worker_returns_its_sequences(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        undisturbed = await results(cluster)
        disturbed = asyncio.create_task(results(cluster))
        await asyncio.sleep(0.5)
        assert not disturbed.done()
        async with AsyncClient(*cluster.addresses) as client:
            status = await client.status()
            await client.drain(status.workers[0].worker_id)
            assert await disturbed == undisturbed


async def test_structured_output_survives_hostile_grammars(tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    async with running(config(tmp_path)) as cluster, AsyncClient(*cluster.addresses) as client:
        others = asyncio.create_task(results(cluster))
        good = await gather(client.generate("x", max_tokens=60, temperature=0, json_schema=schema))
        assert json.loads(good.choices[0].text)["a"] in (1, 2)
        with pytest.raises(InvalidRequest):
            await gather(client.generate("x", max_tokens=9, regex="("))
        # These are refused or answered, depending on the compiler of grammars.
        for hostile in ("(a{1,9999}){1,9999}", "a{1,99999999}", "(a|aa)*" * 999):
            with suppress(EverliftError):
                await gather(client.generate("x", max_tokens=9, regex=hostile))
        with pytest.raises(InvalidRequest):
            await gather(client.generate([1 << 20], max_tokens=9))
        assert len(await others) == _REQUESTS
        assert len((await client.status()).workers) == 2
