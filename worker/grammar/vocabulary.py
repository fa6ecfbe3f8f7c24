"""Conversion of vocabularies and grammars into objects of llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import llguidance
from tokenizers import Tokenizer

from everlift.vocabulary import byte_level, byte_piece, decoder_types

#: Character that SentencePiece writes for a space.
_SPACE = "\u2581"


class UnknownVocabulary(ValueError):
    """Raised if the bytes of a vocabulary's tokens cannot be determined."""


def token_bytes(path: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token id below ``vocab_size``.

    ``path`` is a tokenizer.json. The bytes are empty for special tokens and for ids that the
    tokenizer lacks. Raises UnknownVocabulary, or OSError if ``path`` cannot be read.
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


#: The model chooses how a text is split into tokens, even if the grammar allows only one text.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
#: Limits of llguidance's parser. Its rows have one item for each possible parse of the text so far.
_LIMITS = llguidance.LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
#: llguidance's name for a state in which no token is allowed.
_NOTHING_FOLLOWS = "NoExtension"


class _Vocabulary:
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens: llguidance tokenizes only forced text, and the worker forces none."""
        return []


class LimitExceeded(Exception):
    """Raised if a grammar exceeds a limit of llguidance."""


def token_trie(
    tokens: Sequence[bytes], slices: Sequence[str] | None = None
) -> llguidance.LLTokenizer:
    """Return llguidance's trie of ``tokens``, the bytes of each token by its id.

    The trie has an end token with the id ``len(tokens)``. ``slices`` are regular expressions;
    tokens that match one of them are found without a walk over the trie. None selects expressions
    that suit JSON.
    """
    chosen = llguidance.LLTokenizer.json_slices() if slices is None else list(slices)
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens))
    return llguidance.LLTokenizer(wrapper, slices=chosen)


def token_matcher(trie: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of ``grammar``, which is in Lark syntax.

    An error in the grammar is reported by the matcher's ``is_error`` and ``get_error``.
    """
    lark = llguidance.LLMatcher.grammar_from_lark(_OPTIONS + grammar)
    return llguidance.LLMatcher(trie, lark, log_level=0, limits=_LIMITS)


def allowed_tokens(matcher: llguidance.LLMatcher) -> bytes:
    """Return the bit mask of the tokens that may come next, one bit per token of the trie.

    All bits are 0 if the grammar allows no token. Raises LimitExceeded if the matcher reports any
    error other than that no token is allowed.
    """
    mask: bytes = matcher.compute_bitmask()
    if not matcher.is_error():
        return mask
    if _NOTHING_FOLLOWS in matcher.get_error():
        return bytes(len(mask))
    raise LimitExceeded
