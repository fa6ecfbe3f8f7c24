"""Answers of a router to gRPC's health protocol, through the stub that probes use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from everlift.client.client import AsyncClient
from everlift.errors import LedgerUnavailable
from router.ledger.base import Membership
from router.router import Router
from tests.support.in_process import ROUTER, Cluster, KeptLedger, cluster, receive, until
from tests.support.router.scrape import fetch

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
READINESS = [
    "",
    "everlift.v1.Inference",
    "inference.GRPCInferenceService",
    "everlift.v1.Admin",
    "everlift.v1.Chaos",
    "grpc.health.v1.Health",
]


class AwayLedger(KeptLedger):
    """Ledger that fails heartbeats while ``is_away`` is set."""

    is_away = False

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        if self.is_away:
            raise LedgerUnavailable("away")
        return await super().heartbeat(gateway, address, lease_s)


@asynccontextmanager
async def probe(address: str) -> AsyncIterator[HealthStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield HealthStub(channel)


async def check(stub: HealthStub, service: str) -> int:
    return (await stub.Check(HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", [*READINESS, "live"])
async def test_health_check_reports_serving(service: str) -> None:
    async with cluster(workers=0) as parts, probe(parts.address) as stub:
        assert await check(stub, service) == SERVING


async def test_http_probes_are_served_on_metrics_port() -> None:
    """Probes of Kubernetes do not support gRPC over TLS."""
    async with cluster(workers=0) as parts:
        assert await answered(parts.routers[0], "ready", "live") == ["200", "200"]


async def answered(router: Router, *paths: str) -> list[str]:
    """Return the HTTP status of each path."""
    requests = [f"GET /{path} HTTP/1.1" for path in paths]
    return [(await fetch(router.metrics_address, each)).split()[1] for each in requests]


async def test_health_check_of_unknown_service_is_not_found() -> None:
    async with cluster(workers=0) as parts, probe(parts.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await check(stub, "everlift.v2.Inference")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(HealthCheckRequest(service="everlift.v2.Inference"))
        assert (await watch.read()).status == UNKNOWN
        watch.cancel()


async def test_health_check_rejects_malformed_message() -> None:
    async with cluster(workers=0) as parts:
        async with grpc.aio.insecure_channel(parts.address) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(b"\xff\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_stopping_router_is_live_but_not_ready() -> None:
    """The running stream continues meanwhile."""
    async with cluster(workers=1, router_config=replace(ROUTER, drain=20.0)) as parts:
        [held] = parts.hold()
        router = parts.routers[0]
        async with AsyncClient(parts.address) as client, probe(parts.address) as stub:
            stream = asyncio.create_task(receive(client, [5, 6], 4))
            await until(lambda: held.num_requests)
            watch = stub.Watch(HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            stopping = asyncio.create_task(router.stop())
            assert (await watch.read()).status == NOT_SERVING
            assert [await check(stub, service) for service in READINESS] == [NOT_SERVING] * len(
                READINESS
            )
            assert await check(stub, "live") == SERVING
            assert await answered(router, "ready", "live") == ["503", "200"]
            assert not stopping.done()
            watch.cancel()
            held.release()
            assert len((await stream).tokens) == 4
            await stopping
        parts.routers.remove(router)


async def test_router_without_ledger_is_live_but_not_ready() -> None:
    ledger = AwayLedger(time.monotonic)
    parts = Cluster(ledger=ledger)
    try:
        await parts.add_router()
        async with probe(parts.address) as stub:
            watch = stub.Watch(HealthCheckRequest(service=READINESS[1]))
            assert (await watch.read()).status == SERVING
            ledger.is_away = True
            assert (await watch.read()).status == NOT_SERVING
            assert await check(stub, "live") == SERVING
            ledger.is_away = False
            assert (await watch.read()).status == SERVING
            watch.cancel()
    finally:
        await parts.stop()
