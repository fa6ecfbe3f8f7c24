"""Reader of one request's output, which continues at the next router if a connection is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from everlift import logs, wire
from everlift.client.received_output import Chunk, ReceivedOutput
from everlift.client.retries import RetryBudget, is_refusal, now
from everlift.client.routers import Metadata, Routers
from everlift.errors import (
    DataLoss,
    EverliftError,
    ForgottenRequest,
    OffsetOutOfRange,
    UnknownRequest,
    Unreachable,
)
from everlift.v1 import inference_pb2 as pb

log = logs.get_logger(__name__)

#: Seconds that are added to gRPC's own deadline, so that the router's answer to the deadline, which
#: contains a cause, arrives first.
DEADLINE_MARGIN_S = 1.0
_CANCEL_TIMEOUT_S = 2.0
#: Seconds after its first piece from which a call counts as a success even if it delivered no
#: chunk, for example while the request was queued. A success ends the series of failures before it.
_STEADY_S = 1.0


class OutputReader:
    """Reader of a request's output, which makes as many calls as needed.

    The reader calls Generate until a router has accepted the request, and Attach after that. If the
    request is refused after its acceptance, before any output, the reader calls Generate again. For
    an existing request, it calls only Attach.
    """

    def __init__(
        self,
        routers: Routers,
        reception: ReceivedOutput,
        budget: RetryBudget,
        submission: pb.GenerateRequest | None = None,
        metadata: Metadata = (),
        *,
        failed_router: str = "",
    ) -> None:
        """Create the reader of a new request, or of an existing one if ``submission`` is None.

        ``reception`` receives the output. ``metadata`` is sent with the submission. If the caller's
        own call failed before, ``failed_router`` is the address of the router that it was sent to,
        and ``recover`` must be called first.
        """
        self.is_closed = False
        #: whether a router may have received the submission from this reader
        self.has_submitted = False
        self._routers = routers
        self._reception = reception
        self._budget = budget
        self._submission = submission
        self._metadata = metadata
        self._router = failed_router
        self._receiving_since: float | None = None
        self._call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse] | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk, or None after the last one.

        Raises EverliftError if the request failed, or if retries did not succeed.
        """
        while not self.is_closed:
            try:
                chunk = self._reception.accept(await self._read())
            except EverliftError as error:
                await self.recover(error)
                continue
            if self._reception.is_complete:
                self.close()
            if chunk is not None:
                self._budget.report_success()
                return chunk
        return None

    def close(self) -> None:
        """Stop reading. The router then applies the request's ``on_disconnect``."""
        self.is_closed = True
        self._cancel_call()

    async def recover(self, error: EverliftError) -> None:
        """Wait until the request may be tried again after ``error``.

        If the request must not be tried again, closes the reader and raises the EverliftError with
        which the stream ends.
        """
        refused = is_refusal(error)
        # A refusal after a long wait in the queue is not a success.
        if self._is_steady and not refused:
            self._budget.report_success()
        self._cancel_call()
        try:
            if refused:
                self._mark_not_accepted(error)
            await self._budget.wait(error, self._router)
        except EverliftError as final:
            self.is_closed = True
            raise self._final_error(final) from final.__cause__
        _log_continuation(self._reception, error)

    @property
    def _is_steady(self) -> bool:
        return self._receiving_since is not None and now() - self._receiving_since > _STEADY_S

    def _mark_not_accepted(self, refusal: EverliftError) -> None:
        """Mark the request as not accepted after ``refusal``, so that it is submitted again.

        Does nothing if the request is not marked as accepted. Otherwise, raises ``refusal`` if the
        request was not submitted by this reader, or if output of it has been received.
        """
        if self._reception.is_accepted:
            if self._submission is None or self._reception.has_output:
                raise refusal
            self._reception.is_accepted = False

    async def _read(self) -> pb.GenerateResponse:
        if self._call is None:
            self._call = self._start_call()
        call = self._call
        try:
            piece = await wire.read(call)
        except asyncio.CancelledError:
            # A cancelled read ends its gRPC call, which is no failure of the router. The next read
            # makes another call. ``_receiving_since`` stays, so that short reads do not reset it.
            call.cancel()
            self._call = None
            raise
        if piece is None:
            raise Unreachable("the stream broke off")
        if self._receiving_since is None:
            self._receiving_since = now()
        return piece

    def _start_call(self) -> grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]:
        self._router = self._routers.current
        stub, remaining = self._routers.inference(), self._budget.remaining()
        timeout = None if remaining is None else remaining + DEADLINE_MARGIN_S
        metadata = self._routers.metadata
        # Before its acceptance, a request may be submitted again: its id prevents a second request.
        if self._submission is not None and not self._reception.is_accepted:
            set_timeout(self._submission, remaining)
            self.has_submitted = True
            return stub.Generate(
                self._submission, timeout=timeout, metadata=metadata + self._metadata
            )
        explain = self._submission is not None and self._submission.explain
        message = self._reception.attach_request(explain=explain)
        return stub.Attach(message, timeout=timeout, metadata=metadata)

    def _final_error(self, error: EverliftError) -> EverliftError:
        is_unknown = isinstance(error, UnknownRequest | OffsetOutOfRange)
        is_forgotten = isinstance(error, ForgottenRequest)
        if self._reception.is_accepted and is_unknown and not is_forgotten:
            return DataLoss(f"the cluster lost a request that it had accepted: {error}")
        return error

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = self._receiving_since = None


def set_timeout(submission: pb.GenerateRequest, remaining: float | None) -> None:
    """Set the timeout of ``submission`` to the ``remaining`` seconds, unless these are None."""
    if remaining is not None:
        submission.timeout_ms = max(1, round(remaining * 1e3))


async def cancel(routers: Routers, request_id: str) -> None:
    """Cancel a request whose stream is being closed. Errors are only logged."""
    try:
        message = pb.CancelRequest(request_id=request_id)
        stub = routers.inference()
        call = stub.Cancel(message, timeout=_CANCEL_TIMEOUT_S, metadata=routers.metadata)
        await wire.answer(call, call)
    except EverliftError as error:
        # The router ends the request itself after the grace period for its lost client.
        log.info("cancel failed", request_id=request_id, cause=str(error))


def _log_continuation(reception: ReceivedOutput, error: EverliftError) -> None:
    log.info(
        "stream continues",
        request_id=reception.request_id,
        offsets=reception.offsets(),
        after=str(error),
    )
