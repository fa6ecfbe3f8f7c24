"""What the autoscaler decides and why, as gauges. Ray exports them with its own metrics, on the
metrics port of the node that Serve's controller runs on, each with ``ray_`` before its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.autoscale.policy import Decision
from everlift.v1.session_pb2 import ClusterLoad

#: How reasons of a Decision begin: what follows has figures, of which no label may be made. Those
#: that begin like others come first.
REASONS = (
    *("the load is not known", "limits", "requests wait", "nothing to do", "requests would wait"),
    *("enough are on their way", "enough", "fewer are enough"),
    "another cluster serves too",
)
_GAUGES = {
    "everlift_autoscaler_workers": "Workers that there are to be.",
    "everlift_autoscaler_max_workers": "Workers that there may be.",
    "everlift_autoscaler_need_workers": "Workers that the work there is needs.",
    "everlift_autoscaler_wait_seconds": "What a request that comes now would wait.",
    "everlift_autoscaler_load_age_seconds": "How long ago the leader said what work there is.",
    "everlift_autoscaler_queue_tokens": "Tokens to be computed for all that wait, as told.",
    "everlift_autoscaler_worker_tokens_per_second": "What a full worker computes, as told.",
}
_REASON = "everlift_autoscaler_reason"


class Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str] = ...) -> None: ...


class MakeGauge(Protocol):
    def __call__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> Gauge: ...


class Gauges:
    """``make`` is ray.util.metrics.Gauge."""

    def __init__(self, make: MakeGauge) -> None:
        self._gauges: Mapping[str, Gauge] = {
            name: make(name, description=text, tag_keys=()) for name, text in _GAUGES.items()
        }
        text = "1 for the reason of the last decision."
        self._reason = make(_REASON, description=text, tag_keys=("reason",))
        self._last_reason = ""

    def show(self, decision: Decision, load: ClusterLoad, age_s: float, max_workers: int) -> None:
        """A decision and what it was made of: the load, as it was told so long ago."""
        values: Sequence[float] = (
            *(decision.workers, max_workers, decision.need, decision.wait_s),
            *(age_s, load.queued_tokens, load.worker_rate),
        )
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(value)
        self._show_reason(_label(decision.reason))

    def _show_reason(self, reason: str) -> None:
        if self._last_reason not in ("", reason):
            self._reason.set(0, {"reason": self._last_reason})
        self._reason.set(1, {"reason": reason})
        self._last_reason = reason


def _label(reason: str) -> str:
    return next((begins for begins in REASONS if reason.startswith(begins)), "other")
