"""Cluster in one process: routers and fake workers over real gRPC, and one ledger."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

from everlift.client.client import AsyncClient
from everlift.v1 import inference_pb2 as pb
from router.chat.templates import ChatTemplate
from router.config import RouterConfig
from router.ledger.base import Ledger
from router.ledger.memory.memory import MemoryLedger
from router.router import Router
from worker.config import FakeModel, WorkerConfig
from worker.grammar.fork_server import GrammarForkServer
from worker.runner.fake_runner import expected_tokens
from worker.serving.rank import Rank

# All parts share one process: a worker may be silent because the test is busy.
ROUTER = RouterConfig(model="fake", port=0, http_port=0, drain=0.2, worker_silence=5.0)
#: For tests of one leader: the lease outlasts any pause of the process on a busy machine.
LONG_LEASE = replace(ROUTER, lease=30.0)
WORKER = WorkerConfig(model="fake", num_blocks=256, fake=FakeModel(step_time=0.002))


class KeptLedger(MemoryLedger):
    """Ledger that ignores ``close``, because it outlives its routers."""

    async def close(self) -> None:
        pass


class Held:
    """Fake worker whose steps run only when a test permits them.

    Otherwise requests could start and end between two checks of a test on a busy machine.
    """

    def __init__(self, rank: Rank) -> None:
        """Take over ``rank``, which must not have requests yet."""
        assert rank._thread is not None
        self._rank = rank
        self._steps = threading.Semaphore(0)
        self._is_released = self._is_waiting = False
        engine = cast("Any", rank._thread.ready.result())
        engine._runner._sleep = self._sleep

    @property
    def num_requests(self) -> int:
        assert self._rank._sessions is not None
        return len(self._rank._sessions._attempts)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._is_released:
            self._is_waiting = True
            self._steps.acquire()
            self._is_waiting = False

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    def release(self) -> None:
        self._is_released = True
        self._steps.release()

    async def pace(self, step_s: float) -> None:
        """Permit a step every ``step_s`` seconds, until cancelled."""
        while True:
            if self._is_waiting:
                self.let(1)
            await asyncio.sleep(step_s)


@dataclass
class Cluster:
    """Routers and workers over one ledger; ``stop`` stops those still running."""

    ledger: Ledger = field(default_factory=lambda: KeptLedger(time.monotonic))
    router_config: RouterConfig = ROUTER
    worker_config: WorkerConfig = WORKER
    routers: list[Router] = field(default_factory=list)
    workers: list[Rank] = field(default_factory=list)
    infos: dict[str, str] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.routers[0].address

    async def add_router(self) -> Router:
        # Few tests render a chat, and a renderer takes 0.5 s of CPU time to start. It starts at the
        # first chat instead.
        with mock.patch.object(ChatTemplate, "start"):
            router = await Router.start(self.router_config, self.ledger)
        self.routers.append(router)
        return router

    async def add_worker(self, **changes: object) -> Rank:
        rank = Rank(replace(self.worker_config, **changes))  # type: ignore[arg-type]
        # For the same reason, the process that compiles grammars starts at the first grammar.
        with mock.patch.object(GrammarForkServer, "prestart"):
            info = await rank.start()
        # A router may have another model's tokenizer, for which the fake workers stand in.
        info.model = self.router_config.models[0].name
        self.workers.append(rank)
        await self.routers[0].announce(info)
        await until(lambda: self._is_up_everywhere(rank.worker_id))
        return rank

    def _is_up_everywhere(self, worker_id: str) -> bool:
        return all(
            any(link.info.worker_id == worker_id and link.is_up for link in router._sessions.links)
            for router in self.routers
        )

    def hold(self) -> list[Held]:
        """Hold all workers: each steps only when permitted."""
        self.held = [Held(rank) for rank in self.workers]
        return self.held

    async def kill_worker(self, rank: Rank) -> None:
        """Stop a worker without draining it."""
        self.workers.remove(rank)
        await rank.stop()

    async def drain_worker(self, rank: Rank) -> None:
        await rank.drain()
        await self.kill_worker(rank)

    async def kill_router(self, router: Router) -> None:
        """Stop a router without releasing leases or ending streams, which just break."""
        self.routers.remove(router)
        for task in router._tasks:
            task.cancel()
        router._leader._lease.is_held = False
        router._requests._registry.is_closing = True
        await router._public.stop(None)
        await router._internal.stop(None)
        await router._http.stop(0)
        await router._metrics.stop()
        await router._leader_client.close()
        await router._sessions.close()
        for template in router._templates.values():
            await template.close()

    async def stop(self) -> None:
        """Stop all parts; check that the workers release all KV blocks."""
        for held in self.held:
            held.release()
        for router in self.routers:
            await router.stop()
        for rank in self.workers:
            assert rank._thread is not None
            engine = rank._thread.ready.result()
            await until(lambda engine=engine: engine.load().blocks_used == 0)
            await rank.stop()
            engine.check_integrity()


@asynccontextmanager
async def cluster(
    routers: int = 1,
    workers: int = 2,
    router_config: RouterConfig = ROUTER,
    worker_config: WorkerConfig = WORKER,
    ledger: Ledger | None = None,
) -> AsyncIterator[Cluster]:
    parts = Cluster(ledger or KeptLedger(time.monotonic), router_config, worker_config)
    try:
        for _ in range(routers):
            await parts.add_router()
        for _ in range(workers):
            await parts.add_worker()
        yield parts
    finally:
        await parts.stop()


@asynccontextmanager
async def paced_cluster(
    routers: int = 1, workers: int = 1, step_s: float = 0.01, **options: Any
) -> AsyncIterator[Cluster]:
    """Run a cluster whose workers take no step while the event loop is paused.

    A request thus cannot end before the test acts on it, however long a busy machine pauses this
    process. The workers take a step every ``step_s`` seconds. ``options`` are those of ``cluster``.
    """
    async with cluster(routers, workers, **options) as parts:
        pacing = [asyncio.create_task(held.pace(step_s)) for held in parts.hold()]
        try:
            yield parts
        finally:
            for task in pacing:
                task.cancel()


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds; raise TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Received:
    """Stream as its client received it: the offset of each token, in the order of arrival."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    migrations: int = 0

    @property
    def is_contiguous(self) -> bool:
        return self.offsets == list(range(len(self.offsets)))


async def receive(
    client: AsyncClient, prompt: list[int], count: int, **options: object
) -> Received:
    """Generate greedily, and return the whole stream."""
    stream = client.generate(prompt, max_tokens=count, temperature=0.0, **options)  # type: ignore[arg-type]
    received = Received(stream.request_id)
    async for chunk in stream:
        received.tokens.extend(chunk.token_ids)
        received.offsets.extend(range(chunk.offset, chunk.offset + len(chunk.token_ids)))
        received.epochs.append(chunk.epoch)
    assert stream.timing is not None
    received.migrations = stream.timing.migrations
    return received


def right_tokens(prompt: list[int], count: int, config: WorkerConfig = WORKER) -> list[int]:
    return expected_tokens(prompt, count, config.fake)


async def worker_status(client: AsyncClient, worker_id: str) -> pb.WorkerStatus:
    status = await client.status()
    return next(worker for worker in status.workers if worker.worker_id == worker_id)
