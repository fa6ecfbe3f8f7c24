"""What one choice of a request has generated: tokens, and the text that each of them released.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everlift.text import TextState


class Output:
    """The text after token k depends on tokens 0..k alone, so any reader can go on at any
    offset."""

    def __init__(self, text: TextState) -> None:
        self.tokens: list[int] = []
        self._text = text
        self._released: list[str] = []
        self._tail = ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stopped(self) -> bool:
        """A stop string is complete: nothing may follow."""
        return self._text.stopped

    def extend(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Adds tokens up to the one that completes a stop string; answers those that were added."""
        kept = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self._released.append(self._text.push(token))
            kept.append(token)
        return tuple(kept)

    def finish(self) -> None:
        """No token follows: releases the text that was held back."""
        self._tail = self._text.finish()

    def text(self, start: int, stop: int) -> str:
        """Text released by the tokens from ``start`` to before ``stop``."""
        return "".join(self._released[start:stop])

    @property
    def tail(self) -> str:
        """Text released by the finish."""
        return self._tail
