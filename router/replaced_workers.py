"""Workers of the cluster that another cluster with other models is about to replace. Pure."""

from __future__ import annotations

from collections.abc import Collection

from everlift.v1.session_pb2 import ClusterLoad


def replaced_workers(replaced: ClusterLoad, models: Collection[str]) -> dict[str, int]:
    """Return, for each model of the new cluster, how many workers of the old one it replaces.

    ``replaced`` is the load of the old cluster, and ``models`` are the models of the new one. A
    model of both clusters replaces its own workers. Each model that only the new cluster serves may
    receive the requests of all models that only the old one serves. The number for such a model
    thus includes the workers of all of these.
    """
    dropped = sum(load.workers for name, load in replaced.models.items() if name not in models)
    return {
        name: replaced.models[name].workers if name in replaced.models else dropped
        for name in models
    }
