"""The lanes of all classes: a higher class goes first, and a lower one is not forgotten. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from router.admission.fair_share import FairShare
from router.admission.lanes import FairLane, Lane, Queued
from router.admission.policy import Policy
from router.admission.request import Waiting

_NOBODY = (0, None)


class Classes:
    """``numbers`` has how many requests are queued, of each class that has any.

    For every token of work that leaves while a lower class waits, that one is owed ``floor``
    tokens. Its next request leaves once its work is owed.

    So of the work that higher classes got while a class waited, it got that part, less at most one
    of its requests. What it is owed is forgotten when nothing of it waits.

    With a ``fair_share`` tenants of a class take turns by it.
    """

    def __init__(
        self,
        policy: Policy,
        numbers: Mapping[int, int],
        floor: float,
        fair_share: FairShare | None,
    ) -> None:
        self._policy = policy
        self._numbers = numbers
        self.floor = floor
        self._fair_share = fair_share
        self._lanes: dict[int, Lane] = {}
        #: classes that have a lane, the lowest first
        self._ascending: list[int] = []
        #: tokens of work
        self._owed: dict[int, float] = {}

    @property
    def in_turns(self) -> bool:
        """Tenants take turns."""
        return self._fair_share is not None

    def push(self, queued: Queued) -> None:
        waiting = queued.waiting
        lane = self._lanes.get(waiting.priority)
        if lane is None:
            lane = self._lanes[waiting.priority] = self._lane(waiting.priority)
            insort(self._ascending, waiting.priority)
        lane.push(queued, self._policy.place(waiting))

    def _lane(self, priority: int) -> Lane:
        if self._fair_share is None:
            return self._plain_lane()
        counters = self._fair_share.counters(priority)
        return FairLane(self._plain_lane, counters)

    def _plain_lane(self) -> Lane:
        return self._policy.lane()

    def left(self, queued: Queued) -> None:
        """Note that a request has left."""
        priority = queued.waiting.priority
        if priority in self._numbers:
            self._lanes[priority].left(queued)
        else:
            self._remove(priority)

    def clear(self) -> None:
        """Of classes that nobody is of any more."""
        for priority in self._lanes.keys() - self._numbers.keys():
            self._remove(priority)

    def _remove(self, priority: int) -> None:
        del self._lanes[priority]
        self._ascending.remove(priority)
        self._owed.pop(priority, None)

    def head(self, moment: float | None) -> Queued | None:
        """Who leaves next, at this ledger time in seconds, or by class and place alone."""
        heads = self._heads(moment)
        _, highest = next(heads, _NOBODY)
        if moment is None or not self._owed:
            return highest
        for priority, queued in heads:
            if self._owed.get(priority, 0.0) >= queued.waiting.work_tokens:
                return queued
        return highest

    def highest(self, moment: float | None) -> Queued | None:
        """The same, but for what lower classes are owed."""
        return next(self._heads(moment), _NOBODY)[1]

    def serve(self, waiting: Waiting) -> None:
        """It leaves for a worker."""
        if not self.floor or len(self._ascending) < 2:
            return
        work = waiting.work_tokens
        if self._ascending[-1] > waiting.priority and waiting.priority in self._owed:
            self._owed[waiting.priority] = max(0.0, self._owed[waiting.priority] - work)
        for priority in self._ascending:
            if priority >= waiting.priority:
                break
            self._owed[priority] = self._owed.get(priority, 0.0) + self.floor * work

    def _heads(self, moment: float | None) -> Iterator[tuple[int, Queued]]:
        """By class, the highest first."""
        for priority in reversed(self._ascending):
            queued = self._lanes[priority].head(moment)
            if queued is not None:
                yield priority, queued
