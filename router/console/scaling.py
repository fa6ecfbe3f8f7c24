"""Decisions of the autoscalers, for the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.ledger.base import ScalingReport

Json = dict[str, Any]

#: Age in seconds above which the autoscaler's report is no longer shown. It reports every second.
_FORGOTTEN_S = 3600.0
#: Age in seconds above which the report is shown as late.
_LATE_S = 10.0


def described(reports: Iterable[ScalingReport], now: float) -> list[Json]:
    """Return the autoscalers' reports as JSON, without those that are older than an hour.

    A model with a fixed number of workers has no report. ``now`` and the times of changes in the
    result are in seconds on the same clock.
    """
    return [_described(report, now) for report in reports if report.age_s <= _FORGOTTEN_S]


def _described(report: ScalingReport, now: float) -> Json:
    scaling, reported_at = report.scaling, now - report.age_s
    return {
        "model": scaling.model,
        "late_s": round(report.age_s) if report.age_s > _LATE_S else None,
        "workers": scaling.workers,
        "max_workers": scaling.max_workers,
        "need": round(scaling.need, 1),
        "wait_s": round(scaling.wait_s, 1),
        "reason": scaling.reason,
        "changes": [
            [round(reported_at - each.ago_s), each.before, each.workers, each.reason]
            for each in scaling.changes
        ],
    }
