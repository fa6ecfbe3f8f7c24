"""How long requests wait in the queue, and for what. Pure.

While a request waits nothing may be dispatched, or there is no worker, or it is the next one and no
worker has room; in the time that is left others leave before it, each of them because it came
before, is of a higher class, or is before it by the queue's rules.

Of all that clocks and counts are kept that only grow. Who comes notes where they stand, and who
leaves compares: no cost grows with what waits, and a stay is a tuple of plain values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, TypeAlias

from everlift.request_id import tenant_of
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.request import Waiting

#: Tickets of a block, and blocks of a row.
_BLOCK, _ROW = 512, 64


class BypassCounter:
    def __init__(self) -> None:
        #: tickets below are not kept any more
        self._first = 0
        self._left = bytearray()
        self._of_block: list[int] = []
        self._of_row: list[int] = []

    @property
    def num_kept(self) -> int:
        """Tickets that are looked back to."""
        return len(self._left)

    def leave(self, ticket: int) -> None:
        place = ticket - self._first
        if place >= len(self._left):
            self._grow(place)
        self._left[place] = 1
        self._of_block[place // _BLOCK] += 1
        self._of_row[place // (_BLOCK * _ROW)] += 1

    def count(self, ticket: int) -> int:
        """Larger tickets that left."""
        place = ticket - self._first
        if place >= len(self._left):
            return 0
        block = place // _BLOCK
        row = block // _ROW
        return (
            self._left.count(1, place + 1, (block + 1) * _BLOCK)
            + sum(self._of_block[block + 1 : (row + 1) * _ROW])
            + sum(self._of_row[row + 1 :])
        )

    def forget(self, oldest: int) -> None:
        """Nobody asks for tickets below this one any more."""
        rows = min((oldest - self._first) // (_BLOCK * _ROW), len(self._of_row))
        if rows > 0:
            del self._left[: rows * _ROW * _BLOCK]
            del self._of_block[: rows * _ROW]
            del self._of_row[:rows]
            self._first += rows * _ROW * _BLOCK

    def _grow(self, place: int) -> None:
        rows = place // (_BLOCK * _ROW) + 1 - len(self._of_row)
        self._left.extend(bytes(rows * _ROW * _BLOCK))
        self._of_block.extend([0] * (rows * _ROW))
        self._of_row.extend([0] * rows)


#: Requests that left last, which are looked through for those of a tenant, and those that are told.
_LOOKED_AT, _TOLD = 16, 8


class Obstacle(IntEnum):
    """Why nobody can leave."""

    #: nothing may be dispatched
    LEADER = 0
    #: there is no worker, none starts, and none waits for a place
    NO_WORKER = 1
    #: there is no worker yet, and one starts
    WORKER_STARTS = 2
    #: there is no worker, none starts, and Ray has no place for one
    WORKER_UNPLACED = 3


#: When a request came, how many had left by then, how many waited, the seconds of each obstacle,
#: its number in its class; and of each class its priority, and how many of it had come.
Arrival: TypeAlias = tuple[Any, ...]

_NUMBER = 3 + len(Obstacle)
_CLASSES = _NUMBER + 1
_NOBODY = ("", 0.0, 0.0)


class WaitStatistics:
    """``now`` is seconds and never goes back."""

    def __init__(self) -> None:
        self._obstacle: Obstacle | None = None
        self._looked = 0.0
        #: by obstacle, when it was looked last
        self._seconds: Sequence[float] = [0.0] * len(Obstacle)
        #: requests that left for a worker
        self.num_left = 0
        #: by class, how many came
        self._num_come: dict[int, int] = {}
        #: by class, who left for a worker
        self._left: dict[int, BypassCounter] = {}
        self._left_last: deque[str] = deque(maxlen=_LOOKED_AT)
        #: who is the next one, since when, and the seconds of all obstacles then
        self._next = _NOBODY

    @property
    def num_kept(self) -> int:
        """Requests that are looked back to."""
        return sum(left.num_kept for left in self._left.values())

    # the queue

    def look(self, obstacle: Obstacle | None, now: float) -> None:
        """What holds the queue up from now on."""
        self._seconds = self._held_s(now)
        self._obstacle, self._looked = obstacle, now

    def _held_s(self, now: float) -> Sequence[float]:
        """By obstacle."""
        if self._obstacle is None:
            return self._seconds
        held_s = [*self._seconds]
        held_s[self._obstacle] += max(0.0, now - self._looked)
        return held_s

    def is_next(self, request_id: str, now: float) -> None:
        """It would leave now, if a worker had room."""
        if self._next[0] != request_id:
            self._next = (request_id, now, sum(self._held_s(now)))

    # who comes and goes

    def come(self, waiting: Waiting, num_waiting: int, now: float) -> Arrival:
        if self._next[0] == waiting.request_id:
            # That was another stay of it.
            self._next = _NOBODY
        number = self._num_come.setdefault(waiting.priority, 0)
        arrival = (
            now,
            self.num_left,
            num_waiting,
            *self._held_s(now),
            number,
            *chain.from_iterable(self._num_come.items()),
        )
        self._num_come[waiting.priority] = number + 1
        return arrival

    def leave(self, arrival: Arrival, waiting: Waiting) -> None:
        """It leaves for a worker. Who was told before keeps an older place: it overtakes nobody."""
        self.num_left += 1
        self._left_last.append(waiting.request_id)
        if not waiting.accepted:
            left = self._left.get(waiting.priority)
            if left is None:
                left = self._left[waiting.priority] = BypassCounter()
            left.leave(arrival[_NUMBER])

    def forget(self, oldest: Arrival | None) -> None:
        """Forgets what only those would ask for that came before ``oldest``, the first of those
        that wait; None: nobody waits."""
        numbers = self._num_come if oldest is None else _come(oldest)
        for priority, left in self._left.items():
            left.forget(numbers.get(priority, 0))

    # what came of it

    def _left_later(self, arrival: Arrival) -> dict[int, int]:
        """How many left that came later, by class."""
        numbers = _come(arrival)
        return {
            priority: left.count(numbers.get(priority, 0) - 1)
            for priority, left in self._left.items()
        }

    def told(
        self, arrival: Arrival, waiting: Waiting, order: str, now: float, *, in_turns: bool
    ) -> session_pb2.Stay:
        """Of one that leaves now, from a queue of this order, in which tenants take turns or do
        not."""
        came, before = arrival[0], arrival[3:_NUMBER]
        held_s = [after - at for after, at in zip(self._held_s(now), before, strict=True)]
        queue = self._queue_stay(arrival, waiting, in_turns)
        queue.order = order
        return session_pb2.Stay(
            seconds=now - came,
            leader_s=held_s[Obstacle.LEADER],
            no_worker_s=held_s[Obstacle.NO_WORKER],
            starting_s=held_s[Obstacle.WORKER_STARTS],
            unplaced_s=held_s[Obstacle.WORKER_UNPLACED],
            first_s=self._next_s(waiting.request_id, came, now),
            queue=queue,
        )

    def _next_s(self, request_id: str, came: float, now: float) -> float:
        next_id, since, held_s = self._next
        if next_id != request_id or since < came:
            return 0.0
        return max(0.0, now - since - (sum(self._held_s(now)) - held_s))

    def _queue_stay(self, arrival: Arrival, waiting: Waiting, in_turns: bool) -> pb.QueueStay:
        num_left = self.num_left - arrival[1]
        later = self._left_later(arrival)
        same = later.pop(waiting.priority, 0)
        higher = sum(count for priority, count in later.items() if priority > waiting.priority)
        lower = sum(later.values()) - higher
        return pb.QueueStay(
            found=arrival[2],
            earlier=max(0, num_left - same - higher - lower),
            higher=higher,
            lower=lower,
            turns=same if in_turns else 0,
            ordered=0 if in_turns else same,
            before=self._before(waiting.request_id, num_left),
        )

    def _before(self, request_id: str, num_left: int) -> list[str]:
        """Of its own tenant, those of the last that left while it waited."""
        tenant = tenant_of(request_id)
        last = list(self._left_last)[-num_left:] if num_left else []
        return [each for each in last if tenant_of(each) == tenant][-_TOLD:]


def overtaken(stay: session_pb2.Stay) -> int:
    """How many left before it that came later."""
    return stay.queue.higher + stay.queue.lower + stay.queue.turns + stay.queue.ordered


def _come(arrival: Arrival) -> dict[int, int]:
    """By class, how many had."""
    return dict(zip(arrival[_CLASSES::2], arrival[_CLASSES + 1 :: 2], strict=True))
