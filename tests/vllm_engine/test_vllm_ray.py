"""Cluster under Ray whose workers run vLLM with two processes each, in an environment of its own.

Run by make test-vllm, which names the interpreter of that environment in EVERLIFT_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.ray.ray_cluster import RayCluster
from everlift.client.client import AsyncClient
from router.config import RouterConfig
from tests.support.free_port import free_port
from tests.support.worker.grammar_support import DEMO_MODEL
from tests.vllm_engine.support import PYTHON, generate, is_running, vllm_processes
from worker.config import WorkerConfig

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="run by make test-vllm"),
    # Ray and Serve emit warnings of their own.
    pytest.mark.filterwarnings("ignore"),
]


def config(tmp_path: Path, python: str, num_workers: int) -> Config:
    return Config(
        model=str(DEMO_MODEL),
        num_workers=num_workers,
        state_dir=tmp_path / "state",
        router=RouterConfig(
            model=str(DEMO_MODEL), port=free_port(), http_port=0, drain=1.0, worker_silence=5.0
        ),
        worker=WorkerConfig(
            model=str(DEMO_MODEL),
            engine="vllm",
            python=python,
            tensor_parallel=2,
            dtype="float32",
            num_threads=1,
            num_blocks=256,
        ),
    )


async def test_ray_worker_of_two_processes_is_killed_without_loss(tmp_path: Path) -> None:
    async with (
        RayCluster(config(tmp_path, PYTHON, num_workers=2)) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        undisturbed = [await generate(client, number) for number in range(4)]
        disturbed = asyncio.gather(*(generate(client, number) for number in range(4)))
        await asyncio.sleep(0.3)
        assert not disturbed.done()
        workers = (await client.status()).workers
        worker = max(workers, key=lambda worker: worker.num_running)
        processes = vllm_processes(worker.pid)
        assert worker.num_running and len(processes) == 2
        os.kill(worker.pid, signal.SIGKILL)
        assert await disturbed == undisturbed
        assert not any(map(is_running, processes))
