"""Counters of all routers since their start, summed for a router's console. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from everlift.v1 import session_pb2
from router.console.failures import FailureCount, Failures
from router.console.parts import Measured, Requests, Sessions
from router.console.rates import Percentiles, RecentHistogram, percentiles

#: Histograms whose percentiles the page shows: name on the page, and name of the metric.
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


#: Seconds without an answer after which a router is removed.
_EXPIRY_S = 60.0
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
        self.last_report_at = -inf

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        self.counts, self.last_report_at = counts, now
        self.failures.note(counts.failures, now)
        for latency in counts.latencies:
            histogram = self.histograms.get(latency.name)
            # A router of another release may have other buckets.
            if histogram is not None and len(latency.cumulative) == histogram.size:
                histogram.note(latency.cumulative, now)


class Aggregates:
    """Sums and percentiles of the counters of all routers.

    ``router_id`` is this router's id. Its failures are counted from its start, those of another
    router from that router's first report. ``bounds`` maps the names of histograms to the upper
    bounds of their buckets.
    """

    def __init__(self, router_id: str, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = bounds
        self._routers = {router_id: _Router(bounds, {})}
        #: routers that answered when last asked, including this one, and routers that did not
        self.num_answering, self.num_silent = 1, 0

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        router = self._routers.get(counts.router_id)
        if router is None:
            router = _Router(self._bounds, counts.failures)
            self._routers[counts.router_id] = router
        router.note(counts, now)

    def drop_routers(self, now: float) -> None:
        """Remove routers that have not answered for a minute, with their counters."""
        self._routers = {
            name: it for name, it in self._routers.items() if now - it.last_report_at < _EXPIRY_S
        }

    # aggregates of all routers

    def latencies(self) -> dict[str, Percentiles]:
        return {
            name: percentiles(bounds, [it.histograms[name].recent for it in self._routers.values()])
            for name, bounds in self._bounds.items()
        }

    def failures(self, now: float) -> list[FailureCount]:
        """Return the failures of the last five minutes, one sum for each kind of error.

        They are summed over all routers; the most frequent error is first.
        """
        merged: dict[str, FailureCount] = {}
        for router in self._routers.values():
            for each in router.failures.recent(now):
                merged[each.slug] = each if each.slug not in merged else each + merged[each.slug]
        return sorted(merged.values(), key=lambda it: (-it.recent, it.slug))

    def totals(self) -> dict[str, int]:
        """Return sums over all present routers, by name of the counter.

        Each router counts from its own start.
        """
        return {
            name: sum(getattr(it.counts, name) for it in self._routers.values()) for name in _TOTALS
        }
