"""Stream of many concurrent requests, which delivers each token exactly once."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from everlift import wire
from everlift.client.output_reader import DEADLINE_MARGIN_S, OutputReader, cancel, set_timeout
from everlift.client.received_output import Chunk, ReceivedOutput
from everlift.client.retries import Deadline, Retries, RetryBudget
from everlift.client.routers import Metadata, Routers
from everlift.errors import Cancelled, EverliftError, MessageTooLarge, Unreachable, from_slug
from everlift.messages import MAX_REQUESTS, FinishReason
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb

#: Maximum total size in bytes of the requests that one call carries. The size is far below the
#: default limit of routers; requests that exceed a router's limit together are sent in several
#: calls. A request that is larger by itself is sent in a call of its own.
_MAX_BYTES = 1 << 20
#: Number of chunks that are buffered for the reader; further chunks stay with the routers.
_MAX_BUFFERED_CHUNKS = 64
#: Part of ``concurrency`` that must be free before another call is sent, unless fewer requests are
#: left.
_REFILL_FRACTION = 0.25
#: Maximum number of concurrent Cancel calls when a stream is closed.
_MAX_CONCURRENT_CANCELS = 64
#: Seconds to wait for the answers of all Cancel calls.
_CANCEL_ALL_TIMEOUT_S = 5.0
#: Marker after the last chunk.
_DONE = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an ended request of a ManyStream.

    ``finish_reasons`` maps the index of each choice that has ended to its finish reason. ``error``
    is the error with which the request failed; it is None if the request succeeded. After an error,
    ``usage`` and ``timing`` may be None. The stream delivers all output received before the error,
    unless the stream is closed.
    """

    finish_reasons: Mapping[int, FinishReason]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    usage: pb.Usage | None
    timing: pb.Timing | None
    error: EverliftError | None


@dataclass(slots=True)
class _PendingRequest:
    index: int
    message: pb.GenerateRequest
    reception: ReceivedOutput

    def outcome(self, error: EverliftError | None) -> Outcome:
        return Outcome(
            self.reception.finish_reasons,
            self.reception.prompt_logprobs,
            self.reception.usage,
            self.reception.timing,
            error,
        )


class ManyStream(AsyncIterator[tuple[int, Chunk]]):
    """Stream of the output of several requests.

    Iterate over it for pairs of a prompt's index and a chunk, or ``await stream.texts()``. Use it
    in ``async with``, which closes it at the end.

    Chunks arrive as they are generated, those of each choice of a request in the order of their
    offsets. A request that fails does not affect the others; its error is in ``outcomes``. A slow
    reader slows the routers down, so that chunks do not accumulate in the client.

    >>> async with client.generate_many(["a b", "c"]) as stream:
    ...     async for index, chunk in stream:
    ...         print(index, repr(chunk.text))
    0 'a'
    1 'c'
    0 ' b'
    """

    def __init__(
        self,
        routers: Routers,
        messages: Iterable[pb.GenerateRequest],
        retries: Callable[[], Retries],
        timeout_s: float | None,
        concurrency: int,
        metadata: Metadata = (),
    ) -> None:
        """Create the stream of the requests ``messages``.

        ``retries`` returns the retry state of a new call; a call carries many requests or resumes a
        single one. ``timeout_s`` applies to each request, from the first attempt to send it. At
        most ``concurrency`` requests run at a time. ``metadata`` is sent with the calls that submit
        requests.
        """
        pending = [
            _PendingRequest(index, message, ReceivedOutput(message.request_id))
            for index, message in enumerate(messages)
        ]
        self._request_ids = tuple(each.message.request_id for each in pending)
        self._outcomes: dict[int, Outcome] = {}
        self._routers = routers
        self._retries = retries
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._metadata = metadata
        self._waiting = deque(pending)
        self._in_flight: dict[int, _PendingRequest] = {}
        self._has_ended = asyncio.Event()
        self._chunks: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue(_MAX_BUFFERED_CHUNKS)
        self._work: asyncio.Task[None] | None = None
        self._internal_error: Exception | None = None
        self._tasks = asyncio.TaskGroup()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests, by the index of the prompt.

        >>> client.generate_many(["one", "two"], request_id="mine").request_ids
        ('mine:0', 'mine:1')
        """
        return self._request_ids

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """Results of the requests that have ended, by the index of the prompt.

        >>> stream = client.generate_many(["one two", ""])
        >>> texts = await stream.texts()
        >>> stream.outcomes[0].usage.output_tokens, stream.outcomes[1].error
        (2, EmptyPrompt('the prompt is empty'))
        """
        return self._outcomes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        item = await self._chunks.get()
        if item is not None:
            return item
        self._chunks.put_nowait(_DONE)
        if self._internal_error is not None:
            raise self._internal_error
        raise StopAsyncIteration

    async def texts(self) -> list[str | EverliftError]:
        """Return for each prompt the rest of its output text, or the error of its request.

        If a request has several choices, the text is that of the first one. If the calling task is
        cancelled, the stream is closed.

        >>> await client.generate_many(["one two", "three", ""]).texts()
        ['one two', 'three', EmptyPrompt('the prompt is empty')]
        """
        pieces: defaultdict[int, list[str]] = defaultdict(list)
        try:
            async for index, chunk in self:
                if chunk.choice == 0:
                    pieces[index].append(chunk.text)
        except asyncio.CancelledError:
            # The caller may have no reference to the stream, whose requests would run on.
            await self.aclose()
            raise
        return [
            self._outcomes[index].error or "".join(pieces[index])
            for index in range(len(self._request_ids))
        ]

    async def aclose(self) -> None:
        """Cancel the unfinished requests. Requests that were not sent yet are never sent.

        This method never fails.

        >>> stream = client.generate_many(["one two", "three four"])
        >>> await stream.aclose()
        >>> type(stream.outcomes[0].error)
        <class 'everlift.errors.Cancelled'>
        """
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(_DONE)
        in_flight, never_sent = list(self._in_flight.values()), list(self._waiting)
        self._in_flight.clear()
        self._waiting.clear()
        for each in in_flight + never_sent:
            self._outcomes[each.index] = each.outcome(Cancelled("the stream was closed"))
        await _cancel_all(self._routers, [each.message.request_id for each in in_flight])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _run(self) -> None:
        try:
            async with self._tasks:
                await self._feed()
        except Exception as error:
            self._internal_error = error
        await self._chunks.put(_DONE)

    async def _feed(self) -> None:
        while self._waiting:
            refill = min(len(self._waiting), max(1, round(self._concurrency * _REFILL_FRACTION)))
            while (num_free := self._concurrency - len(self._in_flight)) < refill:
                self._has_ended.clear()
                await self._has_ended.wait()
            part = self._next_part(num_free)
            self._in_flight.update(part)
            self._tasks.create_task(self._run_part(part, Deadline(self._timeout_s)))

    def _next_part(self, num_free: int) -> dict[int, _PendingRequest]:
        part: dict[int, _PendingRequest] = {}
        num_bytes = 0
        while self._waiting and len(part) < min(num_free, MAX_REQUESTS):
            num_bytes += self._waiting[0].message.ByteSize()
            if part and num_bytes > _MAX_BYTES:
                break
            each = self._waiting.popleft()
            part[each.index] = each
        return part

    async def _run_part(self, part: dict[int, _PendingRequest], deadline: Deadline) -> None:
        """Send the requests of ``part`` in one GenerateMany call; retry until ``part`` is empty.

        If the call breaks, each request that a router had accepted continues in a separate task
        with its own call. The others are sent again together, or in two calls if the message was
        too large for the router. The method does not wait for the separate tasks.
        """
        budget = self._budget(deadline)
        while part:
            router = self._routers.current
            try:
                await self._read(part, deadline, budget, router)
            except EverliftError as error:
                for each in tuple(part.values()):
                    if each.reception.is_accepted:
                        self._move_to_own_call(part, each, deadline, error, router)
                if isinstance(error, MessageTooLarge) and len(part) > 1:
                    self._split(part, deadline)
                if part:
                    await self._wait(part, budget, error, router)

    def _split(self, part: dict[int, _PendingRequest], deadline: Deadline) -> None:
        """Move the requests of ``part`` to two separate tasks with a call each."""
        requests = list(part.items())
        part.clear()
        half = len(requests) // 2
        for some in (requests[:half], requests[half:]):
            self._tasks.create_task(self._run_part(dict(some), deadline))

    async def _wait(
        self,
        part: dict[int, _PendingRequest],
        budget: RetryBudget,
        error: EverliftError,
        router: str,
    ) -> None:
        try:
            await budget.wait(error, router)
        except EverliftError as final:
            for each in part.values():
                self._end(each, final)
            part.clear()

    async def _read(
        self,
        part: dict[int, _PendingRequest],
        deadline: Deadline,
        budget: RetryBudget,
        router: str,
    ) -> None:
        """Send the requests of ``part`` in one call, and read the call until ``part`` is empty.

        ``router`` is the address of the current router, which receives the call.

        A request is removed from ``part`` when it ends, or when it fails while the call continues.
        A separate task then resumes the failed request, or ends it if its error must not be
        retried. Raises EverliftError if the call breaks.
        """
        sent, remaining = list(part.values()), budget.remaining()
        for each in sent:
            set_timeout(each.message, remaining)
        call = self._routers.inference().GenerateMany(
            pb.GenerateManyRequest(requests=[each.message for each in sent]),
            timeout=None if remaining is None else remaining + DEADLINE_MARGIN_S,
            metadata=self._routers.metadata + self._metadata,
        )
        try:
            while part:
                if (answer := await wire.read(call)) is None:
                    raise Unreachable("the stream broke off")
                budget.report_success()
                for piece in answer.pieces:
                    # A request that has ended, or continues in its own call, is not in ``part``.
                    if (each := sent[piece.index]).index in part:
                        await self._accept_piece(part, each, piece, deadline, router)
        finally:
            call.cancel()

    async def _accept_piece(
        self,
        part: dict[int, _PendingRequest],
        each: _PendingRequest,
        piece: pb.ManyPiece,
        deadline: Deadline,
        router: str,
    ) -> None:
        try:
            if piece.HasField("failure"):
                raise _error(piece.failure)
            chunk = each.reception.accept(piece.piece)
        except EverliftError as error:
            self._move_to_own_call(part, each, deadline, error, router)
            return
        if chunk is not None:
            await self._chunks.put((each.index, chunk))
        if each.reception.is_complete:
            del part[each.index]
            self._end(each)

    def _move_to_own_call(
        self,
        part: dict[int, _PendingRequest],
        each: _PendingRequest,
        deadline: Deadline,
        error: EverliftError,
        router: str,
    ) -> None:
        del part[each.index]
        self._tasks.create_task(self._resume(each, deadline, error, router))

    async def _resume(
        self, each: _PendingRequest, deadline: Deadline, error: EverliftError, router: str
    ) -> None:
        """Continue a request in its own call, after ``error`` of a call to ``router``."""
        reader = OutputReader(
            self._routers,
            each.reception,
            self._budget(deadline),
            each.message,
            self._metadata,
            failed_router=router,
        )
        try:
            await reader.recover(error)
            while (chunk := await reader.next()) is not None:
                await self._chunks.put((each.index, chunk))
            self._end(each)
        except EverliftError as final:
            self._end(each, final)
        finally:
            reader.close()

    def _end(self, each: _PendingRequest, error: EverliftError | None = None) -> None:
        self._outcomes[each.index] = each.outcome(error)
        del self._in_flight[each.index]
        self._has_ended.set()

    def _budget(self, deadline: Deadline) -> RetryBudget:
        return RetryBudget(self._routers, self._retries(), deadline)


def _error(failure: pb.Failure) -> EverliftError:
    error = from_slug(failure.slug, failure.message)
    error.retry_after_s = failure.retry_after_s if failure.HasField("retry_after_s") else None
    return error


async def _cancel_all(routers: Routers, request_ids: Sequence[str]) -> None:
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_CANCELS)

    async def end(request_id: str) -> None:
        async with semaphore:
            await cancel(routers, request_id)

    if request_ids:
        tasks = [asyncio.create_task(end(request_id)) for request_id in request_ids]
        _, unfinished = await asyncio.wait(tasks, timeout=_CANCEL_ALL_TIMEOUT_S)
        for task in unfinished:
            task.cancel()
