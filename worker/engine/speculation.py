"""What one sequence's next tokens are guessed to be, and how many of them. Pure.

How many follows from what became of the last draft:

    all accepted     twice as many as before, up to the limit
    some accepted    one more than were accepted
    none accepted    half as many, but at least one; from the third time in a row on a pause comes
                     before it, of 2, 4, 8, ... steps, of 64 at most

so a text that does not repeat itself costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.config import Speculation
from worker.engine.ngram import NgramIndex, continued

#: Tokens read in a step, by all drafters: long prompts must not hold it up.
MAX_READ = 2048
_PATIENCE = 2
_MAX_PAUSE = 64


class Drafter:
    """One sequence's. The same tokens and the same ``learn`` make the same drafts."""

    def __init__(self, speculation: Speculation) -> None:
        self._index = NgramIndex(speculation.min_match, speculation.max_match)
        self._limit = speculation.num_draft_tokens
        self._count = self._limit
        self._misses = 0
        self._pause = 0

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Takes in up to ``most`` of those of ``tokens``, which only grow, that are new; how many
        it took."""
        before = self._index.length
        self._index.extend(tokens, most)
        return self._index.length - before

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """A draft of up to ``most`` tokens after ``tokens``, if it has read them all. Once a
        step."""
        if self._pause:
            self._pause -= 1
            return ()
        follower = self._index.follower() if self._index.length == len(tokens) else None
        if follower is None:
            return ()
        return continued(tokens, follower, min(self._count, most))

    def learn(self, drafted: int, accepted: int) -> None:
        """What became of the last draft, which had at least one token."""
        if accepted:
            self._misses = 0
            grown = 2 * self._count if accepted == drafted else accepted + 1
            self._count = min(grown, self._limit)
            return
        self._misses += 1
        self._count = max(1, self._count // 2)
        if self._misses > _PATIENCE:
            self._pause = min(1 << self._misses - _PATIENCE, _MAX_PAUSE)
