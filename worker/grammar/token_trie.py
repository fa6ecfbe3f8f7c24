"""Vocabularies and grammars as llguidance reads them."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

#: The model chooses how a text is cut into tokens, even where the grammar leaves one text alone.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
#: Rows of the parser have one item for each way to read the text so far.
_LIMITS = llguidance.LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
#: llguidance's name for a state that no token leads out of.
_NOTHING_FOLLOWS = "NoExtension"


class _Vocabulary:
    """What llguidance asks of a tokenizer. An end token of its own stands behind the others."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        """Nothing is tokenized: no text is forced."""
        return []


class LimitExceeded(Exception):
    """A grammar went beyond a limit of llguidance."""


def token_trie(
    tokens: Sequence[bytes], slices: Sequence[str] | None = None
) -> llguidance.LLTokenizer:
    """Return the trie of ``tokens``, by id. Its end token has the id ``len(tokens)``. ``slices``
    are expressions whose tokens are found without a walk; None: those that suit JSON."""
    chosen = llguidance.LLTokenizer.json_slices() if slices is None else list(slices)
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens))
    return llguidance.LLTokenizer(wrapper, slices=chosen)


def token_matcher(trie: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at the beginning of ``grammar``, in Lark syntax. Its errors are in it."""
    lark = llguidance.LLMatcher.grammar_from_lark(_OPTIONS + grammar)
    return llguidance.LLMatcher(trie, lark, log_level=0, limits=_LIMITS)


def allowed_tokens(matcher: llguidance.LLMatcher) -> bytes:
    """Return the mask of the tokens that may come next, a bit each. Raises LimitExceeded."""
    mask: bytes = matcher.compute_bitmask()
    if not matcher.is_error():
        return mask
    if _NOTHING_FOLLOWS in matcher.get_error():
        return bytes(len(mask))
    raise LimitExceeded
