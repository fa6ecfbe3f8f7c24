"""gRPC call: its input messages, its answers, and the context that its handler receives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from everlift import error_details, logs, wire
from everlift.errors import EverliftError, RouterStopping
from router.api.http2 import heads
from router.api.http2.framing import IDENTITY, MessageReader, framed
from router.api.http2.h2_connection import Http2
from router.api.http2.heads import Head, Metadata
from router.api.http2.limits import Limits

log = logs.get_logger(__name__)

#: Seconds after the deadline at which the server ends a call. Until then, a handler that watches
#: the deadline can answer with its own error, which has a cause.
_MARGIN_S = 0.5

#: Number of bytes that are parsed before the limit of unread messages is checked again.
_PARSED_BYTES = 4 << 10
#: Maximum number of bytes of answers that a call sends before other calls have their turn.
_PUMPED_BYTES = 64 << 10
#: Approximate memory overhead of a queued message in bytes, in addition to its content.
_MESSAGE_COST = 64

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Carrier(Protocol):
    """Interface of a connection that its calls use."""

    @property
    def limits(self) -> Limits: ...

    def add_buffered(self, size: int) -> None:
        """Add ``size`` to the number of bytes that the connection buffers of incomplete messages.

        ``size`` is negative if bytes are released. Raises RateLimited if ``size`` is positive and
        the sum is too large.
        """
        ...

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Allow the client to send ``size`` more bytes on the stream, by flow control."""
        ...

    def mark(self, call: Call) -> None:
        """Schedule a write to the client, because the call has data to send."""
        ...

    def close_when_idle(self) -> None:
        """Accept no new calls, and close the connection when its calls have ended."""
        ...


class Source(Protocol):
    """Source of answers, which a call polls as fast as the client accepts them."""

    #: callback for when there may be another answer; set by the call
    on_more: Callable[[], None]

    @property
    def is_over(self) -> bool: ...

    def poll(self) -> Any | None:
        """Return the next answer; None if there is none yet, or after the last one.

        A result of None is final if ``is_over`` is True afterwards. Raises the error with which
        the call is to fail.
        """
        ...


class Call:
    """gRPC call of a client, which is also the context that its handler receives.

    It has the methods of grpc.aio's ServicerContext that handlers of a router need. Answers are
    queued. The connection sends them by calling ``pump`` in the next iteration of the event loop,
    so that all answers of one iteration are written together.
    """

    def __init__(self, connection: Carrier, stream_id: int, head: Head, max_bytes: int) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._head = head
        self._limits = connection.limits
        self._loop = asyncio.get_running_loop()
        self._ends_at = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        self._deadline_timer = (
            None
            if self._ends_at is None
            else self._loop.call_at(self._ends_at + _MARGIN_S, self._expire)
        )
        self._reader = MessageReader(max_bytes, head.encoding)
        self._unparsed = bytearray()
        self._inbox: deque[bytes] = deque()
        self._unread_bytes = self._unacknowledged = self._buffered_bytes = 0
        self._is_half_closed = False
        #: whether the handler waits for a message, or has not received its first message yet
        self._is_reading = True
        self._wakeup = asyncio.Event()
        self._failure: EverliftError | None = None
        # answers
        self._encoding = IDENTITY
        self._initial: Metadata = ()
        self._has_sent_head = self._must_send_head = self._is_closed = False
        #: framed answers; the first may be the unsent rest of one
        self._queue: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._writable: asyncio.Future[None] | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        self._source: Source | None = None
        self._source_has_more = False
        self._source_done: asyncio.Future[None] | None = None
        self._status: tuple[int, str, Metadata] | None = None
        self._abort: tuple[int, str, Metadata] = (grpc.StatusCode.OK.value[0], "", ())
        self._task: asyncio.Task[None] | None = None

    # input messages

    def feed(self, data: bytes, flow_bytes: int) -> None:
        """Parse received bytes, which used ``flow_bytes`` of the flow-control windows."""
        self._unacknowledged += flow_bytes
        if self._failure is None:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        """Parse input until the limit of unread messages is reached.

        The flow-control window alone does not limit memory, because compressed or empty messages
        can take far more memory than their bytes in the window.
        """
        while self._unparsed and self._can_parse:
            part = bytes(self._unparsed[:_PARSED_BYTES])
            del self._unparsed[:_PARSED_BYTES]
            try:
                self._receive(part)
            except EverliftError as error:
                self._fail(error)
        if self._failure is None and self._can_parse:
            self._acknowledge()

    @property
    def _can_parse(self) -> bool:
        return self._unread_bytes <= self._limits.max_unread_bytes

    def _receive(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._inbox.append(message)
            self._unread_bytes += len(message) + _MESSAGE_COST
            self._wakeup.set()
        self._report_buffered()

    def _report_buffered(self) -> None:
        if change := self._reader.num_buffered - self._buffered_bytes:
            self._buffered_bytes += change
            self._connection.add_buffered(change)

    def _drop(self) -> None:
        self._unparsed.clear()
        self._reader.drop()
        self._report_buffered()

    def _fail(self, error: EverliftError) -> None:
        """Drop all further input of the call, because of ``error``.

        If the handler is waiting in ``messages``, it first receives the complete messages, and then
        ``messages`` raises the error. A handler that is not waiting might never read again, so its
        task is cancelled, and the call ends with the status of the error.
        """
        self._failure = error
        self._drop()
        if self._is_reading:
            self._wakeup.set()
        else:
            self.refuse(error)
            self._stop()

    def half_close(self) -> None:
        """Record that the client sends no more messages."""
        self._is_half_closed = True
        self._wakeup.set()

    def _acknowledge(self) -> None:
        if self._unacknowledged:
            self._connection.acknowledge(self.stream_id, self._unacknowledged)
            self._unacknowledged = 0

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages of the call until the client has sent its last one.

        Raises InvalidRequest, MessageTooLarge or RateLimited if further input was rejected, and
        CancelledError if the call has ended.
        """
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                self._unread_bytes -= len(message) + _MESSAGE_COST
                self._parse()
                self._is_reading = False
                yield message
                self._is_reading = True
            self._check_open()
            if self._failure is not None:
                raise self._failure
            if self._is_half_closed:
                return
            self._wakeup.clear()
            await self._wakeup.wait()

    # handler

    def run(self, handler: Handler) -> None:
        self._task = self._loop.create_task(self._run(handler))

    async def _run(self, handler: Handler) -> None:
        try:
            await self._handle(handler)
            self._end(*self._abort)
        except grpc.aio.AbortError:
            self._end(*self._abort)
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED.value[0], "")
        except EverliftError as error:
            self.refuse(error)
        except Exception:
            log.exception("a call's handler failed", method=self._head.path)
            self._end(grpc.StatusCode.UNKNOWN.value[0], "the handler failed")

    async def _handle(self, handler: Handler) -> None:
        parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
        self._serialize = handler.response_serializer or bytes
        requests = self._parsed(parse)
        argument = requests if handler.request_streaming else await anext(requests)
        result = behaviour(handler)(argument, self)
        if hasattr(result, "__aiter__"):
            async for answer in result:
                await self.write(answer)
        elif (answer := await result) is not None:
            await self.write(answer)

    async def _parsed(self, parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        async for message in self.messages():
            yield parse(message)

    # context of the handler

    def invocation_metadata(self) -> Metadata:
        return self._head.metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._initial, self._must_send_head = tuple(metadata), True
        self._connection.mark(self)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self._abort = (code.value[0], details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    async def write(self, answer: Any) -> None:
        """Queue an answer, and then wait while too many queued bytes are unsent.

        Raises CancelledError if the call has ended.
        """
        self._check_open()
        self._enqueue(answer)
        self._more()
        if not self._can_write:
            self._writable = self._loop.create_future()
            await self._writable

    async def write_from(self, source: Source) -> None:
        """Send all answers of ``source``, and poll it only as fast as the client accepts answers.

        Returns when the last answer is queued. Raises the error that ``source`` raises, and
        CancelledError if the call has ended.
        """
        self._check_open()
        self._source_done, self._source = self._loop.create_future(), source
        source.on_more = self._more
        self._more()
        await self._source_done

    def _more(self) -> None:
        self._connection.mark(self)

    def _check_open(self) -> None:
        # A library that the handler awaited may have suppressed the cancellation.
        if self._is_closed:
            raise asyncio.CancelledError

    @property
    def _can_write(self) -> bool:
        return self._unsent_bytes <= self._limits.max_unsent_bytes

    def _enqueue(self, answer: Any) -> None:
        message = framed(self._serialize(answer), self._head.encoding)
        self._queue.append(message)
        self._unsent_bytes += len(message)

    def _poll_source(self, source: Source) -> None:
        try:
            while self._can_write and (answer := source.poll()) is not None:
                self._enqueue(answer)
            self._source_has_more = not self._can_write
        except Exception as error:
            self._finish_source(error)
        else:
            if source.is_over:
                self._finish_source(None)

    def _finish_source(self, error: Exception | None) -> None:
        self._source = None
        if self._source_done is not None and not self._source_done.done():
            if error is None:
                self._source_done.set_result(None)
            else:
                self._source_done.set_exception(error)

    # end of the call

    def _expire(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "the call's deadline has passed")
        self._stop()

    def shut_down(self) -> None:
        """End the call because the server is stopping."""
        self._end(grpc.StatusCode.UNAVAILABLE.value[0], "the server is stopping")
        self._stop()

    def cancel(self) -> None:
        """End the call without an answer, because the client can no longer receive one."""
        self._status = self._status or (grpc.StatusCode.CANCELLED.value[0], "", ())
        self._stop()
        self.close()

    def refuse(self, error: EverliftError) -> None:
        """End the call with the status of ``error``."""
        code = wire.status(error).value[0]
        self._end(code, error_details.cause(error), wire.trailing_metadata(error))
        if isinstance(error, RouterStopping):
            # Behind a load balancer, only a new connection can reach another router.
            self._connection.close_when_idle()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, code: int, details: str, metadata: Metadata = ()) -> None:
        if self._status is None:
            self._status = (code, details, metadata)
            self._connection.mark(self)

    def close(self) -> None:
        """Release the call's resources; the connection sends no more data of the call."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._is_closed = True
        # The call's unread bytes are acknowledged, because all calls share the connection's window.
        self._acknowledge()
        self._drop()
        self._inbox.clear()
        self._unread_bytes = 0
        self._wakeup.set()
        self._queue.clear()
        self._unsent_bytes = 0
        self._source = None
        if self._source_done is not None:
            self._source_done.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # sending, called by the connection

    @property
    def has_queued(self) -> bool:
        """Return whether data of the call waits to be sent."""
        return bool(self._queue)

    def pump(self, http2: Http2) -> bool:
        """Send a part that the flow-control windows allow; return whether the call has ended."""
        if self._source is not None:
            self._poll_source(self._source)
        if self._status is not None and not (
            self._has_sent_head or self._queue or self._must_send_head
        ):
            headers = heads.opening(self._initial, IDENTITY) + heads.closing(*self._status)
            http2.send_headers(self.stream_id, headers, end_stream=True)
            return True
        if not self._has_sent_head:
            self._has_sent_head = True
            http2.send_headers(self.stream_id, heads.opening(self._initial, self._head.encoding))
        if self._queue:
            self._send_queue(http2)
        if self._source is not None and self._source_has_more and self._can_write:
            self._more()
        if self._queue or self._status is None:
            return False
        http2.send_headers(self.stream_id, heads.closing(*self._status), end_stream=True)
        return True

    def _send_queue(self, http2: Http2) -> None:
        allowed = min(http2.window(self.stream_id), _PUMPED_BYTES)
        if allowed <= 0:
            return
        data = self._queue.popleft() if len(self._queue) == 1 else b"".join(self._queue)
        self._queue.clear()
        frame = http2.max_outbound_frame_size
        if len(data) <= allowed and len(data) <= frame:
            http2.send(self.stream_id, data)
            self._unsent_bytes = 0
        else:
            end = min(len(data), allowed)
            # Views, because a copy of the rest at every part would make a large answer's cost
            # quadratic.
            view = memoryview(data)
            for start in range(0, end, frame):
                http2.send(self.stream_id, view[start : min(start + frame, end)])
            if end < len(view):
                self._queue.append(view[end:])
            self._unsent_bytes = len(view) - end
        if self._writable is not None and self._can_write and not self._writable.done():
            self._writable.set_result(None)


def behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    """Return the function that ``handler`` wraps.

    A gRPC handler has one attribute for each of the four kinds of calls, such as ``unary_stream``.
    Exactly one of them is set.
    """
    kinds = (
        *(handler.unary_unary, handler.unary_stream),
        *(handler.stream_unary, handler.stream_stream),
    )
    return next(kind for kind in kinds if kind is not None)
