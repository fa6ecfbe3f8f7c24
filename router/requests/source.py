"""Sources of the pieces of one request's stream, whichever router makes them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from everlift.errors import EverliftError, LedgerUnavailable, Moved, RouterStopping, Unreachable
from everlift.v1 import inference_pb2 as pb
from router.requests.closable import Closable
from router.requests.delivered import Delivered


class Source(AsyncIterator[pb.GenerateResponse]):
    """Pieces of one request's stream, which are taken or iterated.

    A server that knows when its client has room takes pieces (``take``), and is notified by
    ``on_more`` when there may be more: thousands of streams need no task of their own. Its owner
    closes it, also before its end."""

    #: Errors after which the same request can be read from another source.
    resumable: ClassVar[tuple[type[EverliftError], ...]] = ()

    def __init__(self) -> None:
        self._came = asyncio.Event()
        #: called in the event loop's thread, and must not block
        self.on_more: Callable[[], None] = self._came.set

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the last piece was taken, or the source is closed."""

    @abstractmethod
    def take(self) -> pb.GenerateResponse | None:
        """Return the next piece that can be read now. Raises what the request fails with."""

    @abstractmethod
    async def aclose(self) -> None: ...

    def delivered(self) -> Delivered | None:
        """Return the tokens that the client has; None if the source does not know them."""
        return None

    async def __anext__(self) -> pb.GenerateResponse:
        while True:
            self._came.clear()
            if (piece := self.take()) is not None:
                return piece
            if self.is_over:
                raise StopAsyncIteration
            await self._came.wait()


class Carried(Source):
    """Pieces that another router makes: one of them is awaited at a time."""

    resumable = (Moved, Unreachable, RouterStopping, LedgerUnavailable)

    def __init__(self, pieces: Closable[pb.GenerateResponse]) -> None:
        super().__init__()
        self._pieces = pieces
        self._is_over = False
        self._coming: asyncio.Task[pb.GenerateResponse] | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take(self) -> pb.GenerateResponse | None:
        if self._coming is None:
            self._coming = asyncio.create_task(self._read())
            self._coming.add_done_callback(lambda _: self.on_more())
        if not self._coming.done():
            return None
        coming, self._coming = self._coming, None
        try:
            return coming.result()
        except StopAsyncIteration:
            self._is_over = True
            return None

    async def _read(self) -> pb.GenerateResponse:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._pieces.aclose()
