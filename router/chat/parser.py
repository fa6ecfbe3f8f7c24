"""Parser of an output's text into content and tool calls, character by character. Pure.

The result after character k depends on characters 0 to k alone, and not on their division into
pieces. A client that reads a stream again from any offset therefore continues with exactly the next
character. Text is held back while its meaning is undecided: a possible opening mark of a call, a
call before its name and arguments are known, half of an escape in its arguments.

Text that turns out not to be a call is content, unchanged. If it is short, it is searched for
another call. Each character is thus read a bounded number of times, for every text.

The arguments of a call end where their brackets close. The client has to check whether they are
valid JSON and fit the tool.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from router.chat.deltas import CallBegins, Delta, Deltas
from router.chat.formats import ToolFormat

T = TypeVar("T")
#: Generator that requests one character with each yield.
Reading = Generator[None, str, T]

_SPACE = " \t\r\n"
_HEX = "0123456789abcdefABCDEF"
_ARGUMENTS = ("arguments", "parameters")
#: Other keys that models write into a call's object. Their values are ignored.
_PASSED_OVER = ("type", "id")
#: Keys that a call's object may have before the call has begun.
_KEYS = frozenset(("name", *_ARGUMENTS, *_PASSED_OVER))
_TOO_MUCH = "},"
#: First half of a surrogate pair, a character that is written as two escapes.
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_LENGTH = 6
#: Most characters of such a key with its quotes, if each of its characters is an escape.
_MAX_KEY = _ESCAPE_LENGTH * max(map(len, _KEYS)) + 2
#: Most characters that are searched again for a call after a text has turned out not to be one. An
#: opening mark and the first key behind it have 17 characters, so none is read more than 16 times.
#: Without a bound, a text of nothing but marks would be read as often as it has marks.
_MAX_AGAIN = 256
#: Characters of numbers, true, false and null.
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")


class Parser(Protocol):
    """Parser of one output, to which the text is fed in pieces."""

    @property
    def has_calls(self) -> bool: ...

    def feed(self, text: str) -> list[Delta]:
        """Parse the next piece of text, and return the deltas that are certain by now."""
        ...

    def finish(self) -> list[Delta]:
        """End the output, and return the remaining deltas."""
        ...


class PlainParser:
    """Parser of an output without tools: everything is content."""

    has_calls = False

    def feed(self, text: str) -> list[Delta]:
        deltas = Deltas()
        deltas.content(text)
        return deltas.drain()

    def finish(self) -> list[Delta]:
        return []


class _NoCall(Exception):
    pass


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: str = "{}"
    has_begun: bool = False


class _CharParser:
    """Base of parsers that read single characters.

    A subclass implements ``_output``, a generator that parses the output and yields whenever it
    needs the next character.
    """

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._call_id = call_id
        self._num_calls = 0
        self._deltas = Deltas()
        #: characters that are read next
        self._unread: deque[str] = deque()
        #: characters that were read, and are neither emitted nor dropped yet
        self._held: list[str] = []
        #: handles the held characters if the output ends at this point
        self._at_end: Callable[[], None] = self._tell_content
        self._reading = self._output()
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> list[Delta]:
        for char in text:
            self._unread.append(char)
            while self._unread:
                self._reading.send(self._unread.popleft())
        return self._deltas.drain()

    def finish(self) -> list[Delta]:
        self._reading.close()
        self._at_end()
        return self._deltas.drain()

    def _output(self) -> Reading[None]:
        raise NotImplementedError

    def _read(self) -> Reading[str]:
        char = yield
        self._held.append(char)
        return char

    def _read_solid(self) -> Reading[str]:
        """Read up to the next character that is not whitespace, and return this character.

        The whitespace before it is held, too.
        """
        while (char := (yield from self._read())) in _SPACE:
            pass
        return char

    def _nothing_more(self) -> Reading[None]:
        while True:
            yield

    def _arguments(self, name: str) -> Reading[None]:
        del self._held[:-1]
        self._begin(name)
        self._at_end = self._tell_arguments
        self._tell_arguments()
        depth = 1
        while depth:
            char = yield from self._read()
            self._tell_arguments()
            if char == '"':
                yield from self._string_of_arguments()
            depth += (char in "{[") - (char in "}]")
        self._at_end = self._drop

    def _string_of_arguments(self) -> Reading[None]:
        while (char := (yield from self._read())) != '"':
            if char == "\\":
                yield from self._escape()
            if not self._is_half():
                self._tell_arguments()
        self._tell_arguments()

    def _is_half(self) -> bool:
        last = self._held[-_ESCAPE_LENGTH:]
        return len(last) == _ESCAPE_LENGTH and _HALF.fullmatch("".join(last)) is not None

    def _escape(self) -> Reading[None]:
        if (yield from self._read()) != "u":
            return
        for _ in range(4):
            if (yield from self._read()) not in _HEX:
                self._unread.appendleft(self._held.pop())
                return

    def _begin(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._deltas.call(CallBegins(index, self._call_id(index), name))

    def _tell_arguments(self) -> None:
        self._deltas.arguments(self._num_calls - 1, "".join(self._held))
        self._held.clear()

    def _tell_content(self) -> None:
        self._deltas.content("".join(self._held))
        self._held.clear()
        self._at_end = self._tell_content

    def _drop(self) -> None:
        self._held.clear()

    def _put_back(self, count: int) -> None:
        self._unread.extendleft(self._held.pop() for _ in range(count))


class ArgumentsParser(_CharParser):
    """Parser of an output that consists of the JSON arguments of one call of the function ``name``.

    An output that does not begin with an object is content.
    """

    def __init__(self, name: str, call_id: Callable[[int], str]) -> None:
        self._name = name
        super().__init__(call_id)

    def _output(self) -> Reading[None]:
        if (yield from self._read_solid()) == "{":
            yield from self._arguments(self._name)
            yield from self._nothing_more()
        while True:
            self._tell_content()
            yield from self._read()


class CallParser(_CharParser):
    """Parser of an output in the format ``form`` with calls of the functions ``names``.

    ``call_id`` returns the id of the output's call with a given number. Unless ``is_parallel``, all
    text after the first call is ignored. Whitespace next to a call is not content, and a call of a
    function that is not in ``names`` is content.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        call_id: Callable[[int], str],
        *,
        is_parallel: bool = True,
    ) -> None:
        self._form = form
        self._names = names
        self._is_parallel = is_parallel
        super().__init__(call_id)
        if form.is_enforced:
            self._at_end = self._drop

    def _output(self) -> Reading[None]:
        char = yield from self._read_solid()
        self._put_back(1)
        if self._form.may_be_bare and char == "{":
            yield from self._calls()
        while True:
            yield from self._content()
            yield from self._calls()

    def _content(self) -> Reading[None]:
        while not (yield from self._is_next(self._form.opens)):
            self._tell_content()
        if not self._form.is_enforced:
            self._at_end = self._tell_content

    def _is_next(self, mark: str) -> Reading[bool]:
        if (yield from self._read_solid()) != mark[:1]:
            return False
        for expected in mark[1:]:
            if (yield from self._read()) != expected:
                self._put_back(1)
                return False
        return True

    def _calls(self) -> Reading[None]:
        is_followed = True
        while is_followed:
            try:
                yield from self._call()
            except _NoCall:
                self._take_back()
                return
            if not self._is_parallel:
                yield from self._nothing_more()
            is_followed = yield from self._is_followed()

    def _take_back(self) -> None:
        """Emit the first held character as content, because no call begins with it.

        A call may begin after it, so the other held characters are read again. If they are too
        many, only the last one is read again and all others are content.
        """
        behind = len(self._held) - self._held_space() - 1
        self._put_back(behind if behind <= _MAX_AGAIN else 1)
        self._tell_content()

    def _is_followed(self) -> Reading[bool]:
        """Read on after a call; return whether another call follows without an opening mark.

        The closing mark and superfluous characters after a call's object are skipped.
        """
        while True:
            self._drop()
            is_closed = yield from self._is_next(self._form.closes)
            if self._held[-1] in self._form.separators:
                return True
            if is_closed or self._held[-1] in _TOO_MUCH:
                continue
            is_bare = self._form.may_be_bare and self._held[-1] == "{"
            self._put_back(len(self._held) - self._held_space())
            self._drop()
            return is_bare

    def _held_space(self) -> int:
        return next(i for i, char in enumerate(self._held) if char not in _SPACE)

    def _call(self) -> Reading[None]:
        call = _Call()
        try:
            if (yield from self._read_solid()) != "{":
                raise _NoCall
            yield from self._members(call)
        except _NoCall:
            if not call.has_begun:
                raise
            # The call has begun, so it remains a call however its object ends.
            self._put_back(1)

    def _members(self, call: _Call) -> Reading[None]:
        char = ","
        while char == ",":
            yield from self._member(call)
            char = yield from self._read_solid()
        if char != "}" or not call.name:
            raise _NoCall
        if not call.has_begun:
            self._begin(call.name)
            self._deltas.arguments(self._num_calls - 1, call.arguments)
            self._at_end = self._drop

    def _member(self, call: _Call) -> Reading[None]:
        key = yield from self._key(call)
        if (yield from self._read_solid()) != ":":
            raise _NoCall
        if key in _ARGUMENTS and call.name and not call.has_begun:
            if (yield from self._read_solid()) == "{":
                call.has_begun = True
                yield from self._arguments(call.name)
                return
            self._put_back(1)
        value = yield from self._value()
        if call.has_begun or key in _PASSED_OVER:
            return
        if key == "name":
            call.name = self._known(_text(value))
        else:
            call.arguments = _object(value)

    def _key(self, call: _Call) -> Reading[str]:
        """Return the next member's key.

        Raises _NoCall as soon as the text cannot be a key that a call's object may have.
        """
        if (yield from self._read_solid()) != '"':
            raise _NoCall
        first = len(self._held) - 1
        yield from self._rest_of_string(None if call.has_begun else _MAX_KEY)
        key = _text("".join(self._held[first:]))
        if not call.has_begun and key not in _KEYS:
            raise _NoCall
        return key

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise _NoCall
        return name

    def _value(self) -> Reading[str]:
        char = yield from self._read_solid()
        first = len(self._held) - 1
        if char == '"':
            yield from self._rest_of_string()
        elif char in "{[":
            yield from self._rest_of_brackets()
        else:
            while self._held[-1] in _SCALAR:
                yield from self._read()
            self._put_back(1)
        return "".join(self._held[first:])

    def _rest_of_string(self, most: int | None = None) -> Reading[None]:
        end = None if most is None else len(self._held) - 1 + most
        while (char := (yield from self._read())) != '"':
            if char == "\\":
                yield from self._read()
            if end is not None and len(self._held) >= end:
                raise _NoCall

    def _rest_of_brackets(self) -> Reading[None]:
        depth = 1
        while depth:
            char = yield from self._read()
            if char == '"':
                yield from self._rest_of_string()
            depth += (char in "{[") - (char in "}]")


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise _NoCall from None


def _text(value: str) -> str:
    text = _loaded(value)
    if not isinstance(text, str):
        raise _NoCall
    return text


def _object(value: str) -> str:
    """Return the text of the JSON object in ``value``, which is JSON text.

    ``value`` is the object itself, a JSON string that contains it, or null, for which "{}" is
    returned. Raises _NoCall for anything else.
    """
    text = _text(value).strip() if value.startswith('"') else value
    if text == "null":
        return "{}"
    if not isinstance(_loaded(text), dict):
        raise _NoCall
    return text
