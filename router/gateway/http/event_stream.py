"""Server-sent events: an answer as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from everlift import logs
from everlift.errors import EverliftError
from router.gateway.http import errors
from router.gateway.http.endpoint import Gone, encode, unless_gone
from router.gateway.http.generation import Generation
from router.gateway.http.transcript import News, Transcript, Usage

log = logs.get(__name__)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that collects what comes would hold tokens back.
    (b"x-accel-buffering", b"no"),
)


class StreamedAnswer(Protocol):
    """What is made of news: the chunks of one kind of answer."""

    def chunk(self, news: News) -> Mapping[str, Any] | None: ...

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]: ...


async def events(
    generation: Generation,
    transcript: Transcript,
    answer: StreamedAnswer,
    *,
    has_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Raises what one of the requests fails with."""
    async with aclosing(generation):
        async for index, piece in generation.pieces():
            news = transcript.read(index, piece)
            if news is not None and (chunk := answer.chunk(news)) is not None:
                transcript.tell(news.choice)
                yield _event(transcript.event_id, encode(chunk))
    if has_usage:
        yield _event(transcript.event_id, encode(answer.usage_chunk(transcript.usage)))
    yield _event(transcript.event_id, "[DONE]")


def _event(event_id: str, data: str) -> bytes:
    return f"id: {event_id}\ndata: {data}\n\n".encode()


class EventStream:
    """An ASGI response. Its first event is there before it begins, so that what is refused until
    then has a status of its own; what fails later is an event, and the last one."""

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        transcript: Transcript,
        params: Mapping[str, str],
    ) -> None:
        self._first = first
        self._rest = rest
        self._transcript = transcript
        self._params = params

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Gone):
            await unless_gone(receive, self._tell(send))

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with aclosing(self._rest):
            await _send(send, self._first)
            try:
                async for event in self._rest:
                    await _send(send, event)
            except EverliftError as error:
                await self._fail(send, error)
            except Exception:
                log.exception("a stream of events failed")
                await self._fail(send, EverliftError("internal error; the router's log says more"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Send, error: EverliftError) -> None:
        data = encode(errors.described(error, self._params))
        await _send(send, _event(self._transcript.event_id, data))


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
