"""Workers of the cluster that another cluster with other models is about to replace. Pure."""

from __future__ import annotations

from collections.abc import Collection

from everlift.v1.session_pb2 import ClusterLoad


def replaced_workers(replaced: ClusterLoad, models: Collection[str]) -> dict[str, int]:
    """Return the number of workers that the workers of each of ``models`` are to replace.

    ``replaced`` is the load of the cluster that is replaced, and ``models`` are those of the new
    cluster. A model of both clusters replaces its own workers. A new model may receive the requests
    of all models that the new cluster does not serve, and so replaces the workers of all of these.
    """
    dropped = sum(load.workers for name, load in replaced.models.items() if name not in models)
    return {
        name: replaced.models[name].workers if name in replaced.models else dropped
        for name in models
    }
