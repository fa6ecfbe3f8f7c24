"""Draft tokens of one sequence, found by n-gram lookup in its own tokens. Pure.

The length of a draft depends on how many tokens of the previous draft were accepted:

    all accepted     twice as long as before, up to the limit
    some accepted    one token longer than the accepted part, up to the limit
    none accepted    half as long, but at least one token; from the third time in a row on, after a
                     pause of 2, 4, 8, ... steps, at most 64

Drafting therefore costs almost nothing for a text that does not repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.config import Speculation

_TOKEN_BITS = 32


class NgramIndex:
    """Index of the token that last followed each n-gram in a growing list of tokens.

    An n-gram is a run of n consecutive tokens; n goes from ``min_match`` to ``max_match``. Adding a
    token takes O(max_match - min_match) time, and about 100 bytes for each n.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        #: by n, the longest first: n-gram as one number -> index of the token that last followed it
        self._followers: dict[int, dict[int, int]] = {
            n: {} for n in range(max_match, min_match - 1, -1)
        }
        self._masks = {n: (1 << _TOKEN_BITS * n) - 1 for n in self._followers}
        self._longest = self._masks[max_match]
        #: the last ``max_match`` tokens as one number
        self._window = 0
        self._length = 0

    @property
    def length(self) -> int:
        """Return the number of tokens in the index."""
        return self._length

    def extend(self, tokens: Sequence[int], most: int) -> None:
        """Add the next tokens of the list to the index, at most ``most``.

        ``tokens`` is the list so far, which begins with the tokens that are in the index already.
        """
        for token in tokens[self._length : self._length + most]:
            for n, followers in self._followers.items():
                if n <= self._length:
                    followers[self._window & self._masks[n]] = self._length
            self._window = (self._window << _TOKEN_BITS | token) & self._longest
            self._length += 1

    def follower(self) -> int | None:
        """Return the index of the token that followed the last earlier occurrence of an n-gram.

        The n-gram is the longest one at the end of the list that also occurred before. Return None
        if there is no such n-gram.
        """
        for n, followers in self._followers.items():
            if n <= self._length:
                index = followers.get(self._window & self._masks[n])
                if index is not None:
                    return index
        return None


def continued(tokens: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return the first ``count`` tokens of an endless repetition of ``tokens[index:]``."""
    period = len(tokens) - index
    return tuple(tokens[index + at % period] for at in range(count))


#: Maximum number of tokens that all drafters together add to their indexes in a step, so that long
#: prompts do not delay the step.
MAX_READ = 2048
_MAX_MISSES = 2
_MAX_PAUSE = 64


class Drafter:
    """Drafter of one sequence: proposes tokens that may come next.

    The same calls always return the same drafts.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._index = NgramIndex(speculation.min_match, speculation.max_match)
        self._limit = speculation.num_draft_tokens
        self._count = self._limit
        self._misses = 0
        self._pause = 0

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Add to the index up to ``most`` of the sequence's tokens that are not in it yet.

        ``tokens`` are all tokens of the sequence. Return the number of tokens added.
        """
        before = self._index.length
        self._index.extend(tokens, most)
        return self._index.length - before

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return a draft of at most ``most`` tokens that may follow ``tokens``. Call once per step.

        ``tokens`` are all tokens of the sequence. The draft is empty during a pause, while ``read``
        has not added all tokens to the index, or if no n-gram matches.
        """
        if self._pause:
            self._pause -= 1
            return ()
        follower = self._index.follower() if self._index.length == len(tokens) else None
        if follower is None:
            return ()
        return continued(tokens, follower, min(self._count, most))

    def learn(self, drafted: int, accepted: int) -> None:
        """Record that ``accepted`` of the ``drafted`` tokens of the last draft were accepted."""
        if accepted:
            self._misses = 0
            grown = 2 * self._count if accepted == drafted else accepted + 1
            self._count = min(grown, self._limit)
            return
        self._misses += 1
        self._count = max(1, self._count // 2)
        if self._misses > _MAX_MISSES:
            self._pause = min(1 << self._misses - _MAX_MISSES, _MAX_PAUSE)
