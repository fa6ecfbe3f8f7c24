"""Faults that a worker injects into itself, only if chaos is allowed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from everlift.v1 import chaos_pb2, session_pb2
from tests.support.in_process import Held
from tests.support.router.session_support import Router
from tests.support.worker.worker_support import prompt, start
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens
from worker.serving.rank import Rank, RankFailed

ROOT = Path(__file__).parents[3]
STEP_S = 0.005
#: Longer than a stall of the event loop.
PARTITION_S = 5.0
CONFIG = WorkerConfig(
    model="fake",
    num_blocks=64,
    max_num_seqs=8,
    cluster_id="here",
    chaos=True,
    fake=FakeModel(step_time=STEP_S),
)


@asynccontextmanager
async def two_routers(config: WorkerConfig = CONFIG) -> AsyncIterator[tuple[Router, Router]]:
    async with held_worker(config) as (near, far, held):
        held.release()
        yield near, far


@asynccontextmanager
async def held_worker(config: WorkerConfig = CONFIG) -> AsyncIterator[tuple[Router, Router, Held]]:
    """Yield two routers of a worker whose steps wait until the test releases them."""
    rank = Rank(config)
    info = await rank.start()
    held = Held(rank)
    routers = Router(info.address, "near"), Router(info.address, "far-away")
    try:
        for router in routers:
            await router.hello()
            await router.read()
        yield *routers, held
    finally:
        held.release()
        for router in routers:
            await router.close()
        await rank.stop()
        await rank.wait()


async def inject(router: Router, kind: chaos_pb2.FaultKind, **fields: object) -> None:
    """Inject a fault, and return when the worker has read it."""
    fault = chaos_pb2.Fault(kind=kind, **fields)  # type: ignore[arg-type]
    await router.call.write(session_pb2.RouterFrame(fault=fault))
    await router.start(start(77, prompt(2), max_tokens=1))
    await router.ended(77)


async def test_partitioned_router_receives_missed_progress_afterwards() -> None:
    async with held_worker() as (near, far, held):
        await far.start(start(1, prompt(10), max_tokens=40))
        held.let(1)
        await far.until(lambda: far.tokens.get(1))
        held.let(3)
        await inject(near, chaos_pb2.FAULT_KIND_PARTITION, peer="far", seconds=PARTITION_S)
        held.release()
        frames = len(far.frames)
        await far.start(start(2, prompt(5), max_tokens=3))
        await near.start(start(3, prompt(5), max_tokens=60))
        await near.ended(3)
        assert 2 not in near.accepted, "its messages are not received either"
        await far.ended(1, 2)
        assert far.tokens[1] == expected_tokens(prompt(10), 40)
        assert far.tokens[2] == expected_tokens(prompt(5), 3)
        num_reports = sum(
            any(p.epoch == 1 for p in frame.progress) for frame in far.frames[frames:]
        )
        assert num_reports <= 5, "some that were under way, and one with all the others"


async def test_router_disconnect_is_detected_after_the_partition() -> None:
    async with two_routers(replace(CONFIG, num_blocks=128)) as (near, far):
        await far.start(start(1, prompt(10), max_tokens=4000))
        await far.until(lambda: far.tokens.get(1))
        await inject(near, chaos_pb2.FAULT_KIND_PARTITION, peer="far", seconds=PARTITION_S)
        far.call.cancel()
        await near.start(start(3, prompt(5), max_tokens=20))
        await near.ended(3)
        assert near.state.num_running == 1, "it does not know"
        await near.until(lambda: not near.state.num_running)
        assert near.state.output_tokens < 4000


async def test_slow_fault_lengthens_each_step() -> None:
    async with two_routers() as (near, _):
        await inject(near, chaos_pb2.FAULT_KIND_SLOW, factor=20, seconds=600)
        before = near.state
        await near.start(start(1, prompt(5), max_tokens=10))
        await near.ended(1)
        steps = near.state.step - before.step
        assert near.state.busy_s - before.busy_s >= 20 * steps * STEP_S


async def test_faults_are_ignored_without_chaos() -> None:
    async with two_routers(replace(CONFIG, chaos=False)) as (near, far):
        for kind in (chaos_pb2.FAULT_KIND_PARTITION, chaos_pb2.FAULT_KIND_SLOW):
            await inject(far, kind, seconds=600, factor=1e6)
        await near.start(start(1, prompt(5), max_tokens=10))
        await near.ended(1)


async def struck(fault: chaos_pb2.Fault) -> tuple[bytes, int | None]:
    """Return the output and the exit status of a process that injects ``fault`` into itself."""
    script = f"""
from everlift.v1 import chaos_pb2
from worker.serving.fault import kill_or_pause
kill_or_pause(chaos_pb2.Fault.FromString({fault.SerializeToString()!r}))
print("goes on")
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", script),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=PIPE,
    )
    async with asyncio.timeout(60.0):
        out, _ = await process.communicate()
    return out, process.returncode


async def test_kill_fault_ends_the_process_at_once() -> None:
    fault = chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_KILL)
    assert await struck(fault) == (b"", -signal.SIGKILL)


async def test_pause_fault_resumes_by_itself() -> None:
    fault = chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_PAUSE, seconds=0.3)
    assert await struck(fault) == (b"goes on\n", 0)


async def test_step_timeout_ends_the_worker() -> None:
    # The step is longer than a stall of the event loop, which stops the watchdog's time. The stop
    # waits for the end of the step.
    fake = FakeModel(step_time=5.0)
    rank = Rank(replace(CONFIG, step_timeout=0.02, drain_timeout=30.0, fake=fake))
    info = await rank.start()
    router = Router(info.address)
    await router.hello(start(1, prompt(3)))
    async with asyncio.timeout(30.0):
        with pytest.raises(RankFailed, match="step 1, of 3 tokens, takes longer than"):
            await rank.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await router.until(lambda: False)
    assert not any(router.tokens.values())
    await router.close()
    await rank.stop()
