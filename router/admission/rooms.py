"""When how many rooms came free in the queue, as a gateway knows it. Pure.

The leader says five times a second how many requests have left its queue. What is between two of
its words is on the line between them, and what comes behind the last one is as it foresees it. Of
several gateways each counts on its part of the rooms.

Some are told to come after seconds, some after an hour: of what was long ago fewer words are kept,
one for each hundredth of the time since then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from everlift.v1 import session_pb2

#: The part of the time since a word by which the next one is later at least, once they are thinned
#: out, and the words after which they are.
_APART, _THINNED_AFTER = 0.01, 350


class Rooms:
    """They are numbered as they come. Moments are seconds, and ``now`` never goes back."""

    def __init__(self) -> None:
        #: that are foreseen for a second; 0: not known
        self.per_s = 0.0
        #: of the leader's words, and the numbers that were reached by then
        self._moments: list[float] = []
        self._numbers: list[float] = []
        #: moments at which nobody waited: there was room for all
        self._empty: list[float] = []
        #: as the leader said last
        self._left: int | None = None
        self._until_thinned = _THINNED_AFTER

    def hear(self, outlook: session_pb2.Outlook, queued: int, now: float) -> None:
        """The leader's word; so many wait."""
        self.per_s = outlook.rooms_per_s
        number = self._numbers[-1] if self._numbers else 0.0
        self._moments.append(now)
        self._numbers.append(number + self._came(outlook.left) / max(1, outlook.gateways))
        if not queued:
            self._empty.append(now)
        self._until_thinned -= 1
        if not self._until_thinned:
            self._until_thinned = _THINNED_AFTER
            self._thin_out(now)

    def _thin_out(self, now: float) -> None:
        kept = [*_apart(self._moments, now)]
        self._moments = [self._moments[i] for i in kept]
        self._numbers = [self._numbers[i] for i in kept]
        self._empty = [self._empty[i] for i in _apart(self._empty, now)]

    def _came(self, left: int) -> int:
        """Rooms of all gateways since the last word. A new leader counts from 0."""
        before, self._left = self._left, left
        if before is None:
            return 0
        return left - before if left >= before else left

    def foreseen(self, after_s: float, now: float) -> float | None:
        """The number that will be reached after so long; None: nobody knows."""
        return self._reached(now + after_s) if self.per_s else None

    def _reached(self, moment: float) -> float:
        """At a moment behind the last word."""
        return self._numbers[-1] + self.per_s * (moment - self._moments[-1])

    def moment(self, number: float, since: float, now: float) -> float:
        """At which this number was reached or will be, as is foreseen by now, at the earliest; or,
        if that was before, at which nobody waited, not before ``since``."""
        empty = bisect_left(self._empty, since)
        return min(self._when(number, now), *self._empty[empty : empty + 1], inf)

    def _when(self, number: float, now: float) -> float:
        after = bisect_left(self._numbers, number)
        if after == len(self._numbers):
            rest = max(0.0, number - self._reached(now))
            return now + rest / self.per_s if self.per_s else now
        before = max(0, after - 1)
        rooms = self._numbers[after] - self._numbers[before]
        part = (self._numbers[after] - number) / rooms if rooms else 0.0
        return self._moments[after] - part * (self._moments[after] - self._moments[before])


def _apart(moments: Sequence[float], now: float) -> Iterator[int]:
    """Which of them to keep: the first, the last, and what is far enough from the one before."""
    before = -inf
    for i, moment in enumerate(moments):
        if moment - before >= _APART * (now - moment) or i == len(moments) - 1:
            yield i
            before = moment
