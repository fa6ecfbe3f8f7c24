"""Parser of request bodies: JSON objects from arbitrary bytes. Pure."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from pydantic_core import PydanticSerializationError, to_json

from everlift.errors import MalformedBody, NotUtf8

#: Maximum nesting of a body. Legitimate bodies have fewer levels; schemas are limited to 64 levels
#: anyway.
MAX_DEPTH = 128
#: Maximum number of digits of an integer; no field needs more.
_MAX_DIGITS = 20
#: Translation table of ``_may_be_odd``: digits become 0, E and e become e, and all other bytes
#: spaces.
_KINDS = bytes(
    ord("0") if byte in b"0123456789" else ord("e") if byte in b"eE" else ord(" ")
    for byte in range(256)
)

Json = dict[str, Any]


def parse(data: bytes) -> Json:
    """Parse a body as a JSON object.

    Raises NotUtf8 if the body is not UTF-8, or if a string in it has an unpaired surrogate. Raises
    MalformedBody if the body is not JSON, not an object, or nested too deeply, or if it has a
    number with too many digits or too large an exponent.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NotUtf8("the body is not UTF-8") from None
    body = _loaded(text, _may_be_odd(data))
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object")
    # Most bodies have so few brackets that their depth need not be checked.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    # Only escapes can produce surrogates, because UTF-8 does not encode them.
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(body)
    return body


def _may_be_odd(data: bytes) -> bool:
    """Return whether the body may have a number with too many digits or too large an exponent.

    Only then is each number checked, because a body may contain millions of numbers. An exponent
    can only be too large if it has at least three digits.
    """
    kinds = data.translate(_KINDS, b"+")
    return b"0" * (_MAX_DIGITS + 1) in kinds or b"0e000" in kinds


def _loaded(text: str, may_be_odd: bool) -> object:
    parse_int, parse_float = (_int, _float) if may_be_odd else (None, None)
    try:
        return json.loads(
            text, parse_int=parse_int, parse_float=parse_float, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        raise MalformedBody(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None


def _int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise MalformedBody(f"a number has more than {_MAX_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise MalformedBody("the body has a number that is too large")
    return number


def _no_number(text: str) -> NoReturn:
    raise MalformedBody(f"the body has the number {text}, which JSON does not allow")


def _check_depth(body: Json) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for each in level
            for value in (each.values() if isinstance(each, dict) else each)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> MalformedBody:
    return MalformedBody(f"the body is nested more than {MAX_DEPTH} levels deep")


def _check_surrogates(body: Json) -> None:
    try:
        to_json(body)
    except PydanticSerializationError:
        raise NotUtf8("a string of the body has an unpaired surrogate") from None
