"""Histories of requests and faults at given times, played on a simulated cluster and judged.

events ---> all faults are healed ---> all clients are served ---> judgement
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

from router.config import RouterConfig
from router.ledger.memory.memory import MemoryLedger
from tests.simulated_cluster.asked import (
    ASKED,
    ROUTERS,
    WORKERS,
    Asked,
)
from tests.simulated_cluster.client import Manners
from tests.simulated_cluster.cluster import SimCluster
from tests.simulated_cluster.judgement import finish, listening
from tests.simulated_cluster.ledger import Trouble
from worker.config import WorkerConfig


class Kind(Enum):
    #: a client submits request ``which`` of those of ASKED that fit the KV cache, to router
    #: ``other``
    SUBMIT = "submit"
    KILL_WORKER = "kill worker"
    FREEZE_WORKER = "freeze worker"
    #: the worker is drained, ends, and is started again
    DRAIN_WORKER = "drain worker"
    SLOW_WORKER = "slow worker"
    #: each worker preempts its sequences and evicts cached blocks, in all, a half or a third of its
    #: KV cache
    FILL_CACHES = "fill caches"
    KILL_ROUTER = "kill router"
    STOP_ROUTER = "stop router"
    FREEZE_ROUTER = "freeze router"
    #: the present leader
    FREEZE_LEADER = "freeze leader"
    #: the link between router ``which`` and worker ``other``
    CUT = "cut"
    RESET = "reset"
    LEDGER_AWAY = "ledger away"
    LEDGER_SLOW = "ledger slow"
    #: the server restarts without the last ``seconds``, at most one
    LEDGER_ROLLBACK = "ledger rollback"
    #: one to four calls of the ledger fail in the way ``which``
    LEDGER_TROUBLE = "ledger trouble"


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a history, ``after`` seconds after the previous one.

    ``which`` and ``other`` select parts, modulo the number of parts. ``seconds`` is the duration of
    a fault, or the time until a killed part is started again.
    """

    after: float
    kind: Kind
    which: int = 0
    other: int = 0
    seconds: float = 0.5
    manners: Manners = Manners()  # noqa: RUF009 it is frozen


@dataclass(frozen=True, slots=True)
class History:
    events: tuple[Event, ...]
    num_routers: int = 2
    num_workers: int = 2
    num_blocks: int = WORKERS.num_blocks or 0
    seed: int = 0


@dataclass
class Played:
    """Result of a history."""

    virtual_s: float = 0.0
    requests: int = 0
    tokens: int = 0
    migrations: int = 0
    preemptions: int = 0
    errors: list[str] = field(default_factory=list)


def play(
    history: History,
    router_config: RouterConfig = ROUTERS,
    worker_config: WorkerConfig = WORKERS,
) -> Played:
    """Play a history, and judge it.

    Raises Wrong, or TimeoutError or NothingHappens if a client is never served.
    """
    random.seed(history.seed)  # used by the clients' backoff
    config = replace(worker_config, num_blocks=history.num_blocks)
    with SimCluster(router_config, config) as cluster, listening() as complaints:
        player = _Player(history, cluster)
        player.play()
        finish(cluster, player.asked, complaints, may_lose=player.may_lose)
        return player.summary()


class _Player:
    def __init__(self, history: History, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.asked: dict[str, tuple[Asked, Manners]] = {}
        #: whether tokens may be lost with their gateway, because the ledger lost them or was away
        self.may_lose = False
        self._history = history
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = count()

    def play(self) -> None:
        for index in range(self._history.num_routers):
            self.cluster.start_router(index)
        for index in range(self._history.num_workers):
            self.cluster.start_worker(index)
        for event in self._history.events:
            self._run_for(event.after)
            self._happen(event)
        self._heal()

    def _run_for(self, seconds: float) -> None:
        """Run for ``seconds`` of virtual time, with all actions that become due."""
        clock = self.cluster.clock
        end = clock.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            at, _, act = heapq.heappop(self._agenda)
            clock.run_for(max(0.0, at - clock.now))
            act()
        clock.run_for(max(0.0, end - clock.now))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.cluster.clock.now + seconds, next(self._tickets), act))

    def _heal(self) -> None:
        """Run all pending actions, and wait until no cache is being filled."""
        while self._agenda:
            self._run_for(max(0.0, self._agenda[0][0] - self.cluster.clock.now))
        workers = self.cluster.workers
        self.cluster.run_until(lambda: not any(it.is_filling for it in workers.values()))

    def _happen(self, event: Event) -> None:
        getattr(self, f"_{event.kind.name.lower()}")(event)

    # clients

    def _submit(self, event: Event) -> None:
        fitting = [it for it in ASKED if it.num_blocks <= self._history.num_blocks]
        asked = fitting[event.which % len(fitting)]
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = asked, event.manners
        prompt = asked.prompt
        self.cluster.submit(request_id, prompt, asked.arguments(), event.manners, event.other)

    # workers

    def _worker(self, event: Event) -> int | None:
        return _pick(self.cluster.workers, event.which)

    def _kill_worker(self, event: Event) -> None:
        if (index := self._worker(event)) is not None:
            self.cluster.kill_worker(index)
            self._later(event.seconds, lambda: self._start_worker(index))

    def _start_worker(self, index: int) -> None:
        self.cluster.start_worker(index)

    def _freeze_worker(self, event: Event) -> None:
        if (index := self._worker(event)) is not None:
            self.cluster.freeze_worker(index, event.seconds)
            self._later(event.seconds, lambda: None)

    def _drain_worker(self, event: Event) -> None:
        if (index := self._worker(event)) is None:
            return
        worker = self.cluster.workers[index]
        self.cluster.drain_worker(index)

        def end() -> None:
            if self.cluster.workers.get(index) is worker:
                self.cluster.kill_worker(index)
                self._start_worker(index)

        self._later(1.5, end)

    def _slow_worker(self, event: Event) -> None:
        if (index := self._worker(event)) is not None:
            self.cluster.workers[index].slow_down(10.0, event.seconds)

    def _fill_caches(self, event: Event) -> None:
        num_blocks = self._history.num_blocks // (1 + event.other % 3)
        for worker in self.cluster.workers.values():
            worker.fill(num_blocks)

    # routers

    def _router(self, event: Event) -> int | None:
        return _pick(self.cluster.routers, event.which)

    def _kill_router(self, event: Event) -> None:
        if (index := self._router(event)) is not None:
            self.cluster.kill_router(index)
            self._later(event.seconds, lambda: self.cluster.start_router(index))

    def _stop_router(self, event: Event) -> None:
        if (index := self._router(event)) is not None:
            self.cluster.stop_router(index)
            self._later(event.seconds, lambda: self.cluster.start_router(index))

    def _freeze_router(self, event: Event) -> None:
        if (index := self._router(event)) is not None:
            self.cluster.freeze_router(index, event.seconds)
            self._later(event.seconds, lambda: None)

    def _freeze_leader(self, event: Event) -> None:
        for index in self.cluster.leaders()[:1]:
            self.cluster.freeze_router(index, event.seconds)
            self._later(event.seconds, lambda: None)

    # the network

    def _link(self, event: Event) -> tuple[int, int] | None:
        router = _pick(self.cluster.routers, event.which)
        worker = _pick(self.cluster.workers, event.other)
        return None if router is None or worker is None else (router, worker)

    def _cut(self, event: Event) -> None:
        if (link := self._link(event)) is not None:
            self.cluster.cut(*link, event.seconds)
            self._later(event.seconds, lambda: None)

    def _reset(self, event: Event) -> None:
        if (link := self._link(event)) is not None:
            self.cluster.reset(*link)

    # the ledger

    def _ledger_away(self, event: Event) -> None:
        self.may_lose = True
        self.cluster.ledger.end_lease(event.seconds)
        self._later(event.seconds, lambda: None)

    def _ledger_slow(self, event: Event) -> None:
        self.cluster.ledger.delay = 0.2

        def end() -> None:
            self.cluster.ledger.delay = 0.0

        self._later(event.seconds, end)

    def _ledger_rollback(self, event: Event) -> None:
        memory = self.cluster.ledger.snapshot()
        self._later(min(event.seconds, 1.0), lambda: self._roll_back(memory))

    def _roll_back(self, memory: MemoryLedger) -> None:
        self.may_lose = True
        self.cluster.ledger.end_lease(0.1)
        self.cluster.ledger.restart(memory)

    def _ledger_trouble(self, event: Event) -> None:
        self.may_lose = True
        trouble = [*Trouble][event.which % len(Trouble)]
        left = iter([trouble] * (1 + event.other % 4))
        self.cluster.ledger.trouble = lambda name: next(left, None)

    # afterwards

    def summary(self) -> Played:
        transcripts = self.cluster.transcripts.values()
        return Played(
            virtual_s=self.cluster.clock.elapsed,
            requests=len(transcripts),
            tokens=sum(it.num_tokens for it in transcripts),
            migrations=sum(it.migrations for it in transcripts),
            preemptions=sum(it.preemptions for it in transcripts),
            errors=[it.error.slug for it in transcripts if it.error is not None],
        )


def _pick(there: Iterable[int], which: int) -> int | None:
    indices = sorted(there)
    return indices[which % len(indices)] if indices else None
