"""``grpc.health.v1.Health`` on a gateway's public port.

    ""                                this router takes new requests: whether to send any here
    everlift.v1.Inference             the same
    inference.GRPCInferenceService    the same
    live                              this process answers: whether to start another one instead

It takes none from the moment that it stops, and while its ledger is away; what it has goes on, and
can be attached to. Its messages have one field each, which on the wire is that of StringValue and
Int32Value: the package that has them asks for a newer grpcio and protobuf than we do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Protocol

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from everlift.v1 import inference_pb2 as pb
from router.gateway.caller import Scope
from router.gateway.door import OPEN
from router.gateway.handlers import Call, Handlers, parse
from router.gateway.kserve.v2 import open_inference_pb2

_NAME = "grpc.health.v1.Health"
_READINESS = (
    "",
    pb.DESCRIPTOR.services_by_name["Inference"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
_LIVENESS = "live"
#: Who watches hears of a change so soon.
_LOOK_S = 0.1


class ServingStatus(IntEnum):
    """As in the protocol."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class Readiness(Protocol):
    @property
    def takes_new(self) -> bool: ...


class HealthServer:
    def __init__(self, requests: Readiness) -> None:
        self._requests = requests

    def status(self, service: str) -> ServingStatus:
        if service in _READINESS:
            ready = self._requests.takes_new
            return ServingStatus.SERVING if ready else ServingStatus.NOT_SERVING
        known = service == _LIVENESS
        return ServingStatus.SERVING if known else ServingStatus.SERVICE_UNKNOWN

    async def check(self, data: bytes, call: Call) -> Int32Value:
        status = self.status(parse(StringValue, data).value)
        if status is ServingStatus.SERVICE_UNKNOWN:
            await call.context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return Int32Value(value=status)

    async def watch(self, data: bytes, call: Call) -> AsyncIterator[Int32Value]:
        service, told = parse(StringValue, data).value, None
        while True:
            if (status := self.status(service)) is not told:
                told = status
                yield Int32Value(value=status)
            await asyncio.sleep(_LOOK_S)

    def handlers(self) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        # Probes have no credentials.
        handlers = Handlers(OPEN)
        methods = {
            "Check": handlers.unary(self.check, Scope.METRICS),
            "Watch": handlers.streaming(self.watch, Scope.METRICS),
        }
        return grpc.method_handlers_generic_handler(_NAME, methods)
