"""A cluster inside one process: routers and fake workers over real gRPC, one ledger."""

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

# Everything shares one process here: a worker may be silent because a test is busy.
ROUTER = RouterConfig(model="fake", port=0, http_port=0, drain=0.2, worker_silence=5.0)
WORKER = WorkerConfig(model="fake", num_blocks=256, fake=FakeModel(step_time=0.002))


class KeptLedger(MemoryLedger):
    """Outlives the routers that close it."""

    async def close(self) -> None:
        pass


class Held:
    """A fake worker whose steps wait to be let: on a busy machine requests may otherwise begin and
    end between two looks of a test."""

    def __init__(self, rank: Rank) -> None:
        """Before it has work."""
        assert rank._thread is not None
        self._rank = rank
        self._steps = threading.Semaphore(0)
        self._is_released = False
        engine = cast("Any", rank._thread.ready.result())
        engine._runner._sleep = self._sleep

    @property
    def num_requests(self) -> int:
        assert self._rank._sessions is not None
        return len(self._rank._sessions._attempts)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._is_released:
            self._steps.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    def release(self) -> None:
        self._is_released = True
        self._steps.release()


@dataclass
class Cluster:
    """Parts are started and ended by name; what is left at the end is ended."""

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
        # Few tests render a chat, and a renderer takes 0.5 s of CPU time to start. The first chat
        # starts it.
        with mock.patch.object(ChatTemplate, "start"):
            router = await Router.start(self.router_config, self.ledger)
        self.routers.append(router)
        return router

    async def add_worker(self, **changes: object) -> Rank:
        rank = Rank(replace(self.worker_config, **changes))  # type: ignore[arg-type]
        # The first grammar starts the process that compiles it, for the same reason.
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
        """The workers, none of which takes a step that it is not let take."""
        self.held = [Held(rank) for rank in self.workers]
        return self.held

    async def kill_worker(self, rank: Rank) -> None:
        """Without handing anything back."""
        self.workers.remove(rank)
        await rank.stop()

    async def drain_worker(self, rank: Rank) -> None:
        await rank.drain()
        await self.kill_worker(rank)

    async def kill_router(self, router: Router) -> None:
        """Without giving back leases or telling clients: its streams just break."""
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
        """Ends what is left; by then no worker may hold a KV block."""
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


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition; a timeout is a failure."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Received:
    """A stream as its client saw it: every token with its offset, in the order of arrival."""

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
    """Greedy tokens of one request, to its end."""
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
