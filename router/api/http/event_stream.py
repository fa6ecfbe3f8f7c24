"""Server-sent events of a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Self

from starlette.types import Receive, Scope, Send

from everlift import logs
from everlift.errors import EverliftError
from router.api.http.endpoint import Disconnected, cancel_on_disconnect
from router.api.http.generation import Generation
from router.api.http.streaming import Event, StreamedAnswer
from router.api.http.transcript import Transcript
from router.api.http.writer import Writer

log = logs.get_logger(__name__)

#: Maximum number of events that a stream writes before other tasks of the event loop get a turn.
_MAX_EVENTS_PER_TURN = 64
#: Number of bytes of events after which other tasks get a turn as well, because events with log
#: probabilities take long to encode.
_MAX_BYTES_PER_TURN = 64 << 10
#: Number of characters without an event, such as output that the client has, after which other
#: tasks get a turn. A resumed stream may begin with a long output, and parsing takes long.
_MAX_SILENT_CHARS = 4096
#: Comment line that keeps proxies from closing an idle connection; SSE parsers ignore it.
_COMMENT = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers the response would delay tokens.
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Settings that keep an idle stream's connection open; an interval of 0 seconds disables them.

    After an interval without an event the response headers are sent. With ``has_comments`` a
    comment line is sent for each interval without an event.
    """

    interval_s: float
    has_comments: bool


class Events:
    """Server-sent events of one answer, which are polled; the creator must close the object.

    ``has_ids`` adds an id line to each event, which states the position up to which the client has
    the output. Several events for the same output differ: the last one has the position after the
    output, and the others have the position before it. ``has_ids`` must be false for clients that
    only know ``data`` lines: they would take the id line for the beginning of the JSON.
    """

    def __init__(
        self,
        generation: Generation,
        transcript: Transcript,
        answer: StreamedAnswer,
        *,
        has_ids: bool = False,
    ) -> None:
        self._generation = generation
        self._transcript = transcript
        self._answer = answer
        self._has_ids = has_ids
        #: events that are sent before any output
        self._first = () if transcript.had_output else answer.first_events(transcript.usage)
        self._is_over = False

    def listen(self, on_more: Callable[[], None]) -> None:
        """Set ``on_more`` as the function to call when there may be another event."""
        self._generation.on_more = on_more

    @property
    def is_over(self) -> bool:
        return self._is_over

    def poll(self) -> bytes | None:
        """Return the next events; None if there are none yet, or if the last ones were returned.

        Also return None after much output without an event. The event loop then calls the function
        of ``listen`` in its next turn.

        ``is_over`` becomes true when the last events are returned. Raises the error of a failed
        request, and DataLoss if the output differs from the output that the client has.
        """
        if self._first:
            events, self._first = self._first, ()
            return self._written(events)
        transcript, num_silent = self._transcript, 0
        while (numbered := self._generation.poll()) is not None:
            output = transcript.read(*numbered)
            events = self._answer.events(output, transcript.usage)
            if events and not output.is_known:
                before = self._id if len(events) > 1 else ""
                transcript.mark_read(output.choice)
                return self._written(events, before)
            num_silent += len(numbered[1].text)
            if num_silent >= _MAX_SILENT_CHARS:
                asyncio.get_running_loop().call_soon(self._generation.on_more)
                return None
        if self._generation.is_over and not self._is_over:
            self._is_over = True
            return self._written(self._answer.last_events(transcript.usage, transcript.spans))
        return None

    def failed(self, error: EverliftError, params: Mapping[str, str]) -> bytes:
        """Return the events that end the stream because of ``error``.

        ``params`` maps names of fields in everlift.messages to the client's names.
        """
        return self._written(self._answer.error_events(error, params, self.resume_headers))

    @property
    def _id(self) -> str:
        return f"id: {self._transcript.event_id}\n" if self._has_ids else ""

    def _written(self, events: Sequence[Event], before: str | None = None) -> bytes:
        """Return the encoded text of ``events``.

        The last event has the id line of the client's current position. The others have the id line
        ``before``, or the same one as the last event if ``before`` is None.
        """
        last = self._id
        lines: list[str] = []
        for number, event in enumerate(events, 1):
            lines.append(last if before is None or number == len(events) else before)
            if event.name:
                lines.append(f"event: {event.name}\n")
            lines.append(f"data: {event.data}\n\n")
        return "".join(lines).encode()

    @property
    def resume_headers(self) -> Mapping[str, str]:
        """Headers with which the same POST continues the stream from its current position."""
        return self._transcript.resume_headers

    async def first(self) -> bytes:
        """Wait for the first events and return them. Raises the errors of ``poll``."""
        wakeup = asyncio.Event()
        self.listen(wakeup.set)
        while (event := self.poll()) is None:
            await wakeup.wait()
            wakeup.clear()
        return event

    async def aclose(self) -> None:
        await self._generation.aclose()


class EventStream:
    """ASGI response with server-sent events.

    If a request fails before its first event, its error is the HTTP response, unless the keep-alive
    interval ended before. A later error is sent as the last event.
    """

    def __init__(
        self, first: bytes, events: Events, params: Mapping[str, str], keep_alive: KeepAlive
    ) -> None:
        """Create a response that sends ``first``, which may be empty, and then the ``events``.

        ``params`` maps names of fields to the client's names, for error messages.
        """
        self._first = first
        self._events = events
        self._params = params
        self._keep_alive = keep_alive

    @classmethod
    async def await_first(
        cls, events: Events, params: Mapping[str, str], keep_alive: KeepAlive
    ) -> Self:
        """Wait for the first event, and return the response.

        The wait ends after one keep-alive interval; an interval of 0 means no limit. Raises the
        error of a request that fails in this time.
        """
        first = b""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(keep_alive.interval_s or None):
                    first = await events.first()
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events, params, keep_alive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(Disconnected):
                await cancel_on_disconnect(receive, self._send_events(Writer.of(scope), send))

    async def _send_events(self, writer: Writer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        comment_s = self._keep_alive.interval_s if self._keep_alive.has_comments else 0.0
        if self._first or comment_s:
            writer.write(self._first or _COMMENT)
        try:
            await _EventWriter(self._events, writer, comment_s).write_all()
        except EverliftError as error:
            self._fail(writer, error)
        except Exception:
            log.exception("a stream of events failed")
            self._fail(writer, EverliftError("internal error; see the router's log"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _fail(self, writer: Writer, error: EverliftError) -> None:
        writer.write(self._events.failed(error, self._params))


class _EventWriter:
    """Writer of events to a client by callbacks, so that no task is woken for each event.

    After ``comment_s`` seconds without an event it writes a comment line; 0 disables comment lines.
    """

    def __init__(self, events: Events, writer: Writer, comment_s: float) -> None:
        self._events = events
        self._writer = writer
        self._comment_s = comment_s
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    async def write_all(self) -> None:
        """Write events until the last one is written.

        Raises the error of a failed request after the events before it are written.
        """
        self._events.listen(self._schedule_write)
        self._writer.on_writable = self._schedule_write
        self._schedule_write()
        if self._comment_s:
            self._comment_after(self._comment_s)
        try:
            await self._done
        finally:
            # A call of ``_write`` that is still scheduled has no effect after this.
            self._done.cancel()
            if self._timer is not None:
                self._timer.cancel()

    def _comment_after(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._comment_if_idle)

    def _comment_if_idle(self) -> None:
        """Write a comment line if no event was written for an interval.

        The timer is set once for each interval. An event does not reset the timer, but only stores
        the time at which it was written.
        """
        now = self._loop.time()
        remaining_s = self._written_at + self._comment_s - now
        if remaining_s <= 0:
            if self._writer.is_writable:
                self._writer.write(_COMMENT)
            self._written_at, remaining_s = now, self._comment_s
        self._comment_after(remaining_s)

    def _schedule_write(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_scheduled = False
        if self._done.done():
            return
        events: list[bytes] = []
        num_bytes = 0
        try:
            while self._writer.is_writable and (event := self._events.poll()) is not None:
                events.append(event)
                num_bytes += len(event)
                if len(events) == _MAX_EVENTS_PER_TURN or num_bytes >= _MAX_BYTES_PER_TURN:
                    self._schedule_write()
                    break
            if self._events.is_over:
                self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)
        if events:
            self._written_at = self._loop.time()
            self._writer.write(b"".join(events))
