"""``everlift.v1.Chaos``: faults on purpose, through any router of a cluster that allows them."""

from __future__ import annotations

import grpc

from everlift.v1 import chaos_pb2 as pb
from router.api.grpc.handlers import Call, Handlers, parse
from router.auth.authenticator import Door
from router.auth.caller import Scope
from router.faults.injector import Chaos


class ChaosServer:
    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    async def inject(self, data: bytes, call: Call) -> pb.InjectResponse:
        return pb.InjectResponse(target=await self._chaos.inject(parse(pb.Fault, data)))

    def handlers(self, door: Door) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        methods = {"Inject": Handlers(door).unary(self.inject, Scope.ADMIN)}
        name = pb.DESCRIPTOR.services_by_name["Chaos"].full_name
        return grpc.method_handlers_generic_handler(name, methods)
