"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol, Self

from starlette.types import Receive, Scope, Send

from everlift import logs
from everlift.errors import EverliftError
from everlift.explanation import spans_as_json
from router.gateway.http import errors
from router.gateway.http.encoding import encode
from router.gateway.http.endpoint import Gone, unless_gone
from router.gateway.http.generation import Generation
from router.gateway.http.transcript import News, Transcript, Usage
from router.gateway.http.writer import Writer

log = logs.get(__name__)

#: Events of one stream before others have their turn of the event loop.
_AT_ONCE = 64
#: So many bytes of them are enough: what has log probabilities takes long to write.
_BYTES_AT_ONCE = 64 << 10
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that collects what comes would hold tokens back.
    (b"x-accel-buffering", b"no"),
)


class StreamedAnswer(Protocol):
    """Writer of the chunks of one kind of answer."""

    def data(self, news: News, usage: Usage | None = None) -> str | None:
        """Return a chunk with the ``usage`` so far, if any, as JSON; None if there is nothing to
        send."""
        ...

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]: ...


class Events:
    """The events of one answer, which can be taken as they come. Who has it closes it.

    With ``has_ids`` each says where the stream is. Clients that know no other line than ``data``
    take an id for the beginning of their JSON."""

    def __init__(
        self,
        generation: Generation,
        transcript: Transcript,
        answer: StreamedAnswer,
        *,
        has_usage: bool,
        has_continuous_usage: bool = False,
        explains: bool = False,
        has_ids: bool = False,
    ) -> None:
        self._generation = generation
        self._transcript = transcript
        self._answer = answer
        self._has_ids = has_ids
        #: the token counts that each chunk has, if any
        self._usage = transcript.usage if has_continuous_usage else None
        #: what comes behind the last piece, the last of it first
        self._last: list[Callable[[], str]] = [lambda: "[DONE]"]
        if has_usage or explains:
            self._last.append(lambda: encode(self._usage_chunk()))

    def _usage_chunk(self) -> Mapping[str, Any]:
        """Where it is asked for, with where the time went."""
        chunk = self._answer.usage_chunk(self._transcript.usage)
        spans = self._transcript.spans
        return {**chunk, "timing": spans_as_json(spans)} if spans else chunk

    def listen(self, on_more: Callable[[], None]) -> None:
        """From now on ``on_more`` is told when there may be more."""
        self._generation.on_more = on_more

    @property
    def is_over(self) -> bool:
        return not self._last

    def take(self) -> bytes | None:
        """The next one, if it is there. Raises what one of the requests fails with."""
        while (numbered := self._generation.take()) is not None:
            news = self._transcript.read(*numbered)
            if news is not None and (data := self._answer.data(news, self._usage)) is not None:
                self._transcript.tell(news.choice)
                return self.event(data)
        if self._generation.is_over and self._last:
            return self.event(self._last.pop()())
        return None

    def event(self, data: str) -> bytes:
        """One that tells ``data`` where the stream is now."""
        where = f"id: {self._transcript.event_id}\n" if self._has_ids else ""
        return f"{where}data: {data}\n\n".encode()

    async def first(self) -> bytes:
        """Raises as ``take`` does."""
        came = asyncio.Event()
        self.listen(came.set)
        while (event := self.take()) is None:
            await came.wait()
            came.clear()
        return event

    async def aclose(self) -> None:
        await self._generation.aclose()


class EventStream:
    """An ASGI response. Its first event is there before it begins, so that what is refused until
    then has a status of its own; what fails later is an event, and the last one."""

    def __init__(self, first: bytes, rest: Events, params: Mapping[str, str]) -> None:
        self._first = first
        self._rest = rest
        self._params = params

    @classmethod
    async def begin(cls, events: Events, params: Mapping[str, str]) -> Self:
        """Raises what one of the requests fails with before its first event."""
        try:
            return cls(await events.first(), events, params)
        except BaseException:
            await events.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            with suppress(Gone):
                await unless_gone(receive, self._tell(Writer.of(scope), send))

    async def _tell(self, writer: Writer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        writer.write(self._first)
        try:
            await _Carrier(self._rest, writer).all_written()
        except EverliftError as error:
            self._fail(writer, error)
        except Exception:
            log.exception("a stream of events failed")
            self._fail(writer, EverliftError("internal error; the router's log says more"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _fail(self, writer: Writer, error: EverliftError) -> None:
        writer.write(self._rest.event(encode(errors.described(error, self._params))))


class _Carrier:
    """Carries events to a client as they come: no task wakes up for each of them."""

    def __init__(self, events: Events, writer: Writer) -> None:
        self._events = events
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._is_due = False

    async def all_written(self) -> None:
        """Raises as Events.take does; what came before is written."""
        self._events.listen(self._soon)
        self._writer.on_room = self._soon
        self._soon()
        try:
            await self._done
        finally:
            # Whoever still calls finds nothing to do.
            self._done.cancel()

    def _soon(self) -> None:
        """With all else that this turn of the event loop brings."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_due = False
        if self._done.done():
            return
        events: list[bytes] = []
        num_bytes = 0
        try:
            while self._writer.has_room and (event := self._events.take()) is not None:
                events.append(event)
                num_bytes += len(event)
                if len(events) == _AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
                    self._soon()
                    break
            if self._events.is_over:
                self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)
        if events:
            self._writer.write(b"".join(events))
