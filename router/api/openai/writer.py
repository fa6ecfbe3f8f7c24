"""The body of an answer, written as uvicorn writes it, but without a call of ASGI for each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

#: Its place among the extensions of a request's scope.
_NAME = "everlift.writer"


class Writer:
    """``on_room`` is called when a client that was slow has read."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.on_room: Callable[[], None] = lambda: None
        extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
        extensions[_NAME] = self

    @classmethod
    def of(cls, scope: Scope) -> Writer:
        return cast(Writer, scope["extensions"][_NAME])

    @property
    def has_room(self) -> bool:
        return not self.cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Once the answer has begun, and before its end is sent."""
        cycle = self.cycle
        if cycle.disconnected or cycle.scope["method"] == "HEAD":
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        cycle.transport.write(data)
