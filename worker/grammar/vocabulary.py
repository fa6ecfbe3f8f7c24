"""The bytes that each token of a model stands for, from its tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: What SentencePiece writes for a space.
_SPACE = "\u2581"


class UnknownVocabulary(ValueError):
    """The bytes of its tokens cannot be told."""


def token_bytes(path: Path, vocab_size: int) -> list[bytes]:
    """Of the tokens below ``vocab_size``, by id. Empty are those that are no text: special tokens,
    and ids that the tokenizer does not have.

    Raises UnknownVocabulary, or OSError where ``path`` is no file.
    """
    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    decoders = set(_decoder_types(json.loads(tokenizer.to_str())["decoder"]))
    if "ByteLevel" in decoders:
        decode = _byte_level
    elif decoders & {"ByteFallback", "Metaspace"}:
        decode = _byte_fallback
    else:
        raise UnknownVocabulary(f"{path} has neither a byte-level nor a SentencePiece vocabulary")
    result = [b""] * vocab_size
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if index < vocab_size:
            result[index] = decode(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if index < vocab_size:
            result[index] = b"" if added.special else added.content.encode()
    return result


def _decoder_types(decoder: Any) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _decoder_types(part)


def _byte_fallback(token: str) -> bytes:
    if piece := _BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(piece[1])
    return token.replace(_SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        # Written as it is, though not declared as an added token.
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for what follows Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
