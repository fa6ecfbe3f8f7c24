"""A priority queue whose operations cost about as much with a million items as with a hundred.

The smallest items are a heap. All others lie in rungs, unsorted, each rung's items before those of
the next one:

    front | rung | rung | rung ...

An item is put where it belongs by its rung's bound, and no other item is looked at. Only a rung
that has become the front, or is too large and is parted, is sorted. A heap of a million has 20
levels, each of which lies elsewhere in memory: 2.4 us for a push and a pop instead of 0.6 to 1.4.

Pure.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

#: Items that a rung has after it was parted; twice as many before.
RUNG = 1024


class _Comparable(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


T = TypeVar("T", bound=_Comparable)


class Ladder(Generic[T]):
    def __init__(self) -> None:
        self._front: list[T] = []
        #: of each rung, what none of its items is smaller than
        self._bounds: list[T] = []
        self._rungs: list[list[T]] = []
        #: the rung that is swept next
        self._swept = 0

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._rungs))

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        return chain(self._front, *self._rungs)

    def push(self, item: T) -> None:
        place = bisect_right(self._bounds, item)
        if place:
            rung = self._rungs[place - 1]
            rung.append(item)
        else:
            rung = self._front
            heapq.heappush(rung, item)
        if len(rung) >= 2 * RUNG:
            self._part(rung, place)

    def _part(self, rung: list[T], place: int) -> None:
        """Its larger half is a rung of its own from now on, at ``place``."""
        rung.sort()
        self._rungs.insert(place, rung[RUNG:])
        self._bounds.insert(place, rung[RUNG])
        del rung[RUNG:]

    def head(self) -> T | None:
        """The smallest."""
        if not self._front:
            self._climb()
        return self._front[0] if self._front else None

    def pop(self) -> T:
        """Takes out what ``head`` shows. Raises IndexError where there is nothing."""
        if not self._front:
            self._climb()
        return heapq.heappop(self._front)

    def _climb(self) -> None:
        while not self._front and self._rungs:
            self._front = self._rungs.pop(0)
            self._front.sort()
            del self._bounds[0]

    def sweep(self, wanted: Callable[[T], bool]) -> None:
        """Leaves the unwanted items of one rung out, each time of another one."""
        if self._swept >= len(self._rungs):
            self._swept = 0
            self._front = [item for item in self._front if wanted(item)]
            heapq.heapify(self._front)
        else:
            rung = self._rungs[self._swept]
            rung[:] = filter(wanted, rung)
            if rung:
                self._swept += 1
            else:
                del self._rungs[self._swept], self._bounds[self._swept]
