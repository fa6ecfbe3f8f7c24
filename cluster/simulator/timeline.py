"""Virtual time, and the calls that are scheduled in it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

_Event: TypeAlias = tuple[float, int, Callable[..., object], tuple[object, ...]]


class Timeline:
    """Queue of scheduled calls, ordered by time; ``now`` is the virtual time in seconds.

    Calls for the same moment are made in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._events: list[_Event] = []

    def at(self, time: float, call: Callable[..., object], *args: object) -> None:
        """Schedule ``call(*args)`` at ``time`` in seconds, which must not be before ``now``."""
        heappush(self._events, (time, next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        heappush(self._events, (self.now + seconds, next(self._numbers), call, args))

    def step(self) -> None:
        """Advance ``now`` to the time of the next scheduled call, and make the call.

        Raises IndexError if no call is scheduled.
        """
        self.now, _, call, args = heappop(self._events)
        call(*args)
