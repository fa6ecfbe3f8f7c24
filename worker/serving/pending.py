"""Sequences that the engine's reported load does not include yet. Pure."""

from __future__ import annotations

from worker.engine.outcome import SequenceKey


class Pending:
    """Sequences received from routers but not yet part of the load that the engine reported.

    ``num_tokens`` is the sum of their tokens: prompts and outputs so far. It is updated with each
    change, because every message to a router reports it and there may be thousands of sequences.
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
        """Remove the sequence if it is pending."""
        self.num_tokens -= self._num_known.pop(key, 0)
