"""Mutation of valid client inputs (seeds): changes of their bits, parts or fields."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_MAX_BYTES = 1 << 14
_NUMBERS = (0, 1, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1e-45, 0.5, 1.0, -1.0, 2.0, 3.5e38, 1e308, math.inf, -math.inf, math.nan)
_TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "a/b",
        "a" * 129,
        "\0",
        "\x7f",
        "é",
        "🙂",
        "\u202e",
        "\ufeff",
        "{}",
        "[]",
    ),
    *(
        "null",
        '"',
        "\\",
        "{{ 1 }}",
        "%s",
        "../..",
        "a" * 5000,
        "r:1",
        "fake",
        "1e999",
        "\U0001d7d9",
    ),
)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], {"": {}}, [None], {"type": "function"}),
    *(-1, *_NUMBERS, 10**25, *_FLOATS, *_TEXTS, "\ud800", '{"a": "\\ud800"}'),
)


def case(rng: Random, seeds: Sequence[bytes], reshape: Any) -> bytes:
    """Return random bytes (one in ten), or a seed changed as bytes, by ``reshape``, or by both."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    data = rng.choice(seeds)
    if kind >= 4:
        data = reshape(rng, data, seeds)
    if kind < 6:
        data = torn(rng, data, seeds)
    return data[:_MAX_BYTES]


def torn(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return the data with one to three random changes to its bytes."""
    buffer = bytearray(data)
    for _ in range(1 + rng.randrange(3)):
        rng.choice(_TEARS)(rng, buffer, seeds)
    return bytes(buffer)


def _span(rng: Random, data: Sequence[Any]) -> slice:
    begin = rng.randrange(len(data) + 1)
    return slice(begin, min(len(data), begin + rng.choice((1, 2, 4, 16, 64))))


def _flip(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x5B))


def _truncate(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[_span(rng, data)]


def _insert(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 8)))


def _repeat(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    span = _span(rng, data)
    data[span] = bytes(data[span]) * rng.choice((2, 3, 50))


def _splice(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    data[_span(rng, data)] = other[_span(rng, other)]


_TEARS: tuple[Callable[[Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip, _overwrite, _truncate, _remove, _insert, _repeat, _splice),
)


# JSON


def json_reshaped(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return JSON with some values and keys removed, repeated, nested, renamed or replaced."""
    try:
        tree = json.loads(data)
        other = json.loads(rng.choice(seeds))
    except (ValueError, RecursionError):
        return torn(rng, data, seeds)
    for _ in range(1 + rng.randrange(3)):
        tree = _changed(rng, tree, other)
    return json.dumps(tree, ensure_ascii=bool(rng.randrange(2))).encode(errors="replace")


def _changed(rng: Random, tree: Any, other: Any) -> Any:
    places = list(_places(tree))
    if not places:
        return copy.deepcopy(rng.choice(JSON_VALUES))
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice((*_TEXTS, "$ref", "type"))] = parent.pop(key)
        case 2:
            parent[key] = [parent[key]] * rng.choice((1, 2, 20))
        case 3:
            for _ in range(rng.choice((1, 70, 140))):
                parent[key] = {"a": parent[key]} if rng.randrange(2) else [parent[key]]
        case 4 if theirs := list(_places(other)):
            whole, name = rng.choice(theirs)
            parent[key] = copy.deepcopy(whole[name])
        case _:
            parent[key] = copy.deepcopy(rng.choice(JSON_VALUES))
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return each value of the tree as a pair of its parent and its key there."""
    found: list[tuple[Any, Any]] = []
    open_ = [tree] if isinstance(tree, dict | list) else []
    while open_ and len(found) < 500:
        node = open_.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        found.extend((node, key) for key in keys)
        open_.extend(node[key] for key in keys if isinstance(node[key], dict | list) and node[key])
    return found


# protobuf


def message_reshaped(rng: Random, message: Message, data: bytes) -> bytes:
    """Return a serialised ``message`` with some fields set, extended or cleared."""
    try:
        message.MergeFromString(data)
    except DecodeError:
        pass
    for _ in range(1 + rng.randrange(3)):
        _change_field(rng, message)
    return message.SerializeToString()


def _change_field(rng: Random, message: Message) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if rng.randrange(8) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(rng, getattr(message, field.name), field.message_type)
    elif field.is_repeated:
        _change_list(rng, getattr(message, field.name), field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        part = getattr(message, field.name)
        part.SetInParent()
        _change_field(rng, part)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _change_map(rng: Random, mapping: Any, entry: Any) -> None:
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    at = _scalar(rng, key)
    if value.type == FieldDescriptor.TYPE_MESSAGE:
        _change_field(rng, mapping[at])
    else:
        mapping[at] = _scalar(rng, value)


def _change_list(rng: Random, values: Any, field: FieldDescriptor) -> None:
    if values and rng.randrange(4) == 0:
        del values[rng.randrange(len(values)) :]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        part = rng.choice(values) if values and rng.randrange(2) else values.add()
        _change_field(rng, part)
    else:
        values.extend([_scalar(rng, field)] * rng.choice((1, 1, 2, 100)))


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return _within(rng, -(2**31), 2**31 - 1)
        case FieldDescriptor.CPPTYPE_UINT32:
            return _within(rng, 0, 2**32 - 1)
        case FieldDescriptor.CPPTYPE_INT64:
            return _within(rng, -(2**63), 2**63 - 1)
        case FieldDescriptor.CPPTYPE_UINT64:
            return _within(rng, 0, 2**64 - 1)
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(rng.randrange(2))
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(_TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    return rng.choice(_FLOATS)


def _within(rng: Random, low: int, high: int) -> int:
    value = rng.choice((rng.choice(_NUMBERS), -rng.choice(_NUMBERS), rng.randrange(300)))
    return max(low, min(high, value))


# text in parts


def parts_reshaped(separator: bytes, odd: Sequence[bytes]) -> Any:
    """Return a mutation that repeats, moves, removes or replaces parts of its input."""

    def reshaped(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
        parts = data.split(separator)
        for _ in range(1 + rng.randrange(3)):
            at = rng.randrange(len(parts) + 1)
            match rng.randrange(4):
                case 0:
                    parts[at:at] = [rng.choice(odd)]
                case 1:
                    theirs = rng.choice(seeds).split(separator)
                    parts[at : at + 1] = theirs[_span(rng, theirs)]
                case 2:
                    del parts[at : at + 1]
                case _:
                    parts[at : at + 1] = parts[at : at + 1] * rng.choice((2, 3, 100))
        return separator.join(parts)

    return reshaped
