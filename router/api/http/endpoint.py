"""Endpoint of the HTTP server: authorisation, request bodies, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everlift import logs
from everlift.errors import (
    BodyTooSlow,
    EverliftError,
    MessageTooLarge,
    MethodNotAllowed,
    UnsupportedMediaType,
)
from router.api.http import body, errors
from router.api.http.fields import F, parse
from router.api.http.writer import encode
from router.api.service import X_REQUEST_ID, header_request_id
from router.auth import caller as callers
from router.auth.caller import ANYONE, Authenticator, Caller
from router.event_loop import now

log = logs.get_logger(__name__)

T = TypeVar("T")
_BODY_TIMEOUT_S = 60.0
#: Longest body that is parsed in the event loop. A thread lets the event loop run between the steps
#: of the parser, each of which takes up to 1.5 ms for a body of 1 MB.
INLINE_BYTES = 1 << 16


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


async def join_parts(parts: Iterable[str]) -> bytes:
    """Return the joined ``parts`` in UTF-8; other tasks of the event loop run between the parts."""
    written: list[bytes] = []
    for part in parts:
        written.append(part.encode())
        await asyncio.sleep(0)
    return b"".join(written)


@dataclass(slots=True)
class Call:
    """HTTP request as a handler receives it, after authentication.

    ``arrived_at`` is the time at which its request line and headers were read
    (``event_loop.now()``). Names in ``headers`` are in lower case.

    ``params`` maps names of fields in everlift.messages to the client's names, for error messages.
    ``response_headers`` are headers that are added to the response, even if it is an error. A
    handler sets both as soon as it knows them.
    """

    request: Request
    caller: Caller
    headers: Mapping[str, str]
    max_body_bytes: int
    arrived_at: float
    params: Mapping[str, str] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)

    async def fields(self, kind: type[F]) -> F:
        """Return the body, parsed as ``kind``. Raises InvalidRequest if the body is invalid."""
        fields = parse(kind, await self.json())
        # Errors of ``parse`` name fields as the body does; later errors need this map.
        self.params = fields.params
        return fields

    async def json(self) -> body.Json:
        """Return the body as a JSON object.

        Raises InvalidRequest or a subclass if the body is malformed, too large or compressed,
        arrives too slowly, or has a media type other than application/json. A missing media type is
        accepted.
        """
        self._check_media_type()
        data = await self._read()
        if len(data) <= INLINE_BYTES:
            return body.parse(data)
        return await asyncio.to_thread(body.parse, data)

    def _check_media_type(self) -> None:
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in ("application/json", ""):
            raise UnsupportedMediaType("the body must be application/json")
        self.check_encoding()

    def check_encoding(self) -> None:
        """Check that the body is not compressed. Raises UnsupportedMediaType."""
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMediaType("the body must not be compressed")

    async def _read(self) -> bytes:
        if int(self.headers.get("content-length", "0")) > self.max_body_bytes:
            raise self._too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for chunk in self.request.stream():
                    data += chunk
                    if len(data) > self.max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
        return bytes(data)

    def _too_large(self) -> MessageTooLarge:
        return MessageTooLarge(
            f"the body is longer than {self.max_body_bytes} bytes (router.max_body_bytes)"
        )


Handler = Callable[[Call], Awaitable[ASGIApp]]
#: Function that returns the body of an error response; see ``errors.described`` for the arguments.
DescribeError = Callable[[EverliftError, Mapping[str, str]], Mapping[str, Any]]
ANY_METHOD = "*"


class Endpoint:
    """ASGI application for one path, with the handlers of its HTTP methods.

    The handler of GET also answers HEAD, unless HEAD has its own. The handler of ANY_METHOD answers
    all methods that have no other handler. The caller's key must have one of the ``scopes``; if
    there are none, no key is required.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        handlers: Mapping[str, Handler],
        scopes: tuple[callers.Scope, ...],
        max_body_bytes: int,
        describe: DescribeError = errors.described,
    ) -> None:
        self._authenticator = authenticator
        self._handlers = handlers
        self._scopes = scopes
        self._max_body_bytes = max_body_bytes
        self._describe = describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at, request = now(), Request(scope, receive)
        call = Call(request, ANYONE, _headers(request), self._max_body_bytes, arrived_at)
        if x_request_id := header_request_id(call.headers):
            call.response_headers[X_REQUEST_ID] = x_request_id
        response = await self._answer(call)
        if response is not None:
            await response(scope, receive, _with_headers(call.response_headers, send))

    async def _answer(self, call: Call) -> ASGIApp | None:
        try:
            handler = self._handler(call)
            if self._scopes:
                call.caller = self._authenticator.admit(call.headers)
                call.caller.check(*self._scopes)
            return await handler(call)
        except (Disconnected, ClientDisconnect):
            return None
        except EverliftError as error:
            return self._refusal(error, call)
        except Exception:
            log.exception("unexpected error in an HTTP request", path=call.request.url.path)
            unknown = EverliftError("internal error; see the router's log")
            return self._refusal(unknown, call)

    def _refusal(self, error: EverliftError, call: Call) -> JsonResponse:
        body = self._describe(error, call.params)
        return JsonResponse(body, error.http_status, errors.headers(error))

    def _handler(self, call: Call) -> Handler:
        """Return the handler of the call's method. Raises MethodNotAllowed."""
        method = call.request.method
        for name in (method, "GET" if method == "HEAD" else method, ANY_METHOD):
            if name in self._handlers:
                return self._handlers[name]
        methods = [*self._handlers]
        allowed = [*methods, "HEAD"] if "GET" in methods else methods
        call.response_headers["allow"] = ", ".join(allowed)
        raise MethodNotAllowed(f"this path needs the method {' or '.join(methods)}")


class Disconnected(Exception):
    """Raised when the client has disconnected."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, unless the client disconnects first.

    In that case ``work`` is cancelled and Disconnected is raised. The request's body must have been
    read.
    """
    working, disconnect = (
        asyncio.create_task(work),
        asyncio.create_task(_wait_for_disconnect(receive)),
    )
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(headers: Mapping[str, str], send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in headers.items()]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return send_with_headers


def _headers(request: Request) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers
