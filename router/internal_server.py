"""The router's internal address: workers announce themselves, gateways speak with the leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from everlift.errors import EverliftError
from everlift.v1 import session_pb2, session_pb2_grpc
from router.fleet import Fleet
from router.leader import Leader

Context = grpc.aio.ServicerContext[Any, Any]


class InternalServer(session_pb2_grpc.RouterInternalServicer):
    def __init__(self, fleet: Fleet, leader: Leader) -> None:
        self._fleet = fleet
        self._leader = leader

    async def Announce(
        self, request: session_pb2.AnnounceRequest, context: Context
    ) -> session_pb2.AnnounceResponse:
        try:
            await self._fleet.announce(request.worker)
        except EverliftError as error:
            await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
        return session_pb2.AnnounceResponse()

    async def Admission(
        self, messages: AsyncIterator[session_pb2.GatewayMessage], context: Context
    ) -> AsyncIterator[session_pb2.LeaderMessage]:
        outbox: asyncio.Queue[session_pb2.LeaderMessage] = asyncio.Queue()
        first = await anext(messages, session_pb2.GatewayMessage())
        gateway, send = first.router_id, outbox.put_nowait
        if not gateway or not self._leader.is_leading:
            yield session_pb2.LeaderMessage(resigned=True)
            return
        self._leader.connect(gateway, send)
        reader = asyncio.create_task(self._read(gateway, first, messages))
        # A line that is not read any more ends, and its gateway opens another one.
        reader.add_done_callback(lambda _: send(session_pb2.LeaderMessage(resigned=True)))
        try:
            while True:
                message = await outbox.get()
                yield message
                if message.resigned:
                    return
        finally:
            reader.cancel()
            self._leader.disconnect(gateway, send)

    async def _read(
        self,
        gateway: str,
        first: session_pb2.GatewayMessage,
        messages: AsyncIterator[session_pb2.GatewayMessage],
    ) -> None:
        self._leader.receive(gateway, first)
        async for message in messages:
            self._leader.receive(gateway, message)
