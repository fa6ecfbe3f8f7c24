"""Why fewer workers are ready than there are to be."""

from __future__ import annotations

import pytest

from everlift.v1.session_pb2 import ClusterLoad, WorkerStart
from router.admission.starts import Starts
from router.ledger.base import LoadReport
from router.missing_workers import missing_workers

NOT_PLACED = "not placed (no node has room, or a node or its image is on the way: see ray status)"


@pytest.mark.parametrize(
    ("ready", "starting", "said"),
    [
        (3, 0, ""),
        (4, 1, ""),
        (1, 2, "1 of 3 ready; 2 loading the model"),
        (0, 0, f"0 of 3 ready; 3 {NOT_PLACED}"),
        (1, 1, f"1 of 3 ready; 1 loading the model, 1 {NOT_PLACED}"),
        # Another one starts in the place of one that was lost just now.
        (2, 5, "2 of 3 ready; 1 loading the model"),
    ],
)
def test_missing_workers_load_or_are_not_placed(ready: int, starting: int, said: str) -> None:
    load = ClusterLoad(workers=ready, starting_workers=starting, wanted_workers=3)
    assert missing_workers(LoadReport(load, 0.2)) == said


def test_nothing_is_said_where_it_is_not_known() -> None:
    assert missing_workers(None) == ""
    assert missing_workers(LoadReport(ClusterLoad(workers=1), 0.2)) == ""
    stale = LoadReport(ClusterLoad(workers=0, wanted_workers=2), 60.0)
    assert missing_workers(stale) == ""


def test_starts_are_counted_until_they_are_over() -> None:
    starts = Starts()
    starts.hear([WorkerStart(name="a", seconds=5.0), WorkerStart(name="b", seconds=9.0)], 0.0)
    assert [starts.count(now) for now in (4.0, 6.0, 10.0)] == [2, 1, 0]
    starts.hear([WorkerStart(name="b", seconds=0.0)], 6.0)
    assert starts.count(6.0) == 0
