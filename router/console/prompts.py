"""Prompt tokens and prefix-cache hits of the last five minutes, for the console. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple

#: Seconds that recent prompts cover.
_WINDOW_S = 300.0
#: Minimum seconds between two updates, which bounds their cost.
_INTERVAL_S = 1.0
#: Minimum seconds between two samples of a counter, which bounds their number.
_SAMPLE_INTERVAL_S = 5.0


class Prompts(NamedTuple):
    """Number of prompt tokens, and how many of them are prefix-cache hits."""

    tokens: int = 0
    cached: int = 0

    def plus(self, other: Prompts) -> Prompts:
        """Return the sums of the numbers of two workers, routers or tenants."""
        return Prompts(self.tokens + other.tokens, self.cached + other.cached)


class _Counter:
    def __init__(self, before: Prompts, now: float) -> None:
        self._samples = deque([(now, before)])
        self.recent = Prompts()

    def note(self, total: Prompts, now: float) -> None:
        if now - self._samples[-1][0] >= _SAMPLE_INTERVAL_S:
            self._samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()
        before = self._samples[0][1]
        self.recent = Prompts(total.tokens - before.tokens, total.cached - before.cached)


class RecentPrompts:
    """Prompt tokens and cache hits of the last five minutes, by the name of a worker or tenant.

    ``before`` maps names to the totals from which their prompts are counted; the prompts of any
    other name are counted from zero. If ``before`` is None, prompts are counted from the first
    total of each name.
    """

    def __init__(self, before: Mapping[str, Prompts] | None = None) -> None:
        self._before = before
        self._counters: dict[str, _Counter] = {}
        self._noted_at = -inf

    def note(self, totals: Iterable[tuple[str, Prompts]], now: float) -> None:
        """Store the total of each name since the start, as of ``now``, in seconds.

        Names that are not in ``totals`` are removed. Within a second after the last update, nothing
        is stored.
        """
        if now - self._noted_at < _INTERVAL_S:
            return
        self._noted_at = now
        self._counters = {name: self._noted(name, total, now) for name, total in totals}

    def _noted(self, name: str, total: Prompts, now: float) -> _Counter:
        counter = self._counters.get(name)
        if counter is None:
            before = total if self._before is None else self._before.get(name, Prompts())
            counter = _Counter(before, now)
        counter.note(total, now)
        return counter

    def of(self, name: str) -> Prompts:
        """Return the recent prompts of a name; zeros if it is unknown."""
        counter = self._counters.get(name)
        return counter.recent if counter is not None else Prompts()

    def items(self) -> Iterator[tuple[str, Prompts]]:
        """Yield all names with their recent prompts."""
        return ((name, counter.recent) for name, counter in self._counters.items())
