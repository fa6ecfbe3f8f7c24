"""Reports of a starting worker to the routers, and its registration afterwards, without Ray."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import grpc

from everlift import logs
from everlift.errors import InvalidRequest
from everlift.transport import GRPC, Transport
from everlift.v1 import session_pb2, session_pb2_grpc

log = logs.get_logger(__name__)

#: Seconds between two reports of a start.
_REPORT_INTERVAL_S = 1.0
#: Seconds for which a report is valid: importing torch blocks the event loop for seconds.
_REPORT_TTL_S = 15.0
_TIMEOUT_S = 1.0


class StartReporter:
    """Context manager that periodically reports to a router that a worker is starting.

    It reports from its entry until ``end`` or its exit. Each report is sent to the first of
    ``routers`` that answers; this router forwards it to the leader. If no router answers, the
    report is lost, and the start of the worker continues.
    """

    def __init__(self, model: str, routers: Sequence[str], transport: Transport) -> None:
        """Create the reporter; ``model`` is the name of the worker's model for clients."""
        self._model = model
        self._name = secrets.token_hex(8)
        self._started_at = time.monotonic()
        self._routers = routers
        self._transport = transport
        self._report_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # Sent at once, because the caller may block the event loop before the task runs.
        await self._report(_REPORT_TTL_S)
        self._report_task = asyncio.create_task(self._report_loop())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Report once that the start has ended, successfully or not. A second call does nothing."""
        if self._report_task is not None:
            self._report_task.cancel()
            await asyncio.gather(self._report_task, return_exceptions=True)
            self._report_task = None
            await self._report(0.0)

    async def _report_loop(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            await self._report(_REPORT_TTL_S)

    async def _report(self, seconds: float) -> None:
        elapsed_s = time.monotonic() - self._started_at
        start = session_pb2.WorkerStart(
            name=self._name, seconds=seconds, elapsed_s=elapsed_s, model=self._model
        )
        for router in self._routers:
            async with self._transport.channel(router) as channel:
                stub = session_pb2_grpc.RouterInternalStub(channel)
                try:
                    await stub.TellStart(start, timeout=_TIMEOUT_S)
                    return
                except grpc.aio.AioRpcError as error:
                    log.debug("start not reported", router=router, code=error.code().name)


_ANNOUNCER_TIMEOUT_S = 2.0
_RETRY_S = 0.1
#: Seconds without a connected router after which possibly no router knows the worker any more.
_DISCONNECTED_S = 1.0
_POLL_S = 0.1


class Announcer:
    """Sender of a worker's registration to one of the routers.

    The router writes the worker to the ledger, from which the other routers read it.
    """

    def __init__(
        self,
        info: session_pb2.WorkerInfo,
        routers: Sequence[str],
        transport: Transport = GRPC,
    ) -> None:
        self._message = session_pb2.AnnounceRequest(worker=info)
        self._routers = routers
        self._transport = transport

    async def announce(self) -> None:
        """Register the worker, and retry until a router accepts it.

        Raises InvalidRequest if a router rejects the worker.
        """
        while True:
            for router in self._routers:
                if await self._register(router):
                    return
            await asyncio.sleep(_RETRY_S)

    async def keep_registered(self, has_no_router: Callable[[], bool]) -> None:
        """Register the worker again each time it had no router for ``_DISCONNECTED_S`` seconds.

        ``has_no_router`` returns whether no router is connected to the worker. Runs until
        cancelled. Raises InvalidRequest if a router rejects the worker.
        """
        while True:
            await _wait_until_disconnected(has_no_router)
            log.info("registering again", worker_id=self._message.worker.worker_id)
            await self.announce()

    async def _register(self, router: str) -> bool:
        async with self._transport.channel(router) as channel:
            stub = session_pb2_grpc.RouterInternalStub(channel)
            try:
                await stub.Announce(self._message, timeout=_ANNOUNCER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise InvalidRequest(error.details() or "") from None
                log.debug("registration failed", router=router, code=error.code().name)
                return False
        return True


async def _wait_until_disconnected(has_no_router: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    since = loop.time()
    while loop.time() < since + _DISCONNECTED_S:
        if not has_no_router():
            since = loop.time()
        await asyncio.sleep(_POLL_S)
