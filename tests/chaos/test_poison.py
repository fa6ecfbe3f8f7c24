"""Request that crashes every worker process in its first step."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from everlift.errors import AttemptsExhausted
from everlift.v1 import session_pb2
from tests.support import in_process
from tests.support.example_counts import long
from tests.support.router import retrying
from tests.support.worker.poisoned_worker import MARK, POISON

ROOT = Path(__file__).parents[2]
MAX_LOSSES = 3
SETTINGS = replace(in_process.ROUTER, max_losses=MAX_LOSSES, max_losses_total=20)


class Workers:
    """Supervisor that keeps one worker process running and counts those that have ended."""

    def __init__(self, parts: in_process.Cluster) -> None:
        self.num_killed = 0
        self._parts = parts
        self._process: Process | None = None

    async def run(self) -> None:
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.worker.poisoned_worker"),
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
                stdout=PIPE,
            )
            await self._parts.routers[0].announce(await info_of(self._process))
            await self._process.wait()
            self.num_killed += 1

    async def end(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.communicate()


async def info_of(process: Process) -> session_pb2.WorkerInfo:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(MARK.encode()):
            return session_pb2.WorkerInfo.FromString(bytes.fromhex(line.decode().split()[1]))
    raise AssertionError("the worker did not start")


@asynccontextmanager
async def worker_processes(parts: in_process.Cluster) -> AsyncIterator[Workers]:
    workers = Workers(parts)
    task = asyncio.create_task(workers.run())
    try:
        yield workers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await workers.end()


@pytest.mark.parametrize("prompt_length", [long(3), 2000])
async def test_poison_request_fails_after_max_losses(prompt_length: int) -> None:
    async with (
        in_process.cluster(workers=0, router_config=SETTINGS) as parts,
        worker_processes(parts) as workers,
        retrying.client(parts.address) as client,
    ):
        poison = [POISON] * prompt_length
        with pytest.raises(AttemptsExhausted, match=f"after {MAX_LOSSES} lost attempts"):
            await client.generate(poison, max_tokens=5).text()
        known = await in_process.receive(client, [1, 2, 3], 5)
        assert known.tokens == in_process.right_tokens([1, 2, 3], 5)
        assert workers.num_killed == MAX_LOSSES
