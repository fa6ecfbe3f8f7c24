"""Reports of the autoscaler's decisions."""

from __future__ import annotations

from cluster.autoscale.decisions import Decisions
from cluster.autoscale.policy import Decision
from everlift.v1.session_pb2 import Scaling, ScalingChange


def test_decisions_are_reported_with_their_reasons() -> None:
    decisions = Decisions()
    decisions.note(Decision(1, "enough"), 1, 10.0)
    decisions.note(Decision(3, "requests would wait 7.0 s", need=2.5, wait_s=7.0), 1, 11.0)
    decisions.note(Decision(3, "enough workers are starting", need=2.0, wait_s=6.0), 3, 12.0)
    change = ScalingChange(ago_s=2.0, before=1, workers=3, reason="requests would wait 7.0 s")
    assert decisions.as_json(13.0, 8, "session", "m") == Scaling(
        workers=3,
        max_workers=8,
        need=2.0,
        wait_s=6.0,
        reason="enough workers are starting",
        changes=[change],
        ray_cluster="session",
        model="m",
    )


def test_decisions_report_the_last_32_changes() -> None:
    decisions = Decisions()
    for workers in range(99):
        decisions.note(Decision(workers + 1, "requests wait"), workers, float(workers))
    changes = decisions.as_json(99.0, 100, "session", "m").changes
    assert [it.workers for it in changes] == list(range(68, 100))
    assert [changes[0].ago_s, changes[-1].ago_s] == [32.0, 1.0]
