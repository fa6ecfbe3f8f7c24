"""The gRPC end of the gateway: wire to requests, errors to statuses.

Handlers get bytes and parse them here, so that a message that cannot be parsed is answered with a
cause like every other bad request.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError, Message

from everlift import logs, wire
from everlift.channels import CLIENT_OPTIONS
from everlift.errors import EverliftError, InvalidRequest, NotUtf8
from everlift.messages import Submission, check_request_id
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.gateway.custody import Elsewhere
from router.gateway.requests import Requests, new_request_id
from router.gateway.status import Status
from router.ledger.entry import Entry, State

log = logs.get(__name__)

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

_WIRE_STATE = {state: pb.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in State}


class InferenceServer:
    """``everlift.v1.Inference`` over one gateway's requests."""

    def __init__(self, requests: Requests, status: Status) -> None:
        self._requests = requests
        self._status = status

    async def generate(self, data: bytes, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        message = _parse(pb.GenerateRequest, data)
        submission = Submission.from_proto(message, new_request_id(), secrets.randbits(63))
        await context.send_initial_metadata((("x-request-id", submission.request_id),))
        timeout_s = _earlier(submission.timeout_s, context.time_remaining())
        try:
            live = await self._requests.submit(submission, timeout_s)
        except Elsewhere as elsewhere:
            attach = pb.AttachRequest(request_id=submission.request_id)
            async for piece in _relay(elsewhere.address, attach):
                yield piece
            return
        async for piece in self._requests.stream(live):
            yield piece

    async def attach(self, data: bytes, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        message = _parse(pb.AttachRequest, data)
        try:
            live = await self._requests.attach(
                check_request_id(message.request_id), message.from_offsets
            )
        except Elsewhere as elsewhere:
            async for piece in _relay(elsewhere.address, message):
                yield piece
            return
        async for piece in self._requests.stream(live, message.from_offsets):
            yield piece

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        message = _parse(pb.CancelRequest, data)
        try:
            entry = await self._requests.cancel(check_request_id(message.request_id))
        except Elsewhere as elsewhere:
            return await _cancel_elsewhere(elsewhere.address, message)
        return pb.CancelResponse(state=_WIRE_STATE[entry.state])

    async def get_request(self, data: bytes, context: Context) -> pb.GetRequestResponse:
        message = _parse(pb.GetRequestRequest, data)
        stored = await self._requests.get(check_request_id(message.request_id))
        response = _described(stored.entry)
        response.model = stored.request.model
        response.prompt_tokens = len(stored.request.prompt_ids)
        return response

    async def get_status(self, data: bytes, context: Context) -> pb.GetStatusResponse:
        _parse(pb.GetStatusRequest, data)
        return self._status.describe()

    def handlers(self) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        methods = {
            "Generate": _streaming(self.generate),
            "Attach": _streaming(self.attach),
            "Cancel": _unary(self.cancel),
            "GetRequest": _unary(self.get_request),
            "GetStatus": _unary(self.get_status),
        }
        name = pb.DESCRIPTOR.services_by_name["Inference"].full_name
        return grpc.method_handlers_generic_handler(name, methods)


def _described(entry: Entry) -> pb.GetRequestResponse:
    return pb.GetRequestResponse(
        request_id=entry.request_id,
        state=_WIRE_STATE[entry.state],
        attempts=entry.attempts,
        worker_id=entry.worker,
        output_tokens=sum(entry.num_tokens),
        finish_reasons=[
            reason.value if reason else pb.FINISH_REASON_UNSPECIFIED
            for reason in entry.finish_reasons
        ],
        error_slug=entry.error_slug,
        error_message=entry.error_message,
    )


def _earlier(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)


async def _relay(address: str, attach: pb.AttachRequest) -> AsyncIterator[pb.GenerateResponse]:
    """The stream of another gateway. Its error becomes ours."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Attach(attach)
        while (piece := await wire.read(call)) is not None:
            yield piece


async def _cancel_elsewhere(address: str, message: pb.CancelRequest) -> pb.CancelResponse:
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Cancel(message)
        return await wire.answer(call, call)


# the wire


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.name
        if _is_well_formed(data):
            raise NotUtf8(f"a text field of {name} is not UTF-8") from None
        raise InvalidRequest(f"the message is not a {name}") from None


def _is_well_formed(data: bytes) -> bool:
    """Fields can be told apart, so it is what they hold that cannot be read."""
    try:
        fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))
    except DecodeError:
        return False
    return len(fields) > 0


def _streaming(
    handler: Callable[[bytes, Context], AsyncIterator[Message]],
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(data: bytes, context: Context) -> AsyncIterator[Message]:
        pieces = handler(data, context)
        try:
            async for piece in pieces:
                yield piece
        except Exception as error:
            await _abort(context, error)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    return grpc.unary_stream_rpc_method_handler(
        answer, response_serializer=lambda message: message.SerializeToString()
    )


def _unary(
    handler: Callable[[bytes, Context], Awaitable[Message]],
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(data: bytes, context: Context) -> Message | None:
        try:
            return await handler(data, context)
        except Exception as error:
            await _abort(context, error)
            return None

    return grpc.unary_unary_rpc_method_handler(
        answer, response_serializer=lambda message: message.SerializeToString()
    )


async def _abort(context: Context, error: Exception) -> None:
    """Answers with the error's status, slug and cause; an unforeseen one is logged, not shown."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, EverliftError):
        log.exception("unforeseen error")
        error = EverliftError("internal error; the router's log says more")
    await wire.abort(context, error)
