"""A priority queue whose operations cost about as much with a million items as with a hundred.

Items are tuples that begin with a number. The smallest are sorted. All others lie in rungs,
unsorted, each rung's items before those of the next one:

    front | rung | rung | rung ...

An item is put where it belongs by its rung's bound, and no other item is looked at; most bounds
are told apart by their numbers alone. Only a rung that has become the front, or is too large and is
parted, is sorted: it is in the CPU's caches then. A heap of a million has 20 levels, each of which
lies elsewhere in memory.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

#: Items that a rung has after it was parted; twice as many before.
RUNG = 256

Item: TypeAlias = tuple[Any, ...]

_NUMBER = itemgetter(0)


class Ladder:
    def __init__(self) -> None:
        self._front: list[Item] = []
        #: of each rung, what none of its items is smaller than, and the number that it begins with
        self._bounds: list[Item] = []
        self._numbers: list[float] = []
        self._rungs: list[list[Item]] = []
        #: the rung that is swept next
        self._swept = 0

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._rungs))

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        return chain(self._front, *self._rungs)

    def push(self, item: Item) -> None:
        place = bisect_right(self._numbers, item[0])
        if place and self._numbers[place - 1] == item[0]:
            place = bisect_right(self._bounds, item)
        if place:
            rung = self._rungs[place - 1]
            rung.append(item)
        else:
            rung = self._front
            insort(rung, item)
        if len(rung) >= 2 * RUNG:
            self._part(rung, place)

    def _part(self, rung: list[Item], place: int) -> None:
        """Its larger half is a rung of its own from now on, at ``place``."""
        _sort(rung)
        bound = rung[RUNG]
        self._rungs.insert(place, rung[RUNG:])
        self._bounds.insert(place, bound)
        self._numbers.insert(place, bound[0])
        del rung[RUNG:]

    def head(self) -> Item | None:
        """The smallest."""
        if not self._front:
            self._climb()
        return self._front[0] if self._front else None

    def pop(self) -> Item:
        """Takes out what ``head`` shows. Raises IndexError where there is nothing."""
        if not self._front:
            self._climb()
        return self._front.pop(0)

    def _climb(self) -> None:
        while not self._front and self._rungs:
            self._front = self._rungs.pop(0)
            _sort(self._front)
            del self._bounds[0], self._numbers[0]

    def sweep(self, wanted: Callable[[Item], bool]) -> None:
        """Leaves the unwanted items of one rung out, each time of another one."""
        if self._swept >= len(self._rungs):
            self._swept = 0
            self._front = [item for item in self._front if wanted(item)]
        else:
            rung = self._rungs[self._swept]
            rung[:] = filter(wanted, rung)
            if rung:
                self._swept += 1
            else:
                for of_rungs in (self._rungs, self._bounds, self._numbers):
                    del of_rungs[self._swept]


def _sort(items: list[Item]) -> None:
    """Numbers are compared several times as fast as items that begin with them."""
    items.sort(key=_NUMBER)
    if len(set(map(_NUMBER, items))) < len(items):
        items.sort()
