"""Reader of one request to its end, across lost connections and routers."""

from __future__ import annotations

from typing import Any

import grpc

from everlift import logs, wire
from everlift.client.reception import Chunk, Reception
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

#: The router's own answer to a deadline, which has a cause, should come first.
DEADLINE_MARGIN_S = 1.0
_CANCEL_TIMEOUT_S = 2.0
#: A connection that has carried pieces for so long is no failure in a row with what was before it.
_STEADY_S = 1.0


class Reading:
    """Call Generate until the request is accepted, then Attach until nothing more will come."""

    def __init__(
        self,
        routers: Routers,
        reception: Reception,
        budget: RetryBudget,
        submission: pb.GenerateRequest | None = None,
        metadata: Metadata = (),
    ) -> None:
        """Create the reader; ``metadata`` goes with the submission."""
        self.is_over = False
        self._routers = routers
        self._reception = reception
        self._budget = budget
        self._submission = submission
        self._metadata = metadata
        self._router = ""
        self._heard_since: float | None = None
        self._call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse] | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk; None after the last one. Raises EverliftError, which is final."""
        while not self.is_over:
            try:
                chunk = self._reception.accept(await self._read())
            except EverliftError as error:
                await self.recover(error)
                continue
            if self._reception.is_complete:
                self.close()
            if chunk is not None:
                self._budget.succeeded()
                return chunk
        return None

    def close(self) -> None:
        """Read no more; the request goes by its ``on_disconnect``."""
        self.is_over = True
        self._hang_up()

    async def recover(self, error: EverliftError) -> None:
        """Wait for the next try after ``error``. Raises EverliftError where there is none."""
        refused = is_refusal(error)
        # Whoever was refused after a long wait had no success.
        if self._is_steady and not refused:
            self._budget.succeeded()
        self._hang_up()
        try:
            if refused:
                self._take_back(error)
            await self._budget.wait(error, self._router)
        except EverliftError as final:
            self.is_over = True
            raise self._named(final) from final.__cause__
        _tell(self._reception, error)

    @property
    def _is_steady(self) -> bool:
        return self._heard_since is not None and now() - self._heard_since > _STEADY_S

    def _take_back(self, refusal: EverliftError) -> None:
        """Forget a submission that the queue refused.

        Raises ``refusal`` if it cannot be submitted again, or if output has arrived.
        """
        if self._reception.is_accepted:
            if self._submission is None or self._reception.has_begun:
                raise refusal
            self._reception.is_accepted = False

    async def _read(self) -> pb.GenerateResponse:
        if self._call is None:
            self._call = self._dial()
        piece = await wire.read(self._call)
        if piece is None:
            raise Unreachable("the stream broke off")
        if self._heard_since is None:
            self._heard_since = now()
        return piece

    def _dial(self) -> grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]:
        self._router = self._routers.current
        stub, remaining = self._routers.inference(), self._budget.remaining()
        timeout = None if remaining is None else remaining + DEADLINE_MARGIN_S
        metadata = self._routers.metadata
        # Until it is accepted it may be submitted again: the request id makes it one request.
        if self._submission is not None and not self._reception.is_accepted:
            limit(self._submission, remaining)
            return stub.Generate(
                self._submission, timeout=timeout, metadata=metadata + self._metadata
            )
        return stub.Attach(self._reception.attach_request(), timeout=timeout, metadata=metadata)

    def _named(self, error: EverliftError) -> EverliftError:
        is_unknown = isinstance(error, UnknownRequest | OffsetOutOfRange)
        is_forgotten = isinstance(error, ForgottenRequest)
        if self._reception.is_accepted and is_unknown and not is_forgotten:
            return DataLoss(f"the cluster lost a request that it had accepted: {error}")
        return error

    def _hang_up(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = self._heard_since = None


def limit(submission: pb.GenerateRequest, remaining: float | None) -> None:
    """Return the seconds left of ``remaining``; None without a limit."""
    if remaining is not None:
        submission.timeout_ms = max(1, round(remaining * 1e3))


async def cancel(routers: Routers, request_id: str) -> None:
    """End a request whose reader is leaving. Never fails."""
    try:
        message = pb.CancelRequest(request_id=request_id)
        stub = routers.inference()
        call = stub.Cancel(message, timeout=_CANCEL_TIMEOUT_S, metadata=routers.metadata)
        await wire.answer(call, call)
    except EverliftError as error:
        # The router ends it by itself when the grace for its lost client is over.
        log.info("cancel failed", request_id=request_id, cause=str(error))


def _tell(reception: Reception, error: EverliftError) -> None:
    log.info(
        "stream continues",
        request_id=reception.request_id,
        offsets=reception.offsets(),
        after=str(error),
    )
