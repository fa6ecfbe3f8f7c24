"""Announcements of starting workers, which routers count until they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from hypothesis import given
from hypothesis import strategies as st

from cluster.local.start_reporter import StartReporter
from everlift.transport import GRPC
from everlift.v1 import session_pb2, session_pb2_grpc
from router.admission.starting_workers import StartingWorkers

Context = grpc.aio.ServicerContext[Any, Any]
REPORT = st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0, 5.0]), st.floats(0.0, 3.0))


@given(st.lists(REPORT, max_size=30))
def test_starting_workers_expire_by_their_latest_announcement(
    reports: list[tuple[str, float, float]],
) -> None:
    starts, until, now = StartingWorkers(), dict[str, float](), 0.0
    for name, seconds, later in reports:
        now += later
        assert starts.count(now) == sum(each > now for each in until.values())
        starts.update([session_pb2.WorkerStart(name=name, seconds=seconds)], now)
        until[name] = now + seconds
    assert starts.count(now) == sum(each > now for each in until.values())
    starts.update([], now + 5.0)
    assert not starts._until


class Router(session_pb2_grpc.RouterInternalServicer):
    def __init__(self) -> None:
        self.received: asyncio.Queue[session_pb2.WorkerStart] = asyncio.Queue()

    async def TellStart(
        self, request: session_pb2.WorkerStart, context: Context
    ) -> session_pb2.TellStartResponse:
        await self.received.put(request)
        return session_pb2.TellStartResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Router, str]]:
    """Yield a serving router and its address."""
    router = Router()  # type: ignore[abstract]
    server = grpc.aio.server()
    session_pb2_grpc.add_RouterInternalServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield router, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def test_announcer_repeats_until_a_router_has_the_ready_worker() -> None:
    async with serving() as (router, address):
        async with StartReporter("m", ["127.0.0.1:1", address], GRPC) as start_reporter:
            first, again = router.received.get_nowait(), await router.received.get()
            assert first.name == again.name and first.seconds > 1.0 and first.model == "m"
            assert again.elapsed_s > first.elapsed_s >= 0.0
            await start_reporter.end()
            over = router.received.get_nowait()
            assert (over.name, over.seconds) == (first.name, 0.0)
        assert router.received.empty()


async def test_failed_start_is_withdrawn_if_a_router_listens() -> None:
    async with serving() as (router, address):
        try:
            async with StartReporter("m", [address], GRPC):
                raise ValueError
        except ValueError:
            pass
        assert [router.received.get_nowait().seconds > 0 for _ in range(2)] == [True, False]
    async with StartReporter("m", ["127.0.0.1:1"], GRPC):
        pass
