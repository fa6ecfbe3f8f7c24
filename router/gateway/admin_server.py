"""``everlift.v1.Admin``: what operators tell a cluster, through any of its routers."""

from __future__ import annotations

import grpc

from everlift import logs
from everlift.errors import UnknownWorker
from everlift.v1 import admin_pb2 as pb
from router import beginnings
from router.gateway.caller import Scope
from router.gateway.door import Door
from router.gateway.handlers import Call, Handlers, parse
from router.sessions import Sessions

log = logs.get(__name__)


class AdminServer:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def drain(self, data: bytes, call: Call) -> pb.DrainResponse:
        message = parse(pb.DrainRequest, data)
        worker_id = self._worker(message.worker_id)
        num_running = self._sessions.drain(worker_id)
        log.info("worker drains", worker_id=worker_id, num_running=num_running)
        return pb.DrainResponse(worker_id=worker_id, num_running=num_running)

    def _worker(self, beginning: str) -> str:
        """Raises UnknownWorker."""
        alive = (link.info.worker_id for link in self._sessions.links if link.is_up)
        worker_id = beginnings.find(beginning, alive)
        if worker_id is None:
            raise UnknownWorker(f"no worker {beginning!r} is connected")
        return worker_id

    def handlers(self, door: Door) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        methods = {"Drain": Handlers(door).unary(self.drain, Scope.ADMIN)}
        name = pb.DESCRIPTOR.services_by_name["Admin"].full_name
        return grpc.method_handlers_generic_handler(name, methods)
