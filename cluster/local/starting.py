"""A worker's word to the routers that it starts, while there is no Ray to carry it: who waits for
it is told so."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from everlift import logs
from everlift.transport import Transport
from everlift.v1 import session_pb2, session_pb2_grpc

log = logs.get(__name__)

#: How often it is said.
_SAY_S = 1.0
#: To import torch holds up the event loop for seconds.
_HOLDS_S = 15.0
_TIMEOUT_S = 1.0


class Starting:
    """Inside it is said, until its ``end``. Any router will do: it tells the leader. What they do
    not hear changes nothing for the worker."""

    def __init__(self, routers: Sequence[str], transport: Transport) -> None:
        self._name = secrets.token_hex(8)
        self._began = time.monotonic()
        self._routers = routers
        self._transport = transport
        self._saying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # What comes next may hold up the loop before a task has its turn.
        await self._say(_HOLDS_S)
        self._saying = asyncio.create_task(self._say_on())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """It is ready, or will never be. Once more changes nothing."""
        if self._saying is not None:
            self._saying.cancel()
            await asyncio.gather(self._saying, return_exceptions=True)
            self._saying = None
            await self._say(0.0)

    async def _say_on(self) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            await self._say(_HOLDS_S)

    async def _say(self, seconds: float) -> None:
        elapsed_s = time.monotonic() - self._began
        start = session_pb2.WorkerStart(name=self._name, seconds=seconds, elapsed_s=elapsed_s)
        for router in self._routers:
            async with self._transport.channel(router) as channel:
                stub = session_pb2_grpc.RouterInternalStub(channel)
                try:
                    await stub.TellStart(start, timeout=_TIMEOUT_S)
                    return
                except grpc.aio.AioRpcError as error:
                    log.debug("start not told", router=router, code=error.code().name)
