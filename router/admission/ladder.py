"""A priority queue of tickets whose operations cost about as much with a million as with a hundred.

Each ticket has a number. The smallest are sorted. All others lie in rungs, unsorted, each rung's
before those of the next one:

    front | rung | rung | rung ...

A ticket is put where it belongs by its rung's bound, and no other one is looked at; most bounds
are told apart by their numbers alone. Only a rung that has come up, or is too large and is parted,
is sorted. A heap of a million has 20 levels, each of which lies elsewhere in memory.

A rung is one array, a number and a ticket in turn. Of objects each would lie somewhere else in
memory, and to wait for it is most of what an operation takes with a million. So rungs are few and
large, and the end of each, where the next ticket is put, is still in the processor's cache. One
that comes up is cut into small ones, since the front has places in its middle to be found.

Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: Tickets that the front has after it was parted, or a rung has after it was cut into small ones;
#: twice as many before.
RUNG = 256
#: That any other rung has after it was parted; twice as many before.
LARGE = 32 * RUNG

Item: TypeAlias = tuple[float, int]

#: Numbers and tickets, which are exact as long as they are below 2 to the power of 53: of shape
#: (items, 2).
_Items: TypeAlias = npt.NDArray[np.float64]


class Ladder:
    """Of tickets with equal numbers the one with the smaller ``tie`` is first, and of those with
    equal ties the smaller one. A ticket's tie must not change while anybody wants it; that of one
    that nobody wants any more is smaller than all others, and so may change once."""

    def __init__(self, tie: Callable[[int], Any] = lambda ticket: ()) -> None:
        self._tie = tie
        self._front_numbers: list[float] = []
        self._front_tickets: list[int] = []
        #: of those at the front that share their number, as they were when they were put in order
        self._ties: dict[int, Any] = {}
        #: of each rung, what none of its tickets comes before, and the number that it begins with
        self._bounds: list[tuple[float, tuple[Any, int]]] = []
        self._numbers = array("d")
        self._rungs: list[array[float]] = []
        #: the rung that is swept next
        self._swept = 0

    def __len__(self) -> int:
        return len(self._front_numbers) + sum(len(rung) // 2 for rung in self._rungs)

    def push(self, number: float, ticket: int) -> None:
        at = bisect_right(self._numbers, number)
        if at and self._numbers[at - 1] == number:
            at = bisect_right(self._bounds, (number, (self._tie(ticket), ticket)))
        if not at:
            self._insert(number, ticket)
            return
        rung = self._rungs[at - 1]
        rung.append(number)
        rung.append(ticket)
        if len(rung) >= 4 * LARGE:
            self._part(at)

    def _insert(self, number: float, ticket: int) -> None:
        """At the front."""
        numbers, tickets = self._front_numbers, self._front_tickets
        at = bisect_right(numbers, number)
        if at and numbers[at - 1] == number:
            first = bisect_left(numbers, number)
            at = bisect_right(tickets, self._rank(ticket), first, at, key=self._rank)
        numbers.insert(at, number)
        tickets.insert(at, ticket)
        if len(numbers) >= 2 * RUNG:
            self._part_front()

    def _rank(self, ticket: int) -> tuple[Any, int]:
        """Of one at the front, among those that share its number: as it was the first time."""
        if ticket not in self._ties:
            self._ties[ticket] = self._tie(ticket)
        return self._ties[ticket], ticket

    def _part_front(self) -> None:
        numbers, tickets = self._front_numbers, self._front_tickets
        items = np.array([numbers[RUNG:], tickets[RUNG:]], np.float64).T
        if self._rungs and len(self._rungs[0]) < 2 * LARGE:
            self._rungs[0].extend(_rung(items))
            self._bounds[0], self._numbers[0] = self._bound(items), numbers[RUNG]
        else:
            self._begin(0, items)
        self._keep(numbers[:RUNG], tickets[:RUNG])

    def _keep(self, numbers: list[float], tickets: list[int]) -> None:
        """These are the front."""
        self._front_numbers, self._front_tickets = numbers, tickets
        if self._ties:
            self._ties = {it: self._ties[it] for it in tickets if it in self._ties}

    def _part(self, at: int) -> None:
        """The larger half of the rung before ``at`` is a rung of its own from now on."""
        items = self._sorted(self._rungs[at - 1])
        half = len(items) // 2
        self._rungs[at - 1] = _rung(items[:half])
        self._begin(at, items[half:])

    def _begin(self, at: int, items: _Items) -> None:
        """A rung of these, which are sorted."""
        self._bounds.insert(at, self._bound(items))
        self._numbers.insert(at, float(items[0, 0]))
        self._rungs.insert(at, _rung(items))

    def _bound(self, items: _Items) -> tuple[float, tuple[Any, int]]:
        number, ticket = float(items[0, 0]), int(items[0, 1])
        return number, (self._ties.get(ticket, self._tie(ticket)), ticket)

    def _sorted(self, rung: array[float]) -> _Items:
        items = _items(rung)
        items = items[items[:, 0].argsort()]
        for start, stop in _runs(items):
            run = _tickets(items[start:stop])
            items[start:stop, 1] = sorted(run, key=lambda ticket: (self._tie(ticket), ticket))
        return items

    def head(self) -> Item | None:
        """The first one."""
        if not self._front_numbers:
            self._climb()
        return (self._front_numbers[0], self._front_tickets[0]) if self._front_numbers else None

    def pop(self) -> Item:
        """Takes out what ``head`` shows. Raises IndexError where there is nothing."""
        if not self._front_numbers:
            self._climb()
        number, ticket = self._front_numbers.pop(0), self._front_tickets.pop(0)
        self._ties.pop(ticket, None)
        return number, ticket

    def _climb(self) -> None:
        while not self._front_numbers and self._rungs:
            items = self._sorted(self._rungs.pop(0))
            del self._bounds[0], self._numbers[0]
            if len(items) > 2 * RUNG:
                items = self._cut(items)
            self._front_numbers, self._front_tickets = items[:, 0].tolist(), _tickets(items)
            for start, stop in _runs(items):
                self._ties |= {it: self._tie(it) for it in self._front_tickets[start:stop]}

    def _cut(self, items: _Items) -> _Items:
        """The first of small rungs; the others lie before all that there are."""
        for start in reversed(range(RUNG, len(items), RUNG)):
            self._begin(0, items[start : start + RUNG])
        return items[:RUNG]

    def sweep(self, wanted: Container[int]) -> int:
        """Leaves the unwanted tickets of one rung out, each time of another one; how many it
        had."""
        if self._swept >= len(self._rungs):
            self._swept = 0
            number = len(self._front_numbers)
            self._sweep_front(wanted)
            return number
        items = _items(self._rungs[self._swept])
        number = len(items)
        items = items[[ticket in wanted for ticket in _tickets(items)]]
        if len(items):
            self._rungs[self._swept] = _rung(items)
            self._swept += 1
        else:
            del self._rungs[self._swept], self._bounds[self._swept], self._numbers[self._swept]
        return number

    def _sweep_front(self, wanted: Container[int]) -> None:
        front = zip(self._front_numbers, self._front_tickets, strict=True)
        kept = [item for item in front if item[1] in wanted]
        self._keep([number for number, _ in kept], [ticket for _, ticket in kept])


def _rung(items: _Items) -> array[float]:
    return array("d", items.tobytes())


def _items(rung: array[float]) -> _Items:
    """Nothing can be added as long as they are held."""
    return np.frombuffer(rung).reshape(-1, 2)


def _tickets(items: _Items) -> list[int]:
    tickets: list[int] = items[:, 1].astype(np.int64).tolist()
    return tickets


def _runs(items: _Items) -> Iterator[tuple[int, int]]:
    """From where to where numbers are equal, of two items or more, which are sorted."""
    differs = items[1:, 0] != items[:-1, 0]
    if differs.all():
        return
    for start, stop in pairwise((0, *(np.flatnonzero(differs) + 1).tolist(), len(items))):
        if stop - start > 1:
            yield start, stop
