"""Token rates and percentiles, from counters at two times. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

#: Minimum seconds between two counts for a rate, because rates over a shorter time fluctuate.
_INTERVAL_S = 1.0


class Rates:
    """Token rates of workers, in tokens per second."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def of(self, worker_id: str, tokens: int, now: float) -> float:
        """Return a worker's last rate in tokens per second; 0 until two counts are 1 s apart.

        ``tokens`` is the worker's counter at the time ``now``, in seconds.
        """
        then, before = self._samples.setdefault(worker_id, (now, tokens))
        if now - then >= _INTERVAL_S:
            self._samples[worker_id] = now, tokens
            self._rates[worker_id] = (tokens - before) / (now - then)
        return self._rates.get(worker_id, 0.0)

    def retain(self, worker_ids: Iterable[str]) -> None:
        """Drop the rates of all workers except ``worker_ids``."""
        retained = set(worker_ids)
        if retained == self._samples.keys():
            return
        self._samples = {name: sample for name, sample in self._samples.items() if name in retained}
        self._rates = {name: rate for name, rate in self._rates.items() if name in retained}


#: Seconds of observations that a recent histogram covers.
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of ``count`` observed values, in their unit; None if ``count`` is 0."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class RecentHistogram:
    """Histogram of the values of the last minute.

    ``bounds`` are the upper bounds of its buckets; the last one is infinite.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        #: time in seconds and cumulative counts at that time, oldest first
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, cumulative: Sequence[int], now: float) -> None:
        """Store the cumulative counts by bucket since the start, as of ``now``, in seconds."""
        self._samples.append((now, tuple(cumulative)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()

    @property
    def size(self) -> int:
        """Number of buckets."""
        return len(self._bounds)

    @property
    def recent(self) -> list[int]:
        """Cumulative counts of the last minute by bucket; zeros until ``note`` was called twice."""
        if len(self._samples) < 2:
            return [0] * self.size
        first, last = self._samples[0][1], self._samples[-1][1]
        return [after - before for before, after in zip(first, last, strict=True)]


def percentiles(bounds: Sequence[float], cumulative: Iterable[Sequence[int]]) -> Percentiles:
    """Return the percentiles of the sum of several histograms with the same bounds.

    ``cumulative`` has, for each histogram, its cumulative counts by bucket.
    """
    counts = [sum(column) for column in zip(*cumulative, strict=True)]
    if not counts or not (total := counts[-1]):
        return Percentiles(0)
    return Percentiles(total, *(quantile(bounds, counts, part) for part in (0.5, 0.9, 0.99)))


def quantile(bounds: Sequence[float], cumulative: Sequence[int], part: float) -> float:
    """Return the ``part`` quantile of a histogram, computed like Prometheus's histogram_quantile.

    ``part`` is from 0 to 1. The value is interpolated linearly within its bucket. The first bucket
    begins at 0. If the value is in the infinite bucket, the last finite bound is returned.
    """
    target = part * cumulative[-1]
    edges = pairwise([(0.0, 0), *zip(bounds, cumulative, strict=True)])
    for (low, before), (high, until) in edges:
        if until >= target and until > before:
            if high == inf:
                return low
            return low + (high - low) * (target - before) / (until - before)
    return bounds[-2]
