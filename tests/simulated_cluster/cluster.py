"""Simulated cluster: replicas of the router, workers, a ledger and clients, and their faults.

Each router and worker is a process. All but network, ledger server and the model's arithmetic is
the product's own code. A part is named by its index; when it is started again, it has its old
address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from everlift.client.client import AsyncClient
from everlift.errors import LedgerUnavailable
from everlift.options import GenerateOptions, Prompt
from router.config import RouterConfig
from router.ledger.listing import Item
from router.router import Router
from tests.simulated_cluster.client import Manners, Transcript, addresses, read
from tests.simulated_cluster.clock import Clock, VirtualLoop
from tests.simulated_cluster.ledger import LedgerServer
from tests.simulated_cluster.network import Network
from tests.simulated_cluster.transport import SimTransport
from tests.simulated_cluster.worker import Build, SimWorker, build_fake
from worker.config import FakeModel, WorkerConfig
from worker.engine.sequence import NO_SLOT

_PUBLIC, _INTERNAL = 1, 2
#: One-way latency of the network and to the ledger.
_LATENCY_S = 0.0002
#: Seconds until a router that found no ledger is started again.
_REVIVE_S = 0.5

ROUTER = RouterConfig(model="fake", drain=1.0)
WORKER = WorkerConfig(model="fake", num_blocks=256, fake=FakeModel(step_time=0.01))


@dataclass(slots=True)
class _RouterProcess:
    """Process of a router; ``router`` is None until it is ready."""

    process: VirtualLoop
    router: Router | None = None


class SimCluster:
    def __init__(
        self,
        router_config: RouterConfig = ROUTER,
        worker_config: WorkerConfig = WORKER,
        latency: float = _LATENCY_S,
        build: Build = build_fake,
    ) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, latency)
        self.ledger = LedgerServer(self.clock, latency)
        self.routers: dict[int, _RouterProcess] = {}
        self.workers: dict[int, SimWorker] = {}
        #: requests whose computation kills the worker
        self.poison: set[str] = set()
        self.transcripts: dict[str, Transcript] = {}
        self._router_config = router_config
        self._worker_config = worker_config
        self._build = build
        self._addresses: list[str] = []
        self._lives = 0
        self.desk = self.clock.process("clients")
        self._reading: dict[str, asyncio.Task[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clock.close()

    # parts

    def start_router(self, index: int) -> None:
        """Start a router, which serves a moment later, or as soon as the ledger answers."""
        name = f"router-{index}"
        config = replace(
            self._router_config,
            host=name,
            port=_PUBLIC,
            internal_host=name,
            internal_port=_INTERNAL,
            metrics_host="",
            http_host="",
        )
        process = self.clock.process(name)
        part = self.routers[index] = _RouterProcess(process)
        process.create_task(self._live(part, config))
        if (address := f"{name}:{_PUBLIC}") not in self._addresses:
            self._addresses.append(address)

    async def _live(self, part: _RouterProcess, config: RouterConfig) -> None:
        """Run a router's process; without a ledger it ends and is started again."""
        ledger, transport = self.ledger.view(part.process), SimTransport(self.network, part.process)
        while part.router is None:
            try:
                part.router = await Router.start(config, ledger, transport)
            except LedgerUnavailable:
                self.network.unbind_all(part.process)
                await asyncio.sleep(_REVIVE_S)
        await part.router.wait()

    def start_worker(self, index: int, **changes: object) -> SimWorker:
        """Start a worker, which announces itself and is known a moment later."""
        self._lives += 1
        name = f"worker-{index}"
        config = replace(self._worker_config, host=name, port=_PUBLIC, **changes)  # type: ignore[arg-type]
        process = self.clock.process(name)
        worker = SimWorker(
            f"{name}.{self._lives}",
            config,
            process,
            SimTransport(self.network, process),
            lambda it: self._taste(index, it),
            self._build,
        )
        process.create_task(worker.run(self._internal_addresses()))
        self.workers[index] = worker
        return worker

    def _internal_addresses(self) -> list[str]:
        return [address.replace(f":{_PUBLIC}", f":{_INTERNAL}") for address in self._addresses]

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        options: GenerateOptions,
        manners: Manners = Manners(),  # noqa: B008 it is frozen
        router: int = 0,
        api_key: str | None = None,
    ) -> Transcript:
        """Let a client submit a request, first to the router with index ``router``."""
        transcript = self.transcripts[request_id] = Transcript(request_id)
        client = AsyncClient(
            addresses(self._addresses, router),
            api_key=api_key,
            transport=SimTransport(self.network, self.desk),
        )
        self._reading[request_id] = self.desk.create_task(
            read(client, transcript, prompt, options, manners)
        )
        return transcript

    @property
    def is_settled(self) -> bool:
        """True if every client is served."""
        return all(task.done() for task in self._reading.values())

    def settle(self, limit: float) -> None:
        """Run until every client is served; raise TimeoutError, and errors that clients found."""
        self.clock.run_until(lambda: self.is_settled, limit)
        for task in self._reading.values():
            task.result()

    def run_for(self, seconds: float) -> None:
        self.clock.run_for(seconds)

    def run_until(self, condition: Callable[[], bool], limit: float = 60.0) -> None:
        self.clock.run_until(condition, limit)

    # faults

    def kill_router(self, index: int) -> None:
        self.network.kill(self.routers.pop(index).process)

    def freeze_router(self, index: int, seconds: float) -> None:
        self.network.freeze(self.routers[index].process, seconds)

    def stop_router(self, index: int, limit: float = 60.0) -> None:
        """Stop a router as SIGTERM does; return when its process has ended."""
        part = self.routers.pop(index)
        if part.router is not None:
            self.clock.run(part.process.create_task(part.router.stop()), limit)
        self.network.kill(part.process)

    def kill_worker(self, index: int) -> None:
        self.network.kill(self.workers.pop(index).process)

    def freeze_worker(self, index: int, seconds: float) -> None:
        self.network.freeze(self.workers[index].process, seconds)

    def drain_worker(self, index: int) -> None:
        """Begin to drain a worker; ``kill_worker`` ends it."""
        worker = self.workers[index]
        worker.process.create_task(worker.drain())

    def cut(self, router: int, worker: int, seconds: float) -> None:
        ends = self.routers[router].process, self.workers[worker].process
        self.network.cut(*ends, seconds)

    def reset(self, router: int, worker: int) -> None:
        self.network.reset(self.routers[router].process, self.workers[worker].process)

    def _taste(self, index: int, worker: SimWorker) -> None:
        """Kill a worker in the middle of a step with poison, and start it again at once."""
        running = [s for s in worker.engine.sequences() if s.slot != NO_SLOT]
        if any(sequence.request_id in self.poison for sequence in running):
            self.network.call_soon(self._revive_worker, index, worker)

    def _revive_worker(self, index: int, worker: SimWorker) -> None:
        if self.workers.get(index) is worker:
            self.kill_worker(index)
            self.start_worker(index)

    # state

    def audit(self) -> list[Item]:
        """Return all that the ledger holds."""
        return self.clock.run(self.desk.create_task(self.ledger.audit()), limit=1.0)

    def leaders(self) -> list[int]:
        """Return the routers that consider themselves the leader."""
        return [i for i, part in self.ready_routers() if part.leader.is_leading]

    def ready_routers(self) -> list[tuple[int, Router]]:
        return [(i, part.router) for i, part in self.routers.items() if part.router is not None]
