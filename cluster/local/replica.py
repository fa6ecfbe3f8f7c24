"""Replicas of a cluster without Ray: a router, or a worker with all its ranks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.errors import ClusterFailed
from cluster.local.launch import Launch, RankLaunch, RouterLaunch
from cluster.local.launcher import Child, Launcher
from cluster.local.router_ports import ReservedPorts

#: Seconds that a process may take to stop, in addition to its configured drain time.
_STOP_MARGIN_S = 5.0


class Replica(ABC):
    """Router or worker, which consists of one or more processes.

    Only the first process communicates with other replicas.
    """

    def __init__(self, name: str, launcher: Launcher, log_dir: Path) -> None:
        self.name = name
        self._launcher = launcher
        self._log_dir = log_dir
        self._children: list[Child] = []

    @property
    def pids(self) -> list[int]:
        """Ids of the replica's processes; those of a worker in the order of their ranks."""
        return [child.pid for child in self._children]

    @property
    def is_running(self) -> bool:
        return bool(self._children) and all(child.is_running for child in self._children)

    async def start(self) -> None:
        """Start all processes, and return when they have reported that the replica serves.

        Raises ClusterFailed if one of them fails, and OSError if one cannot be started. After any
        error, all of them are killed.
        """
        self._children = []
        try:
            await self._start()
        except BaseException:
            await self.kill()
            raise

    @abstractmethod
    async def _start(self) -> None: ...

    @property
    @abstractmethod
    def _bound_s(self) -> float:
        pass

    async def stop(self) -> None:
        """Stop the processes one after another.

        The first process is stopped first, because it coordinates the stop of the others.
        """
        for child in self._children:
            await child.stop(self._bound_s + _STOP_MARGIN_S)

    async def kill(self) -> None:
        """Kill each process with SIGKILL, and return when all have ended."""
        await asyncio.gather(*(child.kill() for child in self._children))

    async def _spawn(self, launch: Launch) -> Child:
        child = Child(launch, self._launcher, self._log_dir / f"{launch.name}.log")
        self._children.append(child)
        await child.start()
        return child


class RouterReplica(Replica):
    """Router of one process; it keeps its ports when it is killed and started again.

    ``stop`` releases the ports.
    """

    def __init__(self, launch: RouterLaunch, launcher: Launcher, log_dir: Path) -> None:
        super().__init__(launch.name, launcher, log_dir)
        self._launch = launch
        self._ports = ReservedPorts()
        self.address = self.internal_address = self.http_address = self.metrics_address = ""

    async def _start(self) -> None:
        try:
            router = self._ports.of(self._launch.router)
        except OSError as error:
            raise ClusterFailed(f"{self.name}: no port could be reserved: {error}") from error
        self._launch = replace(self._launch, router=router)
        report = await (await self._spawn(self._launch)).report()
        self.address, self.internal_address = report["address"], report["internal_address"]
        self.http_address = report["http_address"]
        self.metrics_address = report["metrics_address"]

    async def stop(self) -> None:
        await super().stop()
        self._ports.close()

    @property
    def _bound_s(self) -> float:
        return self._launch.router.drain


class WorkerReplica(Replica):
    """Worker with one process per rank; each start creates a worker with a new id."""

    def __init__(
        self, launch: RankLaunch, launcher: Launcher, log_dir: Path, gpus: Sequence[str]
    ) -> None:
        """Create the replica without starting it; ``gpus`` has the name of the GPU of each rank."""
        super().__init__(launch.name, launcher, log_dir)
        self._launch = launch
        self._gpus = gpus
        self.worker_id = ""

    async def _start(self) -> None:
        first_gpu, *other_gpus = self._gpus
        first = await self._spawn(replace(self._launch, gpu=first_gpu))
        rendezvous = (await first.report())["rendezvous"] if other_gpus else ""
        for rank, gpu in enumerate(other_gpus, 1):
            name = f"{self._launch.name}.{rank}"
            await self._spawn(
                replace(self._launch, name=name, rank=rank, rendezvous=rendezvous, gpu=gpu)
            )
        reports = await asyncio.gather(*(child.report() for child in self._children))
        self.worker_id = reports[0]["worker_id"]

    @property
    def _bound_s(self) -> float:
        return self._launch.worker.drain_timeout
