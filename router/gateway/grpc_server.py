"""The gRPC end of the gateway: ``everlift.v1.Inference``."""

from __future__ import annotations

import grpc

from everlift.errors import EverliftError
from everlift.request_id import is_request_id
from everlift.trace_context import TRACERESPONSE, TraceContext
from everlift.v1 import inference_pb2 as pb
from router.gateway.caller import Scope
from router.gateway.door import Door
from router.gateway.handlers import Call, Handlers, parse
from router.gateway.inference import Inference, Opened
from router.gateway.relay import is_relayed
from router.gateway.status import Status

#: In a call's initial metadata.
_REQUEST_ID = "x-request-id"


class InferenceServer:
    """``everlift.v1.Inference`` over one gateway's requests."""

    def __init__(self, inference: Inference, status: Status) -> None:
        self._inference = inference
        self._status = status

    async def generate(self, data: bytes, call: Call) -> Opened:
        message = self._submitted(data)
        try:
            opened = await self._inference.generate(
                call.caller, message, call.headers, call.context.time_remaining()
            )
        except Exception:
            if is_request_id(message.request_id):
                await _greet(call, message.request_id)
            raise
        await _greet(call, opened.request_id, opened.trace)
        return opened

    def _submitted(self, data: bytes) -> pb.GenerateRequest:
        try:
            return parse(pb.GenerateRequest, data)
        except EverliftError as error:
            self._inference.turned_away(error)
            raise

    async def attach(self, data: bytes, call: Call) -> Opened:
        message = parse(pb.AttachRequest, data)
        opened = await self._inference.attach(
            call.caller, message, is_relayed=is_relayed(call.headers)
        )
        await _greet(call, opened.request_id, opened.trace)
        return opened

    async def cancel(self, data: bytes, call: Call) -> pb.CancelResponse:
        return await self._inference.cancel(call.caller, parse(pb.CancelRequest, data))

    async def forget(self, data: bytes, call: Call) -> pb.ForgetResponse:
        return await self._inference.forget(call.caller, parse(pb.ForgetRequest, data))

    async def get_request(self, data: bytes, call: Call) -> pb.GetRequestResponse:
        return await self._inference.get_request(call.caller, parse(pb.GetRequestRequest, data))

    async def get_status(self, data: bytes, call: Call) -> pb.GetStatusResponse:
        parse(pb.GetStatusRequest, data)
        return self._status.describe(call.caller)

    def handlers(self, door: Door) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        handlers = Handlers(door)
        methods = {
            "Generate": handlers.pieces(self.generate, Scope.INFER),
            "Attach": handlers.pieces(self.attach, Scope.INFER),
            "Cancel": handlers.unary(self.cancel, Scope.INFER),
            "Forget": handlers.unary(self.forget, Scope.INFER),
            "GetRequest": handlers.unary(self.get_request, Scope.INFER),
            "GetStatus": handlers.unary(self.get_status, Scope.METRICS),
        }
        name = pb.DESCRIPTOR.services_by_name["Inference"].full_name
        return grpc.method_handlers_generic_handler(name, methods)


async def _greet(call: Call, request_id: str, trace: TraceContext | None = None) -> None:
    """What a client knows first."""
    metadata = [(_REQUEST_ID, request_id)]
    if trace is not None:
        metadata.append((TRACERESPONSE, str(trace)))
    await call.context.send_initial_metadata(tuple(metadata))
