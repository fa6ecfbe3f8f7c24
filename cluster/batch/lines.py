"""Lines of a batch's input file, each a prompt with its options.

    {"id": "a", "prompt": "count from 1 to 9:", "max_tokens": 20, "temperature": 0}
    {"id": "b", "prompt": [17, 4, 9], "n": 2}
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "12 + 30 ="}}
    {"custom_id": "d", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Options have the names of the client's GenerateOptions. The body of a chat is sent with a seed if it
has none, and with ``on_disconnect``, but otherwise unchanged. The id of a line without one is made
of its number, such as "line-7". Empty lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from cluster.errors import BatchFailed
from everlift.errors import EverliftError, InvalidRequest
from everlift.options import GenerateOptions, Prompt, submission_message
from everlift.typos import did_you_mean

#: Options of a line. There is no on_disconnect, because the requests of a batch always continue, so
#: that a later run of the same batch finds them.
_OPTIONS = GenerateOptions.__annotations__.keys() - {"on_disconnect"}
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class Work:
    """Valid line with a prompt; ``number`` is the line's number in the file, from 1."""

    number: int
    id: str
    prompt: Prompt
    options: GenerateOptions


@dataclass(frozen=True, slots=True)
class ChatWork:
    """Line with the body of a chat completion, which only the router validates.

    ``request_id`` identifies the request in the cluster.
    """

    number: int
    id: str
    body: Mapping[str, Any]
    request_id: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """Invalid line; ``id`` is None if no id can be read."""

    number: int
    id: str | None
    error: EverliftError


Line = Work | ChatWork | BadLine
#: Key of a line in the results: its id, or its number if no id can be read.
Key = str | int


class Survey:
    """Keys of all lines of an input file, and ``digest``, a hash of its content.

    The key of a line is its id, or its number if no id can be read. ``len`` returns the number of
    lines. Empty lines are ignored.
    """

    def __init__(self, path: Path) -> None:
        """Read the whole file once. Raises BatchFailed if an id occurs twice, and OSError."""
        digest = hashlib.sha256()
        self._numbers: dict[str, int] = {}
        #: numbers of the lines without a readable id
        self._nameless: list[int] = []
        for number, data in _numbered(path):
            digest.update(data)
            self._add(_id_of(data, number), number)
        self.digest = digest.digest()

    def __len__(self) -> int:
        return len(self._numbers) + len(self._nameless)

    def keys(self) -> Iterator[Key]:
        """Return an iterator over the keys of all lines."""
        return chain(self._numbers, self._nameless)

    def _add(self, line_id: str | None, number: int) -> None:
        if line_id is None:
            self._nameless.append(number)
            return
        first = self._numbers.setdefault(line_id, number)
        if first != number:
            raise BatchFailed(f"lines {first} and {number} have the same id {line_id!r}")


def read(
    path: Path,
    digest: bytes,
    done: Container[Key] = (),
    attempt: Callable[[Key], int] = lambda key: 1,
) -> Iterator[Line]:
    """Yield the lines of the file ``path`` whose keys are not in ``done``.

    An invalid line is yielded as a BadLine. Raises OSError if the file cannot be read.

    A line without its own request id or seed gets one that is derived from the file's ``digest``
    and the line's number. A later run on the same file therefore derives the same ones, so that a
    cluster recognises the request and its text does not change. ``attempt`` returns the number of
    the attempt for the key of a line. A later attempt is another request with the same seed, unless
    the line has its own request id.
    """
    for number, data in _numbered(path):
        key = _id_of(data, number) or number
        if key not in done:
            yield _line(number, data, _Names(digest, number, attempt(key)))


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield number, data


@dataclass(frozen=True, slots=True)
class _Names:
    """Default request id and seed of a line, derived from the file's digest and the line number."""

    digest: bytes
    number: int
    attempt: int

    @property
    def request_id(self) -> str:
        again = f"-{self.attempt}" if self.attempt > 1 else ""
        return f"batch-{self._hash[8:].hex()}{again}"

    @property
    def seed(self) -> int:
        return int.from_bytes(self._hash[:8], "little") >> 1

    @property
    def _hash(self) -> bytes:
        return hashlib.sha256(self.digest + self.number.to_bytes(8, "little")).digest()


def _line(number: int, data: bytes, names: _Names) -> Line:
    line_id: str | None = None
    try:
        fields = _parse(data)
        line_id = _explicit_id(fields) or _default_id(number)
        if fields.get("url") == _CHATS:
            return ChatWork(number, line_id, _chat_body(fields, names), names.request_id)
        prompt, options = _prompt_and_options(fields)
        options = {"request_id": names.request_id, "seed": names.seed, **options}
        submission_message(prompt, options)
    except TypeError as error:
        return BadLine(number, line_id, InvalidRequest(f"a value of the wrong type: {error}"))
    except EverliftError as error:
        return BadLine(number, line_id, error)
    return Work(number, line_id, prompt, options)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data.strip())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the line is not a JSON object")
    return fields


def _id_of(data: bytes, number: int) -> str | None:
    try:
        return _explicit_id(_parse(data)) or _default_id(number)
    except InvalidRequest:
        return None


def _explicit_id(fields: Mapping[str, Any]) -> str | None:
    given = fields.get("custom_id" if fields.keys() & {"custom_id", "body"} else "id")
    if given is not None and not isinstance(given, str):
        raise InvalidRequest(f"the id must be text, not {given!r}")
    return given


def _default_id(number: int) -> str:
    return f"line-{number}"


def _prompt_and_options(fields: dict[str, Any]) -> tuple[Prompt, GenerateOptions]:
    body = _openai_body(fields) if "body" in fields else fields
    given = {name: value for name, value in body.items() if value is not None}
    given.pop("id", None)
    prompt = given.pop("prompt", None)
    if prompt is None and "messages" in given:
        raise InvalidRequest(f"messages need the url {_CHATS}")
    if not isinstance(prompt, str | list):
        raise InvalidRequest("the prompt must be text or a list of token ids")
    for name in given:
        _check_option(name)
    if "logit_bias" in given:
        given["logit_bias"] = _by_token(given["logit_bias"])
    return prompt, cast(GenerateOptions, given)


def _chat_body(fields: dict[str, Any], names: _Names) -> dict[str, Any]:
    body = _openai_body(fields)
    for name in ("stream", "on_disconnect"):
        if name in body:
            raise InvalidRequest(f"a batch has no option {name!r}")
    # After an interruption the request continues in the cluster, and the same line finds it again.
    return {"seed": names.seed, **body, "on_disconnect": "continue"}


def _openai_body(fields: dict[str, Any]) -> dict[str, Any]:
    if unknown := fields.keys() - _ENVELOPE:
        raise InvalidRequest(
            f"a line with a body must not have the field {sorted(unknown)[0]!r} outside the body"
        )
    url, body = fields.get("url", _COMPLETIONS), fields.get("body")
    if url not in (_COMPLETIONS, _CHATS):
        raise InvalidRequest(f"url must be {_COMPLETIONS} or {_CHATS}, not {url!r}")
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    return body


def _check_option(name: str) -> None:
    if name in _OPTIONS:
        return
    raise InvalidRequest(f"there is no option {name!r}{did_you_mean(name, _OPTIONS)}")


def _by_token(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers")
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest("a key of logit_bias is not a token id") from None
