"""A gateway's line to the leader: what waits goes up, dispatches come down.

The leader may be this very replica or another one, and may change; at each new line the leader is
told everything that waits here. While nobody leads, requests simply wait.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc

from everlift import logs
from everlift.channels import CLIENT_OPTIONS
from everlift.v1 import session_pb2, session_pb2_grpc
from router.leader import Leader
from router.outbox import Outbox

log = logs.get(__name__)


class Gateway(Protocol):
    """Who is at this end of the line."""

    def waiting(self) -> list[session_pb2.Waiting]: ...

    def dispatched(self, message: session_pb2.Dispatched) -> None: ...

    def refused(self, request_id: str) -> None: ...

    def adopt_soon(self, request_id: str) -> None: ...

    def stale(self, request_id: str) -> None: ...


class AdmissionLine:
    def __init__(self, router_id: str, leader: Leader) -> None:
        self._router_id = router_id
        self._local = leader
        self._gateway: Gateway | None = None
        self._outbox = Outbox(session_pb2.GatewayMessage())
        self._task: asyncio.Task[None] | None = None
        self._followed = ("", "")
        self.queued = 0

    def serve(self, gateway: Gateway) -> None:
        """Whose requests go over this line. Once, before the first leader is followed."""
        self._gateway = gateway

    def enqueue(self, waiting: session_pb2.Waiting) -> None:
        self._outbox.add(session_pb2.GatewayMessage(enqueue=[waiting]))

    def withdraw(self, request_id: str) -> None:
        self._outbox.add(session_pb2.GatewayMessage(withdraw=[request_id]))

    async def follow(self, leader: str, address: str) -> None:
        """Holds the line to this leader from now on; nothing happens if it does already."""
        if (leader, address) == self._followed and self._task and not self._task.done():
            return
        await self.close()
        self._followed = (leader, address)
        if leader == self._router_id and self._local.is_leading:
            self._task = asyncio.create_task(self._speak_locally())
        elif leader and leader != self._router_id:
            self._task = asyncio.create_task(self._speak_to(address))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _speak_locally(self) -> None:
        send = self._heard
        self._local.connect(self._router_id, send)
        try:
            async for message in self._new_outbox().messages():
                self._local.receive(self._router_id, message)
        finally:
            self._local.disconnect(self._router_id, send)

    async def _speak_to(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stub = session_pb2_grpc.RouterInternalStub(channel)
            try:
                async for message in stub.Admission(self._new_outbox().messages()):
                    self._heard(message)
            except grpc.aio.AioRpcError as error:
                log.info("line to the leader broke", address=address, code=error.code().name)
            finally:
                self._outbox.close()

    def _new_outbox(self) -> Outbox[session_pb2.GatewayMessage]:
        """Everything that waits, then what changes."""
        assert self._gateway is not None
        waiting = self._gateway.waiting()
        self._outbox = Outbox(
            session_pb2.GatewayMessage(router_id=self._router_id, enqueue=waiting)
        )
        return self._outbox

    def _heard(self, message: session_pb2.LeaderMessage) -> None:
        assert self._gateway is not None
        self.queued = message.queued
        for dispatched in message.dispatched:
            self._gateway.dispatched(dispatched)
        for request_id in message.refused:
            self._gateway.refused(request_id)
        for request_id in message.adopt:
            self._gateway.adopt_soon(request_id)
        for request_id in message.stale:
            self._gateway.stale(request_id)
        if message.resigned and self._task is not None:
            self._task.cancel()
