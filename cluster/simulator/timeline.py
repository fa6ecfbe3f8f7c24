"""Virtual time: what is to happen, in the order of its moments. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

_Event: TypeAlias = tuple[float, int, Callable[..., object], tuple[object, ...]]


class Timeline:
    """Timeline of events; ``now`` is in seconds.

    What is to happen at the same moment happens in the order in which that was said.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._events: list[_Event] = []

    def at(self, moment: float, call: Callable[..., object], *args: object) -> None:
        """Schedule a call at ``moment``, which is not before now."""
        heappush(self._events, (moment, next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        heappush(self._events, (self.now + seconds, next(self._numbers), call, args))

    def step(self) -> None:
        """Advance to the next event. Raises IndexError without one."""
        self.now, _, call, args = heappop(self._events)
        call(*args)
