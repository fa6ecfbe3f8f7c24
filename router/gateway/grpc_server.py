"""The gRPC end of the gateway: wire to requests, errors to statuses."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc

from everlift.errors import EverliftError, UnknownRequest
from everlift.messages import Submission, check_request_id
from everlift.trace_context import TRACERESPONSE, TraceContext
from everlift.transport import Transport
from everlift.v1 import inference_pb2 as pb
from router.clock import now
from router.gateway.custody import Elsewhere
from router.gateway.handlers import Context, parse, streaming, unary
from router.gateway.relay import Relay, is_relayed
from router.gateway.requests import Requests, given_up, new_request_id
from router.gateway.status import Status
from router.gateway.tracer import NO_TRACES, Tracer
from router.ledger.entry import Entry, Event, State

#: In a call's initial metadata.
_REQUEST_ID = "x-request-id"

_WIRE_STATE = {state: pb.RequestState.Value(f"REQUEST_STATE_{state.name}") for state in State}


class InferenceServer:
    """``everlift.v1.Inference`` over one gateway's requests."""

    def __init__(
        self,
        requests: Requests,
        status: Status,
        transport: Transport,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._requests = requests
        self._status = status
        self._relay = Relay(transport)
        self._tracer = tracer

    async def generate(self, data: bytes, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        coming = _Coming(self._tracer.begin(context.invocation_metadata() or ()))
        with self._telling_refusals(coming):
            message = parse(pb.GenerateRequest, data)
            coming.request_id = message.request_id or new_request_id()
            submission = Submission.from_proto(
                message, coming.request_id, secrets.randbits(63), coming.trace
            )
        timeout_s = _earlier(submission.timeout_s, context.time_remaining())
        try:
            with self._telling_refusals(coming):
                live = await self._requests.submit(submission, timeout_s)
        except Exception as error:
            await _greet(context, coming.request_id)
            if not isinstance(error, Elsewhere):
                raise
            attach = pb.AttachRequest(request_id=submission.request_id)
            try:
                async for piece in self._relay.attach(error.address, attach):
                    yield piece
            except UnknownRequest:
                raise given_up() from None
            return
        await _greet(context, live.request_id, live.request.trace)
        async for piece in self._requests.stream(live):
            yield piece

    @contextmanager
    def _telling_refusals(self, coming: _Coming) -> Iterator[None]:
        """What fails in it was never accepted."""
        try:
            yield
        except Elsewhere:
            raise
        except Exception as error:
            known = error if isinstance(error, EverliftError) else EverliftError()
            self._requests.turned_away(known)
            elapsed_s = now() - coming.since
            self._tracer.refused(coming.trace, elapsed_s, known.slug)
            raise

    async def attach(self, data: bytes, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        message = parse(pb.AttachRequest, data)
        try:
            live = await self._requests.attach(check_request_id(message.request_id))
        except Elsewhere as elsewhere:
            async for piece in self._relay.attach(elsewhere.address, message):
                yield piece
            return
        await _greet(context, live.request_id, live.request.trace)
        stream = self._requests.stream(
            live, message.from_offsets, message.digests, is_relayed=is_relayed(context)
        )
        async for piece in stream:
            yield piece

    async def cancel(self, data: bytes, context: Context) -> pb.CancelResponse:
        message = parse(pb.CancelRequest, data)
        try:
            entry = await self._requests.cancel(check_request_id(message.request_id))
        except Elsewhere as elsewhere:
            return await self._relay.ask(elsewhere.address, lambda stub: stub.Cancel, message)
        return pb.CancelResponse(state=_WIRE_STATE[entry.state])

    async def forget(self, data: bytes, context: Context) -> pb.ForgetResponse:
        message = parse(pb.ForgetRequest, data)
        try:
            await self._requests.forget(check_request_id(message.request_id))
        except Elsewhere as elsewhere:
            return await self._relay.ask(elsewhere.address, lambda stub: stub.Forget, message)
        return pb.ForgetResponse()

    async def get_request(self, data: bytes, context: Context) -> pb.GetRequestResponse:
        message = parse(pb.GetRequestRequest, data)
        stored, events = await self._requests.get(check_request_id(message.request_id))
        response = _described(stored.entry)
        response.model = stored.request.model
        response.prompt_tokens = len(stored.request.prompt_ids)
        response.priority = stored.request.priority
        if stored.request.trace is not None:
            response.trace_id = stored.request.trace.trace_id
        response.events.extend(map(_event, events))
        return response

    async def get_status(self, data: bytes, context: Context) -> pb.GetStatusResponse:
        parse(pb.GetStatusRequest, data)
        return self._status.describe()

    def handlers(self) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        methods = {
            "Generate": streaming(self.generate),
            "Attach": streaming(self.attach),
            "Cancel": unary(self.cancel),
            "Forget": unary(self.forget),
            "GetRequest": unary(self.get_request),
            "GetStatus": unary(self.get_status),
        }
        name = pb.DESCRIPTOR.services_by_name["Inference"].full_name
        return grpc.method_handlers_generic_handler(name, methods)


class _Coming:
    """A call to Generate that is not accepted yet."""

    def __init__(self, trace: TraceContext | None) -> None:
        self.trace = trace
        self.since = now()
        self.request_id = ""


async def _greet(context: Context, request_id: str, trace: TraceContext | None = None) -> None:
    """What a client knows first."""
    metadata = [(_REQUEST_ID, request_id)]
    if trace is not None:
        metadata.append((TRACERESPONSE, str(trace)))
    await context.send_initial_metadata(tuple(metadata))


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
        losses=entry.losses,
    )


def _event(event: Event) -> pb.RequestEvent:
    return pb.RequestEvent(time=event.time, move=event.move, detail=event.detail)


def _earlier(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)
