"""Gate that keeps a new cluster's application from RUNNING until enough of its workers run.

KubeRay upgrades a cluster by starting a second Ray cluster on the same ledger. KubeRay removes the
first cluster some time after Serve reports the second cluster's application as RUNNING. Serve
reports this even while workers that its autoscaler added are still starting, which may take long
because they load the model. Serve waits, however, for the first replica of each deployment without
an autoscaler. The gate is such a deployment; the start of its replica ends when enough workers run.
A second cluster with another model becomes the active one when its gate first opens
(router/active.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve._private.common import ReplicaState
from ray.serve.handle import DeploymentHandle

from cluster.ray import deployments
from everlift import logs

log = logs.get_logger(__name__)

_POLL_S = 0.5
#: Seconds for which all workers must have been running before the gate opens with fewer workers
#: than the other clusters have. Within this time the autoscaler reads the number of the other
#: clusters' workers and requests as many as it may.
_SETTLED_S = 10.0
#: Key in Ray's internal key-value store: the ``key_prefix`` for which the gate was last opened. The
#: store belongs to one Ray cluster. With GCS fault tolerance it survives a restart of the head.
_ACTIVATED, _NAMESPACE = "activated", "everlift"


class Progress:
    """Progress of an upgrade: whether the new cluster has enough workers of each model. Pure."""

    def __init__(self) -> None:
        self._complete_since: float | None = None

    def is_enough(
        self, own: Mapping[str, int], total: Mapping[str, int], *, is_complete: bool, now: float
    ) -> bool:
        """Return whether this cluster has enough workers, so that the other cluster may be removed.

        All workers of this cluster must be running. Each deployment must also have at least as many
        workers as it replaces in the other clusters, unless all workers have been running for
        ``_SETTLED_S`` seconds.

        Args:
            own: Number of running workers of this cluster, by the name of their deployment.
            total: Number of workers, by the name of the deployment: its own ones, and those of
                other clusters that it replaces. The router counts all workers of the deployment's
                model that are connected to it, including those of other clusters. The workers of an
                active cluster with separate ledger keys are not connected; the router adds those
                that the deployment replaces.
            is_complete: Whether all workers that this cluster is to have are running.
            now: Monotonic time in seconds.
        """
        if not is_complete:
            self._complete_since = None
            return False
        if self._complete_since is None:
            self._complete_since = now
        # This cluster may be allowed fewer workers than the other one has.
        is_as_large = all(own[name] >= total[name] - own[name] for name in own)
        return is_as_large or now - self._complete_since >= _SETTLED_S


@serve.deployment(name="gate", ray_actor_options={"num_cpus": 0})
class UpgradeGate:
    """Deployment of one replica that becomes ready when the cluster has enough workers."""

    async def __init__(  # type: ignore[misc]
        self,
        router: DeploymentHandle[Any],
        log_dir: Path,
        key_prefix: str,
        *workers: DeploymentHandle[Any],
    ) -> None:
        """Wait until the cluster has enough workers, then make it the active one.

        Serve regards the replica as starting until this returns. A replica that replaces another
        one in the same Ray cluster does not make the cluster active again.

        Args:
            router: Router deployment. It returns the number of workers, and makes this cluster the
                active one.
            log_dir: Directory of the log file.
            key_prefix: Prefix of the cluster's keys in the ledger (``ledger.key_prefix``).
            workers: Worker deployments. Serve adds them to the application because they are
                arguments.
        """
        logs.configure("gate", path=log_dir / f"gate-{os.getpid()}.log")
        self._names = [each.deployment_name for each in workers]
        self._router = router
        self._key_prefix = key_prefix
        self._progress = Progress()
        while not await self._is_open():
            await asyncio.sleep(_POLL_S)

    async def _is_open(self) -> bool:
        own, is_complete = await asyncio.to_thread(_running_workers, self._names)
        now = time.monotonic()
        try:
            total = await self._router.num_workers.remote()
            if not self._progress.is_enough(own, total, is_complete=is_complete, now=now):
                return False
            await self._activate()
        except RayError as error:
            log.warning("router or Ray not responding", cause=str(error))
            return False
        log.info("new cluster has enough capacity", own=own, total=total)
        return True

    async def _activate(self) -> None:
        """Make this cluster the active one, in place of a cluster with another model.

        A cluster that was activated once stays inactive after another one has replaced it, even if
        Serve restarts its gate before KubeRay deletes it.
        """
        if await asyncio.to_thread(_activated) != self._key_prefix:
            await self._router.activate.remote()
            # Stored last, so that the next gate activates the cluster if this one ends before.
            await asyncio.to_thread(_store_activated, self._key_prefix)


def _activated() -> str:
    stored = internal_kv._internal_kv_get(_ACTIVATED, namespace=_NAMESPACE)
    return stored.decode() if stored else ""


def _store_activated(key_prefix: str) -> None:
    internal_kv._internal_kv_put(_ACTIVATED, key_prefix, namespace=_NAMESPACE)


def _running_workers(names: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Return the number of running workers by deployment, and whether none is missing."""
    found = serve.status().applications[deployments.APPLICATION].deployments
    running = {name: found[name].replica_states.get(ReplicaState.RUNNING, 0) for name in names}
    return running, all(found[name].status == "HEALTHY" for name in names)
