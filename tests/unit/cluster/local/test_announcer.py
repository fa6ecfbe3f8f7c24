"""Announcement of a worker to the routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cluster.local.start_reporter import Announcer
from everlift.errors import InvalidRequest
from everlift.v1 import session_pb2, session_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
INFO = session_pb2.WorkerInfo(worker_id="w", address="127.0.0.1:1")


class Router(session_pb2_grpc.RouterInternalServicer):
    """Router that answers with the given statuses, then accepts."""

    def __init__(self, *statuses: grpc.StatusCode) -> None:
        self.statuses = list(statuses)
        self.announced: asyncio.Queue[str] = asyncio.Queue()

    async def Announce(
        self, request: session_pb2.AnnounceRequest, context: Context
    ) -> session_pb2.AnnounceResponse:
        await self.announced.put(request.worker.worker_id)
        if self.statuses:
            await context.abort(self.statuses.pop(0), "does not fit")
        return session_pb2.AnnounceResponse()


@asynccontextmanager
async def serving(*statuses: grpc.StatusCode) -> AsyncIterator[tuple[Router, str]]:
    """Yield a serving router and its address."""
    router = Router(*statuses)  # type: ignore[abstract]
    server = grpc.aio.server()
    session_pb2_grpc.add_RouterInternalServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def test_announcer_repeats_until_a_router_accepts() -> None:
    async with serving(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL) as (router, address):
        await Announcer(INFO, ["127.0.0.1:1", address]).announce()
    assert router.announced.qsize() == 3


async def test_announcer_fails_if_a_router_rejects_the_worker() -> None:
    async with serving(grpc.StatusCode.INVALID_ARGUMENT) as (router, address):
        with pytest.raises(InvalidRequest, match="does not fit"):
            await Announcer(INFO, [address]).announce()
    assert router.announced.qsize() == 1


async def test_announcer_repeats_after_a_second_without_routers() -> None:
    clock = asyncio.get_running_loop().time
    connected = asyncio.Event()
    async with serving() as (router, address):
        announcer = Announcer(INFO, [address])
        keeping = asyncio.create_task(announcer.keep_registered(lambda: not connected.is_set()))
        began = clock()
        assert await router.announced.get() == "w"
        assert clock() - began >= 1.0
        connected.set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.announced.get(), 1.5)
        keeping.cancel()
