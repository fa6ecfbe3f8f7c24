"""Checks of a chat's JSON values, function names and template variables. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from everlift.errors import InvalidRequest, NotUtf8, OutOfRange

#: Maximum number of levels of a JSON value. It equals the limit of a grammar's schema, and is far
#: below the limit of Python's own JSON parser.
MAX_DEPTH = 64
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_json(
    name: str, value: Any, max_bytes: int, num_exempt: Callable[[Any], int] = lambda value: 0
) -> None:
    """Check a JSON value of a request; ``name`` is its name in error messages.

    Raises OutOfRange if the value has more than MAX_DEPTH levels, or more than ``max_bytes`` bytes
    when serialised. ``num_exempt`` receives the value, and returns how many of its bytes do not
    count. Raises NotUtf8 for an unpaired surrogate, and InvalidRequest for NaN or an infinite
    number.
    """
    try:
        # to_json takes a quarter of the time of json.dumps.
        data = to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        # to_json also refuses a value of more than 255 levels.
        check_depth(name, value)
        raise NotUtf8(f"{name} has an unpaired surrogate") from None
    # The other checks take longer, so their time is limited by the size.
    if len(data) > max_bytes and (size := len(data) - num_exempt(value)) > max_bytes:
        raise OutOfRange(f"{name} has {size} bytes; at most {max_bytes} are allowed")
    check_depth(name, value)
    # A string may contain these words as well.
    if b"NaN" in data or b"Infinity" in data:
        _check_numbers(name, value)


def _check_numbers(name: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"{name} has NaN or Infinity, which JSON does not allow") from None


def is_encodable(value: object) -> bool:
    """Return whether a JSON value has neither NaN, infinite numbers nor unpaired surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def check_depth(name: str, value: Any) -> None:
    """Raise OutOfRange if ``value`` has more than MAX_DEPTH levels; ``name`` names it."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in _parts(whole)
            if part and isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise OutOfRange(f"{name} is more than {MAX_DEPTH} levels deep")


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def json_length(value: object, limit: int) -> int:
    """Return the number of characters of all texts in a JSON value, plus its number of values.

    The count ends above ``limit``, so its time does not depend on the size of ``value``.
    """
    values, length = [value], 1
    while values and length <= limit:
        value = values.pop()
        if isinstance(value, str):
            length += len(value)
        elif parts := _parts(value):
            length += len(parts)
            if length <= limit:
                values += parts
    return length


def check_function_name(at: str, name: object) -> str:
    """Check and return the name of a function: 1 to 64 letters, digits, underscores or hyphens.

    Raises InvalidRequest for any other value; the error gives its position ``at`` in the request.
    """
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{at} must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return name


Variables = dict[str, bool | int | float | str]

MAX_VARIABLES = 16
MAX_BYTES = 4096
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    # names that transformers' functions use
    {"chat_template", "conversation", "conversations", "documents", "messages", "tools"}
    | {"add_generation_prompt", "continue_final_message", "sanitize_control_tokens"}
    | {"padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict"}
    | {"return_tensors", "max_length", "tokenize", "tokenizer_kwargs", "truncation", "kwargs"}
    # names in the template environments of transformers and of Jinja
    | {"cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range"}
    | {"caller", "context", "environment", "loop", "self", "strftime_now", "varargs"}
)
#: Names such as bos_token, which only the model sets.
_SPECIAL = re.compile(r".*_tokens?(_id)?")


def checked(raw: object) -> Variables:
    """Check and return template variables, the chat_template_kwargs of a request.

    Raises InvalidRequest for a wrong type, too many variables, a malformed or reserved name, NaN,
    or an infinite number. Raises OutOfRange for too many bytes or levels, and NotUtf8 for an
    unpaired surrogate.
    """
    if not isinstance(raw, dict):
        raise InvalidRequest("chat_template_kwargs must be an object")
    if len(raw) > MAX_VARIABLES:
        raise InvalidRequest(
            f"chat_template_kwargs has more than {MAX_VARIABLES} names, including those that "
            "reasoning_effort sets"
        )
    check_json("chat_template_kwargs", raw, MAX_BYTES)
    for name, value in raw.items():
        _check(name, value)
    return raw


def _check(name: str, value: object) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED or _SPECIAL.fullmatch(name):
        raise InvalidRequest(f"chat_template_kwargs may not set {name[:64]}")
    if not isinstance(value, bool | int | float | str):
        raise InvalidRequest(f"chat_template_kwargs.{name} must be a string, number, true or false")
