"""How long outputs become, by those that ended before. Pure."""

from __future__ import annotations

#: Taken for the length of an output while none has ended yet.
_FIRST_GUESS = 128.0
#: The mean follows the last so many outputs.
_MEMORY = 200


class OutputLengths:
    """A mean of the last outputs' lengths in tokens, those that ended here."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """An output ended by itself, or by its ``max_tokens``."""
        self._count = min(_MEMORY, self._count + 1)
        self._mean += (num_tokens - self._mean) / self._count

    def predict(self, num_made: int, max_tokens: int) -> int:
        """Tokens that an output of ``num_made`` so far and ``max_tokens`` at most will still get;
        at least one, unless it is complete."""
        expected = max(num_made + 1, round(self._mean))
        return max(0, min(expected, max_tokens) - num_made)
