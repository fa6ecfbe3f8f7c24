"""Where a predicted length stands among recent ones. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

#: Predictions that a rank is among, the last ones.
_WINDOW = 1024


class RecentRanks:
    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def rank(self, length: float) -> float:
        """The part of the recent predictions that are shorter, equal ones counted by half: above 0,
        below 1. From now on it is one of them."""
        low, high = bisect_left(self._sorted, length), bisect_right(self._sorted, length)
        rank = (low + high + 1) / 2 / (len(self._sorted) + 1)
        insort(self._sorted, length)
        self._recent.append(length)
        if len(self._recent) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        return rank
