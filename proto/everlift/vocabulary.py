"""Bytes that the tokens of byte-level and byte-fallback vocabularies stand for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decoder_types(decoder: Any) -> frozenset[str]:
    """Return the types of all steps of ``decoder``, which is the decoder of a tokenizer.json."""
    return frozenset(_types(decoder))


def _types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def byte_piece(token: str) -> bytes | None:
    """Return the byte of a byte-fallback token such as ``<0xF0>``; None for any other token."""
    piece = _BYTE_PIECE.fullmatch(token)
    return bytes.fromhex(piece[1]) if piece else None


def byte_level(token: str) -> bytes:
    """Return the bytes of a token that is written in the byte-level alphabet.

    A token with a character outside the alphabet stands for its own UTF-8 bytes.
    """
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: each of 256 characters with the byte it stands for.

    Printable Latin-1 characters stand for themselves, and the characters from U+0100 on stand for
    the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
