"""Sequences that the engine's reported load does not include yet. Pure."""

from __future__ import annotations

from worker.engine.outcome import SequenceKey


class Pending:
    """Sequences received from routers but not yet part of the load that the engine reported.

    ``num_tokens`` is the sum of their tokens (prompts and outputs so far), and ``num_uncached`` the
    sum of those that are not expected to be prefix-cache hits. The sums are updated with each
    change, because every message to a router reports them and there may be thousands of sequences.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_uncached = 0
        self._counts: dict[SequenceKey, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: SequenceKey, num_known: int, num_uncached: int) -> None:
        self.discard(key)
        self._counts[key] = num_known, num_uncached
        self.num_tokens += num_known
        self.num_uncached += num_uncached

    def discard(self, key: SequenceKey) -> None:
        """Remove the sequence if it is pending."""
        num_known, num_uncached = self._counts.pop(key, (0, 0))
        self.num_tokens -= num_known
        self.num_uncached -= num_uncached
