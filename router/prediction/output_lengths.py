"""How long outputs were lately. Pure."""

from __future__ import annotations

#: Taken for the length of an output while none has ended yet.
_FIRST_GUESS = 128.0
#: The mean follows the last so many outputs.
_MEMORY = 200


class OutputLengths:
    """A mean of the last outputs' lengths in tokens, those that ended here."""

    def __init__(self) -> None:
        self.mean = _FIRST_GUESS
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """An output ended by itself, or by its ``max_tokens``."""
        self._count = min(_MEMORY, self._count + 1)
        self.mean += (num_tokens - self.mean) / self._count
