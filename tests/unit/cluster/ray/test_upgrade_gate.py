"""When a new cluster lets the one before it go."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def test_gate_opens_with_as_many_workers_as_the_other_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough(0, 3, is_complete=False, now=0.0)
    # One runs, as the configuration's minimum says; the autoscaler has not asked for more yet.
    assert not progress.is_enough(1, 4, is_complete=True, now=1.0)
    assert not progress.is_enough(2, 5, is_complete=False, now=9.0)
    assert progress.is_enough(3, 6, is_complete=True, now=10.0)


def test_gate_opens_at_once_without_another_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    assert Progress().is_enough(0, 0, is_complete=True, now=0.0)
    assert Progress().is_enough(2, 2, is_complete=True, now=0.0)


def test_gate_opens_when_a_smaller_cluster_stays_complete() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough(2, 7, is_complete=True, now=0.0)
    assert not progress.is_enough(2, 7, is_complete=True, now=9.9)
    assert not progress.is_enough(2, 7, is_complete=False, now=9.95)
    assert not progress.is_enough(2, 7, is_complete=True, now=11.0)
    assert progress.is_enough(2, 7, is_complete=True, now=21.0)
