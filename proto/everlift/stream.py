"""One request's tokens, each offset of a choice exactly once, across the loss of connections and
routers."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from everlift import logs, wire
from everlift.backoff import Backoff
from everlift.digest import TokenDigest
from everlift.errors import (
    DataLoss,
    DeadlineExceeded,
    EverliftError,
    NoWorker,
    OffsetOutOfRange,
    UnknownRequest,
    Unreachable,
)
from everlift.messages import FinishReason
from everlift.routers import Routers
from everlift.sampling import TokenLogprobs
from everlift.trace_context import TRACEPARENT
from everlift.v1 import inference_pb2 as pb

log = logs.get(__name__)

#: The router's own answer to a deadline, which has a cause, should come first.
_DEADLINE_MARGIN_S = 1.0
_CANCEL_TIMEOUT_S = 2.0
#: A connection that has carried pieces for so long is no failure in a row with what was before it.
_STEADY_S = 1.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of consecutive offsets, the first of them at ``offset``, and the text they released.

    ``epoch`` names the attempt that made them, 0 when they were read back from the ledger.
    ``unledgered`` says that they came while the ledger was away: its loss could take them back.
    ``logprobs`` are those of the tokens, if they were asked for.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    epoch: int
    unledgered: bool
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Stream(AsyncIterator[Chunk]):
    """Iterate it, or ``await stream.text()``; best inside ``async with``, whose end closes it.

    Chunks of several choices come as they are made, each choice's in the order of its offsets.
    Raises EverliftError subclasses: the request's own end, Unreachable when no router answered for
    ``reconnect_s``, DataLoss when the cluster lost what it had acknowledged. A choice that has
    ended is in ``finish_reasons``; after the last chunk ``usage`` and ``timing`` are set. If they
    were asked for, ``prompt_logprobs`` are set with the first chunk of choice 0, and are those of
    the prompt's tokens from the second one on.
    """

    def __init__(
        self,
        routers: Routers,
        request_id: str,
        submission: pb.GenerateRequest | None,
        from_offsets: Sequence[int],
        reconnect_s: float,
        received: Sequence[Sequence[int]] = (),
        traceparent: str = "",
    ) -> None:
        """``from_offsets`` are by choice, 0 where none is given; or it begins behind the tokens of
        each choice that were ``received``. Without a ``submission`` the request must be known
        already; then closing only leaves. ``traceparent`` goes with the submission."""
        self.request_id = request_id
        self.finish_reasons: dict[int, FinishReason] = {}
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.usage: pb.Usage | None = None
        self.timing: pb.Timing | None = None
        self._routers = routers
        self._submission = submission
        trace = ((TRACEPARENT, traceparent),) if traceparent else ()
        self._metadata = (*self._routers.metadata, *trace)
        #: by choice, the first offset that has not come
        self._next = defaultdict(int, enumerate(map(len, received) if received else from_offsets))
        #: by choice, of all tokens before that; None where the first ones were never seen
        self._digests = None if any(from_offsets) else _digests(received)
        self._backoff = Backoff(reconnect_s, random.random)
        #: on the event loop's clock; not known before the first try
        self._deadline: float | None = None
        self._router = ""
        self._heard_since: float | None = None
        self._call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse] | None = None
        self._accepted = False
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                chunk = self._take(await self._read())
            except EverliftError as error:
                await self._recover(error)
            else:
                if chunk is not None:
                    return chunk
        raise StopAsyncIteration

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice."""
        return self.finish_reasons.get(0)

    async def text(self) -> str:
        """The whole rest of the text: of the first choice, if there are several."""
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """The whole rest of each choice's text."""
        pieces: defaultdict[int, list[str]] = defaultdict(list)
        async for chunk in self:
            pieces[chunk.choice].append(chunk.text)
        return ["".join(pieces[choice]) for choice in range(max(len(self.finish_reasons), 1))]

    async def aclose(self) -> None:
        """Ends the request if it is this stream's own and unfinished. Never fails."""
        ended, self._ended = self._ended, True
        self._hang_up()
        if self._submission is not None and not ended:
            await self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _read(self) -> pb.GenerateResponse:
        if self._call is None:
            self._call = self._dial()
        piece = await wire.read(self._call)
        if piece is None:
            raise Unreachable("the stream broke off")
        if self._heard_since is None:
            self._heard_since = _now()
        return piece

    def _dial(self) -> grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]:
        self._router = self._routers.current
        stub, remaining = self._routers.stub(), self._remaining()
        timeout = None if remaining is None else remaining + _DEADLINE_MARGIN_S
        # Until it is accepted it may be submitted again: the request id makes it one request.
        if self._submission is not None and not self._accepted:
            if remaining is not None:
                self._submission.timeout_ms = max(1, round(remaining * 1e3))
            return stub.Generate(self._submission, timeout=timeout, metadata=self._metadata)
        metadata = self._routers.metadata
        return stub.Attach(self._attach_request(), timeout=timeout, metadata=metadata)

    def _attach_request(self) -> pb.AttachRequest:
        """Goes on behind what came. The digests let the router see that what it has is the same, or
        will be the same when it has made again what it lost."""
        offsets, digests = self._offsets(), self._digests
        return pb.AttachRequest(
            request_id=self.request_id,
            from_offsets=offsets,
            digests=[digests[choice].value for choice in range(len(offsets))] if digests else (),
        )

    def _offsets(self) -> list[int]:
        return [self._next[choice] for choice in range(max(self._next, default=-1) + 1)]

    def _remaining(self) -> float | None:
        """Seconds to the deadline, which counts from the first call."""
        if self._deadline is None:
            if self._submission is None or not self._submission.HasField("timeout_ms"):
                return None
            self._deadline = _now() + self._submission.timeout_ms / 1e3
        return max(self._deadline - _now(), 0.0)

    def _take(self, piece: pb.GenerateResponse) -> Chunk | None:
        """What is new in ``piece``. Raises DataLoss on a gap."""
        self._accepted = True
        # Who attaches again is told again how each choice ended.
        chunk = None if piece.choice in self.finish_reasons else self._fresh(piece)
        if piece.HasField("usage"):
            self._finish(piece)
        return chunk

    def _fresh(self, piece: pb.GenerateResponse) -> Chunk | None:
        following, end = self._next[piece.choice], piece.offset + len(piece.token_ids)
        if piece.offset > following:
            raise DataLoss(f"offsets {following} to {piece.offset - 1} of the stream are missing")
        if end <= following and not piece.finish_reason and piece.token_ids:
            return None
        if piece.offset < following and piece.token_ids:
            # Text cannot be cut at a token: let the router cut it.
            raise Unreachable("a piece overlaps what came before")
        return self._deliver(piece, max(following, end))

    def _deliver(self, piece: pb.GenerateResponse, end: int) -> Chunk | None:
        self._next[piece.choice] = end
        if self._digests is not None:
            self._digests[piece.choice].add(piece.token_ids)
        if piece.prompt_logprobs:
            self.prompt_logprobs = _parsed(piece.prompt_logprobs)
        if piece.finish_reason:
            self.finish_reasons[piece.choice] = FinishReason(piece.finish_reason)
        if not piece.token_ids and not piece.text:
            return None
        self._backoff.reset()
        return Chunk(
            piece.offset,
            tuple(piece.token_ids),
            piece.text,
            piece.epoch,
            piece.unledgered,
            piece.choice,
            _parsed(piece.logprobs),
        )

    def _finish(self, piece: pb.GenerateResponse) -> None:
        self.usage, self.timing = piece.usage, piece.timing
        self._ended = True
        self._hang_up()

    async def _recover(self, error: EverliftError) -> None:
        """Waits for the next try; raises when there is none."""
        now = _now()
        if self._heard_since is not None and now - self._heard_since > _STEADY_S:
            self._backoff.reset()
        self._hang_up()
        delay = self._backoff.delay(now, error.retry_after_s or 0.0)
        if not _may_pass(error) or delay is None or self._routers.is_closed:
            self._ended = True
            raise self._final(error)
        if self._deadline is not None and now + delay > self._deadline:
            self._ended = True
            raise DeadlineExceeded("the deadline passed while no router answered") from error
        log.info(
            "stream broke", request_id=self.request_id, offsets=self._offsets(), cause=str(error)
        )
        self._routers.failed(self._router)
        await asyncio.sleep(delay)

    def _final(self, error: EverliftError) -> EverliftError:
        if self._accepted and isinstance(error, UnknownRequest | OffsetOutOfRange):
            return DataLoss(f"the cluster has lost what it had acknowledged: {error}")
        return error

    def _hang_up(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = self._heard_since = None

    async def _cancel(self) -> None:
        try:
            message = pb.CancelRequest(request_id=self.request_id)
            call = self._routers.stub().Cancel(
                message, timeout=_CANCEL_TIMEOUT_S, metadata=self._routers.metadata
            )
            await wire.answer(call, call)
        except EverliftError as error:
            # The router ends it by itself when the grace for its lost client is over.
            log.info("cancel failed", request_id=self.request_id, cause=str(error))


def _digests(received: Sequence[Sequence[int]]) -> defaultdict[int, TokenDigest]:
    digests = defaultdict[int, TokenDigest](TokenDigest)
    for choice, tokens in enumerate(received):
        digests[choice].add(tokens)
    return digests


def _may_pass(error: EverliftError) -> bool:
    """Another router, or this one in a moment, may answer. A request that found no worker has
    ended."""
    return error.grpc_status == "UNAVAILABLE" and not isinstance(error, NoWorker)


def _parsed(logprobs: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs.from_proto(it) for it in logprobs)


def _now() -> float:
    """On the event loop's clock, which tests may let run as they like."""
    return asyncio.get_running_loop().time()
