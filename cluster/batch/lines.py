"""Lines of a batch's input file, each a request of OpenAI's API.

    {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "12 + 30 ="}}
    {"custom_id": "c", "prompt": [17, 4, 9], "max_tokens": 20, "temperature": 0}

A line without ``body`` has the members of the body itself; its API follows from ``messages``,
``input`` or ``prompt``. The id of a line without one is made of its number, such as "line-7". Empty
lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import BatchFailed

COMPLETIONS = "/v1/completions"
#: API of a line by the member of its body that only this API has.
_APIS = {"messages": "/v1/chat/completions", "input": "/v1/responses", "prompt": COMPLETIONS}
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
#: Maximum number of invalid lines that an error lists.
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Line:
    """Request of a batch; ``number`` is the line's number in the file, from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return the line in the form of OpenAI's batches."""
        fields = {
            "custom_id": self.custom_id,
            "method": "POST",
            "url": self.url,
            "body": self.body,
        }
        return json.dumps(fields).encode() + b"\n"


class Survey:
    """Ids of all lines of an input file, and ``digest``, a hash of its content.

    ``len`` returns the number of lines. Empty lines are ignored.
    """

    def __init__(self, path: Path) -> None:
        """Read the whole file once.

        Raises BatchFailed if a line is invalid or an id occurs twice, and OSError.
        """
        digest = hashlib.sha256()
        self._numbers: dict[str, int] = {}
        causes: list[str] = []
        for number, data in _numbered(path):
            digest.update(data)
            try:
                self._add(_line(number, data))
            except ValueError as error:
                causes.append(f"line {number}: {error}")
                if len(causes) == _MAX_LISTED:
                    break
        if causes:
            raise BatchFailed(f"{path} has invalid lines\n  " + "\n  ".join(causes))
        self.digest = digest.digest()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def custom_ids(self) -> Collection[str]:
        return self._numbers.keys()

    def _add(self, line: Line) -> None:
        first = self._numbers.setdefault(line.custom_id, line.number)
        if first != line.number:
            raise ValueError(f"line {first} has the same id {line.custom_id!r}")


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file that a Survey has found to be valid. Raises OSError."""
    for number, data in _numbered(path):
        yield _line(number, data)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield number, data


def _line(number: int, data: bytes) -> Line:
    """Parse a line. Raises ValueError if it is invalid."""
    try:
        fields = json.loads(data)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    body = fields.pop("body") if "body" in fields else None
    if body is None:
        names = {"custom_id", "id", "method", "url"} & fields.keys()
        envelope = {name: fields.pop(name) for name in names}
        if "id" in envelope:
            envelope.setdefault("custom_id", envelope.pop("id"))
        body = fields
    else:
        envelope = fields
    if unknown := envelope.keys() - _ENVELOPE:
        raise ValueError(f"unknown member {sorted(unknown)[0]!r} beside body")
    if not isinstance(body, dict):
        raise ValueError("body is not a JSON object")
    return Line(number, _custom_id(envelope, number), _url(envelope, body), body)


def _custom_id(envelope: Mapping[str, object], number: int) -> str:
    custom_id = envelope.get("custom_id")
    if custom_id is None:
        return f"line-{number}"
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"the id must be text, not {custom_id!r}")
    return custom_id


def _url(envelope: Mapping[str, object], body: Mapping[str, Any]) -> str:
    if envelope.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    urls = [*_APIS.values()]
    url = envelope.get("url")
    if url is None:
        url = next((it for name, it in _APIS.items() if name in body), None)
        if url is None:
            raise ValueError(f"the request has none of {', '.join(_APIS)}")
    if url not in urls:
        raise ValueError(f"url must be one of {', '.join(urls)}, not {url!r}")
    return str(url)
