"""Why fewer workers are ready than there are to be, in words. Pure."""

from __future__ import annotations

from router.ledger.base import LoadReport

#: What a leader said longer ago says nothing.
_STALE_S = 5.0


def missing_workers(report: LoadReport | None) -> str:
    """Return what the missing workers wait for; empty where none is missing, or it is not known.

    A worker that loads its model says so itself. One that does not is not placed: no node has room
    for it, or the node or its image is on the way.
    """
    if report is None or report.age_s > _STALE_S or not report.load.HasField("wanted_workers"):
        return ""
    load = report.load
    missing = load.wanted_workers - load.workers
    if missing <= 0:
        return ""
    loading = min(missing, load.starting_workers)
    causes = []
    if loading:
        causes.append(f"{loading} loading the model")
    if pending := missing - loading:
        causes.append(
            f"{pending} not placed (no node has room, or a node or its image is on the way: see "
            "ray status)"
        )
    return f"{load.workers} of {load.wanted_workers} ready; {', '.join(causes)}"
