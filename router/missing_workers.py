"""Why fewer workers are ready than there are to be, in words. Pure."""

from __future__ import annotations

from router.ledger.base import LoadReport

#: What a leader said longer ago says nothing.
_STALE_S = 5.0


def missing_workers(report: LoadReport | None) -> str:
    """Return what the missing workers wait for; empty where none is missing, or it is not known.

    A worker that loads its model reports that itself, and Ray knows those that it has no place for.
    Others wait for a process, or to be started again.
    """
    if report is None or report.age_s > _STALE_S or not report.load.HasField("wanted_workers"):
        return ""
    load = report.load
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
