"""Lanes: priority queues of the requests of one priority class. Pure.

A lane orders requests by their places, the sort keys that a queue policy gives them; some lanes
also consider the time. It keeps requests in heaps with lazy deletion: a request that has left the
queue is skipped when it gets to the top of its heap. A heap is rebuilt when about half of its
requests have left.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import log2
from typing import Any, TypeAlias

from everlift.request_id import tenant_of
from router.admission.fair_share import TokenCounters
from router.admission.parking import Wait
from router.admission.request import Ordered, Place, Waiting
from router.admission.wait_stats import Arrival

#: Entry of a heap: the elements of a place, a ticket and the ``Queued`` request. Entries are sorted
#: by place, then by ticket.
Item: TypeAlias = tuple[Any, ...]

#: Number of departed requests that a heap may hold, however few requests are queued.
_FEW_DEPARTED = 64


class Queued:
    """Queued request, with its number in order of queueing (``ticket``).

    ``arrival`` holds the clocks and counts of the wait statistics when the request was queued. A
    parked request waits for certain workers (``Wait``), and is in no lane. ``wait`` is the last
    such wait, kept after its end; None if the request was never parked. ``parked_s`` is the total
    duration of the ended waits in seconds.
    """

    __slots__ = ("arrival", "is_parked", "is_queued", "parked_s", "ticket", "wait", "waiting")

    def __init__(self, waiting: Waiting, ticket: int, arrival: Arrival) -> None:
        self.waiting = waiting
        self.ticket = ticket
        self.arrival = arrival
        self.is_queued = True
        self.is_parked = False
        self.parked_s = 0.0
        self.wait: Wait | None = None

    @property
    def is_parked_without_worker(self) -> bool:
        """Return whether the request is parked and waits for no particular worker."""
        return self.is_parked and self.wait is not None and not self.wait.worker_id

    def __lt__(self, other: Queued) -> bool:
        """Return whether this object is outdated; an outdated heap entry sorts first.

        Parking a request replaces its object, and the old one may stay in a heap. Heap entries with
        equal places and tickets are therefore objects of one request, and at most one is still
        queued.
        """
        return not self.is_queued


class Lane(ABC):
    @abstractmethod
    def push(self, queued: Queued, place: Place) -> None:
        """Add a request with the sort key ``place``.

        The request with the smallest key is the result of ``head(None)``.
        """

    @abstractmethod
    def head(self, ledger_now: float | None) -> Queued | None:
        """Return the request that leaves next at the ledger time ``ledger_now``, in seconds.

        If ``ledger_now`` is None, the one with the smallest sort key is returned. Return None if
        the lane is empty. The request stays in the lane.
        """

    @abstractmethod
    def note_removed(self, queued: Queued) -> None:
        """Record that a request has left the queue."""


class RequestHeap:
    """Heap of requests by sort key, with lazy deletion. Operations are O(log n) amortised."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        #: departed requests that are still in the heap
        self._num_departed = 0

    def push(self, queued: Queued, place: Place) -> None:
        heapq.heappush(self._items, (*place, queued.ticket, queued))

    def first(self) -> Item | None:
        items = self._items
        while items and not items[0][-1].is_queued:
            heapq.heappop(items)
            self._num_departed -= 1
        return items[0] if items else None

    def note_removed(self, queued: Queued) -> None:
        """Record that a request of this heap has left the queue; the heap drops it now or later.

        ``queued.is_queued`` must already be False. Each request is recorded only once.
        """
        items = self._items
        if items and items[0][-1] is queued:
            heapq.heappop(items)
            return
        self._num_departed += 1
        if self._num_departed > max(_FEW_DEPARTED, len(items) // 2):
            self._items = [item for item in items if item[-1].is_queued]
            heapq.heapify(self._items)
            self._num_departed = 0


class KeyLane(Lane):
    """Lane from which the request with the smallest sort key leaves first."""

    def __init__(self) -> None:
        self._heap = RequestHeap()

    def push(self, queued: Queued, place: Place) -> None:
        self._heap.push(queued, place)

    def head(self, ledger_now: float | None) -> Queued | None:
        return _queued(self._heap.first())

    def note_removed(self, queued: Queued) -> None:
        self._heap.note_removed(queued)


class RatioLane(Lane):
    """Lane in which the request with the longest wait relative to its size leaves first.

    The size is the predicted number of uncached prompt tokens and of output tokens. Requests whose
    sizes differ by less than a factor of about sqrt(2) form one heap, sorted by arrival, and are
    treated as equally large; 40 heaps cover a million tokens. A request of unknown size is not
    bypassed by later requests and bypasses no earlier one.
    """

    def __init__(self) -> None:
        #: by twice the binary logarithm of the tokens, rounded
        self._heaps: dict[int, RequestHeap] = {}
        #: requests of unknown size
        self._by_arrival = RequestHeap()

    def push(self, queued: Queued, place: Place) -> None:
        heap = self._heap_of(queued.waiting)
        if heap is None:
            heap = self._heaps[_size(queued.waiting)] = RequestHeap()
        heap.push(queued, place)

    def _heap_of(self, waiting: Ordered) -> RequestHeap | None:
        return (
            self._heaps.get(_size(waiting))
            if waiting.queue_key.predicted_total
            else self._by_arrival
        )

    def head(self, ledger_now: float | None) -> Queued | None:
        firsts = self._firsts()
        unknown = self._by_arrival.first()
        if unknown is not None:
            firsts = [(size, item) for size, item in firsts if item < unknown]
        if ledger_now is None:
            return _queued(min((item for _, item in firsts), default=unknown))
        ratios = (
            (min(0.0, item[0] - ledger_now) / tokens, item)
            for size, item in firsts
            if (tokens := 2 ** (size / 2))
        )
        return _queued(min(ratios, default=(0.0, unknown))[1])

    def _firsts(self) -> list[tuple[int, Item]]:
        firsts = [(size, it) for size, heap in self._heaps.items() if (it := heap.first())]
        if len(firsts) < len(self._heaps):
            self._heaps = {size: self._heaps[size] for size, _ in firsts}
        return firsts

    def note_removed(self, queued: Queued) -> None:
        if (heap := self._heap_of(queued.waiting)) is not None:
            heap.note_removed(queued)


class LeaderKeyLane(Lane):
    """Lane ordered by ``key``, which only the leader can compute, instead of by place.

    ``head(None)`` returns the request with the smallest place, because routers report requests in
    the order of their places.
    """

    def __init__(self, key: Callable[[Waiting], Place]) -> None:
        self._key = key
        self._by_key = RequestHeap()
        self._by_place = RequestHeap()

    def push(self, queued: Queued, place: Place) -> None:
        self._by_key.push(queued, self._key(queued.waiting))
        self._by_place.push(queued, place)

    def head(self, ledger_now: float | None) -> Queued | None:
        heap = self._by_place if ledger_now is None else self._by_key
        return _queued(heap.first())

    def note_removed(self, queued: Queued) -> None:
        self._by_key.note_removed(queued)
        self._by_place.note_removed(queued)


class StarvationLane(Lane):
    """Lane ordered by ``inner``, except for requests that have waited ``limit_s`` seconds.

    These leave before all others, in order of arrival.
    """

    def __init__(self, inner: Lane, limit_s: float) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._by_arrival = RequestHeap()

    def push(self, queued: Queued, place: Place) -> None:
        self._inner.push(queued, place)
        self._by_arrival.push(queued, (queued.waiting.arrived,))

    def head(self, ledger_now: float | None) -> Queued | None:
        oldest = self._by_arrival.first()
        if (
            oldest is not None
            and ledger_now is not None
            and ledger_now - oldest[0] >= self._limit_s
        ):
            return _queued(oldest)
        return self._inner.head(ledger_now)

    def note_removed(self, queued: Queued) -> None:
        self._inner.note_removed(queued)
        self._by_arrival.note_removed(queued)


class FairLane(Lane):
    """Lane in which the tenant with the smallest token counter is served first.

    ``make_lane`` creates the lane that orders the requests of one tenant. ``head(None)`` ignores
    tenants and returns the request with the smallest sort key.
    """

    def __init__(self, make_lane: Callable[[], Lane], counters: TokenCounters) -> None:
        self._make_lane = make_lane
        self._counters = counters
        self._by_key = KeyLane()
        self._lanes: dict[str, Lane] = {}
        #: heap of (counter, tenant), whose entries may be outdated, because counters grow
        self._tenants: list[tuple[float, str]] = []

    def push(self, queued: Queued, place: Place) -> None:
        self._by_key.push(queued, place)
        tenant = tenant_of(queued.waiting.request_id)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = self._make_lane()
            heapq.heappush(self._tenants, (self._counters.counter_of(tenant), tenant))
        lane.push(queued, place)

    def head(self, ledger_now: float | None) -> Queued | None:
        if ledger_now is None:
            return self._by_key.head(None)
        while self._tenants:
            counter, tenant = self._tenants[0]
            if counter < self._counters.counter_of(tenant):
                heapq.heapreplace(self._tenants, (self._counters.counter_of(tenant), tenant))
            elif (queued := self._lanes[tenant].head(ledger_now)) is not None:
                return queued
            else:
                heapq.heappop(self._tenants)
                del self._lanes[tenant]
        return None

    def note_removed(self, queued: Queued) -> None:
        self._by_key.note_removed(queued)
        if (lane := self._lanes.get(tenant_of(queued.waiting.request_id))) is not None:
            lane.note_removed(queued)


def _size(waiting: Ordered) -> int:
    return round(2 * log2(waiting.queue_key.predicted_total))


def _queued(item: Item | None) -> Queued | None:
    return None if item is None else item[-1]
