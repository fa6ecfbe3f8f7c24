"""The worker as a Ray Serve deployment: a replica that starts and watches the worker's ranks.

The ranks do not run in the replica's process: rank i is an actor in bundle i of the replica's
placement group. Serve schedules the replica, checks its health, and starts a new one when a rank
has ended. No token passes through Serve.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from everlift import logs
from worker.config import WorkerConfig
from worker.serving.interpreter import check_interpreter
from worker.serving.rank_actor import RankActor

log = logs.get_logger(__name__)

#: Seconds between two checks whether a router knows the worker, and between reports of its start.
_ANNOUNCE_S = 1.0
#: Seconds after which a reported start expires unless it is reported again.
_START_EXPIRY_S = 5.0


class Refused(RuntimeError):
    """Raised if the router refuses the worker, because it does not match the existing workers."""


@serve.deployment(name="worker", health_check_period_s=1.0, health_check_timeout_s=10.0)
class WorkerDeployment:
    """Deployment of the workers of a model; ``router`` is the handle of the router's deployment.

    ``models`` has the settings for each model to which such a worker can change at run time.

    Settings that change without a restart are the deployment's user_config, which Serve passes to
    ``reconfigure`` (cluster/ray/deployments.py).
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: WorkerConfig,
        router: DeploymentHandle[Any],
        rank_resources: dict[str, float],
        rank_env: dict[str, str],
        log_dir: Path,
        models: Sequence[WorkerConfig],
    ) -> None:
        name = serve.get_replica_context().deployment
        logs.configure(name, path=log_dir / f"{name}-{os.getpid()}.log")
        self._config = config
        self._router = router
        self._rank_resources = rank_resources
        self._rank_env = rank_env
        self._log_dir = log_dir
        self._models = models
        self._ranks: list[Any] = []

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply the settings that change at run time; the first call also starts the ranks.

        Serve calls this right after ``__init__``, and again for each changed user_config. Raises
        ValueError for an unknown log level, UnusableInterpreter if Ray cannot start ranks with the
        setting ``python``, and Refused if the router refuses the worker. Raises RayError if a rank
        fails while it starts, or has ended before a later call.
        """
        level = user_config["log_level"]
        logs.set_level(level)
        if self._ranks:
            await asyncio.gather(*(rank.set_log_level.remote(level) for rank in self._ranks))
        else:
            await self._start(level)

    async def _start(self, log_level: str) -> None:
        runtime_env: dict[str, Any] = {"env_vars": self._rank_env}
        if python := self._config.python:
            await asyncio.to_thread(check_interpreter, python, ray.__version__)
            runtime_env["py_executable"] = python

        def launch(rank: int, rendezvous: str) -> Any:
            actor = _rank_actor(rank, self._rank_resources, runtime_env)
            return actor.remote(
                self._config, rank, rendezvous, log_level, self._log_dir, self._models
            )

        async with self._starting():
            self._ranks = await _launch_all(launch, self._config.num_ranks)
            await asyncio.gather(*(rank.fetch.remote() for rank in self._ranks))
            await asyncio.gather(*(rank.start.remote() for rank in self._ranks))
            self._watching = [
                asyncio.create_task(self._exit_when_ended(number, rank))
                for number, rank in enumerate(self._ranks)
            ]
            await self._join()
        self._announcing = asyncio.create_task(self._announce_while_unconnected())

    async def _exit_when_ended(self, number: int, rank: Any) -> None:
        """Wait until ``rank``, the actor of rank ``number``, has ended; then exit the process.

        Serve detects an exited process sooner than a replica that fails three health checks.
        """
        try:
            await rank.wait.remote()
            cause = "it was stopped"
        except RayError as error:
            cause = str(error)
        log.error("rank ended", rank=number, cause=cause)
        os._exit(1)

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        name, started_at = secrets.token_hex(8), time.monotonic()
        reporting = asyncio.create_task(self._report_start_repeatedly(name, started_at))
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        await self._report_start(name, 0.0, 0.0)

    async def _report_start_repeatedly(self, name: str, started_at: float) -> None:
        while True:
            await self._report_start(name, _START_EXPIRY_S, time.monotonic() - started_at)
            await asyncio.sleep(_ANNOUNCE_S)

    async def _report_start(self, name: str, seconds: float, elapsed_s: float) -> None:
        try:
            await self._router.worker_starts.remote(name, seconds, elapsed_s, self._config.name)
        except Exception as error:
            log.info("start not reported", cause=str(error))

    async def _join(self) -> None:
        """Announce the worker repeatedly until a router accepts it.

        Loading may have taken minutes, so the worker does not give up if a router, or the ledger in
        which it registers workers, is unavailable for a moment. Raises Refused if the router
        refuses the worker.
        """
        while not await self._is_announced():
            await asyncio.sleep(_ANNOUNCE_S)

    async def _is_announced(self) -> bool:
        try:
            await self._announce()
        except Refused:
            raise
        except Exception as error:
            log.warning("registration failed", cause=str(error))
            return False
        return True

    async def _announce(self) -> None:
        # A worker that has changed its model has another id and address.
        refusal = await self._router.announce.remote(await self._ranks[0].info.remote())
        if refusal:
            raise Refused(f"the router refused this worker: {refusal}")

    async def _announce_while_unconnected(self) -> None:
        while True:
            await asyncio.sleep(_ANNOUNCE_S)
            try:
                if await self._ranks[0].has_no_router.remote():
                    await self._announce()
            except Exception as error:
                log.warning("registration failed", cause=str(error))

    async def _stop(self) -> None:
        for task in (self._announcing, *self._watching):
            task.cancel()
        await asyncio.gather(*(rank.stop.remote() for rank in self._ranks), return_exceptions=True)

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Return a coroutine that stops the worker; None if it never started or was stopped before.

        Serve calls this, and awaits the result, when it stops the replica.
        """
        if "_announcing" not in self.__dict__ or self._announcing.cancelled():
            return None
        return self._stop()


def _rank_actor(rank: int, resources: dict[str, float], runtime_env: dict[str, Any]) -> Any:
    """Return the actor class for ``rank``, whose actor runs in the bundle with that index.

    The bundle is part of the replica's placement group. The environment variables of
    ``runtime_env`` are set before torch is imported.
    """
    group = get_current_placement_group()
    assert group is not None, "the worker's deployment has placement_group_bundles"
    return ray.remote(RankActor).options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        runtime_env=runtime_env,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        ),
    )


async def _launch_all(launch: Callable[[int, str], Any], size: int) -> list[Any]:
    first = launch(0, "")
    if size == 1:
        return [first]
    rendezvous = await first.open.remote()
    return [first, *(launch(rank, rendezvous) for rank in range(1, size))]
