"""A worker's word to the routers that it is ready, while there is no Ray to carry it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from everlift import logs
from everlift.errors import InvalidRequest
from everlift.transport import GRPC, Transport
from everlift.v1 import session_pb2, session_pb2_grpc

log = logs.get(__name__)

_TIMEOUT_S = 2.0
_RETRY_S = 0.1
#: Without a router for so long, it may be that nobody knows the worker any more.
_ALONE_S = 1.0
_LOOK_S = 0.1


class Announcer:
    """Any router will do: it writes the worker into the ledger, where the others find it."""

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
        """Until a router accepts the worker. Raises InvalidRequest when one refuses it."""
        while True:
            for router in self._routers:
                if await self._told(router):
                    return
            await asyncio.sleep(_RETRY_S)

    async def keep(self, is_alone: Callable[[], bool]) -> None:
        """Announces it again whenever no router has been connected for a while."""
        while True:
            await _lonely(is_alone)
            log.info("announcing again", worker_id=self._message.worker.worker_id)
            await self.announce()

    async def _told(self, router: str) -> bool:
        async with self._transport.channel(router) as channel:
            stub = session_pb2_grpc.RouterInternalStub(channel)
            try:
                await stub.Announce(self._message, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise InvalidRequest(error.details() or "") from None
                log.debug("not announced", router=router, code=error.code().name)
                return False
        return True


async def _lonely(is_alone: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    since = loop.time()
    while loop.time() < since + _ALONE_S:
        if not is_alone():
            since = loop.time()
        await asyncio.sleep(_LOOK_S)
