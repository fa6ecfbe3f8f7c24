"""What runs in the cluster, as far as it matters who could make room for whom. Pure.

A leader knows it from its own dispatches and from what the gateways tell it. Every operation is
O(log n), or O(what is answered).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Self, TypeAlias

from everlift.v1 import session_pb2
from router.admission.request import Waiting

#: Priority, known tokens, request id: of those on one worker the smallest gives up its place first.
_Rank: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Running:
    """A request that a worker has. ``known_tokens`` are of all its unfinished ``choices``, when the
    leader heard of it; ``arrived`` is ledger time in seconds."""

    request_id: str
    gateway: str
    worker_id: str
    epoch: int
    priority: int
    known_tokens: int
    arrived: float
    moves_left: int
    choices: int = 1
    #: it waits at its worker, without blocks
    is_preempted: bool = False
    #: as of what waits
    due: float = inf
    predicted_total: int = 0
    predicted_rank: float = 0.0
    predicted_work_rank: float = 0.0
    foreseen_wait_s: float = 0.0

    @classmethod
    def dispatched(cls, waiting: Waiting, gateway: str, worker_id: str, epoch: int) -> Self:
        return cls(
            waiting.request_id,
            gateway,
            worker_id,
            epoch,
            waiting.priority,
            waiting.prefill_tokens,
            waiting.arrived,
            waiting.moves_left,
            waiting.choices,
            due=waiting.due,
            predicted_total=waiting.predicted_total,
            predicted_rank=waiting.predicted_rank,
            predicted_work_rank=waiting.predicted_work_rank,
            foreseen_wait_s=waiting.foreseen_wait_s,
        )

    @classmethod
    def told(cls, gateway: str, message: session_pb2.Running) -> Self:
        return cls(
            message.request_id,
            gateway,
            message.worker_id,
            message.epoch,
            message.priority,
            message.known_tokens,
            message.arrived,
            message.moves_left,
            message.choices,
            is_preempted=message.preempted,
            due=message.due or inf,
            predicted_total=message.predicted_total,
            predicted_rank=message.predicted_rank,
            predicted_work_rank=message.predicted_work_rank,
            foreseen_wait_s=message.foreseen_wait_s,
        )

    @property
    def rank(self) -> _Rank:
        return (self.priority, self.known_tokens, self.request_id)


class RunningTable:
    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._of_gateway: dict[str, set[str]] = {}
        #: by worker, sorted
        self._ranks: dict[str, list[_Rank]] = {}
        self._preempted: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Running | None:
        return self._running.get(request_id)

    def put(self, running: Running) -> None:
        """In place of what was known of it."""
        self.remove(running.request_id)
        self._running[running.request_id] = running
        self._of_gateway.setdefault(running.gateway, set()).add(running.request_id)
        insort(self._ranks.setdefault(running.worker_id, []), running.rank)
        if running.is_preempted:
            self._preempted[running.request_id] = None

    def remove(self, request_id: str) -> Running | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._preempted.pop(request_id, None)
        _discard(self._of_gateway, running.gateway, request_id)
        ranks = self._ranks[running.worker_id]
        del ranks[bisect_left(ranks, running.rank)]
        if not ranks:
            del self._ranks[running.worker_id]
        return running

    def remove_gateway(self, gateway: str) -> None:
        for request_id in tuple(self._of_gateway.get(gateway, ())):
            self.remove(request_id)

    @property
    def has_preempted(self) -> bool:
        return bool(self._preempted)

    def preempted(self) -> list[Running]:
        """Those that wait at their workers."""
        return [self._running[request_id] for request_id in self._preempted]

    def below(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Those of a lower class on a worker; of the lowest class, and there of those with the
        fewest known tokens, the first."""
        for rank in self._ranks.get(worker_id, ()):
            if rank[0] >= priority:
                return
            yield self._running[rank[2]]

    def from_class(self, priority: int, worker_id: str) -> Iterator[Running]:
        """Those of this class or a higher one on a worker."""
        ranks = self._ranks.get(worker_id, [])
        for rank in ranks[bisect_left(ranks, (priority,)) :]:
            yield self._running[rank[2]]


def _discard(index: dict[str, set[str]], key: str, request_id: str) -> None:
    index[key].discard(request_id)
    if not index[key]:
        del index[key]
