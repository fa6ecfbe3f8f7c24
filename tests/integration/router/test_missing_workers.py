"""Wanted but missing workers: in status and metrics, and for queued requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cluster.commands.status_view import show
from everlift.client.client import AsyncClient
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from tests.support.in_process import ROUTER, cluster, until
from tests.support.router.http_client import EVENTS, JSON, ask, get, streamed

NO_GPU = "no node with 1 GPU and 4 CPU is free"


async def missing(client: AsyncClient) -> str:
    return (await client.status()).missing_workers


async def until_said(client: AsyncClient, begins: str) -> None:
    async with asyncio.timeout(30.0):
        while not (await missing(client)).startswith(begins):
            await asyncio.sleep(0.02)


async def test_status_and_metrics_report_missing_workers() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        [router] = parts.routers
        await until(lambda: router._leader.is_leading)
        router.reconfigure(ROUTER, {}, {"fake": 2})
        await until_said(client, "0 of 2 ready; 2 not started")
        router.place("ray", {"fake": (2, NO_GPU)})
        await until_said(client, f"0 of 2 ready; 2 pending placement: {NO_GPU}")
        one = session_pb2.WorkerStart(name="one", model="fake", seconds=60.0, elapsed_s=3600.0)
        router.worker_starts(one)
        await until_said(
            client,
            f"0 of 2 ready; 1 loading the model for 60 min, 1 pending placement: {NO_GPU}",
        )
        metrics = (await get(router.metrics_address, "/metrics")).body.decode()
        assert 'everlift_wanted_workers{model="fake"} 2.0' in metrics
        assert 'everlift_starting_workers{model="fake"} 1.0' in metrics
        shown = StringIO()
        Console(file=shown, width=200).print(show(await client.status()))
        assert "workers 0 of 2 ready; 1 loading the model" in shown.getvalue()
        await parts.add_worker()
        router.worker_starts(session_pb2.WorkerStart(name="one", model="fake", seconds=0.0))
        await until_said(client, "1 of 2 ready; 1 pending placement")
        router.reconfigure(ROUTER, {}, {"fake": 1})
        async with asyncio.timeout(30.0):
            while await missing(client):
                await asyncio.sleep(0.02)


async def test_missing_workers_count_from_autoscaler_target() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        await until(lambda: parts.routers[0]._leader.is_leading)
        assert await missing(client) == ""
        await parts.ledger.put_scaling(
            session_pb2.Scaling(model="fake", workers=3, reason="requests wait")
        )
        await until_said(client, "0 of 3 ready; 3 not started")


async def test_missing_workers_sum_over_clusters_during_upgrade() -> None:
    async with cluster(routers=2, workers=1) as parts, AsyncClient(parts.address) as client:
        old, new = parts.routers
        old.place("old", {"fake": (0, "")})
        old.reconfigure(ROUTER, {}, {"fake": 1})
        new.place("new", {"fake": (3, NO_GPU)})
        new.reconfigure(ROUTER, {}, {"fake": 3})
        await until_said(client, f"1 of 4 ready; 3 pending placement: {NO_GPU}")
        await parts.kill_router(new)
        async with asyncio.timeout(30.0):
            while await missing(client):
                await asyncio.sleep(0.02)


async def test_explain_names_missing_workers() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        [router] = parts.routers
        router.reconfigure(ROUTER, {}, {"fake": 1})
        router.place("ray", {"fake": (1, NO_GPU)})
        await until_said(client, "0 of 1 ready; 1 pending placement")
        asking = asyncio.create_task(client.generate([1, 2], max_tokens=3, request_id="r").text())
        await until(lambda: router._leader.queued)
        waits = await client.explain("r")
        assert waits.missing_workers == f"0 of 1 ready; 1 pending placement: {NO_GPU}"
        await parts.add_worker()
        await asking
        ended = await client.explain("r")
    assert not ended.missing_workers
    spent = {span.kind: span.seconds for span in ended.spans}
    assert spent[pb.SPAN_KIND_NO_WORKER] > 0.0


async def test_requests_without_worker_wait_past_idle_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream gets comments; a unary answer, which has none, is not ended by the idle limit."""
    monkeypatch.setattr("router.api.http.server._IDLE_S", 0.05)
    router = replace(ROUTER, keep_alive=0.05)
    body = {"prompt": [1, 2], "max_tokens": 3}
    async with cluster(workers=0, router_config=router) as parts, AsyncClient(parts.address) as it:
        address = parts.routers[0].http_address
        whole = asyncio.create_task(ask(address, "/v1/completions", body))
        called = asyncio.create_task(it.generate([1, 2], max_tokens=3, request_id="r").text())
        headers = JSON | {"accept": EVENTS}
        stream_body = body | {"stream": True}
        async with streamed(address, "/v1/completions", stream_body, headers) as stream:
            first = asyncio.create_task(anext(stream.events()))
            async with asyncio.timeout(30.0):
                while stream.num_comments < 3 or parts.routers[0]._leader.queued < 3:
                    await asyncio.sleep(0.02)
            assert not (whole.done() or called.done() or first.done())
            await parts.add_worker()
            assert (await first).json["choices"]
        answer = await whole
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 3
        assert await called
