"""Lines of a batch: their requests, and their results. Pure."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everlift.errors import EverliftError, InvalidRequest
from router.api.http import body
from router.api.http.fields import Fields, Object, parse
from router.api.openai.batches.record import MAX_ERRORS, BatchError, Counts

#: Maximum number of lines of an input file, as in OpenAI's API.
MAX_LINES = 50_000
_MAX_ID_BYTES = 512
#: Characters at which Python's str.splitlines ends a line, although JSON may contain them.
_SEPARATORS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


class LineFields(Fields):
    custom_id: str
    method: str
    url: str
    body: Object


@dataclass(frozen=True, slots=True)
class Line:
    """Request of a batch.

    ``number`` is its line in the input file, from 1, and ``num_bytes`` the length of that line.
    """

    number: int
    custom_id: str
    body: Object
    num_bytes: int = 0


def parse_line(number: int, data: bytes, endpoint: str) -> Line:
    """Parse a line of an input file. Raises InvalidRequest if it is no request of ``endpoint``."""
    fields = parse(LineFields, body.parse(data))
    if not 0 < len(fields.custom_id.encode()) <= _MAX_ID_BYTES:
        raise InvalidRequest(f"custom_id must have 1 to {_MAX_ID_BYTES} bytes", field="custom_id")
    if fields.method != "POST":
        raise InvalidRequest("method must be POST", field="method")
    if fields.url != endpoint:
        raise InvalidRequest(f"url must be the batch's endpoint {endpoint}", field="url")
    for name in ("stream", "background"):
        if fields.body.get(name):
            raise InvalidRequest(f"a line of a batch cannot set {name}", field=f"body.{name}")
    return Line(number, fields.custom_id, fields.body, len(data))


def parse_lines(
    first: int, group: Sequence[bytes], endpoint: str, excluded: Container[str]
) -> list[Line]:
    """Parse consecutive lines of an input file, numbered from ``first``.

    Blank lines, and lines with a custom id in ``excluded``, are omitted. Raises InvalidRequest if a
    line that is not blank is not a request of ``endpoint``.
    """
    numbered = enumerate(group, first)
    lines = (parse_line(number, data, endpoint) for number, data in numbered if data.strip())
    return [line for line in lines if line.custom_id not in excluded]


class Survey:
    """Check of an input file: counts its lines and collects its errors."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._numbers: dict[str, int] = {}
        self._last = 0
        self.errors: list[BatchError] = []
        #: model that the first line names
        self.model: str | None = None

    @property
    def num_lines(self) -> int:
        return len(self._numbers)

    def add(self, lines: Iterable[bytes]) -> None:
        """Check further lines of the file."""
        for data in lines:
            self._last += 1
            if data.strip() and not self._has_ended:
                self._check(self._last, data)

    @property
    def _has_ended(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or self.num_lines > MAX_LINES

    def finish(self) -> None:
        """Check the number of lines."""
        if not self._numbers and not self.errors:
            self._add_error("empty_file", None, "the input file has no request", None)

    def _check(self, number: int, data: bytes) -> None:
        try:
            line = parse_line(number, data, self._endpoint)
        except EverliftError as error:
            self._add_error(error.slug, number, str(error), error.field or None)
            return
        first = self._numbers.setdefault(line.custom_id, number)
        if first != number:
            message = f"the lines {first} and {number} have the same custom_id"
            self._add_error("duplicate_custom_id", number, message, "custom_id")
        if self.num_lines > MAX_LINES:
            message = f"a batch has at most {MAX_LINES} requests"
            self._add_error("too_many_requests", number, message, None)
        model = line.body.get("model")
        if self.model is None and isinstance(model, str):
            self.model = model

    def _add_error(self, code: str, line: int | None, message: str, param: str | None) -> None:
        self.errors.append({"code": code, "line": line, "message": message, "param": param})


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a line: the status and the JSON of its body, and the id of its request."""

    status: int
    body: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a line of a batch.

    ``data`` is the result as a line of a result file, with the line terminator. ``counts`` is what
    the result adds to the counts of the batch. The error file has the results of lines that failed.
    """

    batch_id: str
    line: Line
    data: bytes
    counts: Counts


def answered(batch_id: str, line: Line, answer: Answer) -> Result:
    """Return the result of a line with an answer."""
    body = answer.body
    for separator, escaped in _SEPARATORS.items():
        body = body.replace(separator, escaped)
    data = b'{"id": %s, "custom_id": %s, "response": %s, "error": null}\n' % (
        _encoded(_line_id(batch_id, line)),
        _encoded(line.custom_id),
        b'{"status_code": %d, "request_id": %s, "body": %s}'
        % (answer.status, _encoded(answer.request_id), body),
    )
    return Result(batch_id, line, data, _counts(answer.status, json.loads(answer.body)))


def unanswered(batch_id: str, line: Line, code: str, message: str) -> Result:
    """Return the result of a line without an answer, for the reason ``message``."""
    result = {
        "id": _line_id(batch_id, line),
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Result(batch_id, line, _encoded(result) + b"\n", Counts(failed=1))


def _line_id(batch_id: str, line: Line) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def counts_of(result: Mapping[str, Any]) -> Counts:
    """Return what a line's result, as parsed JSON, adds to the counts of its batch."""
    response = result["response"]
    if response is None:
        return Counts(failed=1)
    return _counts(response["status_code"], response["body"])


def _counts(status: int, body: Mapping[str, Any]) -> Counts:
    if status != 200:
        return Counts(failed=1)
    usage = body.get("usage") or {}
    names = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    read, written = (usage.get(f"{name}_tokens_details") or {} for name in names)
    return Counts(
        completed=1,
        input_tokens=usage.get(f"{names[0]}_tokens", 0),
        cached_tokens=read.get("cached_tokens", 0),
        output_tokens=usage.get(f"{names[1]}_tokens", 0),
        reasoning_tokens=written.get("reasoning_tokens", 0),
    )
