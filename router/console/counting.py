"""Counters of all routers since their start, summed for a router's console. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from everlift.v1 import session_pb2
from router.console.failures import FailureCount, Failures
from router.console.parts import Measured, Requests, Sessions
from router.console.prompts import Prompts, RecentPrompts
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
            tenant_prompts=[
                session_pb2.TenantPrompts(
                    tenant=tenant, prompt_tokens=prompts.tokens, cached_tokens=prompts.cached
                )
                for tenant, prompts in measured.tenant_prompts().items()
            ],
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
    """Counters of one router.

    ``bounds`` maps the names of histograms to the upper bounds of their buckets. ``before`` has the
    router's counters at the time from which its recent failures and prompts are counted.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]], before: session_pb2.Counts) -> None:
        self.histograms = {name: RecentHistogram(each) for name, each in bounds.items()}
        self.failures = Failures(before.failures)
        self.prompts = RecentPrompts(dict(_tenant_prompts(before)))
        self.counts = session_pb2.Counts()
        self.last_report_at = -inf

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        self.counts, self.last_report_at = counts, now
        self.failures.note(counts.failures, now)
        self.prompts.note(_tenant_prompts(counts), now)
        for latency in counts.latencies:
            histogram = self.histograms.get(latency.name)
            # A router of another release may have other buckets.
            if histogram is not None and len(latency.cumulative) == histogram.size:
                histogram.note(latency.cumulative, now)


def _tenant_prompts(counts: session_pb2.Counts) -> Iterator[tuple[str, Prompts]]:
    for each in counts.tenant_prompts:
        yield each.tenant, Prompts(each.prompt_tokens, each.cached_tokens)


class Aggregates:
    """Sums and percentiles of the counters of all routers.

    ``router_id`` is this router's id. Failures and prompts of this router are counted from its
    start. Failures and prompts of any other router are counted from its first report, so earlier
    ones are left out. ``bounds`` maps the names of histograms to the upper bounds of their buckets.
    """

    def __init__(self, router_id: str, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = bounds
        self._routers = {router_id: _Router(bounds, session_pb2.Counts())}
        #: routers that answered when last asked, including this one, and routers that did not
        self.num_answering, self.num_silent = 1, 0

    def note(self, counts: session_pb2.Counts, now: float) -> None:
        """Store the latest counters of a router, received at ``now``, in seconds."""
        router = self._routers.get(counts.router_id)
        if router is None:
            router = _Router(self._bounds, counts)
            self._routers[counts.router_id] = router
        router.note(counts, now)

    def drop_routers(self, now: float) -> None:
        """Remove routers that have not answered for a minute, with their counters."""
        self._routers = {
            name: router
            for name, router in self._routers.items()
            if now - router.last_report_at < _EXPIRY_S
        }

    # aggregates of all routers

    def latencies(self) -> dict[str, Percentiles]:
        return {
            name: percentiles(
                bounds, [router.histograms[name].recent for router in self._routers.values()]
            )
            for name, bounds in self._bounds.items()
        }

    def failures(self, now: float) -> list[FailureCount]:
        """Return the failures of the last five minutes by error, summed over all routers.

        The most frequent error is first.
        """
        merged: dict[str, FailureCount] = {}
        for router in self._routers.values():
            for each in router.failures.recent(now):
                merged[each.slug] = each if each.slug not in merged else each + merged[each.slug]
        return sorted(merged.values(), key=lambda failure: (-failure.recent, failure.slug))

    def tenant_prompts(self) -> dict[str, Prompts]:
        """Return each tenant's prompt tokens and cache hits of the last five minutes.

        The numbers are summed over all routers.
        """
        summed: dict[str, Prompts] = {}
        for router in self._routers.values():
            for tenant, prompts in router.prompts.items():
                summed[tenant] = prompts.plus(summed.get(tenant, Prompts()))
        return summed

    def totals(self) -> dict[str, int]:
        """Map the names of counters to sums over all routers that are not removed.

        Each router counts from its own start.
        """
        return {
            name: sum(getattr(router.counts, name) for router in self._routers.values())
            for name in _TOTALS
        }
