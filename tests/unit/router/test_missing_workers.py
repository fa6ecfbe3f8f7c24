"""Causes of fewer ready workers than wanted ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everlift.v1.session_pb2 import ClusterLoad, Scaling, WorkerDemand, WorkerStart
from router.admission.demands import Demand, Demands
from router.admission.starting_workers import StartingWorkers
from router.ledger.base import LoadReport
from router.missing_workers import missing_workers, unplaced

REPLICAS = "SERVE_REPLICA::everlift#worker#"
NO_GPU = "no node with 1 GPU is free"
PENDING = f"pending placement: {NO_GPU}"
OTHERS = "not started (see worker-*.log)"


def report(**models: ClusterLoad) -> LoadReport:
    return LoadReport(ClusterLoad(models=models), 0.2)


@pytest.mark.parametrize(
    ("ready", "starting", "pending", "said"),
    [
        (3, 0, 0, ""),
        (4, 1, 0, ""),
        (1, 2, 0, "1 of 3 ready; 2 loading the model for up to 40 s"),
        (0, 0, 3, f"0 of 3 ready; 3 {PENDING}"),
        (0, 1, 1, f"0 of 3 ready; 1 loading the model for 40 s, 1 {PENDING}, 1 {OTHERS}"),
        (2, 0, 0, f"2 of 3 ready; 1 {OTHERS}"),
        # Another worker starts in place of one that was just lost.
        (2, 5, 1, "2 of 3 ready; 1 loading the model for 40 s"),
    ],
)
def test_missing_workers_reports_loading_and_unplaced_workers(
    ready: int, starting: int, pending: int, said: str
) -> None:
    load = ClusterLoad(
        workers=ready,
        wanted_workers=3,
        starting_workers=starting,
        starting_s=40.0,
        unplaced_workers=pending,
        unplaced_cause=NO_GPU,
    )
    assert missing_workers(report(m=load)) == said
    assert missing_workers(report(m=load), "m") == said
    assert missing_workers(report(m=load), "other") == ""


def test_missing_workers_is_empty_without_a_recent_report() -> None:
    assert missing_workers(None) == ""
    assert missing_workers(report(m=ClusterLoad(workers=1))) == ""
    stale = replace(report(m=ClusterLoad(workers=0, wanted_workers=2)), age_s=60.0)
    assert missing_workers(stale) == ""


def test_missing_workers_names_models_if_there_are_several() -> None:
    missing = ClusterLoad(workers=1, wanted_workers=2)
    several = report(b=missing, a=missing, c=ClusterLoad(workers=1, wanted_workers=1))
    said = f"1 of 2 ready; 1 {OTHERS}"
    assert missing_workers(several) == f"a: {said}; b: {said}"
    assert missing_workers(several, "b") == said


def test_starting_workers_are_counted_until_started() -> None:
    starts = StartingWorkers()
    first = WorkerStart(name="a", seconds=5.0, elapsed_s=30.0)
    starts.update([first, WorkerStart(name="b", seconds=9.0, elapsed_s=2.0)], 0.0)
    assert [starts.count(now) for now in (4.0, 6.0, 10.0)] == [2, 1, 0]
    assert [starts.longest_s(now) for now in (4.0, 6.0, 10.0)] == [34.0, 8.0, 0.0]
    starts.update([WorkerStart(name="b", seconds=0.0)], 6.0)
    assert starts.count(6.0) == 0


def test_demands_count_each_connected_cluster_once() -> None:
    demands = Demands()
    assert demands.total(0.0) == Demand() and not demands.is_scaled
    demands.update("g1", WorkerDemand(ray_cluster="old", workers=2))
    demands.update("g2", WorkerDemand(ray_cluster="old", workers=2))
    new = WorkerDemand(ray_cluster="new", workers=3, unplaced=1, unplaced_cause=NO_GPU)
    demands.update("g3", new)
    assert demands.total(0.0) == Demand(5, 1, NO_GPU)
    demands.update("g1", WorkerDemand(ray_cluster="old", workers=4))
    assert demands.total(0.0) == Demand(7, 1, NO_GPU)
    demands.disconnect("g1")
    demands.disconnect("g2")
    assert demands.total(0.0) == Demand(3, 1, NO_GPU)


def test_autoscaler_scales_only_its_own_cluster() -> None:
    demands = Demands()
    demands.update("g1", WorkerDemand(ray_cluster="old"))
    demands.update("g2", WorkerDemand(ray_cluster="new"))
    assert demands.is_scaled and demands.total(0.0).workers is None
    demands.scale(Scaling(ray_cluster="old", workers=4), 1.0)
    demands.scale(Scaling(ray_cluster="new", workers=5), 30.0)
    demands.scale(Scaling(ray_cluster="gone", workers=6), 30.0)
    assert demands.total(31.0).workers == 9
    # The number of an autoscaler that no longer reports is ignored.
    assert demands.total(62.0).workers == 5


def group(state: str, scheduling: str, strategy: str, *bundles: dict[str, float]) -> Any:
    """Return a placement group as Ray describes it."""
    return {
        "name": f"{REPLICAS}dt5ytvsq",
        "bundles": dict(enumerate(bundles)),
        "strategy": strategy,
        "state": state,
        "stats": {"scheduling_state": scheduling},
    }


RANK = {"CPU": 4.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("pending", "cause"),
    [
        (
            group("PENDING", "NO_RESOURCES", "STRICT_PACK", RANK, RANK),
            "no node with 2 GPU and 8 CPU is free",
        ),
        (group("PENDING", "INFEASIBLE", "STRICT_PACK", RANK), "no node has 1 GPU and 4 CPU"),
        (group("RESCHEDULING", "QUEUED", "PACK", {"CPU": 0.5}), "no node with 0.5 CPU is free"),
        (
            group("PENDING", "NO_RESOURCES", "PACK", RANK, RANK),
            "no nodes with 2 x (1 GPU and 4 CPU) are free",
        ),
        (
            group("PENDING", "INFEASIBLE", "PACK", RANK, RANK),
            "no nodes have 2 x (1 GPU and 4 CPU)",
        ),
    ],
)
def test_unplaced_workers_name_the_missing_resources(pending: Any, cause: str) -> None:
    others = [
        group("CREATED", "FINISHED", "STRICT_PACK", RANK),
        group("REMOVED", "REMOVED", "STRICT_PACK", RANK),
        pending | {"name": "another application's"},
    ]
    assert unplaced([*others, pending, pending], REPLICAS, is_on_kubernetes=False) == (2, cause)
    assert unplaced(others, REPLICAS, is_on_kubernetes=False) == (0, "")


def test_pending_placement_on_kubernetes_points_to_the_pods() -> None:
    pending = [group("PENDING", "NO_RESOURCES", "PACK", RANK)]
    cause = (
        "no node with 1 GPU and 4 CPU is free "
        "(a pod that is pending or pulling its image does not count; see kubectl get pods)"
    )
    assert unplaced(pending, REPLICAS, is_on_kubernetes=True) == (1, cause)
    assert unplaced([], REPLICAS, is_on_kubernetes=True) == (0, "")
