"""Counts of a router since its start, for its own console and others'. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from everlift.v1 import session_pb2
from router.console.failures import Failed, Failures
from router.console.parts import Measured, Requests, Sessions
from router.console.rates import Percentiles, RecentHistogram, percentiles

#: Histograms of which a page has percentiles, by their names there and in the catalogue.
LATENCIES = {
    "ttft": "everlift_time_to_first_token_seconds",
    "inter_token": "everlift_inter_token_latency_seconds",
    "queue_wait": "everlift_queue_wait_seconds",
    "latency": "everlift_request_latency_seconds",
    "ledger": "everlift_ledger_call_seconds",
}


class Counting:
    def __init__(
        self, router_id: str, sessions: Sessions, requests: Requests, measured: Measured
    ) -> None:
        self._router_id = router_id
        self._sessions = sessions
        self._requests = requests
        self._measured = measured

    def counts(self) -> session_pb2.Counts:
        counters, measured = self._requests.counters, self._measured
        return session_pb2.Counts(
            router_id=self._router_id,
            latencies=[
                session_pb2.LatencyCounts(name=name, cumulative=measured.cumulative(metric))
                for name, metric in LATENCIES.items()
            ],
            failures=measured.failures(),
            completed=counters.completed,
            failed=counters.failed,
            migrated=counters.migrated,
            preempted=counters.preempted,
            moved=counters.moved,
            recomputed_tokens=counters.recomputed_tokens,
            false_alarms=self._sessions.false_alarms,
        )


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


class Aggregates:
    """Aggregates of the counters, from the start of ``router_id``.

    ``bounds`` are those of the buckets, by histogram.
    """

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

    def drop_routers(self, now: float) -> None:
        """Remove routers that are gone, with their counts."""
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
        """Return recent failures, the most frequent first."""
        merged: dict[str, Failed] = {}
        for router in self._routers.values():
            for each in router.failures.recent(now):
                merged[each.slug] = each if each.slug not in merged else each + merged[each.slug]
        return sorted(merged.values(), key=lambda it: (-it.recent, it.slug))

    def totals(self) -> dict[str, int]:
        """Return the counts of all present routers since their starts."""
        return {
            name: sum(getattr(it.counts, name) for it in self._routers.values()) for name in _TOTALS
        }
