"""Dispatchers that bind each request to a worker on arrival, the baseline of late binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Literal, TypeAlias

from cluster.simulator.frame import Frame
from cluster.simulator.global_queue import update_index
from everlift.v1 import session_pb2
from router.admission.load_shedding import Refusal
from router.admission.model_queue import Placed
from router.admission.placement import Placement
from router.admission.preemption import Move
from router.admission.request import Running, Waiting
from router.admission.workers import Capacity
from router.config import RouterConfig

Choice: TypeAlias = Literal["random", "round_robin", "jsq", "p2c"]


@dataclass(frozen=True, slots=True)
class EarlyBinding:
    """Settings of a baseline: each request goes to a worker on arrival and queues there, FIFO.

    random, round_robin   independent of the workers' load
    jsq                   join the shortest queue
    p2c                   the shorter queue of two random workers (power of two choices)

    A worker's load is known as of its last frame and the dispatches since, or, with ``age_s``, as
    of the last poll of all workers, which happens every ``age_s`` seconds.
    """

    choice: Choice
    age_s: float = 0.0

    def queue(self, config: RouterConfig, seed: int = 0) -> EarlyQueue:
        return EarlyQueue(self, config, seed)


class EarlyQueue:
    """Dispatcher with early binding; requests are queued here only if no worker is open."""

    def __init__(self, binding: EarlyBinding, config: RouterConfig, seed: int) -> None:
        self._age_s = binding.age_s
        self._placement = Placement(config)
        self._dice = Random(seed)
        self._epochs = count(1)
        self._turn = -1
        self._waiting: dict[str, Waiting] = {}
        #: number of requests of each worker at the last poll; empty without ``age_s``
        self._polled_loads: dict[str, int] = {}
        self._next_poll = 0.0
        choices: Mapping[Choice, Callable[[list[str]], str]] = {
            "random": self._dice.choice,
            "round_robin": self._next,
            "jsq": self._shortest,
            "p2c": self._shorter_of_two,
        }
        self._choose = choices[binding.choice]

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def worker_up(self, worker_id: str, capacity: Capacity) -> None:
        self._placement.join(worker_id, capacity)

    def worker_lost(self, worker_id: str) -> None:
        self._placement.remove_worker(worker_id)
        self._polled_loads.pop(worker_id, None)

    def on_message(self, frame: Frame, now: float) -> None:
        for epoch in frame.accepted:
            self._placement.acknowledge(frame.worker_id, epoch)
        update_index(self._placement.index, frame)
        self._placement.report(frame.worker_id, frame.load, now)

    def most_cached(self, chunks: Sequence[int], num_tokens: int) -> int:
        """Return 0, because the order of the requests does not depend on it."""
        return 0

    def estimated_wait_s(self, priority: int, work_tokens: int) -> float:
        return 0.0

    def enqueue(self, waiting: Waiting, now: float) -> list[Refusal]:
        self._waiting[waiting.request_id] = waiting
        return []

    def withdraw(self, request_id: str, now: float) -> None:
        self._waiting.pop(request_id, None)

    def running(self, running: Running, now: float) -> None:
        """Ignore a preempted request, which stays at its worker."""

    def session_output(self, session: int, tokens: int, now: float) -> None:
        """Ignore it, because requests are not ordered by it."""

    def expired(self, now: float) -> list[Refusal]:
        return []

    def moves(self, now: float) -> list[Move]:
        return []

    def place(self, now: float) -> list[Placed]:
        if not self._waiting:
            return []
        workers = [name for name, view in self._placement.workers.items() if view.is_open]
        if not workers:
            return []
        placed = [self._place(waiting, workers, now) for waiting in self._waiting.values()]
        self._waiting.clear()
        return placed

    def _place(self, waiting: Waiting, workers: list[str], now: float) -> Placed:
        if self._age_s and now >= self._next_poll:
            self._next_poll = now + self._age_s
            self._polled_loads = {name: self._load_of(name) for name in self._placement.workers}
        placed = Placed(waiting, self._choose(workers), next(self._epochs))
        self._placement.reserve(placed.worker_id, placed.epoch, waiting, now)
        return placed

    def _next(self, workers: list[str]) -> str:
        self._turn += 1
        return workers[self._turn % len(workers)]

    def _shortest(self, workers: list[str]) -> str:
        return min(workers, key=lambda name: (self._known_load(name), self._dice.random()))

    def _known_load(self, name: str) -> int:
        """Return the worker's number of requests, as of the last poll if there are polls."""
        return self._polled_loads.get(name, 0) if self._age_s else self._load_of(name)

    def _load_of(self, name: str) -> int:
        worker = self._placement.workers[name]
        return worker.load.num_running + worker.num_ahead

    def _shorter_of_two(self, workers: list[str]) -> str:
        return self._shortest(self._dice.sample(workers, min(2, len(workers))))

    def served(self, outputs: list[session_pb2.ServedTokens], now: float) -> None:
        """Ignore it, because there is no fair share."""

    def finished(self, tpot_ratio: float, now: float) -> None:
        """Ignore it, because nothing was predicted."""

    def tick(self, now: float) -> None:
        self._placement.expire(now)
