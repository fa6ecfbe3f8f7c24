"""Parser of an output's text into content and tool calls, character by character. Pure.

The result after character k depends only on characters 0 to k, and not on their division into
pieces. A client that reads a stream again from any offset therefore continues with exactly the next
character. Text is held back while its meaning is undecided: a possible opening mark of a call, a
call before its name and arguments are known, an incomplete escape in its arguments.

Text that turns out not to be a call is unchanged content. If this text is short, it is searched for
another call; the limit bounds how often a character can be read.

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
from router.chat.parsers.formats import ToolFormat

T = TypeVar("T")
#: Generator that requests one character with each yield.
Reading = Generator[None, str, T]

_SPACE = " \t\r\n"
_HEX = "0123456789abcdefABCDEF"
_ARGUMENTS = ("arguments", "parameters")
#: Other keys that models write into a call's object. Their values are ignored.
_IGNORED_KEYS = ("type", "id")
#: Keys that a call's object may have before the call has begun.
_KEYS = frozenset(("name", *_ARGUMENTS, *_IGNORED_KEYS))
_SUPERFLUOUS = "},"
#: Escape of a high surrogate. It represents a character together with the escape of a low surrogate
#: that follows.
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_LENGTH = 6
#: Maximum length of a key in _KEYS with its quotes, if each of its characters is an escape.
_MAX_KEY = _ESCAPE_LENGTH * max(map(len, _KEYS)) + 2
#: Maximum number of characters that are searched for a call again after they turned out not to be
#: one. An opening mark and the first key after it have 17 characters, so that no character is read
#: more than 16 times. Without this limit, a text that consists of opening marks would be read once
#: for each mark.
_MAX_REREAD = 256
#: Characters that may continue a number, true, false or null, and all other lower-case letters.
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
    """Parser of the output of a request without tools: the whole text is content."""

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
    is_started: bool = False


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
        self._pending: list[str] = []
        #: handles the pending characters if the output ends at this point
        self._at_end: Callable[[], None] = self._emit_content
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
        self._pending.append(char)
        return char

    def _read_nonspace(self) -> Reading[str]:
        """Read up to the next character that is not whitespace, and return this character.

        The whitespace before it becomes pending, too.
        """
        while (char := (yield from self._read())) in _SPACE:
            pass
        return char

    def _ignore_rest(self) -> Reading[None]:
        while True:
            yield

    def _arguments(self, name: str) -> Reading[None]:
        del self._pending[:-1]
        self._emit_call(name)
        self._at_end = self._emit_arguments
        self._emit_arguments()
        depth = 1
        while depth:
            char = yield from self._read()
            self._emit_arguments()
            if char == '"':
                yield from self._string_of_arguments()
            depth += (char in "{[") - (char in "}]")
        self._at_end = self._drop

    def _string_of_arguments(self) -> Reading[None]:
        while (char := (yield from self._read())) != '"':
            if char == "\\":
                yield from self._escape()
            if not self._ends_in_high_surrogate():
                self._emit_arguments()
        self._emit_arguments()

    def _ends_in_high_surrogate(self) -> bool:
        last = self._pending[-_ESCAPE_LENGTH:]
        return len(last) == _ESCAPE_LENGTH and _HIGH_SURROGATE.fullmatch("".join(last)) is not None

    def _escape(self) -> Reading[None]:
        if (yield from self._read()) != "u":
            return
        for _ in range(4):
            if (yield from self._read()) not in _HEX:
                self._unread.appendleft(self._pending.pop())
                return

    def _emit_call(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._deltas.call(CallBegins(index, self._call_id(index), name))

    def _emit_arguments(self) -> None:
        self._deltas.arguments(self._num_calls - 1, "".join(self._pending))
        self._pending.clear()

    def _emit_content(self) -> None:
        self._deltas.content("".join(self._pending))
        self._pending.clear()
        self._at_end = self._emit_content

    def _drop(self) -> None:
        self._pending.clear()

    def _push_back(self, count: int) -> None:
        self._unread.extendleft(self._pending.pop() for _ in range(count))


class ArgumentsParser(_CharParser):
    """Parser of an output that consists of the JSON arguments of one call of the function ``name``.

    An output that does not begin with an object is content.
    """

    def __init__(self, name: str, call_id: Callable[[int], str]) -> None:
        self._name = name
        super().__init__(call_id)

    def _output(self) -> Reading[None]:
        if (yield from self._read_nonspace()) == "{":
            yield from self._arguments(self._name)
            yield from self._ignore_rest()
        while True:
            self._emit_content()
            yield from self._read()


class CallParser(_CharParser):
    """Parser of an output in the format ``form`` with calls of the functions ``names``.

    ``call_id`` maps the index of a call in the output to the call's id. Unless ``is_parallel``, all
    text after the first call is ignored. Whitespace next to a call is not content. A call of a
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
        char = yield from self._read_nonspace()
        self._push_back(1)
        if self._form.may_be_bare and char == "{":
            yield from self._calls()
        while True:
            yield from self._content()
            yield from self._calls()

    def _content(self) -> Reading[None]:
        while not (yield from self._is_next(self._form.opens)):
            self._emit_content()
        if not self._form.is_enforced:
            self._at_end = self._emit_content

    def _is_next(self, mark: str) -> Reading[bool]:
        if (yield from self._read_nonspace()) != mark[:1]:
            return False
        for expected in mark[1:]:
            if (yield from self._read()) != expected:
                self._push_back(1)
                return False
        return True

    def _calls(self) -> Reading[None]:
        is_followed = True
        while is_followed:
            try:
                yield from self._call()
            except _NoCall:
                self._backtrack()
                return
            if not self._is_parallel:
                yield from self._ignore_rest()
            is_followed = yield from self._is_followed()

    def _backtrack(self) -> None:
        """Emit the first pending character that is not whitespace as content.

        No call begins with this character, but one may begin later, so the characters after it are
        read again. If they are too many, only the last one is read again, and the others are
        emitted. The whitespace before the first character is emitted, too.
        """
        behind = len(self._pending) - self._num_leading_spaces() - 1
        self._push_back(behind if behind <= _MAX_REREAD else 1)
        self._emit_content()

    def _is_followed(self) -> Reading[bool]:
        """Read the text after a call; return whether another call follows without an opening mark.

        The closing mark and superfluous characters after a call's object are skipped.
        """
        while True:
            self._drop()
            is_closed = yield from self._is_next(self._form.closes)
            if self._pending[-1] in self._form.separators:
                return True
            if is_closed or self._pending[-1] in _SUPERFLUOUS:
                continue
            is_bare = self._form.may_be_bare and self._pending[-1] == "{"
            self._push_back(len(self._pending) - self._num_leading_spaces())
            self._drop()
            return is_bare

    def _num_leading_spaces(self) -> int:
        return next(i for i, char in enumerate(self._pending) if char not in _SPACE)

    def _call(self) -> Reading[None]:
        call = _Call()
        try:
            if (yield from self._read_nonspace()) != "{":
                raise _NoCall
            yield from self._members(call)
        except _NoCall:
            if not call.is_started:
                raise
            # The start of the call was already emitted, so an invalid end of its object is ignored.
            self._push_back(1)

    def _members(self, call: _Call) -> Reading[None]:
        char = ","
        while char == ",":
            yield from self._member(call)
            char = yield from self._read_nonspace()
        if char != "}" or not call.name:
            raise _NoCall
        if not call.is_started:
            self._emit_call(call.name)
            self._deltas.arguments(self._num_calls - 1, call.arguments)
            self._at_end = self._drop

    def _member(self, call: _Call) -> Reading[None]:
        key = yield from self._key(call)
        if (yield from self._read_nonspace()) != ":":
            raise _NoCall
        if key in _ARGUMENTS and call.name and not call.is_started:
            if (yield from self._read_nonspace()) == "{":
                call.is_started = True
                yield from self._arguments(call.name)
                return
            self._push_back(1)
        value = yield from self._value()
        if call.is_started or key in _IGNORED_KEYS:
            return
        if key == "name":
            call.name = self._known(_text(value))
        else:
            call.arguments = _object(value)

    def _key(self, call: _Call) -> Reading[str]:
        """Read and return the key of the next member.

        Raises _NoCall as soon as the text cannot be a key that a call's object may have.
        """
        if (yield from self._read_nonspace()) != '"':
            raise _NoCall
        first = len(self._pending) - 1
        yield from self._read_string(None if call.is_started else _MAX_KEY)
        key = _text("".join(self._pending[first:]))
        if not call.is_started and key not in _KEYS:
            raise _NoCall
        return key

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise _NoCall
        return name

    def _value(self) -> Reading[str]:
        char = yield from self._read_nonspace()
        first = len(self._pending) - 1
        if char == '"':
            yield from self._read_string()
        elif char in "{[":
            yield from self._read_brackets()
        else:
            while self._pending[-1] in _SCALAR:
                yield from self._read()
            self._push_back(1)
        return "".join(self._pending[first:])

    def _read_string(self, max_chars: int | None = None) -> Reading[None]:
        end = None if max_chars is None else len(self._pending) - 1 + max_chars
        while (char := (yield from self._read())) != '"':
            if char == "\\":
                yield from self._read()
            if end is not None and len(self._pending) >= end:
                raise _NoCall

    def _read_brackets(self) -> Reading[None]:
        depth = 1
        while depth:
            char = yield from self._read()
            if char == '"':
                yield from self._read_string()
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
