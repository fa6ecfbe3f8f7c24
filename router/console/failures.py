"""Recent failures, and a history of values, for the console's charts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Seconds for which a failure is recent.
_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures of requests with the same error in the last five minutes.

    ``slug`` names the error, ``recent`` is the number of failures, and ``last_s`` the seconds since
    the last one.
    """

    slug: str
    recent: int
    last_s: float

    def __add__(self, other: FailureCount) -> FailureCount:
        """Return the sum of the failures of two routers, which have the same slug."""
        return FailureCount(self.slug, self.recent + other.recent, min(self.last_s, other.last_s))


class Failures:
    """Recent failures by slug, derived from counters that only grow.

    ``before`` has the initial values of the counters. Failures that are included in them are left
    out, because their times are unknown.
    """

    def __init__(self, before: Mapping[str, int] | None = None) -> None:
        self._totals = dict(before or {})
        #: time in seconds, slug, number of new failures
        self._increments: deque[tuple[float, str, int]] = deque()

    def note(self, totals: Mapping[str, int], now: float) -> None:
        for slug, total in totals.items():
            if more := total - self._totals.get(slug, 0):
                self._increments.append((now, slug, more))
        self._totals = dict(totals)
        while self._increments and self._increments[0][0] <= now - _WINDOW_S:
            self._increments.popleft()

    def recent(self, now: float) -> list[FailureCount]:
        """Return the failures of the last five minutes, one for each error, most frequent first."""
        counts: dict[str, int] = {}
        last: dict[str, float] = {}
        for at, slug, more in self._increments:
            counts[slug] = counts.get(slug, 0) + more
            last[slug] = at
        slugs = sorted(counts, key=lambda slug: (-counts[slug], slug))
        return [FailureCount(slug, counts[slug], now - last[slug]) for slug in slugs]


Json = dict[str, Any]

#: Minimum seconds between two points of the history.
_MIN_INTERVAL_S = 0.9
_RETENTION_S = 300.0


class History:
    def __init__(self) -> None:
        self._points: deque[Json] = deque()

    def note(self, numbers: Mapping[str, Any], now: float) -> None:
        """Add a point with these values at ``now`` (seconds), unless the last one is too recent."""
        if self._points and now - self._points[-1]["at"] < _MIN_INTERVAL_S:
            return
        self._points.append({"at": round(now, 3), **numbers})
        while self._points[0]["at"] <= now - _RETENTION_S:
            self._points.popleft()

    @property
    def points(self) -> list[Json]:
        """Points of the charts as JSON objects with the time and the values, oldest first."""
        return list(self._points)
