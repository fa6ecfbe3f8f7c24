"""Reports of the autoscaler to a page."""

from __future__ import annotations

from typing import Any

from everlift.v1.session_pb2 import Scaling, ScalingChange
from router.console.scaling import described
from router.ledger.base import ScalingReport


def report(age_s: float, *changes: ScalingChange) -> ScalingReport:
    scaling = Scaling(workers=3, max_workers=8, need=2.46, wait_s=4.12, reason="enough", model="m")
    scaling.changes.extend(changes)
    return ScalingReport(scaling, age_s)


def section(age_s: float, *changes: ScalingChange) -> Any:
    return next(iter(described([report(age_s, *changes)], now=1000.0)), None)


def test_scaling_section_has_target_reason_and_changes() -> None:
    change = ScalingChange(ago_s=19.0, before=1, workers=3, reason="requests would wait 7.0 s")
    assert section(1.0, change) == {
        "model": "m",
        "late_s": None,
        "workers": 3,
        "max_workers": 8,
        "need": 2.5,
        "wait_s": 4.1,
        "reason": "enough",
        "changes": [[980, 1, 3, "requests would wait 7.0 s"]],
    }


def test_silent_autoscaler_is_late_and_gone_after_an_hour() -> None:
    assert [section(age_s)["late_s"] for age_s in (10.0, 11.0, 3600.0)] == [None, 11, 3600]
    assert section(3601.0) is None


def test_scaling_section_is_absent_without_a_report() -> None:
    assert described([], now=1000.0) == []
