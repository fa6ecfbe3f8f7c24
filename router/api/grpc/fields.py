"""Fields of a message that has not been parsed, which may cost a hundred times its bytes. Pure."""

from __future__ import annotations

#: Bytes of fields of a fixed size, by wire type.
_FIXED = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
#: Of a varint.
_MOST_BYTES = 10


def count(data: bytes, most: int) -> int:
    """Fields at the top of the message, one more than ``most`` if there are more, and no more than
    those before the first that is none."""
    at = found = 0
    while at < len(data) and found <= most:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LENGTH:
            length, at = _varint(data, at)
            at += length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            break
        found += at <= len(data)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and what is behind it: beyond the end where it breaks off."""
    value = 0
    for place, byte in enumerate(data[at : at + _MOST_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return value, len(data) + 1
