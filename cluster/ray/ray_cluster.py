"""Cluster under Ray Serve: Ray places and restarts the routers and workers.

this process ─┬─ valkey-server    unless ledger.url names another server
              └─ Ray              started on this machine, or already running at ray_address
                   ├─ router deployment
                   └─ worker deployment of each model: one placement group per replica, one actor
                      per rank

With vLLM as the engine a worker has one rank. vLLM starts processes of its own on the node of the
rank, or actors if the placement group has several bundles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cluster.config import Config
from cluster.errors import ClusterFailed
from cluster.groups import WorkerGroup, interchangeable
from cluster.local.own_ledger import OwnLedger, write_url
from cluster.model import pinned
from cluster.ray import deployments, local_ray
from cluster.stages import Stages, listening
from cluster.threads import rank_environment, threads_per_rank
from everlift import logs

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

log = logs.get_logger(__name__)

LOCAL = "local"
#: Size of Ray's object store. Little data passes through it, and no tokens.
_OBJECT_STORE_BYTES = 100 << 20
_POLL_S = 0.1
#: Lets an actor without GPUs of its own detect those of its node.
_SEES_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class RayCluster:
    """Cluster under Ray Serve; use it with ``async with``. Inside, the application is running.

    The address attributes describe a single router, even if there are several: the one to which
    Serve routed the query for its addresses.
    """

    def __init__(self, config: Config, *, stages: Stages | None = None) -> None:
        """Create the cluster without starting it; ``stages`` shows the progress of its start."""
        self.config = config
        self._stages = stages or Stages()
        #: the router's gRPC address for clients
        self.addresses: list[str] = []
        #: the router's address for the other routers and the workers
        self.internal_address = ""
        #: the router's HTTP address; an empty string if it does not serve the OpenAI API
        self.http_addresses: list[str] = []
        #: the router's address of metrics; an empty string if it does not serve them
        self.metrics_addresses: list[str] = []
        self._ledger_config = config.ledger
        self._ledger = OwnLedger(config)
        self._scratch: Path | None = None

    @property
    def address(self) -> str:
        """Address of the router for gRPC clients."""
        return self.addresses[0]

    async def start(self) -> None:
        """Start the ledger, Ray and the application, and wait until the application runs.

        Everything that was started is stopped after an error. Missing nodes of a Ray cluster are no
        error: the call waits for them.

        Raises:
            ModelUnavailable: The commit of a hub model or hub adapter cannot be determined.
            LedgerSetupError: The embedded ledger cannot start.
            ClusterFailed: The application fails, a local Ray is to run several routers, or a worker
                of vLLM without GPUs needs several nodes.
            OSError: Ray cannot be reached at ``ray_address``, or a directory cannot be created.
        """
        routers = self.config.autoscale.max_routers or self.config.num_routers
        if self.config.ray_address == LOCAL and routers > 1:
            raise ClusterFailed(
                f"num_routers is {routers}, but Ray places at most one router per node, "
                "and a local Ray is one node: set num_routers to 1, or start with --no-ray"
            )
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config = await pinned(self.config)
        with self._stages.stage("ledger", "starting") as stage:
            self._ledger_config = await self._ledger.start()
            stage.result = self._ledger.place
        with self._stages.stage("Ray", "starting") as stage:
            stage.result = self._ray_location()
            self._start_ray()
            from ray import serve

            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            serve.start(proxy_location="Disabled")
        with self._stages.stage("routers", "starting") as stage:
            self._deploy(self.application(config))
            await self._wait_until(_has_router)
            await self._find_router()
            stage.result = listening(config, self.addresses, self.http_addresses)
        models = ", ".join(group.model for group in config.groups)
        with self._stages.stage("workers", f"loading {models}") as stage:
            await self._wait_until(lambda application: application.status == "RUNNING")
            stage.result = f"ready with {models}"

    def _ray_location(self) -> str:
        address = self.config.ray_address
        return "on this machine" if address == LOCAL else f"cluster at {address}"

    async def _find_router(self) -> None:
        from ray import serve

        router = serve.get_deployment_handle(deployments.ROUTER, deployments.APPLICATION)
        found = await router.describe.remote()
        # Without a shutdown the handle would report its calls to Serve for ever, even after Ray has
        # stopped.
        await router.shutdown_async()
        self.addresses = [found["address"]]
        self.internal_address = found["internal_address"]
        self.http_addresses = [found["http_address"]]
        self.metrics_addresses = [found["metrics_address"]]

    def _deploy(self, application: Application) -> None:
        from ray import serve

        target = serve.RunTarget(application, name=deployments.APPLICATION, route_prefix=None)
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def _wait_until(self, condition: Callable[[ApplicationStatusOverview], bool]) -> None:
        """Wait until ``condition`` is true for the status of the application.

        Raises ClusterFailed if the application cannot be deployed. Serve's own wait function is not
        used: it never returns if a worker cannot be placed. The event loop would also be blocked,
        so that signals would not be handled.
        """
        from ray import serve

        while not condition(found := serve.status().applications[deployments.APPLICATION]):
            if found.status == "DEPLOY_FAILED":
                raise ClusterFailed(f"{_cause(found)} (logs: {log_dir(self.config)})")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        try:
            self._stop_ray()
        finally:
            await self._ledger.stop()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _stop_ray(self) -> None:
        import ray
        from ray import serve

        # Without a connection to Ray, Serve would first start or join one in order to stop.
        if not ray.is_initialized():
            return
        if self.config.ray_address == LOCAL:
            serve.shutdown()
        else:
            serve.delete(deployments.APPLICATION)
        ray.shutdown()

    def application(self, config: Config) -> Application:
        """Return the Serve application of ``config`` with this cluster's ledger.

        Ray must be running.
        """
        scales = any(group.autoscale.is_on for group in config.groups)
        if scales or config.autoscale.max_routers is not None:
            # The autoscaling policies in Serve's controller read the URL from the state directory,
            # so that Serve's own records do not contain it.
            write_url(config, self._ledger_config.url)
        return application(replace(config, ledger=self._ledger_config))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _start_ray(self) -> None:
        if self.config.ray_address != LOCAL:
            import ray

            ray.init(address=self.config.ray_address, log_to_driver=False)
            return
        local_ray.prepare()
        import ray

        local_ray.log_messages()
        # The path must be short because Ray's sockets are in it, and the path of a socket has at
        # most 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="everlift-ray-"))
        ray.init(
            address=LOCAL,
            num_cpus=max(_cores(), self._needed_cpus()),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"worker_process_setup_hook": local_ray.bind_replicas},
            _temp_dir=str(self._scratch),
        )

    def _needed_cpus(self) -> int:
        groups = self.config.groups
        return sum(group.most_ranks * threads_per_rank(groups, group, _cores()) for group in groups)


def _has_router(application: ApplicationStatusOverview) -> bool:
    from ray.serve._private.common import ReplicaState

    router = application.deployments.get(deployments.ROUTER)
    return router is not None and router.replica_states.get(ReplicaState.RUNNING, 0) > 0


def _cause(application: ApplicationStatusOverview) -> str:
    """Return why Serve does not run the application: one cause for each failed deployment.

    A cause is the last line of the deployment's message; the whole messages are logged. The message
    of the application itself would only list the deployments, with tracebacks.
    """
    messages = {
        name: each.message
        for name, each in application.deployments.items()
        if each.status == "DEPLOY_FAILED"
    }
    log.error("Serve application failed", error=application.message, deployments=messages)
    causes = [f"{name}: {_last_line(message)}" for name, message in messages.items()]
    return "; ".join(causes) or _last_line(application.message)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def log_dir(config: Config) -> Path:
    return config.state_dir / "logs"


def application(config: Config) -> Application:
    """Return the Serve application of a configuration; Ray must be running.

    If the ledger's settings have no URL, the routers read it from their environment.
    """
    if config.models:
        # Serve needs a deployment that has all others as its arguments.
        return upgradable_application(config)
    return _workers(config, config.groups[0], _routers(config))


def upgradable_application(config: Config) -> Application:
    """Return the Serve application with a gate, for clusters that replace each other.

    cluster/ray/upgrade_gate.py describes the gate. Ray must be running.
    """
    from cluster.ray.upgrade_gate import UpgradeGate

    routers = _routers(config)
    workers = [_workers(config, group, routers) for group in config.groups]
    gated: Application = UpgradeGate.bind(  # type: ignore[attr-defined]
        routers, log_dir(config), config.ledger.key_prefix, *workers
    )
    return gated


def _routers(config: Config) -> Application:
    from router.app import RouterDeployment

    routers: Application = RouterDeployment.options(  # type: ignore[attr-defined]
        **deployments.options(config)[deployments.ROUTER],
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0, "resources": _router_resources(config)},
        graceful_shutdown_timeout_s=config.router.drain + 5.0,
    ).bind(config.router, config.ledger, log_dir(config), [group.label for group in config.groups])
    return routers


def _workers(config: Config, group: WorkerGroup, routers: Application) -> Application:
    import ray

    from worker.serving.app import WorkerDeployment

    worker, cores = group.worker, _cores() if config.ray_address == LOCAL else 1
    threads = threads_per_rank(config.groups, group, cores)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    placement = _placement(group, nodes, _rank_resources(group, nodes, threads))
    workers: Application = WorkerDeployment.options(  # type: ignore[attr-defined]
        name=group.label,
        **deployments.options(config)[group.label],
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=placement.bundles,
        placement_group_strategy=placement.strategy,
        graceful_shutdown_timeout_s=worker.drain_timeout + 5.0,
    ).bind(
        replace(worker, num_threads=threads),
        routers,
        placement.rank_resources,
        {**rank_environment(threads, worker), **placement.environment},
        log_dir(config),
        [
            replace(each.worker, num_threads=threads)
            for each in interchangeable(config.groups, group)
        ],
    )
    return workers


def _router_resources(config: Config) -> dict[str, float]:
    return {config.router_resource: 1.0} if config.router_resource else {}


@dataclass(frozen=True, slots=True)
class _Placement:
    """Placement group of a worker; ``rank_resources`` and ``environment`` are those of each rank.

    Rank i runs in bundle i.
    """

    bundles: list[dict[str, float]]
    strategy: str
    rank_resources: dict[str, float]
    environment: Mapping[str, str] = field(default_factory=dict)


def _placement(
    group: WorkerGroup, nodes: Sequence[Mapping[str, float]], resources: dict[str, float]
) -> _Placement:
    """Return the placement of a worker that needs ``resources`` for each of its devices.

    ``nodes`` are the resources of each node. Usually each device has a bundle and a rank. A worker
    of vLLM has a single rank instead. The rank's only bundle has the resources of all devices if
    the worker is on one node. Otherwise each device has a bundle, in which vLLM runs its own actor,
    and the rank itself has no resources, not even a GPU.

    Raises ClusterFailed if a worker of vLLM needs several nodes but its devices are not GPUs.
    """
    size = group.worker.tensor_parallel
    # The resources of nodes that do not exist yet are unknown.
    strategy = "PACK" if group.nodes_per_worker > 1 else _strategy(nodes, resources, size)
    if group.worker.num_ranks == size:
        return _Placement([resources] * size, strategy, resources)
    if strategy == "STRICT_PACK":
        whole = {name: size * each for name, each in resources.items()}
        return _Placement([whole], strategy, whole)
    if "GPU" not in resources:
        raise ClusterFailed(
            f"no node has the resources of a worker with {group.section}worker.tensor_parallel "
            f"{size}, and vLLM uses several nodes only with GPUs: lower it or worker.num_threads"
        )
    return _Placement([resources] * size, strategy, {}, _SEES_GPUS)


def _rank_resources(
    group: WorkerGroup, nodes: Sequence[Mapping[str, float]], threads: int
) -> dict[str, float]:
    device, own = group.worker.device, group.worker_resource
    has_gpus = device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes))
    gpu = {"GPU": 1.0} if has_gpus else {}
    return {"CPU": float(threads)} | gpu | ({own: 1.0} if own else {})


def _strategy(
    nodes: Sequence[Mapping[str, float]], resources: Mapping[str, float], size: int
) -> str:
    """Return Ray's placement strategy for a worker of ``size`` ranks.

    ``nodes`` have the resources of each node, and ``resources`` are those of one rank. STRICT_PACK
    places all ranks on one node. It is returned if a node is large enough for this, or if no node
    can hold even one rank yet. Otherwise PACK lets the ranks use several nodes.
    """

    def fit(count: int) -> bool:
        needed = {name: count * each for name, each in resources.items()}
        return any(all(node.get(name, 0.0) >= n for name, n in needed.items()) for node in nodes)

    return "STRICT_PACK" if fit(size) or not fit(1) else "PACK"
