"""Exchange of the autoscaler with the ledger."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.autoscale.exchange import LedgerExchange
from everlift.errors import LedgerUnavailable
from everlift.v1.session_pb2 import ClusterLoad, Scaling
from router.ledger.config import LedgerConfig
from router.ledger.redis.redis_ledger import RedisLedger, connect
from tests.support.ledger.ledgers import TIMEOUT_S, valkey_server


async def test_exchange_reads_load_and_publishes_scaling() -> None:
    with valkey_server() as url:
        config = LedgerConfig(url=url, durability_class="memory")
        ledger = await connect(config)
        exchange = LedgerExchange(lambda: config)
        try:
            await ledger.lead("router", "address", 1, TIMEOUT_S)
            await ledger.put_load(ClusterLoad(term=1, queued=7))
            for workers in (2, 3):
                exchange.publish(Scaling(workers=workers, reason="requests wait"))
            async with asyncio.timeout(TIMEOUT_S):
                while (latest := exchange.latest()) is None:
                    await asyncio.sleep(0.02)
                while [it.scaling.workers for it in await ledger.scaling()] != [3]:
                    await asyncio.sleep(0.02)
            assert latest.load.queued == 7
            [published] = await ledger.scaling()
            assert published.scaling == Scaling(workers=3, reason="requests wait")
        finally:
            exchange.stop()
            await asyncio.to_thread(exchange._thread.join)
            await ledger.close()


async def test_exchange_reports_replaced_workers_until_activation() -> None:
    with valkey_server() as url:
        shared: Any = {"url": url, "durability_class": "memory", "active_key": "release-active"}
        old = await connect(LedgerConfig(**shared, key_prefix="release-old"))
        await old.lead("router", "address", 1, TIMEOUT_S)
        await old.put_load(ClusterLoad(term=1, workers=3))
        assert await old.is_active()
        config = LedgerConfig(**shared, key_prefix="release-new")
        exchange = LedgerExchange(lambda: config)
        new = await connect(config)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (load := exchange.replaced_load()) is None or load.workers != 3:
                    await asyncio.sleep(0.02)
                await new.activate()
                while exchange.replaced_load() is not None:
                    await asyncio.sleep(0.02)
        finally:
            exchange.stop()
            await asyncio.to_thread(exchange._thread.join)
            await old.close()
            await new.close()


async def test_exchange_reads_load_while_ledger_rejects_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections: list[LedgerConfig] = []
    refused: list[Scaling] = []

    async def refuse(self: RedisLedger, scaling: Scaling) -> None:
        refused.append(scaling)
        raise LedgerUnavailable("it is full")

    with valkey_server() as url:
        config = LedgerConfig(url=url, durability_class="memory")
        ledger = await connect(config)
        await ledger.lead("router", "address", 1, TIMEOUT_S)
        await ledger.put_load(ClusterLoad(term=1, queued=7))
        monkeypatch.setattr(RedisLedger, "put_scaling", refuse)
        exchange = LedgerExchange(lambda: connections.append(config) or config)  # type: ignore[func-returns-value]
        exchange.publish(Scaling(workers=2))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not refused:
                    await asyncio.sleep(0.02)
                await ledger.put_load(ClusterLoad(term=1, queued=9))
                while (latest := exchange.latest()) is None or latest.load.queued != 9:
                    await asyncio.sleep(0.02)
            assert len(connections) == 1
        finally:
            exchange.stop()
            await asyncio.to_thread(exchange._thread.join)
            await ledger.close()
