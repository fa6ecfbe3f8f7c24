"""Calls as Llama 3.2 and 4 write them in Python's syntax. Pure.

    [get_weather(city="Paris", days=3), search(words=["a", "b"])]

The calls are the whole output, or follow the mark <|python_tag|>, which is a special token. All
arguments have keywords, and are literals. They become a JSON object.
"""

from __future__ import annotations

import json
import re

from router.chat.parsers.base import (
    MarkedCallParser,
    NoCall,
    Reading,
    ToolFormat,
)

_TAG = "<|python_tag|>"
#: Maximum number of levels of lists and dicts in an argument.
_MAX_DEPTH = 32
#: Maximum number of characters of a number. A model does not write longer ones on purpose.
_MAX_WORD = 64
_WORD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+-")
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: JSON of Python's constants. Models also write those of JSON.
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    **{word: word for word in ("true", "false", "null")},
}
_NUMBER = re.compile(r"\+?(-?)(0|[1-9]\d*|(?=\.\d))(?:\.(\d*))?([eE][+-]?\d+)?")
_ESCAPES = {
    **{char: char for char in "\\'\""},
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
}
#: Number of hexadecimal digits of an escape.
_CODES = {"x": 2, "u": 4, "U": 8}
_OCTAL = "01234567"


class PythonicParser(MarkedCallParser):
    """Parser of an output with calls in Python's syntax.

    A call is emitted when it is complete, because only then is it certain that it is one.
    """

    _opens = (_TAG,)

    def _output(self) -> Reading[None]:
        is_list = (yield from self._read_nonspace()) == "["
        self._push_back(1)
        if is_list:
            try:
                yield from self._calls("")
            except NoCall:
                self._backtrack()
        yield from super()._output()

    def _calls(self, mark: str) -> Reading[None]:
        if (yield from self._read_nonspace()) != "[":
            raise NoCall
        char = ","
        while char == ",":
            yield from self._call()
            yield from self._end_call()
            char = yield from self._read_nonspace()
            if char == "," and (yield from self._read_nonspace()) == "]":
                char = "]"
            elif char == ",":
                self._push_back(1)
        if char != "]":
            self._push_back(1)
            return
        self._drop()
        yield from self._read_nonspace()
        self._drop_space()

    def _call(self) -> Reading[None]:
        name = yield from self._read_name()
        if not (yield from self._read_mark("(")):
            raise NoCall
        arguments: dict[str, str] = {}
        while (yield from self._read_nonspace()) != ")":
            self._push_back(1)
            keyword = yield from self._word()
            if not _KEYWORD.fullmatch(keyword) or keyword in arguments:
                raise NoCall
            if not (yield from self._read_mark("=")):
                raise NoCall
            arguments[keyword] = yield from self._literal(0)
            if not (yield from self._next_item(")")):
                break
        written = ", ".join(f"{json.dumps(key)}: {value}" for key, value in arguments.items())
        self._emit_call(name)
        self._add_arguments(f"{{{written}}}")
        self._at_end = self._drop

    def _next_item(self, closes: str) -> Reading[bool]:
        """Read what follows an item; return whether it is a comma and not the character ``closes``.

        Raises NoCall for any other character.
        """
        char = yield from self._read_nonspace()
        if char not in f",{closes}":
            raise NoCall
        return char == ","

    def _word(self) -> Reading[str]:
        char = yield from self._read_nonspace()
        start = len(self._pending) - 1
        while char in _WORD and len(self._pending) - start <= _MAX_WORD:
            char = yield from self._read()
        self._push_back(1)
        return "".join(self._pending[start:])

    def _literal(self, depth: int) -> Reading[str]:
        """Read a literal, and return it as JSON.

        ``depth`` is the number of lists, tuples and dicts that enclose the literal. Raises NoCall
        if the text is not a literal, or if it is nested more than _MAX_DEPTH levels deep.
        """
        char = yield from self._read_nonspace()
        if char in "'\"":
            return _json((yield from self._string(char)))
        if char == "[" or char == "(":
            items = yield from self._items("]" if char == "[" else ")", depth + 1)
            return f"[{', '.join(items)}]"
        if char == "{":
            items = yield from self._items("}", depth + 1, has_keys=True)
            return f"{{{', '.join(items)}}}"
        self._push_back(1)
        return _constant((yield from self._word()))

    def _items(self, closes: str, depth: int, *, has_keys: bool = False) -> Reading[list[str]]:
        """Read the items of a list, tuple or dict up to ``closes``, and return them as JSON.

        The items are those of a dict, in the form "key: value", if ``has_keys``.
        ``depth`` is the number of lists, tuples and dicts that enclose the items. Raises NoCall if
        the text is invalid, if a key is not a string, or if ``depth`` exceeds _MAX_DEPTH.
        """
        if depth > _MAX_DEPTH:
            raise NoCall
        items: list[str] = []
        while (char := (yield from self._read_nonspace())) != closes:
            key = ""
            if has_keys:
                if char not in "'\"":
                    raise NoCall
                key = _json((yield from self._string(char))) + ": "
                if not (yield from self._read_mark(":")):
                    raise NoCall
            else:
                self._push_back(1)
            items.append(key + (yield from self._literal(depth)))
            if not (yield from self._next_item(closes)):
                break
        return items

    def _string(self, quote: str) -> Reading[str]:
        """Read a string whose first quotation mark is the last character that was read.

        Return the string's value, with decoded escapes. Raises NoCall for an escape that names a
        character or has an invalid code, and for a line break outside triple quotes.
        """
        parts: list[str] = []
        num_closing = 1
        if (yield from self._read()) == quote:
            if (yield from self._read()) != quote:
                self._push_back(1)
                return ""
            num_closing = 3
        else:
            self._push_back(1)
        # The number of quotation marks without a backslash that were read last, without a break.
        num_quotes = 0
        while num_quotes < num_closing:
            char = yield from self._read()
            num_quotes = num_quotes + 1 if char == quote else 0
            if char == "\n" and num_closing == 1:
                raise NoCall
            is_escape = char == "\\"
            parts.append((yield from self._escape_in_string()) if is_escape else char)
        return "".join(parts[:-num_closing])

    def _escape_in_string(self) -> Reading[str]:
        char = yield from self._read()
        if (num_digits := _CODES.get(char)) is not None:
            digits = ""
            for _ in range(num_digits):
                digits += yield from self._read()
            return _character(digits, 16)
        if char in _OCTAL:
            digits = char
            while len(digits) < 3 and (char := (yield from self._read())) in _OCTAL:
                digits += char
            if char not in _OCTAL:
                self._push_back(1)
            return _character(digits, 8)
        if char == "N":
            raise NoCall
        # As in Python, the backslash of an unknown escape is part of the string.
        return _ESCAPES.get(char, "\\" + char)


def _character(digits: str, base: int) -> str:
    if not digits.isascii() or not digits.isalnum():
        raise NoCall
    try:
        return chr(int(digits, base))
    except (ValueError, OverflowError):
        raise NoCall from None


def _json(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    # Half of a surrogate pair has no encoding, but JSON has an escape for it.
    has_surrogates = any("\ud800" <= char <= "\udfff" for char in text)
    return json.dumps(text) if has_surrogates else written


def _constant(word: str) -> str:
    """Return a decimal number, or a constant of Python or JSON, as JSON.

    The constants are True, False and None, and true, false and null. Raises NoCall for any other
    text.
    """
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if not word.isascii() or not (match := _NUMBER.fullmatch(word)):
        raise NoCall
    sign, whole, fraction, exponent = match.groups()
    point = "" if fraction is None else f".{fraction or 0}"
    return f"{sign}{whole or 0}{point}{exponent or ''}"


def _is_shown(template: str) -> bool:
    # The example in Meta's instructions.
    return "func_name1(params_name1=" in template


PYTHONIC = ToolFormat("pythonic", (_TAG,), PythonicParser, _is_shown)
