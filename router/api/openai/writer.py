"""Body of an answer: JSON values, and how they are written to the connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def around(value: object, name: str, held: object) -> tuple[str, str]:
    """Return the JSON of ``value`` before and behind its last member ``name``, which is ``held``.

    Something else can be written in its place.
    """
    # What is a client's cannot be taken for it: in JSON its quotation marks are escaped.
    begin, _, end = encode(value).rpartition(f'"{name}":{encode(held)}')
    return f'{begin}"{name}":', end


def array(begin: str, members: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    """Write an array between ``begin`` and ``end``, whose members come in parts.

    There is at least one.
    """
    before = f"{begin}["
    for member in members:
        for part in member:
            yield before + part
            before = ""
        before = ","
    yield f"{before.removesuffix(',')}]{end}"


#: Its place among the extensions of a request's scope.
_NAME = "everlift.writer"


class Writer:
    """Writer of a response. ``on_room`` is called when a slow client has caught up."""

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
        """Write a part of the answer, after its start and before its end."""
        cycle = self.cycle
        if cycle.disconnected or cycle.scope["method"] == "HEAD":
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        cycle.transport.write(data)
