"""Ray Serve deployment of a router: starts, monitors and stops a Router.

Serve places the replicas, restarts them and checks their health. No request and no token passes
through Serve.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ray import get_runtime_context, serve
from ray.util import get_node_ip_address, placement_group_table

from everlift import heap, logs, settings
from everlift.errors import InvalidRequest
from everlift.notice import on_signal
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.leader.policy_store import ROUTER_SETTINGS
from router.ledger.config import EMBEDDED, URL_VARIABLE, LedgerConfig, LedgerSetupError
from router.ledger.redis.redis_ledger import connect
from router.missing_workers import unplaced
from router.router import Router

log = logs.get_logger(__name__)

T = TypeVar("T")

#: Seconds between two queries of Ray for the workers that it cannot place.
_PLACEMENT_S = 5.0


@serve.deployment(
    name="router",
    health_check_period_s=1.0,
    health_check_timeout_s=10.0,
)
class RouterDeployment:
    """Serve deployment of a router.

    If the ledger is embedded, its URL is read from the environment variable URL_VARIABLE. Workers
    and other routers connect to the node's address, clients to the addresses in ``config``.

    Settings that change without a restart are in the deployment's user_config, which Serve passes
    to ``reconfigure`` (cluster/ray/deployments.py).
    """

    async def __init__(  # type: ignore[misc]
        self, config: RouterConfig, ledger: LedgerConfig, log_dir: Path, workers: Sequence[str]
    ) -> None:
        """Create the router without starting it.

        Raises LedgerSetupError if the URL of an embedded ledger is missing from the environment.

        Args:
            config: Settings of the router.
            ledger: Settings of the ledger.
            log_dir: Directory of the log file.
            workers: Names of the worker deployments, one for each model of ``config``, in the order
                of the models.
        """
        logs.configure("router", path=log_dir / f"router-{os.getpid()}.log")
        models = (model.name for model in config.models)
        #: model of each worker deployment, by the name of the deployment
        self._models = dict(zip(workers, models, strict=True))
        self._config = replace(config, internal_host=get_node_ip_address())
        self._ledger = _located(ledger)
        self._router: Router | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply the settings that change at run time; the first call also starts the router.

        The keys of ``autoscale`` and of ``num_workers`` are the names of the worker deployments.
        Serve calls this right after ``__init__``, and again for each changed user_config. Raises
        SettingsError for an invalid setting, ValueError for an unknown log level, and in the first
        call the errors of Router.start and of the connection to the ledger.
        """
        logs.set_level(user_config["log_level"])
        loaded = settings.load(RouterConfig, user_config["router"])
        policy = {name: getattr(loaded, name) for name in ROUTER_SETTINGS}
        self._config = replace(self._config, **policy)
        if self._router is None:
            await self._start()
        self._running.reconfigure(
            self._config,
            self._by_model(user_config["autoscale"]),
            self._by_model(user_config["num_workers"]),
        )

    def _by_model(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return the values of the worker deployments, keyed by model instead of by deployment."""
        return {model: values[deployment] for deployment, model in self._models.items()}

    async def _start(self) -> None:
        self._router = await Router.start(
            self._config, await connect(self._ledger), ledger_config=self._ledger
        )
        heap.freeze_heap()
        on_signal(self._shut_down)
        self._placement_task = asyncio.create_task(self._poll_placement())

    async def _poll_placement(self) -> None:
        cluster = get_runtime_context().get_session_name()
        application = serve.get_replica_context().app_name
        is_on_kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ
        while self._router is not None:
            try:
                groups = await asyncio.to_thread(placement_group_table)
                waiting = {
                    model: unplaced(
                        groups.values(),
                        f"SERVE_REPLICA::{application}#{deployment}#",
                        is_on_kubernetes=is_on_kubernetes,
                    )
                    for deployment, model in self._models.items()
                }
                self._router.place(cluster, waiting)
            except Exception as error:
                log.info("placement unknown", cause=str(error))
            await asyncio.sleep(_PLACEMENT_S)

    async def worker_starts(self, name: str, seconds: float, elapsed_s: float, model: str) -> None:
        """Report to the leader that a worker is starting.

        The arguments are the fields of a WorkerStart: ``name`` identifies the start, ``seconds`` is
        how long the report is valid, ``elapsed_s`` how long the start has taken so far, and
        ``model`` the name of the worker's model.
        """
        self._running.worker_starts(
            session_pb2.WorkerStart(name=name, seconds=seconds, elapsed_s=elapsed_s, model=model)
        )

    async def announce(self, worker: bytes) -> str:
        """Register a ready worker, given as a serialized WorkerInfo.

        Return why the worker is rejected, or an empty string if it is accepted. Raises
        LedgerUnavailable, after which the worker may retry.
        """
        try:
            await self._running.announce(session_pb2.WorkerInfo.FromString(worker))
        except InvalidRequest as error:
            return str(error)
        return ""

    async def num_workers(self) -> dict[str, int]:
        """Return the number of workers that are connected to this router, by worker deployment.

        While another cluster is the active one (router/active.py), each number also includes that
        cluster's workers that the deployment is to replace. Raises LedgerUnavailable, and
        RuntimeError if the router was not started or Serve has stopped it.
        """
        numbers = await self._running.num_workers()
        return {deployment: numbers[model] for deployment, model in self._models.items()}

    async def activate(self) -> None:
        """Make this cluster the active one, so that clients are sent to its routers.

        The call has no effect if ``ledger.active_key`` is empty. Raises LedgerUnavailable.
        """
        await self._running.activate()

    async def describe(self) -> dict[str, str | int]:
        """Return the replica's router id, process id (``pid``) and addresses, by name.

        The address of a port that is disabled is empty.
        """
        router = self._running
        return {
            "router_id": router.router_id,
            "address": router.address,
            "internal_address": router.internal_address,
            "metrics_address": router.metrics_address,
            "http_address": router.http_address,
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Raise the error of a background task of the router that has failed, if any.

        Serve calls this periodically, and starts a new replica after an error.
        """
        self._running.check()

    @property
    def _running(self) -> Router:
        if self._router is None:
            raise RuntimeError("the router has stopped")
        return self._router

    def _shut_down(self) -> None:
        """Start a task that stops the router and then exits the process.

        Called on SIGUSR1, when the machine is about to be shut down, because Serve might stop the
        replica too late.
        """
        if self._router is not None:
            self._shutdown_task = asyncio.create_task(_end(self._router))

    def __del__(self) -> Coroutine[None, None, None] | None:
        """Return a coroutine that stops the router; Serve awaits it when it stops the replica.

        Return None if the router was never started, or if this was called before.
        """
        router: Router | None = self.__dict__.get("_router")
        self._router = None
        if router is None:
            return None
        self._placement_task.cancel()
        return router.stop()


async def _end(router: Router) -> None:
    """Stop the router, then exit the process, even if stopping fails.

    The health checks of a stopped router still pass, so Serve notices the stop only by the exit.
    The sender of SIGUSR1 also waits for the exit.
    """
    try:
        await router.stop()
    except Exception:
        log.exception("router did not stop cleanly")
    finally:
        os._exit(0)


def _located(ledger: LedgerConfig) -> LedgerConfig:
    """Return ``ledger`` with the URL at which its servers are reached.

    The URL of an embedded ledger is read from the environment. Raises LedgerSetupError if it is
    missing there.
    """
    if ledger.url != EMBEDDED:
        return ledger
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise LedgerSetupError(
            f"the embedded ledger's url is unknown: set {URL_VARIABLE} in Ray's environment"
        )
    return replace(ledger, url=url)
