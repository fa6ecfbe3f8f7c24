"""Output of a GenerateMany call: several independent requests in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from everlift import error_details
from everlift.errors import EverliftError, InvalidRequest, OutOfRange, TooManyRequests
from everlift.messages import MAX_REQUESTS
from everlift.v1 import inference_pb2 as pb
from router.api.failures import answerable
from router.api.opened import Opened
from router.requests.stream import Source

#: Maximum number of requests of one call that are opened concurrently. By default a router has at
#: most this many connections to a ledger with several servers, so that more would only delay other
#: calls.
_MAX_CONCURRENT_OPENS = 32
#: Size in bytes from which no further piece is added to a message. A single piece may be larger.
_MESSAGE_BYTES = 256 << 10

Open = Callable[[pb.GenerateRequest], Awaitable[Opened]]


def check_count(num_requests: int) -> None:
    """Check the number of requests in a call.

    Raises TooManyRequests if there are more than MAX_REQUESTS, and OutOfRange if there is none.
    """
    kind = TooManyRequests if num_requests > MAX_REQUESTS else OutOfRange
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise kind(f"a call has 1 to {MAX_REQUESTS} requests", field="requests")


def check_names(requests: Sequence[pb.GenerateRequest]) -> None:
    """Check that no request id occurs twice. Raises InvalidRequest if one does."""
    named = [request.request_id for request in requests if request.request_id]
    if len(set(named)) < len(named):
        raise InvalidRequest("two requests of the call have the same request_id", field="requests")


class MergedStream(AsyncIterator[pb.GenerateManyResponse]):
    """Merged output of several requests, as one stream of messages.

    A message consists of pieces, each of which has output of one request. The stream ends when the
    last request has ended. Closing it closes the streams of all requests.
    Requests take turns in the order in which their output became available. A message is only
    created when it is read.
    """

    def __init__(self, requests: Sequence[pb.GenerateRequest], open_: Open) -> None:
        """Create the stream, and begin to open each request by calling ``open_``.

        ``requests`` must have passed ``check_count`` and ``check_names``. The error of a request
        that cannot be opened becomes a piece of a message.
        """
        self._open = open_
        self._open_slots = asyncio.Semaphore(_MAX_CONCURRENT_OPENS)
        self._wakeup = asyncio.Event()
        self._pieces: dict[int, Source] = {}
        #: sources of the requests that have ended, still to be closed
        self._ended: list[Source] = []
        #: indices of the requests that may have a piece to read, in the order in which they became
        #: ready
        self._ready: dict[int, None] = {}
        #: errors of the requests that could not be opened, not sent yet
        self._failures: list[pb.ManyPiece] = []
        self._opening = [
            asyncio.create_task(self._open_request(index, request))
            for index, request in enumerate(requests)
        ]
        self._num_unfinished = len(requests)

    async def __anext__(self) -> pb.GenerateManyResponse:
        while True:
            self._wakeup.clear()
            message = self._take()
            await self._close_ended()
            if message.pieces:
                return message
            if not self._num_unfinished:
                raise StopAsyncIteration
            await self._wakeup.wait()

    async def aclose(self) -> None:
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self._ended.extend(self._pieces.values())
        await self._close_ended()

    async def _close_ended(self) -> None:
        while self._ended:
            await self._ended.pop().aclose()

    async def _open_request(self, index: int, request: pb.GenerateRequest) -> None:
        try:
            async with self._open_slots:
                opened = await self._open(request)
        except Exception as error:
            self._failures.append(_failure(index, answerable(error)))
            self._wakeup.set()
            return
        self._pieces[index] = opened.pieces
        self._pieces[index].on_more = partial(self._mark_ready, index)
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        if index in self._pieces:
            self._ready[index] = None
            self._wakeup.set()

    def _take(self) -> pb.GenerateManyResponse:
        message = pb.GenerateManyResponse(pieces=self._failures)
        self._num_unfinished -= len(self._failures)
        self._failures.clear()
        num_bytes = 0
        while self._ready and num_bytes < _MESSAGE_BYTES:
            index = next(iter(self._ready))
            del self._ready[index]
            if (piece := self._next(index)) is not None:
                message.pieces.append(piece)
                num_bytes += piece.ByteSize()
        return message

    def _next(self, index: int) -> pb.ManyPiece | None:
        pieces = self._pieces[index]
        try:
            piece = pieces.poll()
        except Exception as error:
            self._end(index)
            return _failure(index, answerable(error))
        if pieces.is_over:
            self._end(index)
        elif piece is not None:
            self._ready[index] = None
        return None if piece is None else pb.ManyPiece(index=index, piece=piece)

    def _end(self, index: int) -> None:
        self._num_unfinished -= 1
        self._ended.append(self._pieces.pop(index))


def _failure(index: int, error: EverliftError) -> pb.ManyPiece:
    failure = pb.Failure(
        slug=error.slug, message=error_details.cause(error), retry_after_s=error.retry_after_s
    )
    return pb.ManyPiece(index=index, failure=failure)
