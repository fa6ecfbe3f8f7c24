"""Killed, frozen, draining and restarted router processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from everlift.client.client import AsyncClient
from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import running_url
from router.ledger.redis.redis_ledger import connect
from tests.chaos.support import Cluster, Load, config, paused, report, running, until
from tests.support.router import retrying
from worker.config import FakeModel


@pytest.mark.long
async def test_killed_gateway_clients_continue_at_another(tmp_path: Path) -> None:
    async with (
        running(config(tmp_path, routers=3)) as cluster,
        Load(cluster.addresses, 24, max_tokens=300) as load,
    ):
        await load.until(20)
        gateway = others(cluster)[0]
        since = time.time()
        await cluster.kill_router(gateway)
        await load.finish()
        load.check()
        assert load.moved
        report("gateway killed", cluster, load, since)


def others(cluster: Cluster) -> list[int]:
    """Return the indices of the routers that do not lead."""
    return [index for index in range(len(cluster.routers)) if index != cluster.leader]


async def test_killed_leader_keeps_queue_order_and_streams(
    tmp_path: Path,
) -> None:
    """Requests run in a single slot in order of arrival, also those sent while no router leads."""
    fake = FakeModel(step_time=0.01)
    settings = config(
        tmp_path, routers=3, workers=1, fake=fake, max_num_seqs=1, router={"local_depth": 0}
    )
    async with running(settings) as cluster:
        leader = cluster.leader
        addresses = [cluster.addresses[index] for index in others(cluster)]
        async with Load(addresses, 1, seed=1, fake=fake, max_tokens=800, plain=True) as first:
            await first.until(5)
            async with Load([], 10, seed=2, fake=fake, max_tokens=10, plain=True) as queue:
                await ask_in_turn(queue, addresses, range(6))
                since = time.time()
                await cluster.kill_router(leader)
                await ask_in_turn(queue, addresses, range(6, 10))
                await queue.finish()
            await first.finish()
        for load in (first, queue):
            load.check()
            assert not load.moved
        # Clients may observe another order, because one of their two routers may be late.
        starts = await dispatch_times(cluster, queue)
        assert starts == sorted(starts)
        report("leader killed", cluster, queue, since)
        assert cluster.leader != leader


async def dispatch_times(cluster: Cluster, load: Load) -> list[float]:
    """Return the time of each request's first dispatch, by the ledger's clock."""
    url = running_url(cluster.config.state_dir)
    assert url is not None
    ledger = await connect(LedgerConfig(url=url, timeout=30.0))
    try:
        histories = [await ledger.events(stream.request_id) for stream in load.streams]
    finally:
        await ledger.close()
    return [next(it.time for it in events if it.move == "dispatch") for events in histories]


async def ask_in_turn(load: Load, addresses: list[str], numbers: range) -> None:
    """Submit the requests at the routers in turn, each after the previous one is in the ledger."""
    for number in numbers:
        stream = load.streams[number]
        load.follow(stream, [addresses[number % len(addresses)]])
        async with retrying.client(addresses) as client:

            async def is_known(client: AsyncClient = client, id_: str = stream.request_id) -> bool:
                return (await client.get_request(id_)).request_id == id_

            await until(is_known)


@pytest.mark.long
async def test_resumed_leader_is_fenced(tmp_path: Path) -> None:
    """Two routers lead for a moment, but no request runs twice."""
    settings = config(tmp_path, routers=3, max_num_seqs=4)
    async with running(settings) as cluster:
        leader = cluster.leader
        addresses = [cluster.addresses[index] for index in others(cluster)]
        async with Load(addresses, 24, max_tokens=300, plain=True) as load:
            await load.until(20, part=0.1)
            since = time.time()
            with paused(cluster.routers[leader].pids):
                await until(lambda: cluster.leader != leader)
                await load.until(300, part=0.4)
            await load.finish()
        load.check()
        assert not load.moved
        report("leader frozen", cluster, load, since)
        await until(lambda: has_said(cluster, leader, "leadership lost", since))
        statuses = await asyncio.gather(*(cluster.status(index) for index in range(3)))
        assert len({status.leader for status in statuses}) == 1


def has_said(cluster: Cluster, router: int, event: str, since: float = 0.0) -> bool:
    return event in {each["event"] for each in cluster.events(f"router-{router}", since)}


@pytest.mark.long
async def test_frozen_router_clients_find_requests_elsewhere(tmp_path: Path) -> None:
    """The leader, which owns a third of the requests, is frozen and later resumes."""
    async with (
        running(config(tmp_path, routers=3)) as cluster,
        Load(cluster.addresses, 24, max_tokens=600) as load,
    ):
        await load.until(20)
        since = time.time()
        leader = cluster.leader
        with paused(cluster.routers[leader].pids):
            await until(lambda: cluster.leader != leader)
            await until(lambda: len(adopted(cluster, since)) >= 8)
        await load.finish()
        load.check()
        report("router frozen with its clients", cluster, load, since)
        await cluster.idle()


def adopted(cluster: Cluster, since: float) -> list[str]:
    events = cluster.events(since=since)
    return [e["request_id"] for e in events if e["event"] == "request taken over"]


@pytest.mark.long
@pytest.mark.parametrize("drain", [0.2, pytest.param(30.0, marks=pytest.mark.long)])
async def test_leaving_leader_loses_no_token_and_frees_its_lease(
    tmp_path: Path, drain: float
) -> None:
    """Another router leads before the lease expires.

    The streams of the leaving router end within its drain time, or resume at the other router.
    """
    fake = FakeModel(step_time=0.01)
    settings = config(tmp_path, routers=2, fake=fake, router={"drain": drain, "lease": 20.0})
    async with (
        running(settings) as cluster,
        Load(cluster.addresses, 12, seed=1, fake=fake, max_tokens=200) as load,
    ):
        leader = cluster.leader
        await load.until(20)
        since = time.time()
        os.kill(cluster.routers[leader].pids[0], signal.SIGUSR1)
        await until(lambda: has_said(cluster, leader, "router stopping"))
        newcomers = [cluster.addresses[index] for index in (leader, 1 - leader)]
        async with Load(newcomers, 4, seed=2, fake=fake, max_tokens=50) as new:
            await new.finish()
        await until(lambda: cluster.leader != leader, seconds=10.0)
        await load.finish()
        for each in (load, new):
            each.check()
        assert bool(load.moved) == (drain < 1.0)
        await until(lambda: not cluster.routers[leader].is_running)
        report(f"router left, drain {drain:g} s", cluster, load, since)


@pytest.mark.long
async def test_rolling_router_restart_fails_no_request(tmp_path: Path) -> None:
    fake = FakeModel(step_time=0.01)
    settings = config(tmp_path, routers=2, fake=fake, router={"drain": 0.2})
    async with running(settings) as cluster:
        async with (
            Load(cluster.addresses, 12, seed=1, fake=fake, max_tokens=450) as long,
            Load(cluster.addresses, 12, seed=2, fake=fake, max_tokens=450) as others_,
        ):
            await long.until(20)
            since = time.time()
            for router in range(2):
                await cluster.restarted(router)
            await long.finish()
            await others_.finish()
        for load in (long, others_):
            load.check()
        report("all routers restarted", cluster, long, since)
        await cluster.idle()
