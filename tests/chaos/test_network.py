"""Temporarily silent or broken connections between routers, workers and the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from everlift.v1 import session_pb2, session_pb2_grpc
from router.ledger.config import LedgerConfig
from tests.chaos.support import Cluster, Load, config, report, until
from tests.support.ledger.ledgers import redis_server
from tests.support.router.proxy import Proxy, proxy
from worker.config import FakeModel

SLOW = FakeModel(step_time=0.01)


class Ways(session_pb2_grpc.RouterInternalServicer):
    """Server that forwards workers' announcements to router 0 with addresses of proxies."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._proxies: dict[str, Proxy] = {}
        self._server = grpc.aio.server()
        session_pb2_grpc.add_RouterInternalServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __getitem__(self, worker: int) -> Proxy:
        return self._proxies[self._cluster.workers[worker].worker_id]

    async def Announce(
        self, request: session_pb2.AnnounceRequest, context: Any
    ) -> session_pb2.AnnounceResponse:
        info = request.worker
        if info.worker_id not in self._proxies:
            way = self._proxies[info.worker_id] = Proxy(info.address)
            await way.start()
        info.address = self._proxies[info.worker_id].address
        router = self._cluster.routers[0].internal_address
        async with grpc.aio.insecure_channel(router) as channel:
            try:
                return await session_pb2_grpc.RouterInternalStub(channel).Announce(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
        for way in self._proxies.values():
            await way.stop()


@asynccontextmanager
async def with_ways(settings: Any) -> AsyncIterator[tuple[Cluster, Ways]]:
    """Yield a cluster whose routers reach each worker through a proxy."""
    cluster = Cluster(settings)
    ways = Ways(cluster)
    cluster.announce_to = lambda _: (ways.address,)
    await ways.start()
    try:
        async with cluster:
            yield cluster, ways
    finally:
        await ways.stop()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["silent", "closed"])
async def test_disconnected_worker_is_abandoned_and_rejoins(tmp_path: Path, kind: str) -> None:
    """No byte passes for 5 s, or every connection is reset. The worker itself keeps running."""
    # On a busy machine the other worker may be silent for a second too.
    settings = config(tmp_path, routers=2, fake=SLOW, router={"worker_silence": 2.0})
    async with with_ways(settings) as (cluster, ways):
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=550, plain=True) as load:
            await load.until(40)
            since = time.time()
            with ways[0].silent() if kind == "silent" else ways[0].closed():
                await asyncio.sleep(5)
            await load.finish()
        load.check()
        assert 0 < len(load.moved) < 24
        report(f"wire to a worker {kind} for 5 s", cluster, load, since)
        cut_off = cluster.workers[0].worker_id
        await until(lambda: is_back(cluster, cut_off))
        await cluster.idle()
        async with Load(cluster.addresses, 24, seed=2, fake=SLOW, max_tokens=20) as load:
            await load.finish()
        load.check()
        assert not load.moved
        workers = (await cluster.status()).workers
        assert all(w.output_tokens > 0 for w in workers)


async def is_back(cluster: Cluster, worker_id: str) -> bool:
    statuses = await asyncio.gather(*(cluster.status(r) for r in range(len(cluster.routers))))
    alive = [{w.worker_id for w in status.workers if w.alive} for status in statuses]
    return all(worker_id in ids for ids in alive)


@pytest.mark.long
async def test_repeated_connection_breaks_lose_no_token(tmp_path: Path) -> None:
    """Each break counts as a loss of the requests on the connection, below max_losses."""
    settings = config(tmp_path, fake=SLOW, router={"max_losses": 10})
    async with with_ways(settings) as (cluster, ways):
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=300, plain=True) as load:
            await load.until(20)
            for turn in range(4):
                ways[turn % 2].cut()
                await asyncio.sleep(0.4)
            await load.finish()
        load.check()
        assert load.moved
        await cluster.idle()


@pytest.mark.long
async def test_router_without_ledger_neither_leads_nor_duplicates(
    tmp_path: Path,
) -> None:
    """The leader's connection to the ledger is silent for longer than a lease.

    Its requests continue at other routers, while its own clients still receive tokens that the
    ledger does not have.
    """
    with redis_server() as url:
        async with ways_to(url.removeprefix("unix://"), tmp_path) as ways:
            cluster = Cluster(config(tmp_path, routers=3, fake=SLOW, ledger=LedgerConfig(url=url)))
            for router, way in enumerate(ways):
                cluster.ledgers[router] = LedgerConfig(url=f"unix://{way.address}")
            async with cluster:
                async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=700) as load:
                    await load.until(40)
                    leader, since = cluster.leader, time.time()
                    with ways[leader].silent():
                        await until(lambda: cluster.leader != leader)
                        await asyncio.sleep(2)
                    await load.finish()
                load.check()
                report("leader without its ledger", cluster, load, since)
                await cluster.idle()


@asynccontextmanager
async def ways_to(socket: str, directory: Path) -> AsyncIterator[list[Proxy]]:
    """Yield three proxies in front of the ledger's socket."""
    async with AsyncExitStack() as stack:
        places = [directory / f"way-{number}" for number in range(3)]
        yield [await stack.enter_async_context(proxy(socket, place)) for place in places]
