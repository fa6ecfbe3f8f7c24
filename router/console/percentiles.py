"""Percentiles of what was observed lately, from histograms that only count on. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

#: What was observed longer ago does not count.
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of ``count`` observations, in their unit; None where there was none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class RecentHistogram:
    """``bounds`` are the buckets' upper bounds, the infinite one last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        #: cumulative counts as they were at moments in seconds, the oldest first
        self._marks: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, cumulative: Sequence[int], now: float) -> None:
        """By bucket, how many were observed until now."""
        self._marks.append((now, tuple(cumulative)))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW_S:
            self._marks.popleft()

    @property
    def size(self) -> int:
        """Buckets."""
        return len(self._bounds)

    @property
    def recent(self) -> list[int]:
        """Cumulative, by bucket."""
        if len(self._marks) < 2:
            return [0] * self.size
        first, last = self._marks[0][1], self._marks[-1][1]
        return [after - before for before, after in zip(first, last, strict=True)]


def percentiles(bounds: Sequence[float], cumulative: Iterable[Sequence[int]]) -> Percentiles:
    """Of several histograms with the same bounds together."""
    counts = [sum(column) for column in zip(*cumulative, strict=True)]
    if not counts or not (total := counts[-1]):
        return Percentiles(0)
    return Percentiles(total, *(quantile(bounds, counts, part) for part in (0.5, 0.9, 0.99)))


def quantile(bounds: Sequence[float], cumulative: Sequence[int], part: float) -> float:
    """As Prometheus's histogram_quantile: linear within the bucket that it falls in, whose lower
    bound is 0 for the first one; the last finite bound for the infinite one."""
    wanted = part * cumulative[-1]
    edges = pairwise([(0.0, 0), *zip(bounds, cumulative, strict=True)])
    for (low, before), (high, until) in edges:
        if until >= wanted and until > before:
            if high == inf:
                return low
            return low + (high - low) * (wanted - before) / (until - before)
    return bounds[-2]
