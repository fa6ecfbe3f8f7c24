"""What the routers of a cluster counted, as each of them tells it from time to time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from everlift.v1 import session_pb2
from router.console.failures import Failed, Failures
from router.console.percentiles import Percentiles, RecentHistogram, percentiles

#: A router that was not heard for so long is none.
_FORGOTTEN_S = 60.0
_TOTALS = (
    "completed",
    "failed",
    "migrated",
    "preempted",
    "moved",
    "recomputed_tokens",
    "false_alarms",
)


class _Router:
    """``failures`` are those of before it was heard first."""

    def __init__(self, bounds: Mapping[str, Sequence[float]], failures: Mapping[str, int]) -> None:
        self.histograms = {name: RecentHistogram(each) for name, each in bounds.items()}
        self.failures = Failures(failures)
        self.counts = session_pb2.Counts()
        self.heard = -inf

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        self.counts, self.heard = counts, now
        self.failures.note(counts.failures, now)
        for told in counts.latencies:
            histogram = self.histograms.get(told.name)
            # A router of another release may have other buckets.
            if histogram is not None and len(told.cumulative) == histogram.size:
                histogram.note(told.cumulative, now)


class Census:
    """``bounds`` of the buckets, by histogram. The router ``router_id`` is heard from its start."""

    def __init__(self, router_id: str, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = bounds
        self._routers = {router_id: _Router(bounds, {})}
        #: that answered when they were asked last, this one counted in, and that did not
        self.num_heard, self.num_silent = 1, 0

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        router = self._routers.get(counts.router_id)
        if router is None:
            router = _Router(self._bounds, counts.failures)
            self._routers[counts.router_id] = router
        router.note(counts, now)

    def forget(self, now: float) -> None:
        """Routers that are gone, with what they counted."""
        self._routers = {
            name: it for name, it in self._routers.items() if now - it.heard < _FORGOTTEN_S
        }

    # of all of them

    def latencies(self) -> dict[str, Percentiles]:
        return {
            name: percentiles(bounds, [it.histograms[name].recent for it in self._routers.values()])
            for name, bounds in self._bounds.items()
        }

    def failures(self, now: float) -> list[Failed]:
        """Of late, the most frequent first."""
        merged: dict[str, Failed] = {}
        for router in self._routers.values():
            for each in router.failures.recent(now):
                merged[each.slug] = each if each.slug not in merged else each + merged[each.slug]
        return sorted(merged.values(), key=lambda it: (-it.recent, it.slug))

    def totals(self) -> dict[str, int]:
        """Since each started, of those that are there."""
        return {
            name: sum(getattr(it.counts, name) for it in self._routers.values()) for name in _TOTALS
        }
