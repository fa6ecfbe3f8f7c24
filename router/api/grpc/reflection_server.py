"""``grpc.reflection`` on a gateway's public port: what grpcurl and other tools ask a server instead
of reading its .proto files.

Versions v1 and v1alpha of the protocol have the same messages. What is told is public.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection

import grpc
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.reflection import aio

from router.api.grpc.handlers import Call, Handlers, parse
from router.auth.authenticator import OPEN
from router.auth.caller import Scope

_VERSIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


class ReflectionServer:
    def __init__(self, services: Collection[str]) -> None:
        """``services`` are the names of those to tell of; their modules have been imported."""
        self._servicer = aio.ReflectionServicer(services)

    async def converse(
        self, messages: AsyncIterator[bytes], call: Call
    ) -> AsyncGenerator[pb.ServerReflectionResponse, None]:
        requests = (parse(pb.ServerReflectionRequest, data) async for data in messages)
        async for response in self._servicer.ServerReflectionInfo(requests, call.context):
            yield response

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """To be added to a grpc.aio server."""
        # A tool that has no credential yet asks what there is.
        method = Handlers(OPEN).bidirectional(self.converse, Scope.METRICS)
        return tuple(
            grpc.method_handlers_generic_handler(
                f"{version}.ServerReflection", {"ServerReflectionInfo": method}
            )
            for version in _VERSIONS
        )
