"""Whether running requests of a lower class make room for a higher one. Pure.

The head of the queue has no credit anywhere, and its deadline comes before it would get one: then
it is dispatched all the same, to the worker where the least is lost, and that worker's victims go
back to the queue. There they keep their place and their tokens. A worker gives blocks and slots to
its sequences by class, so none of those that wait there comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf

from router.admission.policy import Waiting
from router.admission.running import Running, RunningTable
from router.admission.worker_view import WorkerView, blocks_for, blocks_of

#: So long before its last moment a request makes room for itself where nobody knows how long it
#: would have to wait.
_MARGIN_S = 0.5
#: More are not sent away for one.
_MAX_VICTIMS = 8


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker, and those that make room there."""

    worker_id: str
    victims: tuple[Running, ...]


def is_due(waiting: Waiting, workers: Mapping[str, WorkerView], ledger_now: float) -> bool:
    """Whether it would miss a deadline by waiting for a credit. One that is missed already is in
    no hurry any more."""
    slack = _slack(waiting, workers, ledger_now)
    return slack < inf and slack <= max(_MARGIN_S, _wait(waiting, workers))


def _slack(waiting: Waiting, workers: Mapping[str, WorkerView], ledger_now: float) -> float:
    """Seconds until it must run to meet its deadlines; infinite where it has none to meet."""
    prefill_s = min((_prefill_s(waiting, it) for it in workers.values()), default=0.0)
    step_s = min((it.pace.step_s for it in workers.values() if it.pace.step_s), default=0.0)
    decode_s = step_s * waiting.max_tokens / max(1, waiting.choices)
    moments = [
        due - prefill_s - rest
        for due, rest in ((waiting.ttft_deadline, 0.0), (waiting.deadline, decode_s))
        if due > ledger_now
    ]
    return min(moments, default=inf) - ledger_now


def _prefill_s(waiting: Waiting, worker: WorkerView) -> float:
    rate = worker.pace.prefill_rate
    return waiting.prefill_tokens / rate if rate else 0.0


def _wait(waiting: Waiting, workers: Mapping[str, WorkerView]) -> float:
    """Seconds until some worker has blocks for it; 0 where nobody knows."""
    waits = [
        max(0, blocks_of(waiting) + 1 - worker.free_blocks) / rate
        for worker in workers.values()
        if worker.is_open and (rate := worker.pace.free_rate) is not None and rate > 0
    ]
    return min(waits, default=0.0)


class Evictions:
    """``occupants`` answers the ids of the requests that have a slot of a worker."""

    def __init__(self, running: RunningTable, occupants: Callable[[str], Collection[str]]) -> None:
        self._running = running
        self._occupants = occupants

    def choose(
        self, waiting: Waiting, workers: Mapping[str, WorkerView], spared: Collection[str]
    ) -> Eviction | None:
        """Where the victims' known tokens are the fewest, none of them among the ``spared``; None
        where no victims make enough room."""
        found = [
            (sum(victim.known_tokens for victim in victims), worker_id, victims)
            for worker_id, worker in workers.items()
            if worker.is_open and not worker.is_slow
            if (victims := self._victims(waiting, worker_id, worker, spared)) is not None
        ]
        if not found:
            return None
        _, worker_id, victims = min(found, key=lambda it: it[:2])
        return Eviction(worker_id, victims)

    def _victims(
        self, waiting: Waiting, worker_id: str, worker: WorkerView, spared: Collection[str]
    ) -> tuple[Running, ...] | None:
        """None where they do not suffice."""
        occupants = self._occupants(worker_id)
        room = _room_beside(worker) - _Room(waiting.choices, blocks_of(waiting) + 1)
        for other in self._running.from_class(waiting.priority, worker_id):
            if other.request_id not in occupants:
                room -= _room_of(other)
        victims: list[Running] = []
        lower = self._running.below(waiting.priority, worker_id)
        while not room.suffices:
            victim = next(lower, None)
            if victim is None or len(victims) == _MAX_VICTIMS:
                return None
            if victim.request_id in occupants and victim.request_id not in spared:
                victims.append(victim)
                room += _room_of(victim)
        return tuple(victims)


@dataclass(frozen=True, slots=True)
class _Room:
    slots: int
    blocks: int

    @property
    def suffices(self) -> bool:
        return self.slots >= 0 and self.blocks >= 0

    def __add__(self, other: _Room) -> _Room:
        return _Room(self.slots + other.slots, self.blocks + other.blocks)

    def __sub__(self, other: _Room) -> _Room:
        return _Room(self.slots - other.slots, self.blocks - other.blocks)


def _room_beside(worker: WorkerView) -> _Room:
    """What runs there does not use, nor what is on its way there."""
    slots = worker.capacity.max_num_seqs - worker.load.num_running
    coming = worker.unacknowledged
    return _Room(slots - coming.choices, worker.unused_blocks - blocks_for(coming.tokens))


def _room_of(running: Running) -> _Room:
    return _Room(running.choices, blocks_for(running.known_tokens))
