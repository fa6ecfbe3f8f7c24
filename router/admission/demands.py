"""Numbers of workers that are wanted by the clusters that share a ledger. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.v1 import session_pb2

#: Seconds for which an autoscaler's last report is used. Two autoscalers on one ledger overwrite
#: each other's reports every second, so that not every report is read.
_SCALING_STALE_S = 60.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand for workers, summed over the clusters that share the ledger.

    ``workers`` is the wanted number of workers, None if no cluster's number is known.
    ``unplaced`` is the number of wanted workers for which no node has room.
    """

    workers: int | None = None
    unplaced: int = 0
    #: why one of the unplaced workers has no place; empty without any
    cause: str = ""


class Demands:
    """Leader's record of the demand for workers that each cluster last reported.

    Several clusters, distinguished by their Ray session names, share a ledger during an upgrade.
    ``gateway`` is the id of the router that reports; ``now`` is the leader's clock in seconds.
    """

    def __init__(self) -> None:
        #: last report of each gateway, the newest last
        self._reports: dict[str, session_pb2.WorkerDemand] = {}
        #: by cluster: the number of workers that its autoscaler reported, and when
        self._scaled: dict[str, tuple[int, float]] = {}

    def update(self, gateway: str, demand: session_pb2.WorkerDemand) -> None:
        self._reports.pop(gateway, None)
        self._reports[gateway] = demand

    def disconnect(self, gateway: str) -> None:
        self._reports.pop(gateway, None)

    def scale(self, scaling: session_pb2.Scaling, reported_at: float) -> None:
        """Record the number of workers that an autoscaler reported at the time ``reported_at``."""
        self._scaled[scaling.ray_cluster] = scaling.workers, reported_at

    @property
    def is_scaled(self) -> bool:
        """Return whether any cluster's number of workers is set by an autoscaler."""
        return any(not demand.HasField("workers") for demand in self._reports.values())

    def total(self, now: float) -> Demand:
        """Return the sum of the clusters' demands. O(routers)."""
        # The gateways of a cluster report the same demand, except for a moment after a change.
        newest = {demand.ray_cluster: demand for demand in self._reports.values()}
        known = [
            workers
            for demand in newest.values()
            if (workers := self._workers(demand, now)) is not None
        ]
        return Demand(
            sum(known) if known else None,
            sum(demand.unplaced for demand in newest.values()),
            next((it.unplaced_cause for it in newest.values() if it.unplaced), ""),
        )

    def _workers(self, demand: session_pb2.WorkerDemand, now: float) -> int | None:
        if demand.HasField("workers"):
            return demand.workers
        workers, reported_at = self._scaled.get(demand.ray_cluster, (0, 0.0))
        is_known = demand.ray_cluster in self._scaled and now - reported_at < _SCALING_STALE_S
        return workers if is_known else None
