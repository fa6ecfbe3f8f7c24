"""Decisions of the autoscaler, for the page. Pure."""

from __future__ import annotations

from typing import Any

from router.ledger.base import ScalingReport

Json = dict[str, Any]

#: It says something every second; of what it said so long ago a page hears nothing.
_FORGOTTEN_S = 3600.0
#: It is late when it said nothing for so long.
_LATE_S = 10.0


def described(report: ScalingReport | None, now: float) -> Json | None:
    """Return the autoscaler's report, or None without one: the number of workers is fixed.

    Moments are in seconds, as ``now`` is.
    """
    if report is None or report.age_s > _FORGOTTEN_S:
        return None
    scaling, said_at = report.scaling, now - report.age_s
    return {
        "late_s": round(report.age_s) if report.age_s > _LATE_S else None,
        "workers": scaling.workers,
        "max_workers": scaling.max_workers,
        "need": round(scaling.need, 1),
        "wait_s": round(scaling.wait_s, 1),
        "reason": scaling.reason,
        "changes": [
            [round(said_at - each.ago_s), each.before, each.workers, each.reason]
            for each in scaling.changes
        ],
    }
