"""Trust in predictions: whether their order agrees with that of the actual lengths. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import groupby
from math import sqrt


def kendall_tau(pairs: Collection[tuple[float, float]]) -> float:
    """Return Kendall's tau-b of pairs (x, y): how well their order by x agrees with that by y.

    The result is 1 for the same order, -1 for the reverse order, and about 0 for independent
    orders. If all x or all y are equal, the result is 0.

        tau-b = (concordant - discordant) / sqrt((N - ties in x) (N - ties in y))

    The formula (Kendall, Biometrika 33, 1945) counts combinations of two of the n pairs; N is the
    number of all combinations. The y values are inserted into a sorted list in the order of x. This
    takes O(n log n) comparisons, like the merge sort of Knight (JASA 61, 1966).
    """
    sorted_ys: list[float] = []
    balance = 0
    for _, tied in groupby(sorted(pairs), key=lambda pair: pair[0]):
        ys = [y for _, y in tied]
        balance += sum(
            bisect_left(sorted_ys, y) - len(sorted_ys) + bisect_right(sorted_ys, y) for y in ys
        )
        for y in ys:
            insort(sorted_ys, y)
    every = _pairs(len(pairs))
    x_untied = every - _ties(x for x, _ in pairs)
    y_untied = every - _ties(y for _, y in pairs)
    return balance / sqrt(x_untied * y_untied) if x_untied and y_untied else 0.0


def _ties(values: Iterable[Hashable]) -> int:
    return sum(map(_pairs, Counter(values).values()))


def _pairs(count: int) -> int:
    return count * (count - 1) // 2


#: Number of last ended outputs over which tau and coverage are computed.
_WINDOW = 500
#: Number of outputs between two computations of tau, each of which is O(n log n) in the window.
_TAU_INTERVAL = 100
#: Predictions are trusted again when tau is this much above the limit.
_MARGIN = 0.05


class Trust:
    """Decision whether a model's predictions are trusted, by Kendall's tau of the last outputs.

    Tau measures how well the order of the predicted lengths agrees with that of the actual lengths.

    Once tau falls below ``limit``, predictions are not trusted until it is 0.05 above the limit.

    For a random order, tau over n = 500 outputs has a standard deviation of sqrt(2 (2 n + 5) / (9 n
    (n - 1))) = 0.03 (Kendall 1945).
    """

    def __init__(self, limit: float, tau: float) -> None:
        """Start with ``tau`` from the model's training, used until 100 outputs have ended."""
        self._limit = limit
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._within: deque[tuple[bool, ...]] = deque(maxlen=_WINDOW)
        self._num_since_tau = 0
        self.tau = tau
        self.is_trusted = tau >= limit

    def note(self, predicted: float, within: Sequence[bool], actual: float) -> None:
        """Record an output with its predicted and its actual number of tokens.

        ``within`` states, for each predicted quantile, whether the output was at most that long.
        """
        self._pairs.append((predicted, actual))
        self._within.append(tuple(within))
        self._num_since_tau += 1
        if self._num_since_tau == _TAU_INTERVAL:
            self._num_since_tau = 0
            self.tau = kendall_tau(self._pairs)
            self.is_trusted = self.tau >= self._limit + (0 if self.is_trusted else _MARGIN)

    @property
    def coverage(self) -> list[float]:
        """Fraction, for each predicted quantile, of recent outputs that were at most that long.

        The list is empty before any output has ended.
        """
        if not self._within:
            return []
        return [sum(each) / len(self._within) for each in zip(*self._within, strict=True)]
