"""Rank of a value among the last values of its kind, as a fraction. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

#: Number of last values that a new one is ranked among.
WINDOW = 1024


class RecentRanks:
    """Ranks of values, such as predicted lengths, among the last ``WINDOW`` values."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def rank(self, value: float) -> float:
        """Return the fraction of recent values that are smaller than ``value``.

        The result is above 0 and below 1, and equal values count half. ``value`` is then added to
        the recent values.
        """
        low, high = bisect_left(self._sorted, value), bisect_right(self._sorted, value)
        rank = (low + high + 1) / 2 / (len(self._sorted) + 1)
        insort(self._sorted, value)
        self._recent.append(value)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        return rank
