"""Cluster of plain processes, without Ray: the embedded ledger, routers and workers.

    this process ─┬─ valkey-server          unless the ledger has a url
                  ├─ router-0 ...
                  ├─ worker-0, worker-0.1 ... one process per rank; on Linux forked by a fork
                  │                           server if ended processes are restarted
                  └─ worker-NAME-0 ...        workers of the model in the section models.NAME

All of them end when this process ends, even if it is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from cluster.config import Config
from cluster.errors import ClusterFailed
from cluster.groups import WorkerGroup, interchangeable
from cluster.local.fork_server import ForkServer, is_possible
from cluster.local.gpus import gpus_of_ranks, ranks_with_gpus, visible_gpus
from cluster.local.launch import RankLaunch, RouterLaunch
from cluster.local.launcher import Launcher, SubprocessLauncher
from cluster.local.own_ledger import OwnLedger
from cluster.local.replica import Replica, RouterReplica, WorkerReplica
from cluster.local.router_ports import consecutive
from cluster.model import pinned
from cluster.stages import Stages, listening
from cluster.threads import cores_of_worker, rank_environment, threads_per_rank
from everlift import logs
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError
from everlift.transport import GRPC, internal
from router.config import RouterConfig
from router.ledger.config import LedgerConfig

log = logs.get_logger(__name__)

#: Maximum seconds until every router is connected to every worker, and seconds between two checks.
_SETTLE_S, _POLL_S = 60.0, 0.05
#: Seconds between two checks whether a replica has to be restarted.
_RESTART_S = 1.0


class ProcessCluster:
    """Cluster of processes without Ray; use it with ``async with``.

    Inside ``async with``, all processes run and every router is connected to every worker.

    Routers and workers are numbered from 0; the workers of the main model come first. A router
    keeps its addresses when it is restarted. A restarted worker is a new worker with another id.
    """

    def __init__(
        self, config: Config, *, revive: bool = False, stages: Stages | None = None
    ) -> None:
        """Create the cluster without starting it.

        With ``revive``, processes that end are restarted. ``stages`` displays the progress of the
        start.
        """
        self.config = config
        self._stages = stages or Stages()
        self._revive = revive
        self._reviving: asyncio.Future[list[None]] | None = None
        self.routers: list[RouterReplica] = []
        self.workers: list[WorkerReplica] = []
        self._log_dir = config.state_dir / "logs"
        self._ledger = OwnLedger(config)
        #: fork servers by the ranks that they can fork: whether these need torch, and their threads
        self._fork_servers: dict[tuple[bool, int], ForkServer] = {}
        self._gpus: list[str] = []
        self._transport = GRPC

    @property
    def address(self) -> str:
        """Address of the first router for gRPC clients."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return [router.address for router in self.routers]

    @property
    def internal_address(self) -> str:
        """Internal address of the first router.

        It requires no API key. It requires a client certificate only if ``internal_tls`` is on:
        the one that ``internal_tls`` names.
        """
        return self.routers[0].internal_address

    @property
    def http_addresses(self) -> list[str]:
        """Address of the OpenAI API at each router; an empty text if it is not served."""
        return [router.http_address for router in self.routers]

    @property
    def metrics_addresses(self) -> list[str]:
        """Address of the metrics of each router; an empty text if they are not served."""
        return [router.metrics_address for router in self.routers]

    @property
    def pids(self) -> list[int]:
        """Process ids of the embedded ledger, the routers, and the workers' ranks."""
        ledger = [self._ledger.pid] if self._ledger.pid else []
        replicas = (*self.routers, *self.workers)
        return [*ledger, *(pid for replica in replicas for pid in replica.pids)]

    async def start(self) -> None:
        """Start all processes, and return when every router is connected to every worker.

        All processes that were started are stopped after any error.

        Raises:
            ModelUnavailable: The commit of a hub model or hub adapter cannot be determined.
            LedgerSetupError: The embedded ledger cannot start.
            SettingsError: The routers' ports or the files of ``internal_tls`` are invalid.
            ClusterFailed: The configuration needs Ray, a router or rank fails, or a router does not
                connect to all workers in time.
            OSError: A directory, log file or process cannot be created.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        for group in self.config.groups:
            if group.autoscale.is_on:
                raise ClusterFailed(
                    f"{group.section}autoscale.max_workers needs Ray: without Ray the number of "
                    "workers is fixed"
                )
        if self.config.autoscale.max_routers is not None:
            raise ClusterFailed(
                "autoscale.max_routers needs Ray: without Ray the number of routers is fixed"
            )
        self._router_configs()
        self._transport = internal(self.config.internal_tls)
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.config = await pinned(self.config)
        groups = self.config.groups
        self._gpus = await asyncio.to_thread(visible_gpus, groups, os.environ)
        self._warn_of_shared_gpus()
        await _together(self._load_fork_servers(), self._start_routers())
        for group in groups:
            self.workers += [self._worker(group, index) for index in range(group.num_workers)]
        names = ", ".join(group.model for group in groups)
        with self._stages.stage("workers", f"loading {names}") as stage:
            await _together(*(worker.start() for worker in self.workers))
            await self._settle()
            stage.result = ", ".join(
                f"{group.num_workers} ready with {group.model}" for group in groups
            )
        if self._revive:
            self._reviving = asyncio.gather(*map(_keep_alive, (*self.routers, *self.workers)))

    def _warn_of_shared_gpus(self) -> None:
        ranks = ranks_with_gpus(self.config.groups)
        if 0 < len(self._gpus) < ranks:
            log.warning("ranks share GPUs", ranks=ranks, gpus=len(self._gpus))

    async def _load_fork_servers(self) -> None:
        if self._revive and is_possible():
            await _together(*(self._load_fork_server(group) for group in self.config.groups))

    async def _load_fork_server(self, group: WorkerGroup) -> None:
        key, worker = self._fork_key(group), group.worker
        if worker.python or worker.engine != "everlift" or key in self._fork_servers:
            return
        environment = rank_environment(self._threads(group), worker)
        server = ForkServer(worker, environment, self._log_dir / "fork-server.log")
        self._fork_servers[key] = server
        try:
            await server.load()
        except ClusterFailed as error:
            log.warning("fork server unavailable: workers start more slowly", cause=str(error))
            server.close()
            del self._fork_servers[key]

    def _fork_key(self, group: WorkerGroup) -> tuple[bool, int]:
        return group.worker.is_fake, self._threads(group)

    async def _start_routers(self) -> None:
        with self._stages.stage("ledger", "starting") as stage:
            ledger = await self._ledger.start()
            stage.result = self._ledger.place
        for index in range(self.config.num_routers):
            self.routers.append(self._router(index, ledger))
        with self._stages.stage("routers", "starting") as stage:
            await _together(*(router.start() for router in self.routers))
            stage.result = listening(self.config, self.addresses, self.http_addresses)

    async def stop(self) -> None:
        """Stop the routers, which finish or hand over their requests, then workers and ledger."""
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        for replicas in (self.routers, self.workers):
            await asyncio.gather(*(replica.stop() for replica in replicas))
        for server in self._fork_servers.values():
            server.close()
        await self._ledger.stop()

    # methods for tests and demonstrations, which name one replica by its number

    async def kill_router(self, index: int) -> None:
        await self.routers[index].kill()

    async def restart_router(self, index: int) -> None:
        """Restart router number ``index``; kill it first if it still runs."""
        await self._restart(self.routers[index])

    async def kill_worker(self, index: int) -> None:
        """Kill all ranks of worker number ``index``."""
        await self.workers[index].kill()

    async def restart_worker(self, index: int) -> None:
        """Restart worker number ``index``; kill it first if it still runs."""
        await self._restart(self.workers[index])

    async def _restart(self, replica: Replica) -> None:
        await replica.kill()
        await replica.start()
        await self._settle()

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

    def _router(self, index: int, ledger: LedgerConfig) -> RouterReplica:
        router = self._router_configs()[index]
        num_workers = {group.model: group.num_workers for group in self.config.groups}
        launch = RouterLaunch(f"router-{index}", self.config.log_level, router, ledger, num_workers)
        return RouterReplica(launch, SubprocessLauncher({}), self._log_dir)

    def _router_configs(self) -> list[RouterConfig]:
        return consecutive(self.config.router, self.config.num_routers)

    def _worker(self, group: WorkerGroup, index: int) -> WorkerReplica:
        launch = RankLaunch(
            f"{group.label}-{index}",
            self.config.log_level,
            replace(group.worker, num_threads=self._threads(group)),
            routers=tuple(router.internal_address for router in self.routers),
            models=tuple(
                replace(each.worker, num_threads=self._threads(group))
                for each in interchangeable(self.config.groups, group)
            ),
        )
        gpus = gpus_of_ranks(self.config.groups, group, self._gpus, index)
        return WorkerReplica(launch, self._ranks(group, index), self._log_dir, gpus)

    def _threads(self, group: WorkerGroup) -> int:
        return threads_per_rank(self.config.groups, group, len(os.sched_getaffinity(0)))

    def _ranks(self, group: WorkerGroup, index: int) -> Launcher:
        """Return the launcher of the ranks of worker number ``index`` of ``group``."""
        is_forkable = not group.worker.python and group.worker.engine == "everlift"
        if is_forkable and (server := self._fork_servers.get(self._fork_key(group))):
            return server
        cores = cores_of_worker(self.config.groups, group, sorted(os.sched_getaffinity(0)), index)
        return SubprocessLauncher(rank_environment(self._threads(group), group.worker, cores))

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(_SETTLE_S):
                for router in self.routers:
                    while router.is_running and not await self._knows_all(router):
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ClusterFailed(
                f"{router.name} did not connect to all workers within {_SETTLE_S:g} s "
                f"(logs: {self._log_dir})"
            ) from None

    async def _knows_all(self, router: RouterReplica) -> bool:
        # The internal address requires no API key; the transport has the certificate if needed.
        async with AsyncClient(
            router.internal_address, retry_s=0, transport=self._transport
        ) as client:
            try:
                status = await client.status()
            except EverliftError:
                return False
        known = {worker.worker_id for worker in status.workers if worker.alive}
        return known >= {worker.worker_id for worker in self.workers if worker.is_running}


async def _together(*starts: Coroutine[Any, Any, None]) -> None:
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _keep_alive(replica: Replica) -> None:
    while True:
        await asyncio.sleep(_RESTART_S)
        if not replica.is_running:
            await _revive(replica)


async def _revive(replica: Replica) -> None:
    log.warning("replica ended: restarting it", replica=replica.name)
    try:
        await replica.kill()
        await replica.start()
    except ClusterFailed as error:
        log.error("restart failed", replica=replica.name, cause=str(error))
    except Exception:
        # Also retried, because the machine may lack processes or descriptors only temporarily.
        log.exception("restart failed", replica=replica.name)
