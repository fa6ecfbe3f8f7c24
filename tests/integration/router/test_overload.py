"""Rejected, shed and timed-out requests of the queue, over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, QueueFull, QueueTimeout, Shed, UnknownRequest
from tests.support.in_process import LONG_LEASE, ROUTER, cluster, until


async def refusal(client: AsyncClient, request_id: str, priority: int = 0) -> EverliftError | None:
    """Run a request; return its error, or None if it is served."""
    try:
        await client.generate([1], request_id=request_id, priority=priority, max_tokens=2).text()
    except EverliftError as error:
        return error
    return None


async def test_higher_class_sheds_lower_class_of_any_router() -> None:
    # A new leader would not shed requests that the previous one had accepted.
    config = replace(LONG_LEASE, max_queued=2)
    async with (
        cluster(routers=2, workers=0, router_config=config) as parts,
        AsyncClient(parts.routers[0].address, retry_s=0) as one,
        AsyncClient(parts.routers[1].address, retry_s=0) as other,
    ):
        await until(lambda: all(router._leader_client.is_open for router in parts.routers))
        low = [asyncio.create_task(refusal(one, "a"))]
        await until(lambda: parts.routers[1]._leader_client.queued == 1)
        low.append(asyncio.create_task(refusal(one, "b")))
        await until(lambda: parts.routers[1]._leader_client.queued == 2)
        lowest = parts.routers[1]._requests.queue_estimates["fake"]
        await until(lambda: parts.routers[1]._requests.queue_estimates["fake"] is not lowest)
        assert isinstance(await refusal(other, "c"), QueueFull)
        high = asyncio.create_task(refusal(other, "d", priority=1))
        shed = await low[1]
        assert isinstance(shed, Shed), "the higher class took its place"
        # One second times a random factor, because no worker's throughput is known.
        assert 0.5 <= (shed.retry_after_s or 0.0) <= 2.5
        with pytest.raises(UnknownRequest):
            await one.get_request("b")
        await parts.add_worker()
        assert [await low[0], await high] == [None, None]


async def test_queue_ttl_ends_wait_with_queue_timeout() -> None:
    config = replace(ROUTER, queue_ttl=0.3)
    async with (
        cluster(workers=0, router_config=config) as parts,
        AsyncClient(parts.address, retry_s=0) as client,
    ):
        assert isinstance(await refusal(client, "a"), QueueTimeout)
        await parts.add_worker()
        assert await refusal(client, "a") is None, "its name is free"


async def test_client_retries_queue_timeout_until_served() -> None:
    config = replace(ROUTER, queue_ttl=0.3)
    async with cluster(workers=0, router_config=config) as parts:
        counters = parts.routers[0]._requests.counters
        async with AsyncClient(parts.address) as client:
            one = asyncio.create_task(client.generate([1], max_tokens=2).text())
            many = asyncio.create_task(client.generate_many([[1], [2]], max_tokens=2).texts())
            await until(lambda: parts.routers[0]._leader_client.queued == 3)
            await until(lambda: parts.routers[0]._leader_client.queued == 0)
            await parts.add_worker()
            assert all([await one, *await many])
        assert counters.completed == 3
