"""Count of the output tokens that belong to the reasoning. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from everlift.text import Tokenizer, decode_utf8


class ReasoningTokens:
    """Counter of one output's tokens that belong to its reasoning.

    A token belongs to the reasoning if the first character of its text does. Marks around the
    reasoning and tokens without text do not. ``tokenizer`` must be the one that made the output's
    text. A text that keeps special tokens needs the view that ``with_special_tokens`` returns.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: position in the output's text of the first character of each token that has text
        self._starts = array("I")
        #: number of complete characters, and the bytes of an incomplete one
        self._num_characters = 0
        self._incomplete = b""
        self._is_first = True

    def add(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the output."""
        for token in tokens:
            data = self._tokenizer.token_bytes(token, is_first=self._is_first)
            if data is None:
                continue
            self._is_first = False
            self._starts.append(self._num_characters)
            text, self._incomplete = decode_utf8(self._incomplete + data)
            self._num_characters += len(text)

    def count(self, ranges: Iterable[range]) -> int:
        """Return the number of tokens whose text begins within ``ranges``.

        ``ranges`` are the parser's ``reasoning_ranges``, positions of characters in the output.
        """
        return sum(
            bisect_left(self._starts, each.stop) - bisect_left(self._starts, each.start)
            for each in ranges
        )
