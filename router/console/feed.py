"""What a page watches: a stream of frames, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from everlift import logs
from everlift.errors import EverliftError, TooManyConnections
from router.api.openai import errors
from router.api.openai.encoding import encode
from router.api.openai.endpoint import Gone, unless_gone

log = logs.get(__name__)

#: Between two frames of a page that reads them in time.
FRAME_S = 0.25
#: Pages that watch one router.
MOST_VIEWERS = 32
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class Audience:
    """Those who watch."""

    def __init__(self) -> None:
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(self) -> None:
        """Raises TooManyConnections."""
        if self._size >= MOST_VIEWERS:
            raise TooManyConnections(f"{MOST_VIEWERS} consoles watch this router")

    @contextmanager
    def joined(self) -> Iterator[None]:
        self._size += 1
        try:
            yield
        finally:
            self._size -= 1


class Feed:
    """An ASGI response. ``frame`` makes the next one; what it raises is told as the last event. Who
    reads slowly gets fewer of them."""

    def __init__(self, audience: Audience, frame: Callable[[], str]) -> None:
        self._audience = audience
        self._frame = frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._audience.joined(), suppress(Gone):
            await unless_gone(receive, self._tell(send))

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while True:
                await _say(send, "frame", self._frame())
                await asyncio.sleep(FRAME_S)
        except EverliftError as error:
            await _say(send, "error", encode(errors.described(error, {})))
        except Exception:
            log.exception("a console's feed failed")
            unknown = EverliftError("internal error; the router's log says more")
            await _say(send, "error", encode(errors.described(unknown, {})))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _say(send: Send, kind: str, data: str) -> None:
    body = f"event: {kind}\ndata: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
