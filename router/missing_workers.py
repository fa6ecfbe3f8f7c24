"""Reasons why fewer workers are ready than wanted. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everlift.v1 import session_pb2
from router.ledger.base import LoadReport

#: Reports of a leader that are older than this, in seconds, are ignored.
_STALE_S = 5.0


def missing_workers(report: LoadReport | None, model: str | None = None) -> str:
    """Return as text how many workers are ready, and what the missing ones wait for.

    ``report`` is the leader's last load report. The text is about the workers of ``model``, or of
    all models if it is None. It counts the workers that load their model, those that Ray cannot
    place, and those that have not started. The text is empty if no worker is missing. It is also
    empty without a report, or if the report is older than 5 s or does not state how many workers
    are wanted.
    """
    if report is None or report.age_s > _STALE_S:
        return ""
    loads = report.load.models
    texts = {name: _missing(loads[name]) for name in sorted(loads) if model in (None, name)}
    has_names = model is None and len(loads) > 1
    return "; ".join(f"{name}: {it}" if has_names else it for name, it in texts.items() if it)


def _missing(load: session_pb2.ClusterLoad) -> str:
    if not load.HasField("wanted_workers"):
        return ""
    missing = load.wanted_workers - load.workers
    if missing <= 0:
        return ""
    loading = min(missing, load.starting_workers)
    unplaced = min(missing - loading, load.unplaced_workers)
    others = missing - loading - unplaced
    causes = []
    if loading:
        up_to = "up to " if loading > 1 else ""
        causes.append(f"{loading} loading the model for {up_to}{_duration(load.starting_s)}")
    if unplaced:
        causes.append(f"{unplaced} pending placement: {load.unplaced_cause}")
    if others:
        causes.append(f"{others} not started (see worker-*.log)")
    return f"{load.workers} of {load.wanted_workers} ready; {', '.join(causes)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


_WAITING = ("PENDING", "PREPARED", "RESCHEDULING")
_POD_NOTE = " (a pod that is pending or pulling its image does not count; see kubectl get pods)"


def unplaced(
    groups: Iterable[Mapping[str, Any]], replicas: str, *, is_on_kubernetes: bool
) -> tuple[int, str]:
    """Return the number of pending placement groups, and why the first of them is pending.

    If none is pending, return 0 and an empty text.

    Args:
        groups: Placement groups as ``ray.util.placement_group_table`` describes them.
        replicas: Prefix of the names of the groups to count.
        is_on_kubernetes: Whether the nodes are pods. Ray does not know a pod that does not run
            yet, so the reason then includes a note on such pods.
    """
    waiting = [
        group
        for group in groups
        if group["name"].startswith(replicas) and group["state"] in _WAITING
    ]
    if not waiting:
        return 0, ""
    note = _POD_NOTE if is_on_kubernetes else ""
    return len(waiting), _cause(waiting[0]) + note


def _cause(group: Mapping[str, Any]) -> str:
    bundles: Sequence[Mapping[str, float]] = [*group["bundles"].values()]
    is_infeasible = group["stats"]["scheduling_state"] == "INFEASIBLE"
    if len(bundles) == 1 or group["strategy"] == "STRICT_PACK":
        needed = _words(bundles)
        return f"no node has {needed}" if is_infeasible else f"no node with {needed} is free"
    needed = f"{len(bundles)} x ({_words(bundles[:1])})"
    return f"no nodes have {needed}" if is_infeasible else f"no nodes with {needed} are free"


def _words(bundles: Iterable[Mapping[str, float]]) -> str:
    """Return the total resources of ``bundles`` as text, GPUs and CPUs first.

    Each bundle has amounts by the name of a resource.
    """
    total: dict[str, float] = defaultdict(float)
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] += amount
    names = sorted(total, key=lambda name: (name != "GPU", name != "CPU", name))
    return " and ".join(f"{total[name]:g} {name}" for name in names)
