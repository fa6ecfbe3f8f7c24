"""Clusters of different models on one ledger server, one of which is active."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from everlift.v1 import session_pb2
from router.ledger.redis.connections import Command
from router.ledger.redis.redis_ledger import _ACTIVE_MS, RedisLedger
from tests.support.ledger.ledger_servers import cluster, cluster_url
from tests.support.ledger.ledgers import connected, valkey_server


@dataclass(frozen=True)
class Pair:
    old: RedisLedger
    new: RedisLedger
    key: str


@pytest.fixture(scope="module", params=["valkey", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "valkey":
        with valkey_server() as url:
            yield url
    else:
        with cluster() as nodes:
            yield cluster_url(nodes)


@pytest.fixture
async def pair(url: str) -> AsyncIterator[Pair]:
    key = f"release-{secrets.token_hex(4)}-active"
    async with AsyncExitStack() as stack:
        old, new = [
            await stack.enter_async_context(connected(url, active_key=key, timeout=30.0))
            for _ in range(2)
        ]
        yield Pair(old, new, key)


async def test_active_cluster_is_first_until_replaced(pair: Pair) -> None:
    assert await pair.old.is_active()
    assert not await pair.new.is_active()
    assert await pair.old.is_active()
    await pair.new.activate()
    assert await pair.new.is_active()
    assert not await pair.old.is_active()
    # A repeated call changes nothing.
    await pair.new.activate()
    assert not await pair.old.is_active()


async def on_key(pair: Pair, command: str, *arguments: str) -> int:
    """Run a command on the key that the clusters share."""
    whole = Command(pair.key, (command, pair.key, *arguments))
    [answer] = await pair.old._shards.run_commands("test", whole)
    return int(answer)


async def test_expired_active_cluster_is_replaced(pair: Pair) -> None:
    assert await pair.old.is_active()
    await on_key(pair, "PEXPIRE", "600000")
    assert not await pair.new.is_active()
    assert await on_key(pair, "PTTL") > _ACTIVE_MS
    # A call of the active cluster renews the key for _ACTIVE_MS.
    assert await pair.old.is_active()
    assert 0 < await on_key(pair, "PTTL") <= _ACTIVE_MS
    await on_key(pair, "PEXPIRE", "1")
    async with asyncio.timeout(30.0):
        while not await pair.new.is_active():
            await asyncio.sleep(0.05)
    assert not await pair.old.is_active()


async def test_active_load_is_readable_by_new_cluster(pair: Pair) -> None:
    assert await pair.old.active_load() is None
    assert await pair.new.active_load() is None
    await pair.old.lead("router", "address", 1, 3600.0)
    await pair.old.put_load(session_pb2.ClusterLoad(term=1, workers=3))
    assert await pair.old.active_load() is None
    report = await pair.new.active_load()
    assert report is not None
    assert report.load.workers == 3
    await pair.new.activate()
    assert await pair.new.active_load() is None


async def test_cluster_without_shared_key_is_active(url: str) -> None:
    async with connected(url, timeout=30.0) as one, connected(url, timeout=30.0) as other:
        await one.activate()
        assert await other.is_active()
        assert await other.active_load() is None


async def test_active_cluster_renews_on_full_server() -> None:
    with valkey_server(also="+config|set") as url:
        async with connected(url, active_key="release-active", timeout=30.0) as old:
            assert await old.is_active()
            async with Redis.from_url(url) as client:
                await client.config_set("maxmemory", 1)
            assert await old.is_active()
            async with Redis.from_url(url) as client:
                assert await client.pttl("release-active") > 5000
