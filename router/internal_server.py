"""Server at the router's internal address, for workers and other routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from everlift import wire
from everlift.errors import EverliftError
from everlift.v1 import chaos_pb2, session_pb2, session_pb2_grpc
from router.console.counting import Counting
from router.faults.injector import Chaos
from router.heartbeat import Heartbeat
from router.leader.leader import Leader

Context = grpc.aio.ServicerContext[Any, Any]


class InternalServer(session_pb2_grpc.RouterInternalServicer):
    def __init__(
        self, heartbeat: Heartbeat, leader: Leader, chaos: Chaos, counting: Counting
    ) -> None:
        self._heartbeat = heartbeat
        self._leader = leader
        self._chaos = chaos
        self._counting = counting

    async def Announce(
        self, request: session_pb2.AnnounceRequest, context: Context
    ) -> session_pb2.AnnounceResponse:
        try:
            await self._heartbeat.announce(request.worker)
        except EverliftError as error:
            await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
        return session_pb2.AnnounceResponse()

    async def TellStart(
        self, request: session_pb2.WorkerStart, context: Context
    ) -> session_pb2.TellStartResponse:
        self._heartbeat.worker_starts(request)
        return session_pb2.TellStartResponse()

    async def Count(
        self, request: session_pb2.CountRequest, context: Context
    ) -> session_pb2.Counts:
        return self._counting.counts()

    async def Inject(self, request: chaos_pb2.Fault, context: Context) -> chaos_pb2.InjectResponse:
        try:
            await self._chaos.apply(request)
        except EverliftError as error:
            await wire.abort(context, error)
        return chaos_pb2.InjectResponse(target=request.target)

    async def Admission(
        self, messages: AsyncIterator[session_pb2.GatewayMessage], context: Context
    ) -> AsyncIterator[session_pb2.LeaderMessage]:
        async with aclosing(self._leader.serve_stream(messages)) as answers:
            async for message in answers:
                yield message
