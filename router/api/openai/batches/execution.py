"""Execution of one line of a batch, by the handler that serves its endpoint to clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from everlift.errors import EverliftError, UnknownRequest
from everlift.messages import BATCH_PRIORITY
from everlift.v1 import inference_pb2 as pb
from router.api.http import errors
from router.api.http.endpoint import INLINE_BYTES, Call, Handler, JsonResponse
from router.api.http.writer import encode
from router.api.openai.batches.lines import Answer, Line
from router.api.openai.fields import MAX_PROMPTS
from router.api.service import IDEMPOTENCY_KEY, X_REQUEST_ID, Inference
from router.auth.caller import Caller
from router.event_loop import now

T = TypeVar("T")


class Execution:
    """Executor of lines; ``handlers`` are the handlers of the endpoints of batches.

    A line is submitted with a name of its own, so that a second submission continues the same
    request.
    """

    def __init__(self, inference: Inference, handlers: Mapping[str, Handler]) -> None:
        self._inference = inference
        self._handlers = handlers

    async def answer(self, caller: Caller, endpoint: str, batch_id: str, line: Line) -> Answer:
        """Submit a line, or attach to its request, and return the answer.

        Raises the EverliftErrors of the handler.
        """
        call = await self._call(caller, batch_id, line)
        response = await self._handlers[endpoint](call)
        # A line cannot set stream, so the response is whole.
        assert isinstance(response, Response)
        request_id = call.response_headers.get(IDEMPOTENCY_KEY, "")
        return Answer(response.status_code, bytes(response.body), request_id)

    def refused(self, batch_id: str, line: Line, error: EverliftError) -> Answer:
        """Return the answer to a line that failed with ``error``."""
        described = JsonResponse(errors.described(error, {}))
        return Answer(error.http_status, bytes(described.body), line_name(batch_id, line.number))

    async def cancel(self, caller: Caller, batch_id: str, number: int) -> None:
        """Cancel the requests of a line, unless they have ended. Raises LedgerUnavailable."""

        async def cancel(request_id: str) -> None:
            await self._inference.cancel(caller, pb.CancelRequest(request_id=request_id))

        await _for_requests(batch_id, number, cancel)

    async def forget(self, caller: Caller, batch_id: str, number: int) -> None:
        """Erase the requests of a line, so that the line may be submitted again.

        Unfinished requests are cancelled first. Raises LedgerUnavailable, and Moved if another
        router takes over a request.
        """

        async def forget(request_id: str) -> None:
            await self._inference.forget(caller, pb.ForgetRequest(request_id=request_id))

        await _for_requests(batch_id, number, forget)

    async def _call(self, caller: Caller, batch_id: str, line: Line) -> Call:
        fields = {**line.body, "priority": BATCH_PRIORITY, "on_disconnect": "continue"}
        body = await in_thread_if_long(line.num_bytes, lambda: encode(fields).encode())
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        headers = {IDEMPOTENCY_KEY: line_name(batch_id, line.number), X_REQUEST_ID: batch_id}
        receive = _Receiving(body)
        # The length of the line was limited as it was read. The body may be longer than the line,
        # because numbers can be written differently.
        return Call(Request(scope, receive), caller, headers, len(body), now())


async def _for_requests(batch_id: str, number: int, do: Callable[[str], Awaitable[None]]) -> None:
    """Call ``do`` with the id of each existing request of a line.

    ``do`` raises UnknownRequest for an id without a request. A line with several prompts has one
    request for each of them; the calls end at the first one that does not exist.
    """
    name = line_name(batch_id, number)
    with suppress(UnknownRequest):
        await do(name)
        return
    # A line with several prompts has a request for each.
    with suppress(UnknownRequest):
        for index in range(MAX_PROMPTS):
            await do(f"{name}:{index}")


async def in_thread_if_long(num_bytes: int, work: Callable[[], T]) -> T:
    """Return ``work()``, which encodes or parses about ``num_bytes`` of JSON.

    It runs in another thread if it may take long, that is, for more than INLINE_BYTES.
    """
    return work() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(work)


class _Receiving:
    """Client's side of a call: sends the body, and stays connected."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def line_name(batch_id: str, number: int) -> str:
    """Return the request id of a line.

    Each request of a line with several prompts has this id, followed by a colon and the index of
    its prompt.
    """
    return f"{batch_id}-{number}"
