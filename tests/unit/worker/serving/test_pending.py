"""Started sequences that are not part of the reported load yet."""

from __future__ import annotations

from worker.engine.outcome import SequenceKey
from worker.serving.pending import Pending


def test_pending_tracks_token_sum() -> None:
    pending = Pending()
    first, second = SequenceKey(1, 0), SequenceKey(1, 1)
    pending.add(first, 5, 4)
    pending.add(second, 7, 1)
    assert (len(pending), pending.num_tokens, pending.num_uncached) == (2, 12, 5)
    pending.discard(first)
    pending.discard(first)
    assert (len(pending), pending.num_tokens, pending.num_uncached) == (1, 7, 1)
    pending.add(second, 2, 2)
    assert (len(pending), pending.num_tokens, pending.num_uncached) == (1, 2, 2)
