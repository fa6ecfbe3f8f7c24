"""What one client reads of a request: taken piece by piece, or waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from everlift.v1 import inference_pb2 as pb
from router.gateway.live import LiveRequest
from router.gateway.reading import Reading


class Pieces(AsyncIterator[pb.GenerateResponse]):
    """From its making on the request has a reader, until it is closed: ``left`` is called then.

    A server that knows when its client can have more takes what there is (``take``), and is told
    by ``on_more`` when there may be more: thousands of streams need no task of their own. Others
    iterate. What is not read is not made.
    """

    def __init__(self, live: LiveRequest, reading: Reading, left: Callable[[], None]) -> None:
        self._live = live
        self._reading = reading
        self._left = left
        self._head: pb.GenerateResponse | None = reading.head()
        self._came = asyncio.Event()
        #: called in the event loop's thread, and must not block
        self.on_more: Callable[[], None] = self._came.set
        self._is_closed = False
        live.join(self._wake)

    def _wake(self) -> None:
        self.on_more()

    @property
    def is_over(self) -> bool:
        """The last piece was taken, or it is closed."""
        return self._reading.is_at_end or self._is_closed

    def take(self) -> pb.GenerateResponse | None:
        """The next piece that can be read now, if there is one. Raises the request's error where
        it ends with one and all before it was taken, and DataLoss as Reading does."""
        if (piece := self._head) is not None:
            self._head = None
        elif not self._is_closed:
            piece = self._reading.next()
            if piece is None and self._live.error is not None and not self.is_over:
                raise self._live.error.with_traceback(None)
        return piece

    async def __anext__(self) -> pb.GenerateResponse:
        while True:
            self._came.clear()
            if (piece := self.take()) is not None:
                return piece
            if self.is_over:
                raise StopAsyncIteration
            await self._came.wait()

    async def aclose(self) -> None:
        """The client is gone, or has all."""
        if not self._is_closed:
            self._is_closed = True
            self._live.part(self._wake)
            self._left()
            self._came.set()
