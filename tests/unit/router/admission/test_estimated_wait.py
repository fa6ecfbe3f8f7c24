"""Estimated wait of a new request at its gateway."""

from __future__ import annotations

from everlift.v1.session_pb2 import ClassWait, QueueEstimate
from router.admission.wait_estimate import EstimatedWait

ESTIMATE = QueueEstimate(
    waits=[ClassWait(priority=5, work_tokens=100), ClassWait(priority=0, work_tokens=400)],
    tokens_per_s=100.0,
)


def test_estimate_assumes_a_new_cluster_is_slow() -> None:
    wait = EstimatedWait()
    assert [wait.estimate(0, 500) for _ in range(3)] == [0.0, 0.5, 1.0]
    wait.on_estimate(QueueEstimate(waits=ESTIMATE.waits))
    assert wait.estimate(0, 500) == 0.4


def test_estimate_counts_own_and_higher_classes() -> None:
    for priority, wait_s in ((9, 0.0), (5, 1.0), (3, 1.0), (0, 4.0), (-1, 4.0)):
        wait = EstimatedWait()
        wait.on_estimate(ESTIMATE)
        assert wait.estimate(priority, 7) == wait_s


def test_estimate_includes_requests_the_leader_has_not_counted() -> None:
    wait = EstimatedWait()
    wait.on_estimate(ESTIMATE)
    assert [wait.estimate(0, 50) for _ in range(3)] == [4.0, 4.5, 5.0]
    assert wait.estimate(5, 200) == 1.0
    assert wait.estimate(0, 50) == 4.0 + 3.5
    wait.on_estimate(ESTIMATE)
    assert wait.estimate(0, 50) == 4.0


def test_estimate_assumes_the_old_speed_after_lost_workers() -> None:
    """Otherwise, requests that arrive meanwhile would yield for too long."""
    wait = EstimatedWait()
    wait.on_estimate(QueueEstimate(tokens_per_s=50_000.0))
    wait.on_estimate(QueueEstimate(waits=[ClassWait(priority=0, work_tokens=100_000)]))
    assert wait.estimate(0, 7) == 2.0
