"""Waits of requests in the queue and their causes. Pure.

A request waits while there is no worker, while no worker has room for it, and while other requests
precede it: earlier ones, ones of a higher class, or ones that the rules prefer. All clocks and
counts only grow. They are stored when a request arrives and compared with their values when it
leaves, so that no cost grows with the length of the queue.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any, TypeAlias

from everlift.request_id import tenant_of
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.request import Waiting

#: Number of tickets per block, and of blocks per row, of the sums that speed up counting.
_BLOCK, _ROW = 512, 64


class BypassCounter:
    """Record of departures, to count the later requests that left the queue before a given one.

    A ticket is the number of a request in order of arrival.
    """

    def __init__(self) -> None:
        #: smallest ticket that is kept
        self._first = 0
        self._departed = bytearray()
        self._of_block: list[int] = []
        self._of_row: list[int] = []

    @property
    def num_retained(self) -> int:
        """Number of tickets that are kept in memory."""
        return len(self._departed)

    def note_departure(self, ticket: int) -> None:
        place = ticket - self._first
        if place >= len(self._departed):
            self._grow(place)
        self._departed[place] = 1
        self._of_block[place // _BLOCK] += 1
        self._of_row[place // (_BLOCK * _ROW)] += 1

    def count(self, ticket: int) -> int:
        """Return how many requests with a larger ticket have left the queue."""
        place = ticket - self._first
        if place >= len(self._departed):
            return 0
        block = place // _BLOCK
        row = block // _ROW
        return (
            self._departed.count(1, place + 1, (block + 1) * _BLOCK)
            + sum(self._of_block[block + 1 : (row + 1) * _ROW])
            + sum(self._of_row[row + 1 :])
        )

    def prune(self, oldest: int) -> None:
        """Forget tickets below ``oldest``; memory is freed in multiples of 32,768 tickets."""
        rows = min((oldest - self._first) // (_BLOCK * _ROW), len(self._of_row))
        if rows > 0:
            del self._departed[: rows * _ROW * _BLOCK]
            del self._of_block[: rows * _ROW]
            del self._of_row[:rows]
            self._first += rows * _ROW * _BLOCK

    def _grow(self, place: int) -> None:
        rows = place // (_BLOCK * _ROW) + 1 - len(self._of_row)
        self._departed.extend(bytes(rows * _ROW * _BLOCK))
        self._of_block.extend([0] * (rows * _ROW))
        self._of_row.extend([0] * rows)


#: Number of last departures that are searched for those of a tenant, and maximum number of their
#: ids in a report.
_MAX_SEARCHED, _MAX_REPORTED = 16, 8


#: Clocks and counts at the arrival of a request: the time, departures, queued requests, seconds
#: without a worker, and its number in its class. Then for each class its priority and its arrivals.
Arrival: TypeAlias = tuple[Any, ...]

_NUMBER = 4
_CLASSES = _NUMBER + 1


class WaitStatistics:
    """Statistics of waits in the queue; ``now`` is in seconds and never decreases."""

    def __init__(self) -> None:
        self._has_worker = True
        self._updated_at = 0.0
        #: seconds without any worker, as of the last update
        self._no_worker_s = 0.0
        #: number of requests that left for a worker
        self.num_departed = 0
        #: number of arrivals, by class
        self._num_arrived: dict[int, int] = {}
        #: numbers of the requests that left for a worker, by class
        self._departures: dict[int, BypassCounter] = {}
        self._last_departed: deque[str] = deque(maxlen=_MAX_SEARCHED)

    @property
    def num_retained(self) -> int:
        """Number of tickets that are kept in memory, over all classes."""
        return sum(counter.num_retained for counter in self._departures.values())

    # time without workers

    def update(self, now: float, *, has_worker: bool) -> None:
        """Record whether there is any worker from ``now`` on."""
        self._no_worker_s = self._without_worker_s(now)
        self._has_worker, self._updated_at = has_worker, now

    def _without_worker_s(self, now: float) -> float:
        since_s = 0.0 if self._has_worker else max(0.0, now - self._updated_at)
        return self._no_worker_s + since_s

    # arrivals and departures

    def note_arrival(self, waiting: Waiting, num_waiting: int, now: float) -> Arrival:
        number = self._num_arrived.setdefault(waiting.priority, 0)
        arrival = (
            now,
            self.num_departed,
            num_waiting,
            self._without_worker_s(now),
            number,
            *chain.from_iterable(self._num_arrived.items()),
        )
        self._num_arrived[waiting.priority] = number + 1
        return arrival

    def note_departure(self, arrival: Arrival, waiting: Waiting) -> None:
        """Record that a request leaves for a worker.

        A request that was accepted before has been queued again with its older arrival time, so it
        does not count as bypassing others.
        """
        self.num_departed += 1
        self._last_departed.append(waiting.request_id)
        if not waiting.accepted:
            counter = self._departures.get(waiting.priority)
            if counter is None:
                counter = self._departures[waiting.priority] = BypassCounter()
            counter.note_departure(arrival[_NUMBER])

    def prune(self, oldest: Arrival | None) -> None:
        """Drop records that no queued request needs.

        ``oldest`` is what was recorded at the arrival of the oldest queued request; None means that
        no request is queued.
        """
        numbers = self._num_arrived if oldest is None else _arrivals_by_class(oldest)
        for priority, counter in self._departures.items():
            counter.prune(numbers.get(priority, 0))

    # waits of departures

    def _departed_later(self, arrival: Arrival) -> dict[int, int]:
        numbers = _arrivals_by_class(arrival)
        return {
            priority: counter.count(numbers.get(priority, 0) - 1)
            for priority, counter in self._departures.items()
        }

    def wait_of(
        self, arrival: Arrival, waiting: Waiting, order: str, now: float, *, is_fair: bool
    ) -> session_pb2.QueueWait:
        """Return the wait of a request that leaves now, and how many requests left before it.

        The requests before it are counted by cause: earlier arrival, class, fair share, or policy.
        ``arrival`` is the result of ``note_arrival`` for the request. ``order`` is the name of the
        queue policy, and ``is_fair`` states whether fair shares are in effect.
        """
        queue = self._bypass(arrival, waiting, is_fair)
        queue.order = order
        return session_pb2.QueueWait(
            seconds=now - arrival[0],
            no_worker_s=self._without_worker_s(now) - arrival[3],
            queue=queue,
        )

    def _bypass(self, arrival: Arrival, waiting: Waiting, is_fair: bool) -> pb.QueueBypass:
        num_departed = self.num_departed - arrival[1]
        later = self._departed_later(arrival)
        same = later.pop(waiting.priority, 0)
        higher = sum(count for priority, count in later.items() if priority > waiting.priority)
        lower = sum(later.values()) - higher
        return pb.QueueBypass(
            found=arrival[2],
            earlier=max(0, num_departed - same - higher - lower),
            higher=higher,
            lower=lower,
            fair_share=same if is_fair else 0,
            ordered=0 if is_fair else same,
            before=self._before(waiting.request_id, num_departed),
        )

    def _before(self, request_id: str, num_departed: int) -> list[str]:
        tenant = tenant_of(request_id)
        last = list(self._last_departed)[-num_departed:] if num_departed else []
        return [each for each in last if tenant_of(each) == tenant][-_MAX_REPORTED:]


def bypassed(queue_wait: session_pb2.QueueWait) -> int:
    """Return how many later requests left before the request with this wait."""
    return (
        queue_wait.queue.higher
        + queue_wait.queue.lower
        + queue_wait.queue.fair_share
        + queue_wait.queue.ordered
    )


def _arrivals_by_class(arrival: Arrival) -> dict[int, int]:
    return dict(zip(arrival[_CLASSES::2], arrival[_CLASSES + 1 :: 2], strict=True))
