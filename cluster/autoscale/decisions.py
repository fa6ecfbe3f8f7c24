"""Publication of the autoscaler's decisions: a report for consoles, and gauges for metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.autoscale.policy import Decision
from everlift.v1 import session_pb2
from everlift.v1.session_pb2 import ClusterLoad

#: Maximum number of changes, the latest ones, that a report contains.
_MAX_CHANGES = 32


class Decisions:
    """Last decision of the autoscaler, and its last changes of the number of workers."""

    def __init__(self) -> None:
        self._last = Decision(0, "")
        #: time in seconds, target number of workers before, the decision
        self._changes: deque[tuple[float, int, Decision]] = deque(maxlen=_MAX_CHANGES)

    def note(self, decision: Decision, workers: int, now: float) -> None:
        """Record a decision; ``workers`` is the target number of workers before it."""
        self._last = decision
        if decision.workers != workers:
            self._changes.append((now, workers, decision))

    def as_json(
        self, now: float, max_workers: int, ray_cluster: str, model: str
    ) -> session_pb2.Scaling:
        last = self._last
        return session_pb2.Scaling(
            workers=last.workers,
            max_workers=max_workers,
            need=last.need,
            wait_s=last.wait_s,
            reason=last.reason,
            ray_cluster=ray_cluster,
            model=model,
            changes=[
                session_pb2.ScalingChange(
                    ago_s=now - changed_at,
                    before=before,
                    workers=decision.workers,
                    reason=decision.reason,
                )
                for changed_at, before, decision in self._changes
            ],
        )


#: Values of the label ``reason``. Each one is a prefix of the reason of a Decision; the rest of a
#: reason may contain numbers, which must not become label values. The first match counts, so a
#: longer prefix comes before a shorter one that it starts with.
REASONS = (
    *("the load is not known", "limits", "requests wait", "nothing to do", "requests would wait"),
    *("enough workers are starting", "enough", "fewer are enough"),
    "another cluster serves as well",
)
_GAUGES = {
    "everlift_autoscaler_workers": "Target number of workers.",
    "everlift_autoscaler_max_workers": "Maximum number of workers.",
    "everlift_autoscaler_need_workers": "Number of workers that the present work needs.",
    "everlift_autoscaler_wait_seconds": "Estimated queue wait of a new request, in seconds.",
    "everlift_autoscaler_load_age_seconds": "Age of the leader's load report, in seconds.",
    "everlift_autoscaler_queue_tokens": "Reported tokens to compute for all queued requests.",
    "everlift_autoscaler_worker_tokens_per_second": "Reported tokens/s of a saturated worker.",
}
_REASON = "everlift_autoscaler_reason"


class Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> None: ...


class GaugeFactory(Protocol):
    def __call__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> Gauge: ...


class Gauges:
    """Gauges of the decisions on the workers of ``model``, with its name as a tag.

    Each is created by ``create_gauge`` (Ray's Gauge).
    """

    def __init__(self, create_gauge: GaugeFactory, model: str) -> None:
        self._tags = {"model": model}
        self._gauges: Mapping[str, Gauge] = {
            name: create_gauge(name, description=text, tag_keys=("model",))
            for name, text in _GAUGES.items()
        }
        text = "1 for the reason of the last decision."
        self._reason = create_gauge(_REASON, description=text, tag_keys=("model", "reason"))
        self._last_reason = ""

    def show(self, decision: Decision, load: ClusterLoad, age_s: float, max_workers: int) -> None:
        """Set all gauges to a decision and to the load report on which it was based.

        ``age_s`` is the age of the report in seconds.
        """
        values: Sequence[float] = (
            *(decision.workers, max_workers, decision.need, decision.wait_s),
            *(age_s, load.queued_tokens, load.worker_rate),
        )
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(value, self._tags)
        self._show_reason(_label(decision.reason))

    def _show_reason(self, reason: str) -> None:
        if self._last_reason not in ("", reason):
            self._reason.set(0, self._tags | {"reason": self._last_reason})
        self._reason.set(1, self._tags | {"reason": reason})
        self._last_reason = reason


def _label(reason: str) -> str:
    return next((prefix for prefix in REASONS if reason.startswith(prefix)), "other")
