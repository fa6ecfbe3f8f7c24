"""Who finds a worker for each request: the product's queue, or a baseline. Pure."""

from __future__ import annotations

from typing import Protocol

from cluster.simulator.frame import Frame
from everlift.v1 import session_pb2
from router.admission.load_shedding import Refusal
from router.admission.preemption import Move
from router.admission.scheduler import Placed
from router.admission.workers import Capacity

#: The only gateway there is.
GATEWAY = "gateway"


class Dispatcher(Protocol):
    """``now`` is seconds; the ledger's clock and the router's are one."""

    @property
    def queued(self) -> int:
        """Requests that have no worker."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether room at a worker would be used."""
        ...

    # workers

    def worker_up(self, worker_id: str, capacity: Capacity) -> None: ...

    def worker_lost(self, worker_id: str) -> None: ...

    def hear(self, frame: Frame, now: float) -> None: ...

    # requests

    def foreseen_wait_s(self, priority: int, work_tokens: int) -> float:
        """Of a request that comes now, by what waits; 0 where each has its worker at once."""
        ...

    def enqueue(self, waiting: session_pb2.Waiting, now: float) -> list[Refusal]:
        """Who is refused: it, or somebody who makes room for it."""
        ...

    def withdraw(self, request_id: str, now: float) -> None:
        """It needs neither its place in the queue nor its worker any more."""
        ...

    def running(self, running: session_pb2.Running, now: float) -> None:
        """Its worker preempted it, or goes on with it."""
        ...

    def served(self, outputs: list[session_pb2.ServedTokens], now: float) -> None:
        """What tenants got since this was said last."""
        ...

    def finished(self, tpot_ratio: float, now: float) -> None:
        """A request did, and each of its tokens took so many times as long as was predicted."""
        ...

    # what is decided

    def expired(self, now: float) -> list[Refusal]:
        """Requests that have waited for too long."""
        ...

    def moves(self, now: float) -> list[Move]:
        """Preempted requests that go on sooner elsewhere."""
        ...

    def place(self, now: float) -> list[Placed]:
        """Requests that go to a worker now."""
        ...

    def tick(self, now: float) -> None:
        """Called every so often."""
        ...
