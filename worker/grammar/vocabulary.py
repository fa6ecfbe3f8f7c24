"""The bytes that each token of a model stands for, from its tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from everlift.vocabulary import byte_level, byte_piece, decoder_types

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
    decoders = decoder_types(json.loads(tokenizer.to_str())["decoder"])
    if "ByteLevel" in decoders:
        decode = byte_level
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


def _byte_fallback(token: str) -> bytes:
    piece = byte_piece(token)
    return token.replace(_SPACE, " ").encode() if piece is None else piece
