"""gRPC server of ``everlift.v1.Inference``, Everlift's own API."""

from __future__ import annotations

from typing import TypeVar

import grpc

from everlift.errors import EverliftError, InvalidRequest, OutOfRange
from everlift.messages import MAX_REQUESTS
from everlift.request_id import is_request_id
from everlift.trace_context import TRACERESPONSE
from everlift.v1 import inference_pb2 as pb
from router.api import service
from router.api.grpc.handlers import Call, Handlers, parse
from router.api.opened import Opened
from router.api.service import Inference
from router.api.status import Status
from router.auth.caller import Authenticator, Scope
from router.requests.stream import Closable, is_relayed
from router.requests.timing import Journal

#: Size in bytes of a fixed-size field, by protobuf wire type.
_FIXED = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
#: Maximum length of a varint, in bytes.
_MAX_VARINT_BYTES = 10


def count(data: bytes, max_fields: int) -> int:
    """Return the number of top-level fields of an encoded protobuf message, without parsing it.

    Counting stops at the first invalid field, which is not counted. Counting also stops when more
    than ``max_fields`` fields were found, with the result ``max_fields`` + 1.
    """
    at = found = 0
    while at < len(data) and found <= max_fields:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LENGTH:
            length, at = _varint(data, at)
            at += length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            break
        found += at <= len(data)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return value, len(data) + 1


M = TypeVar("M", pb.GenerateRequest, pb.GenerateManyRequest)


class InferenceServer:
    """Server of ``everlift.v1.Inference`` in one router."""

    def __init__(self, inference: Inference, status: Status) -> None:
        self._inference = inference
        self._status = status

    async def generate(self, data: bytes, call: Call) -> Opened:
        message = self._submitted(pb.GenerateRequest, data)
        try:
            opened = await self._inference.generate(
                call.caller, message, call.headers, Journal(call.arrived_at), call.timeout_s
            )
        except Exception:
            # The id of a rejected request may be invalid; an invalid id is not returned.
            if is_request_id(message.request_id):
                call.initial_metadata[service.IDEMPOTENCY_KEY] = message.request_id
            raise
        return _with_metadata(call, opened)

    def generate_many(self, data: bytes, call: Call) -> Closable[pb.GenerateManyResponse]:
        message = self._submitted(pb.GenerateManyRequest, data, max_fields=2 * MAX_REQUESTS)
        return self._inference.generate_many(
            call.caller, message, call.headers, call.arrived_at, call.timeout_s
        )

    def _submitted(self, kind: type[M], data: bytes, max_fields: int | None = None) -> M:
        try:
            if max_fields is not None and count(data, max_fields) > max_fields:
                raise OutOfRange(f"the message has more than {max_fields} fields")
            message = parse(kind, data)
            requests = [message] if isinstance(message, pb.GenerateRequest) else message.requests
            if any(request.attachment for request in requests):
                raise InvalidRequest(
                    "attachment must be empty: routers alone use it", field="attachment"
                )
            return message
        except EverliftError as error:
            self._inference.count_rejected(error)
            raise

    async def attach(self, data: bytes, call: Call) -> Opened:
        message = parse(pb.AttachRequest, data)
        opened = await self._inference.attach(
            call.caller, message, is_relayed=is_relayed(call.headers)
        )
        return _with_metadata(call, opened)

    async def cancel(self, data: bytes, call: Call) -> pb.CancelResponse:
        return await self._inference.cancel(call.caller, parse(pb.CancelRequest, data))

    async def forget(self, data: bytes, call: Call) -> pb.ForgetResponse:
        return await self._inference.forget(call.caller, parse(pb.ForgetRequest, data))

    async def get_request(self, data: bytes, call: Call) -> pb.GetRequestResponse:
        return await self._inference.get_request(call.caller, parse(pb.GetRequestRequest, data))

    async def explain(self, data: bytes, call: Call) -> pb.Explanation:
        return await self._inference.explain(call.caller, parse(pb.ExplainRequest, data))

    async def tokenize(self, data: bytes, call: Call) -> pb.TokenizeResponse:
        return await self._inference.tokenize(call.caller, parse(pb.TokenizeRequest, data))

    async def detokenize(self, data: bytes, call: Call) -> pb.DetokenizeResponse:
        return await self._inference.detokenize(call.caller, parse(pb.DetokenizeRequest, data))

    async def list_models(self, data: bytes, call: Call) -> pb.ListModelsResponse:
        parse(pb.ListModelsRequest, data)
        response = self._inference.list_models()
        response.http_address = self._status.http_address
        return response

    async def list_requests(self, data: bytes, call: Call) -> pb.ListRequestsResponse:
        message = parse(pb.ListRequestsRequest, data)
        return await self._inference.list_requests(call.caller, message)

    async def get_status(self, data: bytes, call: Call) -> pb.GetStatusResponse:
        parse(pb.GetStatusRequest, data)
        return await self._status.describe(call.caller)

    def handlers(self, authenticator: Authenticator) -> grpc.GenericRpcHandler:
        """Return the handlers to add to a gRPC server."""
        handlers = Handlers(authenticator)
        # Administrators have access to the requests of all tenants.
        infer_or_admin = (Scope.INFER, Scope.ADMIN)
        methods = {
            "Generate": handlers.pieces(self.generate, Scope.INFER),
            "GenerateMany": handlers.streaming(self.generate_many, Scope.INFER),
            "Attach": handlers.pieces(self.attach, *infer_or_admin),
            "Cancel": handlers.unary(self.cancel, *infer_or_admin),
            "Forget": handlers.unary(self.forget, *infer_or_admin),
            "GetRequest": handlers.unary(self.get_request, *infer_or_admin),
            "Explain": handlers.unary(self.explain, *infer_or_admin),
            "Tokenize": handlers.unary(self.tokenize, Scope.INFER),
            "Detokenize": handlers.unary(self.detokenize, Scope.INFER),
            "ListModels": handlers.unary(self.list_models, Scope.INFER),
            "ListRequests": handlers.unary(self.list_requests, *infer_or_admin),
            "GetStatus": handlers.unary(self.get_status, Scope.METRICS, Scope.ADMIN),
        }
        name = pb.DESCRIPTOR.services_by_name["Inference"].full_name
        return grpc.method_handlers_generic_handler(name, methods)


def _with_metadata(call: Call, opened: Opened) -> Opened:
    call.initial_metadata[service.IDEMPOTENCY_KEY] = opened.request_id
    if opened.trace is not None:
        call.initial_metadata[TRACERESPONSE] = str(opened.trace)
    return opened
