"""What a router counted since it started, for its own console and for those of others. Pure."""

from __future__ import annotations

from everlift.v1 import session_pb2
from router.console.parts import Measured, Requests, Sessions

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
