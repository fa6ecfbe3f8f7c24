"""Workers that are asked for and missing: in the status, in the metrics, and for who waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import StringIO

from rich.console import Console

from cluster.status_view import show
from everlift.client import AsyncClient
from everlift.v1 import session_pb2
from tests.http_client import EVENTS, JSON, get, streamed
from tests.in_process import ROUTER, cluster, until


async def missing(client: AsyncClient) -> str:
    return (await client.status()).missing_workers


async def until_said(client: AsyncClient, begins: str) -> None:
    async with asyncio.timeout(30.0):
        while not (await missing(client)).startswith(begins):
            await asyncio.sleep(0.02)


async def test_status_and_metrics_say_which_workers_are_missing() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        [router] = parts.routers
        await until(lambda: router._leader.is_leading)
        router.reconfigure(ROUTER, {}, 2)
        await until_said(client, "0 of 2 ready; 2 not placed")
        router.worker_starts(session_pb2.WorkerStart(name="one", seconds=60.0))
        await until_said(client, "0 of 2 ready; 1 loading the model, 1 not placed")
        metrics = (await get(router.metrics_address, "/metrics")).body.decode()
        assert "everlift_wanted_workers 2.0" in metrics
        assert "everlift_starting_workers 1.0" in metrics
        shown = StringIO()
        Console(file=shown, width=200).print(show(await client.status()))
        assert "workers 0 of 2 ready; 1 loading the model" in shown.getvalue()
        await parts.add_worker()
        router.worker_starts(session_pb2.WorkerStart(name="one", seconds=0.0))
        await until_said(client, "1 of 2 ready; 1 not placed")
        router.reconfigure(ROUTER, {}, 1)
        async with asyncio.timeout(30.0):
            while await missing(client):
                await asyncio.sleep(0.02)


async def test_the_autoscalers_number_is_what_there_is_to_be() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        await until(lambda: parts.routers[0]._leader.is_leading)
        assert await missing(client) == ""
        await parts.ledger.put_scaling(session_pb2.Scaling(workers=3, reason="requests wait"))
        await until_said(client, "0 of 3 ready; 3 not placed")


async def test_a_stream_without_a_worker_gets_comments_and_is_answered_in_the_end() -> None:
    router = replace(ROUTER, keep_alive=0.05)
    body = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
    async with cluster(workers=0, router_config=router) as parts:
        address = parts.routers[0].http_address
        headers = JSON | {"accept": EVENTS}
        async with streamed(address, "/v1/completions", body, headers) as stream:
            waiting = asyncio.create_task(anext(stream.events()))
            async with asyncio.timeout(30.0):
                while stream.num_comments < 3:
                    await asyncio.sleep(0.02)
            assert not waiting.done()
            await parts.add_worker()
            assert (await waiting).json["choices"]
