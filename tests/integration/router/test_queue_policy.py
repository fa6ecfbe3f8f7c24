"""Queue policies that operators set, in clusters of several routers over real gRPC."""

from __future__ import annotations

import asyncio

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import QueueFull
from router.ledger.entry import State
from tests.support.in_process import Cluster, cluster, until


def orders(parts: Cluster) -> list[tuple[str, int]]:
    """Return the order and the queue limit in effect at each router."""
    rules = [router._leader.rules for router in parts.routers]
    return [(each.order.name, each.max_queued) for each in rules]


def waiting(parts: Cluster) -> int:
    return sum(router._leader.queued for router in parts.routers if router._leader.is_leading)


async def submit(parts: Cluster, request_id: str, timeout_s: float | None) -> asyncio.Task[None]:
    """Start a request; return its task once it is queued."""

    async def read() -> None:
        async with AsyncClient(parts.address) as client:
            options = {"request_id": request_id, "timeout_s": timeout_s, "max_tokens": 2}
            async for _ in client.generate([1, 2], **options):  # type: ignore[arg-type]
                pass

    before = waiting(parts)
    task = asyncio.create_task(read())
    await until(lambda: waiting(parts) > before)
    return task


async def test_queue_policy_holds_on_all_routers_and_next_leader() -> None:
    async with cluster(routers=3, workers=0) as parts:
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        async with AsyncClient(parts.routers[-1].address) as client:
            answer = await client.set_policy(order="deadline", max_queued=3, class_floor=0.2)
        assert (answer.order, answer.max_queued) == ("deadline", 3)
        assert list(answer.overridden) == ["order", "max_queued", "class_floor"]
        await until(lambda: orders(parts) == [("deadline", 3)] * 3)
        leader = next(router for router in parts.routers if router._leader.is_leading)
        await parts.kill_router(leader)
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        await until(lambda: all(router._leader_client.is_open for router in parts.routers))
        (leader,) = (router for router in parts.routers if router._leader.is_leading)
        assert leader._leader._leader_state is not None
        assert leader._leader._leader_state.queue("fake")._queue.class_floor == 0.2
        timeouts = {"without": None, "late": 50.0, "soon": 30.0}
        tasks = [await submit(parts, name, timeout_s) for name, timeout_s in timeouts.items()]
        await until(lambda: all(router._leader_client.queued == 3 for router in parts.routers))
        async with AsyncClient(parts.address, retry_s=0) as client:
            with pytest.raises(QueueFull):
                await client.generate([1], request_id="refused").text()
        await parts.add_worker(max_num_seqs=1)
        await asyncio.gather(*tasks)
        dispatched = {name: (await parts.ledger.events(name))[1].time for name in timeouts}
        assert sorted(dispatched, key=dispatched.__getitem__) == ["soon", "late", "without"]
        listed = await parts.ledger.list_requests("", states=[State.FINISHED])
        assert {entry.request_id for entry in listed.entries} == timeouts.keys()


async def test_queue_policy_reaches_later_router() -> None:
    async with cluster(routers=1, workers=0) as parts:
        async with AsyncClient(parts.address) as client:
            await client.set_policy(max_queued=5)
        await parts.add_router()
        await until(lambda: orders(parts) == [("fifo", 5)] * 2)
