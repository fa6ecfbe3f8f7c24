"""gRPC handlers of the services on the clients' port.

The handlers parse the request bytes themselves, so that the answer to a malformed message states
the cause. They turn exceptions into gRPC statuses. The caller and its scope are checked before the
message is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from everlift import wire
from everlift.errors import InvalidRequest, NotUtf8
from router.api import http2
from router.api.failures import answerable
from router.api.opened import Opened
from router.api.service import X_REQUEST_ID, header_request_id
from router.auth.caller import Authenticator, Caller, Scope
from router.event_loop import now
from router.requests.stream import Closable, Source

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

#: Seconds by which a request's timeout is shorter than its call's deadline, so that the error with
#: its cause arrives before the client gives up.
_ANSWER_MARGIN_S = 0.05


@dataclass(slots=True)
class Call:
    """gRPC call whose caller is authenticated and has the required scope.

    ``arrived_at`` is the time at which the call arrived (``event_loop.now()``). Names in
    ``headers`` are in lower case. The client receives ``initial_metadata`` even if the handler
    fails. A handler that is wrapped by ``Handlers.pieces`` may add entries. The other methods of
    ``Handlers`` send the metadata before they call the handler.
    """

    caller: Caller
    headers: Mapping[str, str]
    context: Context
    arrived_at: float
    initial_metadata: dict[str, str] = field(default_factory=dict)

    @property
    def timeout_s(self) -> float | None:
        """Time that a request of this call may take, in seconds; None without a deadline."""
        remaining_s = self.context.time_remaining()
        return None if remaining_s is None else max(remaining_s - _ANSWER_MARGIN_S, remaining_s / 2)

    async def send_initial_metadata(self) -> None:
        """Send the initial metadata, unless it is empty."""
        if self.initial_metadata:
            await self.send_head()

    async def send_head(self) -> None:
        """Send the initial metadata now, even if it is empty.

        A proxy then sees response headers before the first message.
        """
        await self.context.send_initial_metadata(tuple(self.initial_metadata.items()))


def service_name(handlers: grpc.GenericRpcHandler) -> str:
    """Return the name of the service that ``handlers`` belong to."""
    assert isinstance(handlers, grpc.ServiceRpcHandler)
    name: str = handlers.service_name()
    return name


def parse(kind: type[M], data: bytes) -> M:
    """Parse ``data`` as a message of type ``kind``.

    Raises NotUtf8 if a text field is not UTF-8, and InvalidRequest if ``data`` is otherwise
    invalid. With protobuf 6, which reports no reason, the error is always InvalidRequest.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        # protobuf 7 reports the reason, but only in the text of its error.
        if "bad UTF-8" in str(error):
            raise NotUtf8(f"a text field of {name} is not UTF-8") from None
        raise InvalidRequest(f"the message is not a {name}") from None


class Handlers:
    """Factory of gRPC handlers whose callers are authenticated by ``authenticator``.

    Each method wraps a function ``handler``, which receives messages as bytes. A caller whose key
    has none of the ``scopes`` (permissions) is rejected.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def streaming(
        self, handler: Callable[[bytes, Call], Closable[Message]], *scopes: Scope
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that answers one message with a stream of messages."""

        async def start(messages: AsyncIterator[bytes], call: Call) -> Closable[Message]:
            return handler(await _single_message(messages), call)

        return self._stream(start, scopes)

    def bidirectional(
        self,
        handler: Callable[[AsyncIterator[bytes], Call], Closable[Message]],
        *scopes: Scope,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that reads a stream of messages and answers with another one.

        ``handler`` may read messages after its first answers.
        """

        async def start(messages: AsyncIterator[bytes], call: Call) -> Closable[Message]:
            return handler(messages, call)

        return self._stream(start, scopes)

    def _stream(
        self,
        start: Callable[[AsyncIterator[bytes], Call], Awaitable[Closable[Message]]],
        scopes: Sequence[Scope],
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(
            messages: AsyncIterator[bytes], context: Context
        ) -> AsyncIterator[Message]:
            try:
                call = self._admit(context, scopes)
                await call.send_head()
                async with aclosing(await start(messages, call)) as pieces:
                    async for piece in pieces:
                        yield piece
            except Exception as error:
                await _abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            answer, response_serializer=lambda message: message.SerializeToString()
        )

    def pieces(
        self, handler: Callable[[bytes, Call], Awaitable[Opened]], *scopes: Scope
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that streams the output of the request that ``handler`` opens.

        If ``handler`` sets ``Call.initial_metadata``, the metadata is sent before the first
        message. If ``handler`` raises an error, the metadata is sent before the error.
        """

        async def answer(messages: AsyncIterator[bytes], context: Context) -> None:
            try:
                call = self._admit(context, scopes)
                try:
                    opened = await handler(await _single_message(messages), call)
                finally:
                    await call.send_initial_metadata()
                async with aclosing(opened.pieces):
                    await _send(opened.pieces, context)
            except Exception as error:
                await _abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            answer, response_serializer=lambda message: message.SerializeToString()
        )

    def unary(
        self, handler: Callable[[bytes, Call], Awaitable[Message]], *scopes: Scope
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that answers one message with one message."""

        async def answer(messages: AsyncIterator[bytes], context: Context) -> Message | None:
            try:
                call = self._admit(context, scopes)
                await call.send_initial_metadata()
                return await handler(await _single_message(messages), call)
            except Exception as error:
                await _abort(context, error)
                return None

        return grpc.stream_unary_rpc_method_handler(
            answer, response_serializer=lambda message: message.SerializeToString()
        )

    def _admit(self, context: Context, scopes: Sequence[Scope]) -> Call:
        arrived_at, headers = now(), _headers(context)
        caller = self._authenticator.admit(headers)
        caller.check(*scopes)
        call = Call(caller, headers, context, arrived_at)
        if x_request_id := header_request_id(headers):
            call.initial_metadata[X_REQUEST_ID] = x_request_id
        return call


async def _send(pieces: Source, context: Context) -> None:
    if isinstance(context, http2.Call):
        await context.write_from(pieces)
        return
    async for piece in pieces:
        await context.write(piece)


def _headers(context: Context) -> Mapping[str, str]:
    headers: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers[key] = f"{headers[key]},{value}" if key in headers else value
    return headers


async def _single_message(messages: AsyncIterator[bytes]) -> bytes:
    """Return the message of a call that must have exactly one.

    Raises InvalidRequest if the call ends without a message. gRPC's own handlers for single
    messages would leave such a call without an answer. Further messages are not read.
    """
    async for data in messages:
        return data
    raise InvalidRequest("the call ended without a message")


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    answer = answerable(error)
    if isinstance(context, http2.Call):
        # The http2 server turns the error into a status.
        raise answer
    await wire.abort(context, answer)
