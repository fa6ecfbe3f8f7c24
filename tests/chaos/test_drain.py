"""Draining and replacement of workers, and restart of a killed cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from everlift.messages import OnDisconnect
from everlift.v1 import inference_pb2 as pb
from tests.chaos.support import Cluster, Load, config, report, running, until
from tests.support.router import retrying
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

SLOW = FakeModel(step_time=0.01)


@pytest.mark.parametrize(
    "way",
    [
        "SIGTERM",
        *(pytest.param(it, marks=pytest.mark.long) for it in ("SIGUSR1", "everlift drain")),
    ],
)
async def test_drained_worker_hands_back_all_requests(tmp_path: Path, way: str) -> None:
    """The requests migrate at once, with their tokens, and no worker counts as lost."""
    # The drain timeout is long enough for processes that lack a core for a second.
    async with running(config(tmp_path, fake=SLOW, drain_timeout=20.0)) as cluster:
        leaving = cluster.workers[0].worker_id
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=600, plain=True) as load:
            await load.until(40)
            since = time.time()
            await start_drain(cluster, way)
            await until(lambda: has_nothing(cluster, leaving))
            handed_back = time.time() - since
            await load.finish()
        load.check()
        assert len(load.moved) > 4
        async with retrying.client(cluster.address) as client:
            for stream in load.moved:
                known = await client.get_request(stream.request_id)
                assert (known.attempts, known.losses) == (2, 0)
        report(f"{way}: all handed back in {handed_back:.2f} s", cluster, load, since)
        await cluster.idle()


async def start_drain(cluster: Cluster, way: str) -> None:
    """Drain the first worker by a signal or by the CLI."""
    if way == "everlift drain":
        await drain(cluster, cluster.workers[0].worker_id)
    else:
        os.kill(cluster.workers[0].pids[0], getattr(signal, way))


async def drain(cluster: Cluster, worker_id: str) -> None:
    command = ("-m", "cluster.cli", "drain", worker_id, "--address", cluster.address)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=PIPE)
    _, err = await process.communicate()
    assert process.returncode == 0, err.decode()


async def has_nothing(cluster: Cluster, worker_id: str) -> bool:
    workers = {w.worker_id: w for w in (await cluster.status()).workers}
    known = workers.get(worker_id)
    return known is None or not known.alive or not (known.num_running or known.num_waiting)


@pytest.mark.long
async def test_rolling_worker_replacement_fails_no_request(tmp_path: Path) -> None:
    async with running(config(tmp_path, fake=SLOW)) as cluster:
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=500, plain=True) as load:
            await load.until(20)
            since = time.time()
            for index, worker in enumerate(cluster.workers):
                await worker.stop()
                await cluster.restart_worker(index)
            await load.finish()
        load.check()
        assert load.moved
        report("all workers replaced", cluster, load, since)
        async with retrying.client(cluster.address) as client:
            known = await asyncio.gather(
                *(client.get_request(stream.request_id) for stream in load.streams)
            )
        assert sum(k.losses for k in known) == 0
        await cluster.idle()


@pytest.mark.long
async def test_killed_cluster_resumes_continued_requests(tmp_path: Path) -> None:
    """Routers, workers and ledger are killed; their clients receive each token once.

    A client that attaches later receives the whole output of a request without a client.
    """
    settings = config(tmp_path, routers=2, fake=SLOW)
    async with running(settings) as cluster:
        going_on = {"fake": SLOW, "max_tokens": 400, "on_disconnect": OnDisconnect.CONTINUE}
        async with Load(cluster.addresses, 12, seed=1, **going_on) as load:
            await load.until(60, part=1.0)
            left = await left_alone(cluster)
            # The ledger syncs every second, so all older writes are on disk.
            await asyncio.sleep(1.5)
            since = time.time()
            await kill_everything(cluster)
            await asyncio.gather(*(cluster.restart_router(index) for index in (0, 1)))
            await asyncio.gather(*(cluster.restart_worker(index) for index in (0, 1)))
            await load.finish()
            load.check()
        report("everything killed", cluster, load, since)
        async with retrying.client(cluster.addresses) as client:
            stream = client.attach(left)
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens([7], 400, SLOW)
            assert (await client.get_request(left)).state == pb.REQUEST_STATE_FINISHED
        await cluster.idle()


async def left_alone(cluster: Cluster) -> str:
    """Return the id of a request whose client has disconnected."""
    async with retrying.client(cluster.addresses) as client:
        stream = client.generate(
            [7], max_tokens=400, temperature=0.0, on_disconnect=OnDisconnect.CONTINUE
        )
        await anext(stream)
        return stream.request_id


async def kill_everything(cluster: Cluster) -> None:
    replicas = (*cluster.routers, *cluster.workers)
    pids = [cluster.ledger_pid, *(pid for replica in replicas for pid in replica.pids)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*(replica.kill() for replica in replicas))
    await until(lambda: cluster.ledger_pid not in (0, pids[0]))
