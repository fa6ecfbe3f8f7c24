"""Where those of one class wait, in the order of a policy. Pure.

A lane is told who comes. Who is gone it finds out by ``present``, the tickets of those that still
wait: what it has of others are holes, left out when they come up or when a part of them is swept.
Who was first in a line leaves none. Places are numbers first, which is all that a lane keeps of
them: by ``places`` it asks for a whole one where numbers are equal.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from math import log2
from typing import TypeAlias

from everlift.request_id import tenant_of
from router.admission.ladder import RUNG, Item, Ladder
from router.admission.token_counters import TokenCounters
from router.admission.waiting import Ordered, Place

#: By ticket; empty of those that wait no more.
Places: TypeAlias = Callable[[int], Place | tuple[()]]

#: Departures after which one rung is swept, or half as many as the one before had: of what a lane
#: has, about a half are holes at most.
_SWEPT_AFTER = RUNG // 2


class Lane(ABC):
    def __init__(self, present: Container[int]) -> None:
        self._present = present

    @abstractmethod
    def push(self, waiting: Ordered, place: Place, ticket: int) -> None:
        """``place`` is the policy's."""

    @abstractmethod
    def head(self, moment: float | None) -> int | None:
        """The ticket of who leaves next at this ledger time in seconds, or by the places alone."""

    @abstractmethod
    def left(self, waiting: Ordered, ticket: int) -> None:
        """It is not present any more."""


class Line:
    """Tickets by a number, with the holes among them. Of equal numbers the smaller place is first,
    or without ``places`` the smaller ticket."""

    def __init__(self, present: Container[int], places: Places | None = None) -> None:
        self._present = present
        self._items = Ladder(places) if places else Ladder()
        self._until_sweep = _SWEPT_AFTER

    def push(self, number: float, ticket: int) -> None:
        self._items.push(number, ticket)

    def first(self) -> Item | None:
        while (item := self._items.head()) is not None and item[1] not in self._present:
            self._items.pop()
        return item

    def left(self, ticket: int) -> None:
        first = self._items.head()
        if first is not None and first[1] == ticket:
            self._items.pop()
            return
        self._until_sweep -= 1
        if not self._until_sweep:
            self._until_sweep = max(_SWEPT_AFTER, self._items.sweep(self._present) // 2)


class KeyLane(Lane):
    """By the key."""

    def __init__(self, present: Container[int], places: Places) -> None:
        super().__init__(present)
        self._line = Line(present, places)

    def push(self, waiting: Ordered, place: Place, ticket: int) -> None:
        self._line.push(place[0], ticket)

    def head(self, moment: float | None) -> int | None:
        return _ticket(self._line.first())

    def left(self, waiting: Ordered, ticket: int) -> None:
        self._line.left(ticket)


class RatioLane(Lane):
    """By how long it has waited for each token that it takes, the highest first.

    Those that take about as many tokens, up to a factor of sqrt(2), are one line, by arrival: of
    each line only the first can be next, so that 40 lines do for a million tokens. A request's
    tokens count as those of its line.

    Those whose tokens nobody knows leave by arrival: no one that came later goes before them, and
    they go before no one that came earlier.
    """

    def __init__(self, present: Container[int], places: Places) -> None:
        super().__init__(present)
        self._places = places
        #: by twice the binary logarithm of the tokens
        self._lines: dict[int, Line] = {}
        #: of unknown tokens
        self._by_arrival = Line(present, places)

    def push(self, waiting: Ordered, place: Place, ticket: int) -> None:
        line = self._line_of(waiting)
        if line is None:
            line = self._lines[_size(waiting)] = Line(self._present, self._places)
        line.push(place[0], ticket)

    def _line_of(self, waiting: Ordered) -> Line | None:
        return self._lines.get(_size(waiting)) if waiting.predicted_total else self._by_arrival

    def head(self, moment: float | None) -> int | None:
        firsts = self._firsts()
        unknown = self._by_arrival.first()
        if unknown is not None:
            firsts = [(size, item) for size, item in firsts if self._came_before(item, unknown)]
        if moment is None:
            return _ticket(self._earliest([item for _, item in firsts]) or unknown)
        ratios = (
            (min(0.0, item[0] - moment) / tokens, item)
            for size, item in firsts
            if (tokens := 2 ** (size / 2))
        )
        return _ticket(min(ratios, default=(0.0, unknown))[1])

    def _firsts(self) -> list[tuple[int, Item]]:
        """Of each line, with its size."""
        firsts = [(size, it) for size, line in self._lines.items() if (it := line.first())]
        if len(firsts) < len(self._lines):
            self._lines = {size: self._lines[size] for size, _ in firsts}
        return firsts

    def _came_before(self, one: Item, other: Item) -> bool:
        if one[0] != other[0]:
            return one[0] < other[0]
        return self._places(one[1]) < self._places(other[1])

    def _earliest(self, items: Sequence[Item]) -> Item | None:
        arrived = min((it[0] for it in items), default=None)
        tied = (it for it in items if it[0] == arrived)
        return min(tied, key=lambda it: self._places(it[1]), default=None)

    def left(self, waiting: Ordered, ticket: int) -> None:
        if (line := self._line_of(waiting)) is not None:
            line.left(ticket)


class StarvationLane(Lane):
    """As another lane, but who has waited for ``limit_s`` leaves first, by arrival."""

    def __init__(self, inner: Lane, limit_s: float, present: Container[int]) -> None:
        super().__init__(present)
        self._inner = inner
        self._limit_s = limit_s
        self._by_arrival = Line(present)

    def push(self, waiting: Ordered, place: Place, ticket: int) -> None:
        self._inner.push(waiting, place, ticket)
        self._by_arrival.push(waiting.arrived, ticket)

    def head(self, moment: float | None) -> int | None:
        oldest = self._by_arrival.first()
        if oldest is not None and moment is not None and moment - oldest[0] >= self._limit_s:
            return _ticket(oldest)
        return self._inner.head(moment)

    def left(self, waiting: Ordered, ticket: int) -> None:
        self._inner.left(waiting, ticket)
        self._by_arrival.left(ticket)


class FairLane(Lane):
    """A lane for each tenant, and the turn is that of who was served least. By the places alone
    tenants are not told apart."""

    def __init__(
        self,
        make: Callable[[], Lane],
        counters: TokenCounters,
        present: Container[int],
        places: Places,
    ) -> None:
        super().__init__(present)
        self._make = make
        self._counters = counters
        self._by_key = KeyLane(present, places)
        self._lanes: dict[str, Lane] = {}
        #: by their counters, as they were: they only grow
        self._tenants: list[tuple[float, str]] = []

    def push(self, waiting: Ordered, place: Place, ticket: int) -> None:
        self._by_key.push(waiting, place, ticket)
        tenant = tenant_of(waiting.request_id)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = self._make()
            heapq.heappush(self._tenants, (self._counters.of(tenant), tenant))
        lane.push(waiting, place, ticket)

    def head(self, moment: float | None) -> int | None:
        if moment is None:
            return self._by_key.head(None)
        while self._tenants:
            counter, tenant = self._tenants[0]
            if counter < self._counters.of(tenant):
                heapq.heapreplace(self._tenants, (self._counters.of(tenant), tenant))
            elif (ticket := self._lanes[tenant].head(moment)) is not None:
                return ticket
            else:
                heapq.heappop(self._tenants)
                del self._lanes[tenant]
        return None

    def left(self, waiting: Ordered, ticket: int) -> None:
        self._by_key.left(waiting, ticket)
        if (lane := self._lanes.get(tenant_of(waiting.request_id))) is not None:
            lane.left(waiting, ticket)


def _size(waiting: Ordered) -> int:
    return round(2 * log2(waiting.predicted_total))


def _ticket(item: Item | None) -> int | None:
    return None if item is None else item[1]
