"""JSON encoding of answers, and a writer of response bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: Number of values of a long array that are encoded at once, which takes some milliseconds.
_VALUES_PER_PART = 1 << 14


def around(value: object, name: str, placeholder: object) -> tuple[str, str]:
    """Split the JSON of ``value`` at the value of a member ``name``, which may be nested.

    Return the text before and the text after that value; the caller writes another value between
    them. The member must have the value ``placeholder``. If several members have this name and
    value, the last one is used.
    """
    # A client's text cannot match, because its quotation marks are escaped in JSON.
    begin, _, end = encode(value).rpartition(f'"{name}":{encode(placeholder)}')
    return f'{begin}"{name}":', end


def array(begin: str, members: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    """Yield, in parts, ``begin``, then ``members`` as a JSON array, then ``end``.

    Each member is given as one or more parts of its JSON.
    """
    before = f"{begin}["
    for member in members:
        for part in member:
            yield before + part
            before = ""
        before = ","
    yield f"{before.removesuffix(',')}]{end}"


def long_array(values: Sequence[object]) -> Iterator[str]:
    """Yield the JSON array of ``values`` in parts, each of which is encoded quickly."""
    starts = range(0, len(values), _VALUES_PER_PART)
    return array("", ([encode(values[i : i + _VALUES_PER_PART])[1:-1]] for i in starts), "")


#: Key of the writer in the extensions of a request's ASGI scope.
_NAME = "everlift.writer"


class Writer:
    """Writer of a response's body.

    ``on_writable`` is called when more can be written, after a slow client has received enough.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.on_writable: Callable[[], None] = lambda: None
        extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
        extensions[_NAME] = self

    @classmethod
    def of(cls, scope: Scope) -> Writer:
        return cast(Writer, scope["extensions"][_NAME])

    @property
    def is_writable(self) -> bool:
        return not self.cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part of the body, after the response's start and before its end."""
        cycle = self.cycle
        if cycle.disconnected or cycle.scope["method"] == "HEAD":
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        cycle.transport.write(data)
