"""What one request's pieces are taken from, whichever router makes them, without a task that waits
for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everlift.v1 import inference_pb2 as pb
from router.gateway.closable import Closable
from router.gateway.pieces import Pieces


class Carried:
    """Pieces that another router makes, as Pieces are taken: one of them waits here."""

    def __init__(self, pieces: Closable[pb.GenerateResponse]) -> None:
        self.on_more: Callable[[], None] = lambda: None
        self.is_over = False
        self._pieces = pieces
        self._coming: asyncio.Task[pb.GenerateResponse] | None = None

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
            self.is_over = True
            return None

    async def _read(self) -> pb.GenerateResponse:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._pieces.aclose()


Source = Pieces | Carried


def source_of(pieces: Closable[pb.GenerateResponse]) -> Source:
    return pieces if isinstance(pieces, Pieces) else Carried(pieces)
