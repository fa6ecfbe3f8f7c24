"""How alike two orders are. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from itertools import groupby
from math import sqrt


def kendall_tau(pairs: Collection[tuple[float, float]]) -> float:
    """Kendall's tau-b of the pairs' first and second values: 1 for the same order, -1 for the
    reverse, 0 for none, also where all of one side are equal.

    tau-b = (concordant - discordant) / sqrt((n - ties in x) (n - ties in y)), n = all pairs of
    pairs (Kendall, Biometrika 33, 1945). With the second values inserted into a sorted list in the
    order of the first ones (as Knight, JASA 61, 1966, does by merging): O(n log n) comparisons.
    """
    seen: list[float] = []
    balance = 0
    for _, tied in groupby(sorted(pairs), key=lambda pair: pair[0]):
        ys = [y for _, y in tied]
        balance += sum(bisect_left(seen, y) - len(seen) + bisect_right(seen, y) for y in ys)
        for y in ys:
            insort(seen, y)
    every = _pairs(len(pairs))
    x_told = every - _ties(x for x, _ in pairs)
    y_told = every - _ties(y for _, y in pairs)
    return balance / sqrt(x_told * y_told) if x_told and y_told else 0.0


def _ties(values: Iterable[Hashable]) -> int:
    return sum(map(_pairs, Counter(values).values()))


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
