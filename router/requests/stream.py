"""The pieces of a request that this router owns or that has ended, as one client reads them."""

from __future__ import annotations

from collections.abc import Callable

from everlift.errors import Moved
from everlift.v1 import inference_pb2 as pb
from router.requests.delivered import Delivered
from router.requests.reading import Reading
from router.requests.request import LiveRequest
from router.requests.source import Source


class Pieces(Source):
    """Pieces of a live request, which has a reader until they are closed.

    ``left`` is called when they are closed. No piece is made before it is taken."""

    resumable = (Moved,)

    def __init__(self, live: LiveRequest, reading: Reading, left: Callable[[], None]) -> None:
        super().__init__()
        self._live = live
        self._reading = reading
        self._left = left
        self._head: pb.GenerateResponse | None = reading.head()
        self._is_closed = False
        live.join(self._wake)

    def _wake(self) -> None:
        self.on_more()

    @property
    def is_over(self) -> bool:
        return self._reading.is_at_end or self._is_closed

    def take(self) -> pb.GenerateResponse | None:
        """Return the next piece that can be read now.

        Raises the request's error when all pieces before it were taken, and DataLoss as Reading
        does."""
        if (piece := self._head) is not None:
            self._head = None
        elif not self._is_closed:
            piece = self._reading.next()
            if piece is None and self._live.error is not None and not self.is_over:
                raise self._live.error.with_traceback(None)
        return piece

    def delivered(self) -> Delivered | None:
        return self._reading.delivered()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._live.part(self._wake)
            self._left()
            self._came.set()
