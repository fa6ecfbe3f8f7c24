"""Deployment that keeps a new cluster's application from running until it carries the load.

In an upgrade KubeRay starts a second Ray cluster on the same ledger. It removes the first one a
while after the application of the second one runs. Serve says that an application runs as soon as
its autoscaler asks for more workers, however long these take to load. An application with a replica
that still starts does not run yet: the gate is such a replica. A cluster of another model becomes
the active one when its gate opens (router/active.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.handle import DeploymentHandle

from cluster.ray import deployments
from everlift import logs

log = logs.get_logger(__name__)

_LOOK_S = 0.5
#: The autoscaler has seen the other cluster's workers by then, and asked for all that it may.
_SETTLED_S = 10.0


class Progress:
    """Progress of an upgrade: whether this cluster's workers carry the load. Pure."""

    def __init__(self) -> None:
        self._complete_since: float | None = None

    def is_enough(self, own: int, total: int, *, is_complete: bool, now: float) -> bool:
        """Return whether the other clusters on the ledger may go.

        Args:
            own: Running workers of this cluster.
            total: Workers of all clusters that serve: those that the router is connected with, and
                those of a cluster of another model.
            is_complete: All workers that this cluster is to have run.
            now: Monotonic time in seconds.
        """
        if not is_complete:
            self._complete_since = None
            return False
        if self._complete_since is None:
            self._complete_since = now
        # This cluster may be allowed fewer workers than the other one has.
        return own >= total - own or now - self._complete_since >= _SETTLED_S


@serve.deployment(name="gate", ray_actor_options={"num_cpus": 0})
class UpgradeGate:
    """Deployment with one replica that is ready when the new workers carry the load."""

    async def __init__(  # type: ignore[misc]
        self, workers: DeploymentHandle[Any], router: DeploymentHandle[Any], log_dir: Path
    ) -> None:
        """Add the gate to the application ``workers``."""
        logs.configure("gate", path=log_dir / f"gate-{os.getpid()}.log")
        self._workers = workers
        self._router = router
        self._progress = Progress()
        while not await self._is_open():
            await asyncio.sleep(_LOOK_S)

    async def _is_open(self) -> bool:
        own, is_complete = await asyncio.to_thread(_workers)
        now = time.monotonic()
        try:
            total = await self._router.num_workers.remote()
            if not self._progress.is_enough(own, total, is_complete=is_complete, now=now):
                return False
            # Clients of a cluster of another model come here from now on.
            await self._router.activate.remote()
        except RayError as error:
            log.warning("router not responding", cause=str(error))
            return False
        log.info("new cluster has enough capacity", own=own, total=total)
        return True


def _workers() -> tuple[int, bool]:
    """Return how many workers of this cluster run, and whether these are all that it is to have."""
    found = serve.status().applications[deployments.APPLICATION].deployments[deployments.WORKER]
    return found.replica_states.get(ReplicaState.RUNNING, 0), found.status == "HEALTHY"
