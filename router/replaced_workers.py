"""Workers of the cluster that another cluster with other models is about to replace. Pure."""

from __future__ import annotations

from collections.abc import Collection

from everlift.v1.session_pb2 import ClusterLoad


def replaced_workers(replaced: ClusterLoad, models: Collection[str]) -> dict[str, int]:
    """Return how many workers of the old cluster each model of the new cluster replaces.

    ``replaced`` is the load of the old cluster, and ``models`` are the models of the new one. A
    model of both clusters replaces its own workers. Each other model of the new cluster may receive
    the requests of all models that only the old cluster serves. The number for such a model is thus
    the sum of those models' workers.
    """
    dropped = sum(load.workers for name, load in replaced.models.items() if name not in models)
    return {
        name: replaced.models[name].workers if name in replaced.models else dropped
        for name in models
    }
