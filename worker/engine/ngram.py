"""Where the last tokens occurred before: drafts without a draft model (prompt lookup). Pure.

tokens     the cat  sat on the mat .  the cat
           |match|  ^follower         |match|  ->  draft: sat on the mat . the cat sat on ...
"""

from __future__ import annotations

from collections.abc import Sequence

_TOKEN_BITS = 32


class NgramIndex:
    """What followed each n-gram of a growing list of tokens the last time, for n from ``min_match``
    to ``max_match``. A token costs O(max_match - min_match), and about 100 bytes for each n."""

    def __init__(self, min_match: int, max_match: int) -> None:
        #: by n, the longest first: an n-gram as one number -> the index of what followed it last
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
        """How many tokens were taken in."""
        return self._length

    def extend(self, tokens: Sequence[int], most: int) -> None:
        """Takes in up to ``most`` of those of ``tokens`` that are new."""
        for token in tokens[self._length : self._length + most]:
            for n, followers in self._followers.items():
                if n <= self._length:
                    followers[self._window & self._masks[n]] = self._length
            self._window = (self._window << _TOKEN_BITS | token) & self._longest
            self._length += 1

    def follower(self) -> int | None:
        """The index of what followed the longest n-gram that ends the tokens, where it occurred
        last before; None where none of them did."""
        for n, followers in self._followers.items():
            if n <= self._length:
                index = followers.get(self._window & self._masks[n])
                if index is not None:
                    return index
        return None


def continued(tokens: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``index`` on; at the end of ``tokens`` they repeat themselves."""
    period = len(tokens) - index
    return tuple(tokens[index + at % period] for at in range(count))
