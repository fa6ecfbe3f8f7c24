"""Workers that the clusters on the ledger are to have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.v1 import session_pb2

#: Two autoscalers on one ledger overwrite each other's reports once a second: not every report is
#: read.
_SCALING_STALE_S = 60.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Sums over the clusters on the ledger. ``workers`` is None where no cluster's is known."""

    workers: int | None = None
    unplaced: int = 0
    #: why one of these has no place
    cause: str = ""


class Demands:
    """Demands of requests; ``now`` is the router's clock in seconds.

    Several clusters, which Ray's session names tell apart, share a ledger during an upgrade.
    """

    def __init__(self) -> None:
        #: by gateway, the newest last
        self._told: dict[str, session_pb2.WorkerDemand] = {}
        #: by cluster, what its autoscaler decided, and when
        self._scaled: dict[str, tuple[int, float]] = {}

    def update(self, gateway: str, demand: session_pb2.WorkerDemand) -> None:
        self._told.pop(gateway, None)
        self._told[gateway] = demand

    def disconnect(self, gateway: str) -> None:
        self._told.pop(gateway, None)

    def scale(self, scaling: session_pb2.Scaling, moment: float) -> None:
        """Take the decision of an autoscaler, which it reported at that moment."""
        self._scaled[scaling.ray_cluster] = scaling.workers, moment

    @property
    def is_scaled(self) -> bool:
        """Return whether an autoscaler sets the number of workers of any cluster."""
        return any(not demand.HasField("workers") for demand in self._told.values())

    def total(self, now: float) -> Demand:
        """Return the sum of all demands. O(gateways)."""
        # The routers of a cluster say the same, except for a moment after it has changed.
        newest = {demand.ray_cluster: demand for demand in self._told.values()}
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
        workers, moment = self._scaled.get(demand.ray_cluster, (0, 0.0))
        is_known = demand.ray_cluster in self._scaled and now - moment < _SCALING_STALE_S
        return workers if is_known else None
