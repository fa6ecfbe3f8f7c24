"""What the autoscaler decided of late, for who wants to see it. Pure."""

from __future__ import annotations

from collections import deque

from cluster.autoscale.policy import Decision
from everlift.v1 import session_pb2

#: Changes of the number of workers that are told.
_MOST_KEPT = 32


class Decisions:
    """Told of every decision; keeps the last changes."""

    def __init__(self) -> None:
        self._last = Decision(0, "")
        #: moment in seconds, workers before, the decision
        self._changes: deque[tuple[float, int, Decision]] = deque(maxlen=_MOST_KEPT)

    def note(self, decision: Decision, workers: int, now: float) -> None:
        """``workers`` there were to be until then."""
        self._last = decision
        if decision.workers != workers:
            self._changes.append((now, workers, decision))

    def told(self, now: float, max_workers: int, ray_cluster: str) -> session_pb2.Scaling:
        last = self._last
        return session_pb2.Scaling(
            workers=last.workers,
            max_workers=max_workers,
            need=last.need,
            wait_s=last.wait_s,
            reason=last.reason,
            ray_cluster=ray_cluster,
            changes=[
                session_pb2.ScalingChange(
                    ago_s=now - moment, before=before, workers=it.workers, reason=it.reason
                )
                for moment, before, it in self._changes
            ],
        )
