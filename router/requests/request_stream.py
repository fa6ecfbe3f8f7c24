"""Client stream that continues when another router takes its request over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from everlift import logs
from everlift.errors import (
    DataLoss,
    EverliftError,
    ForgottenRequest,
    LedgerUnavailable,
    Moved,
    RouterStopping,
    UnknownRequest,
)
from everlift.v1 import inference_pb2 as pb
from router.event_loop import now
from router.requests.delivered import Delivered
from router.requests.stream import Source
from router.requests.submission import discarded_error

log = logs.get_logger(__name__)

#: Seconds for which a stream searches for the new owner of its request. The lease of a dead router
#: expires well before.
_RESUME_S = 10.0
#: Seconds before the first search. The delay doubles with each search, up to the maximum, because
#: each search reads the request from the ledger.
_RETRY_S = 0.05
_MAX_RETRY_S = 0.4

Reopen = Callable[[pb.AttachRequest], Awaitable[Source]]


class RequestStream(Source):
    """Stream of one request that continues when the request's owner changes.

    When the request leaves the router that the stream reads from, ``reopen`` is called with an
    AttachRequest and returns a source at the new owner. The stream then continues directly after
    the last piece (message) that the client received. If no new owner is found in time, the stream
    fails with the error of its last source.
    """

    def __init__(
        self,
        request_id: str,
        source: Source,
        reopen: Reopen,
        delivered: Delivered | None,
        *,
        was_submitted: bool = False,
        had_output: bool = False,
    ) -> None:
        """Create a stream that reads from ``source``.

        ``delivered`` records what the client has received. If it is None, the source provides this
        record when the stream has to be resumed. ``was_submitted`` states whether the client can
        submit the request again. ``had_output`` states whether the client has output from an
        earlier stream.
        """
        super().__init__()
        self._request_id = request_id
        self._source = source
        self._reopen = reopen
        self._delivered = delivered
        self._was_submitted = was_submitted
        self._had_output = had_output
        self._opening: asyncio.Task[Source] | None = None
        self._error: EverliftError | None = None
        #: time until which a new source is searched for; None once a source has delivered a piece
        self._deadline: float | None = None
        #: seconds before the next search for a source
        self._retry_s = _RETRY_S
        #: time at which the last source was found
        self._opened_at = now()
        source.on_more = self._wake

    def _wake(self) -> None:
        self.on_more()

    @property
    def is_over(self) -> bool:
        return self._opening is None and self._source.is_over

    def poll(self) -> pb.GenerateResponse | None:
        """Return the next piece that can be read now, or None.

        Raises the error with which the request or the stream fails.
        """
        try:
            piece = self._take() if self._opening is None or self._is_reopened() else None
        except UnknownRequest as error:
            raise self._unknown_error(error) from None
        if piece is None and self._error is not None and not self.is_over:
            raise self._error
        return piece

    def fail(self, error: EverliftError) -> None:
        """End the stream with ``error`` after the pieces that can be read now.

        If these pieces complete the output, the stream ends without an error.
        """
        self._error = error
        self._wake()

    def _is_reopened(self) -> bool:
        """Switch to the new source if the search for a new source has ended.

        Return True after the switch, and False while the search continues. Raises the error of a
        failed search, and RouterStopping if the search was cancelled.
        """
        assert self._opening is not None
        if not self._opening.done():
            return False
        opening, self._opening = self._opening, None
        if opening.cancelled():
            raise RouterStopping("this router is stopping: attach through another router")
        self._source = opening.result()
        self._opened_at = now()
        self._source.on_more = self._wake
        return True

    def _take(self) -> pb.GenerateResponse | None:
        try:
            piece = self._source.poll()
            if self._delivered is None:
                return piece
            while piece is not None:
                if (new := self._delivered.accept(piece)) is not None:
                    self._deadline, self._retry_s = None, _RETRY_S
                    return new
                piece = self._source.poll()
        except self._source.resumable as error:
            self._resume(error)
        return None

    def _resume(self, error: EverliftError) -> None:
        if self._delivered is None:
            self._delivered = self._source.delivered()
        time = now()
        if self._deadline is None or time - self._opened_at >= _RESUME_S:
            self._deadline, self._retry_s = time + _RESUME_S, _RETRY_S
            log.info(
                "stream searches for its request", request_id=self._request_id, cause=str(error)
            )
        if self._delivered is None or time >= self._deadline:
            raise error
        message = self._delivered.attach_request(self._request_id)
        self._opening = asyncio.create_task(self._find_source(message, self._deadline, error))
        self._opening.add_done_callback(lambda _: self._wake())

    async def _find_source(
        self, message: pb.AttachRequest, deadline: float, cause: EverliftError
    ) -> Source:
        """Search for the request's new source and return it.

        Raises ``cause`` if none is found before the deadline. An error of ``reopen`` other than
        Moved, LedgerUnavailable and TimeoutError ends the search and is raised at once.
        """
        await self._source.aclose()
        while True:
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
            try:
                async with asyncio.timeout(max(0.0, deadline - now())):
                    return await self._reopen(message)
            except (Moved, LedgerUnavailable, TimeoutError):
                if now() >= deadline:
                    raise cause from None

    def _unknown_error(self, error: UnknownRequest) -> EverliftError:
        """Return the error to raise when no router knows the stream's request any more.

        Return ``error`` if the request was erased. Otherwise, return DataLoss if the client has
        output, Moved if the client can submit the request again, or else ``error``.
        """
        if isinstance(error, ForgottenRequest):
            return error
        if self._had_output or (self._delivered is not None and self._delivered.has_output):
            return lost_output_error(error)
        return discarded_error() if self._was_submitted else error

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            [opened] = await asyncio.gather(self._opening, return_exceptions=True)
            self._opening = None
            if isinstance(opened, Source):
                await opened.aclose()
        await self._source.aclose()


def lost_output_error(error: UnknownRequest) -> DataLoss:
    """Return the error to raise if a request is unknown although the client has output of it."""
    return DataLoss(
        f"the cluster lost delivered output: {error}; the retention of the request may be over"
    )
