"""Parser of calls that are JSON objects with a name and arguments. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from router.chat.parsers.base import (
    ESCAPE_LENGTH,
    CallableTools,
    CharParser,
    NoCall,
    Reading,
)

_ARGUMENTS = ("arguments", "parameters")
#: Other keys that models write into a call's object. Their values are ignored.
_IGNORED_KEYS = ("type", "id")
#: Keys that a call's object may have before the call has begun.
_KEYS = frozenset(("name", *_ARGUMENTS, *_IGNORED_KEYS))
_SUPERFLUOUS = "},"
#: Maximum length of a key in _KEYS with its quotes, if each of its characters is an escape.
_MAX_KEY = ESCAPE_LENGTH * max(map(len, _KEYS)) + 2
#: Characters that may continue a number, true, false or null, and all other lower-case letters.
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """Texts around calls that are JSON objects.

    The text ``opens`` precedes a call. The text ``closes`` follows it, or one of the characters in
    ``separators`` if another call follows. If ``may_be_bare``, a call needs no opening text at the
    beginning of the output or after another call. If ``is_enforced``, a grammar enforces the
    format, so the output has no content, not even if a call is cut off.
    """

    opens: str
    closes: str = ""
    separators: str = ""
    may_be_bare: bool = False
    is_enforced: bool = False


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: str = "{}"
    is_started: bool = False


class JsonCallParser(CharParser):
    """Parser of an output with calls that are JSON objects between ``marks``.

    Whitespace next to a call is not content. A call of a function that is not in the tools is
    content.
    """

    def __init__(self, marks: JsonMarks, tools: CallableTools) -> None:
        self._marks = marks
        super().__init__(tools)
        if marks.is_enforced:
            self._at_end = self._drop

    def _output(self) -> Reading[None]:
        char = yield from self._read_nonspace()
        self._push_back(1)
        if self._marks.may_be_bare and char == "{":
            yield from self._calls()
        while True:
            yield from self._content()
            yield from self._calls()

    def _content(self) -> Reading[None]:
        while not (yield from self._read_mark(self._marks.opens)):
            self._emit_content()
        if not self._marks.is_enforced:
            self._at_end = self._emit_content

    def _calls(self) -> Reading[None]:
        is_followed = True
        while is_followed:
            try:
                yield from self._call()
            except NoCall:
                self._backtrack()
                return
            if not self._tools.is_parallel:
                yield from self._ignore_rest()
            is_followed = yield from self._is_followed()

    def _is_followed(self) -> Reading[bool]:
        """Read the text after a call; return whether another call follows without an opening mark.

        The closing mark and superfluous characters after a call's object are skipped.
        """
        while True:
            self._drop()
            is_closed = yield from self._read_mark(self._marks.closes)
            if self._pending[-1] in self._marks.separators:
                return True
            if is_closed or self._pending[-1] in _SUPERFLUOUS:
                continue
            is_bare = self._marks.may_be_bare and self._pending[-1] == "{"
            self._drop_space()
            return is_bare

    def _call(self) -> Reading[None]:
        call = _Call()
        try:
            if (yield from self._read_nonspace()) != "{":
                raise NoCall
            yield from self._members(call)
        except NoCall:
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
            raise NoCall
        if not call.is_started:
            self._emit_call(call.name)
            self._add_arguments(call.arguments)
            self._at_end = self._drop

    def _member(self, call: _Call) -> Reading[None]:
        key = yield from self._key(call)
        if (yield from self._read_nonspace()) != ":":
            raise NoCall
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
        """Read the key of the next member, a JSON string, and return the string's value.

        Raises NoCall if the text is not a JSON string. Until the call has begun, also raises NoCall
        for a key that is not in _KEYS or, with its quotes, is longer than _MAX_KEY characters.
        """
        if (yield from self._read_nonspace()) != '"':
            raise NoCall
        first = len(self._pending) - 1
        yield from self._read_string(None if call.is_started else _MAX_KEY)
        key = _text("".join(self._pending[first:]))
        if not call.is_started and key not in _KEYS:
            raise NoCall
        return key

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
                raise NoCall

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
        raise NoCall from None


def _text(value: str) -> str:
    text = _loaded(value)
    if not isinstance(text, str):
        raise NoCall
    return text


def _object(value: str) -> str:
    """Return the text of the JSON object in ``value``, which is JSON text.

    ``value`` is the object itself, a JSON string that contains it, or null, for which "{}" is
    returned. Raises NoCall for anything else, and for a string with an unpaired surrogate.
    """
    text = _text(value).strip() if value.startswith('"') else value
    if text == "null":
        return "{}"
    if not isinstance(_loaded(text), dict) or _SURROGATE.search(text):
        raise NoCall
    return text
