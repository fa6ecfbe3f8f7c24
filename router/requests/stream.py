"""Streams of a request's pieces for one client, from this router or from another one."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import grpc

from everlift import wire
from everlift.errors import (
    DataLoss,
    EverliftError,
    LedgerUnavailable,
    Moved,
    OffsetOutOfRange,
    RouterStopping,
    Unreachable,
)
from everlift.hashes import token_digest
from everlift.transport import Transport
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.event_loop import now
from router.requests.delivered import Delivered
from router.requests.request import Choice, LiveRequest


class ChoiceReader:
    """Reader of a request's choices for one client, each choice from its offset on.

    An offset is the number of tokens of the choice that the client already has. With a digest of
    these tokens, the offset may exceed the number of tokens that the choice has so far, because the
    ledger may have lost some. Reading then continues when the choice has that many tokens again.
    """

    def __init__(
        self,
        live: LiveRequest,
        offsets: Sequence[int] = (),
        digests: Sequence[int] = (),
        *,
        explains: bool = False,
    ) -> None:
        """Create a reader; with ``explains``, its last message contains the time breakdown.

        ``offsets`` are, by choice, the numbers of tokens that the client already has; those not
        given are 0. ``digests`` are, by choice, the digests of these tokens (``token_digest``), to
        be compared with the choice's tokens; they are optional.

        Raises OffsetOutOfRange if there are more offsets than choices, or if an offset is negative
        or too large. The largest valid offset is the request's max_tokens for a choice with a
        digest, and the number of readable tokens for one without.
        """
        self._live = live
        self._explains = explains
        self._offsets = [*offsets, *[0] * (len(live.choices) - len(offsets))]
        #: digests that have not been compared yet, by choice
        self._digests = dict(zip(live.choices, digests, strict=False))
        #: choices whose last piece has not been read
        self._open = list(live.choices)
        #: index in ``_open`` of the choice that is read next
        self._next_index = 0
        self._check()

    def _check(self) -> None:
        if len(self._offsets) > len(self._live.choices):
            raise OffsetOutOfRange(
                f"{len(self._offsets)} offsets are too many for {len(self._live.choices)} choices"
            )
        for choice, offset in zip(self._live.choices, self._offsets, strict=True):
            last = choice.readable
            if choice in self._digests:
                last = self._live.request.max_tokens
            if not 0 <= offset <= last:
                raise OffsetOutOfRange(
                    f"the offset of choice {choice.index} is {offset}, but must be from 0 to {last}"
                )

    def head(self) -> pb.GenerateResponse:
        return self._live.head(self._offsets[0])

    @property
    def is_at_end(self) -> bool:
        return not self._open

    def delivered(self) -> Delivered | None:
        """Return a record of the tokens and ends that the client has.

        Return None if tokens before an offset have not been compared with their digest yet.
        """
        if any(self._offsets[choice.index] for choice in self._digests):
            return None
        delivered = Delivered()
        delivered.add_head()
        for choice, offset in zip(self._live.choices, self._offsets, strict=True):
            delivered.add_tokens(choice.index, choice.output.tokens[:offset])
            if choice not in self._open:
                delivered.add_end(choice.index)
        return delivered

    def next(self) -> pb.GenerateResponse | None:
        """Return the next piece (message) that can be read now, or None; the choices take turns.

        If the prompt's log probabilities are requested, the first choice is read first, because
        its first piece contains them. The last piece of the last choice contains usage and timing.
        Raises DataLoss if tokens before an offset do not match their digest, or if a choice has
        ended with fewer tokens than its offset.
        """
        if self._lacks_prompt_logprobs:
            first = self._open[0]
            return self._read(first) if self._may_read(first) else None
        for _ in range(len(self._open)):
            self._next_index %= len(self._open)
            choice = self._open[self._next_index]
            if self._may_read(choice):
                return self._read(choice)
            self._next_index += 1
        return None

    @property
    def _lacks_prompt_logprobs(self) -> bool:
        """Return whether the client still has to receive the prompt's log probabilities."""
        is_requested = self._live.request.sampling.prompt_logprobs is not None
        is_first_open = bool(self._open) and self._open[0].index == 0
        return is_requested and is_first_open and not self._offsets[0]

    def _read(self, choice: Choice) -> pb.GenerateResponse:
        piece = self._live.piece(choice, self._offsets[choice.index])
        self._offsets[choice.index] += len(piece.token_ids)
        choice.mark_delivered(self._offsets[choice.index])
        if choice.has_slow_reader and choice.delivered >= choice.readable:
            self._live.caught_up(choice, now())
        if piece.finish_reason:
            self._end(choice, piece)
        return piece

    def _may_read(self, choice: Choice) -> bool:
        offset = self._offsets[choice.index]
        if not self._digests and offset < choice.readable:
            return True
        if choice in self._digests and choice.readable >= offset:
            self._compare(choice, offset)
        if choice.is_complete and offset > len(choice.output):
            raise _data_loss(choice, offset, f"it ended after {len(choice.output)} tokens")
        return choice not in self._digests and choice.is_readable_from(offset)

    def _compare(self, choice: Choice, offset: int) -> None:
        if token_digest(choice.output.tokens[:offset]) != self._digests.pop(choice):
            raise _data_loss(choice, offset, "the tokens before it differ from the client's")

    def _end(self, choice: Choice, piece: pb.GenerateResponse) -> None:
        self._open.remove(choice)
        if self.is_at_end:
            self._live.close(piece, now(), explains=self._explains)


def _data_loss(choice: Choice, offset: int, cause: str) -> DataLoss:
    return DataLoss(f"choice {choice.index} cannot be continued at offset {offset}: {cause}")


T_co = TypeVar("T_co", covariant=True)


class Closable(Protocol[T_co]):
    """Asynchronous iterator that can be closed."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[object]: ...


Q = TypeVar("Q")
A = TypeVar("A")
_Method = Callable[
    ["inference_pb2_grpc.InferenceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[Q, A]
]

#: Metadata of a call that a router makes to another router on behalf of a client.
_RELAYED = ("everlift-relayed", "1")


def is_relayed(headers: Mapping[str, str]) -> bool:
    name, value = _RELAYED
    return headers.get(name) == value


class Relay:
    """Client of other routers at their internal addresses.

    An error that the other router returns is raised by the method that called it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def attach(
        self, address: str, message: pb.AttachRequest
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with self._transport.channel(address) as channel:
            call = _stub(channel).Attach(message, metadata=(_RELAYED,))
            while (piece := await wire.read(call)) is not None:
                yield piece

    async def call(self, address: str, method: _Method[Q, A], message: Q) -> A:
        async with self._transport.channel(address) as channel:
            call = method(_stub(channel))(message)
            return await wire.answer(call, call)


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceAsyncStub:
    return inference_pb2_grpc.InferenceStub(channel)


class Source(AsyncIterator[pb.GenerateResponse]):
    """Source of the pieces (messages) of one request's stream, which are polled or iterated.

    A server calls ``poll`` when its client can receive a piece, and ``on_more`` notifies the server
    when there may be more pieces. Streams therefore need no tasks of their own, even if there are
    thousands. The owner of a source must close it, even if the owner has not read all pieces.
    """

    #: Errors after which the same request can be read from another source.
    resumable: ClassVar[tuple[type[EverliftError], ...]] = ()

    def __init__(self) -> None:
        self._more = asyncio.Event()
        #: called in the event loop's thread when there may be more pieces; must not block
        self.on_more: Callable[[], None] = self._more.set

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the last piece was taken, or the source is closed.

        Some sources, such as RelayedSource, find their end only in the ``poll`` after the last
        piece, which returns None. Until then the result is False.
        """

    @abstractmethod
    def poll(self) -> pb.GenerateResponse | None:
        """Return the next piece; None if none can be read yet, or after the last one.

        Raises the error with which the request fails.
        """

    @abstractmethod
    async def aclose(self) -> None: ...

    def delivered(self) -> Delivered | None:
        """Return a record of the tokens that the client has; None if the source has no record."""
        return None

    async def __anext__(self) -> pb.GenerateResponse:
        while True:
            self._more.clear()
            if (piece := self.poll()) is not None:
                return piece
            if self.is_over:
                raise StopAsyncIteration
            await self._more.wait()


class RelayedSource(Source):
    """Source of the pieces that another router sends, which are requested one at a time."""

    resumable = (Moved, Unreachable, RouterStopping, LedgerUnavailable)

    def __init__(self, pieces: Closable[pb.GenerateResponse]) -> None:
        super().__init__()
        self._pieces = pieces
        self._is_over = False
        self._coming: asyncio.Task[pb.GenerateResponse] | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over

    def poll(self) -> pb.GenerateResponse | None:
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


class LiveSource(Source):
    """Source of a live request's pieces, registered as a reader of the request until it is closed.

    ``on_close`` is called when the source is closed. Each piece is made when it is polled.
    """

    resumable = (Moved,)

    def __init__(
        self, live: LiveRequest, reader: ChoiceReader, on_close: Callable[[], None]
    ) -> None:
        super().__init__()
        self._live = live
        self._reader = reader
        self._on_close = on_close
        self._head: pb.GenerateResponse | None = reader.head()
        self._is_closed = False
        live.add_reader(self._wake)

    def _wake(self) -> None:
        self.on_more()

    @property
    def is_over(self) -> bool:
        return self._reader.is_at_end or self._is_closed

    def poll(self) -> pb.GenerateResponse | None:
        """Return the next piece that can be read now, or None.

        Raises the request's error when all readable pieces have been returned. Raises DataLoss if
        tokens before an offset do not match their digest, or if a choice has ended with fewer
        tokens than its offset.
        """
        if (piece := self._head) is not None:
            self._head = None
        elif not self._is_closed:
            piece = self._reader.next()
            if piece is None and self._live.error is not None and not self.is_over:
                raise self._live.error.with_traceback(None)
        return piece

    def delivered(self) -> Delivered | None:
        return self._reader.delivered()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._live.remove_reader(self._wake)
            self._on_close()
            self._more.set()
