"""Servers of ``grpc.health.v1.Health`` and of gRPC reflection on a router's public port.

    service                  SERVING means
    ""                       this router accepts new requests (readiness)
    everlift.v1.Inference    the same; also for every other service of the router
    live                     this process answers (liveness)

A router accepts no new requests while it is stopping, while its ledger is unavailable or lacks the
required durability, and while another cluster is the active one (router/active.py). Its running
requests continue, and clients can attach to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from router.api.grpc.handlers import Call, Handlers, parse
from router.auth.caller import OPEN, Scope
from router.requests.manager import Requests

_NAME = pb.DESCRIPTOR.services_by_name["Health"].full_name
_OVERALL = ""
_LIVENESS = "live"
#: Seconds between two checks of the readiness. Watchers are notified of a change at the next check.
_POLL_INTERVAL_S = 0.1


class HealthServer:
    def __init__(self, requests: Requests, services: Collection[str]) -> None:
        """Create the server; ``services`` are the names of the router's other services."""
        self._requests = requests
        self._readiness = frozenset({_OVERALL, _NAME, *services})
        # One timer checks the readiness for all watchers.
        self._num_watching = 0
        self._timer: asyncio.TimerHandle | None = None
        self._was_accepting = False
        self._changed = asyncio.Event()

    def status(self, service: str) -> pb.HealthCheckResponse:
        return self._status(service, self._requests.accepts_requests)

    def _status(self, service: str, accepts_requests: bool) -> pb.HealthCheckResponse:
        if service == _LIVENESS or (service in self._readiness and accepts_requests):
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)
        if service in self._readiness:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.NOT_SERVING)
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)

    async def check(self, data: bytes, call: Call) -> pb.HealthCheckResponse:
        answer = self.status(parse(pb.HealthCheckRequest, data).service)
        if answer.status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            await call.context.abort(grpc.StatusCode.NOT_FOUND, "this router has no such service")
        return answer

    async def watch(self, data: bytes, call: Call) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        service, last_sent = parse(pb.HealthCheckRequest, data).service, None
        self._num_watching += 1
        try:
            if self._timer is None:
                self._tick()
            while True:
                self._refresh()
                changed = self._changed
                if (answer := self._status(service, self._was_accepting)) != last_sent:
                    last_sent = answer
                    yield answer
                await changed.wait()
        finally:
            self._num_watching -= 1

    def _tick(self) -> None:
        self._timer = None
        if self._num_watching:
            self._timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._tick)
            self._refresh()

    def _refresh(self) -> None:
        if (accepts_requests := self._requests.accepts_requests) != self._was_accepting:
            self._was_accepting = accepts_requests
            self._changed.set()
            self._changed = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers to add to a gRPC server."""
        # Probes have no credentials.
        handlers = Handlers(OPEN)
        methods = {
            "Check": handlers.unary(self.check, Scope.METRICS),
            "Watch": handlers.streaming(self.watch, Scope.METRICS),
        }
        return grpc.method_handlers_generic_handler(_NAME, methods)


_VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


class ReflectionServer:
    def __init__(self, services: Collection[str]) -> None:
        """Create the server; ``services`` are the full names of the services to list.

        The Python modules generated for these services must have been imported.
        """
        self._servicer = aio.ReflectionServicer(services)

    async def converse(
        self, messages: AsyncIterator[bytes], call: Call
    ) -> AsyncGenerator[reflection_pb2.ServerReflectionResponse, None]:
        requests = (parse(reflection_pb2.ServerReflectionRequest, data) async for data in messages)
        async for response in self._servicer.ServerReflectionInfo(requests, call.context):
            yield response

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers to add to a gRPC server."""
        # Tools use reflection before they have a credential.
        method = Handlers(OPEN).bidirectional(self.converse, Scope.METRICS)
        return tuple(
            grpc.method_handlers_generic_handler(
                f"{version}.ServerReflection", {"ServerReflectionInfo": method}
            )
            for version in _VERSIONS
        )
