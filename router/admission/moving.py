"""Whether a preempted request goes on sooner elsewhere. Pure.

A worker whose blocks do not suffice takes them from some of its sequences, which wait there until
others end. Another worker may have room for one of them now, at the price of computing again what
is known of it:

    here    (blocks that it and those before it lack) / (blocks that come free a second)
    there   (prefill pending there + its known tokens) / (tokens computed a second)

It moves where that is sooner, if the other worker has a slot and all its blocks, and some to spare:
it must not be preempted there in its turn. So the room in which it can grow is promised to it, and
the next one that moves there must find more (``growth``). What nobody knows yet is not bet on: a
worker that has been watched for less than a second keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from router.admission.request import Key, Ordered, Waiting
from router.admission.running import Running
from router.admission.workers import WorkerView, blocks_for

#: It moves where so many times its blocks are free. In tests/perf/preemption.py the 99th percentile
#: with both workers overfull was 0.80 of that without moves, and with 3 times 0.96 of it.
ROOM = 4
#: As fast as a worker is taken to prefill where none has been seen to do it, in tokens a second.
_UNKNOWN_RATE = 1000.0


@dataclass(frozen=True, slots=True)
class Move:
    """A request to be taken off its worker, and the worker that has room for it."""

    running: Running
    worker_id: str


class Moving:
    """``reserve`` is the part of a worker's blocks that must stay free there."""

    def __init__(self, reserve: float) -> None:
        self._reserve = reserve

    def candidates(
        self, preempted: Iterable[Running], head: Waiting | None, key: Callable[[Ordered], Key]
    ) -> Iterator[tuple[Running, int]]:
        """Those that may move, in the order of ``key``, with the blocks that each has to wait for.
        ``head`` is what leaves the queue next: all that come after it by the key stay."""
        needed: dict[str, int] = {}
        for running in sorted(preempted, key=key):
            if head is not None and key(running) > key(head):
                return
            blocks = needed[running.worker_id] = needed.get(running.worker_id, 0) + _blocks(running)
            if running.moves_left > 0:
                yield running, blocks

    def choose(
        self,
        running: Running,
        needed: int,
        workers: Mapping[str, WorkerView],
        promised: Mapping[str, int],
    ) -> Move | None:
        """Where it goes on soonest, if that is not where it is. ``needed`` blocks must come free
        there. ``promised`` are blocks at the others, for those that moved there before."""
        home = workers.get(running.worker_id)
        if home is None:
            return None
        sooner = [
            (seconds, worker_id)
            for worker_id, worker in workers.items()
            if worker is not home and self._has_room(worker, running, promised.get(worker_id, 0))
            if (seconds := _there(running, worker, home)) < _here(needed, home)
        ]
        return Move(running, min(sooner)[1]) if sooner else None

    def _has_room(self, worker: WorkerView, running: Running, promised: int) -> bool:
        """So much that it and those beside it can grow: who is preempted there again computes the
        same tokens a third time."""
        spare = worker.free_blocks - promised - ROOM * _blocks(running)
        return (
            worker.is_open
            and not worker.is_slow
            and worker.free_slots >= running.choices
            and spare >= self._reserve * worker.capacity.num_blocks
        )


def _blocks(running: Running) -> int:
    """For what is known and the next token, of each choice."""
    return blocks_for(running.known_tokens + 1) + running.choices - 1


def _here(needed: int, home: WorkerView) -> float:
    """Seconds until it has its blocks again where it is; 0 where nobody knows."""
    # A worker keeps a block free, and more of them the more it has.
    rate, lacking = home.pace.free_rate, needed + 1 - home.unused_blocks
    if lacking <= 0 or rate is None:
        return 0.0
    return lacking / rate if rate > 0 else inf


def _there(running: Running, worker: WorkerView, home: WorkerView) -> float:
    """Seconds until another worker has computed what is known of it."""
    tokens = worker.pending_prefill + running.known_tokens
    return worker.prefill_s(tokens) or home.prefill_s(tokens) or tokens / _UNKNOWN_RATE
