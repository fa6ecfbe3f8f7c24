"""When a new cluster lets the one before it go."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def test_gate_opens_with_as_many_workers_as_the_other_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough({"w": 0}, {"w": 3}, is_complete=False, now=0.0)
    # One runs, as the configuration's minimum says; the autoscaler has not asked for more yet.
    assert not progress.is_enough({"w": 1}, {"w": 4}, is_complete=True, now=1.0)
    assert not progress.is_enough({"w": 2}, {"w": 5}, is_complete=False, now=9.0)
    assert progress.is_enough({"w": 3}, {"w": 6}, is_complete=True, now=10.0)


def test_gate_opens_at_once_without_another_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    assert Progress().is_enough({"w": 0}, {"w": 0}, is_complete=True, now=0.0)
    assert Progress().is_enough({"w": 2}, {"w": 2}, is_complete=True, now=0.0)


def test_gate_opens_when_a_smaller_cluster_stays_complete() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=0.0)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=9.9)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=False, now=9.95)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=11.0)
    assert progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=21.0)


def test_gate_waits_for_as_many_workers_of_each_model() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    total = {"worker": 5, "worker-small": 5}
    # There are as many in total, but fewer of one model.
    own = {"worker": 1, "worker-small": 4}
    assert not progress.is_enough(own, total, is_complete=True, now=0.0)
    assert progress.is_enough({**own, "worker": 3}, total, is_complete=True, now=1.0)
