"""Sequences that the engine's load does not count yet. Pure."""

from __future__ import annotations

from worker.engine.outcome import SequenceKey


class Pending:
    """Pending sequences, with ``num_tokens`` known tokens in all.

    A sum that is kept: a frame tells it, and a burst of starts, or the room that one leaves in a
    dict, would be walked through for each.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_known: dict[SequenceKey, int] = {}

    def __len__(self) -> int:
        return len(self._num_known)

    def add(self, key: SequenceKey, num_known: int) -> None:
        self.discard(key)
        self._num_known[key] = num_known
        self.num_tokens += num_known

    def discard(self, key: SequenceKey) -> None:
        """Remove the sequence if it is there."""
        self.num_tokens -= self._num_known.pop(key, 0)
