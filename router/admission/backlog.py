"""What waits, by what an overloaded queue looks at: who is to go first, and how much is before
whom. Pure.

It is told who comes and goes; every operation is O(log n), or O(classes).
"""

from __future__ import annotations

from math import inf

from router.admission.lanes import Line, Queued


class Backlog:
    """Times are ledger time in seconds."""

    def __init__(self) -> None:
        #: to be computed for all, as predicted, and by class
        self.work_tokens = 0
        self._work: dict[int, int] = {}
        #: requests that have not run by ticket, by class, the newest last
        self._fresh: dict[int, dict[int, Queued]] = {}
        self._expiring = Line()

    def add(self, queued: Queued) -> None:
        waiting = queued.waiting
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens += work
        self._work[priority] = self._work.get(priority, 0) + work
        if not waiting.has_run:
            if priority not in self._fresh:
                self._fresh[priority] = {}
            self._fresh[priority][queued.ticket] = queued
        if waiting.expires < inf:
            self._expiring.push(queued, (waiting.expires,))

    def remove(self, queued: Queued) -> None:
        """Note that a request has left."""
        waiting = queued.waiting
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens -= work
        left = self._work[priority] = self._work.get(priority, 0) - work
        if not left:
            del self._work[priority]
        if not waiting.has_run:
            fresh = self._fresh[priority]
            del fresh[queued.ticket]
            if not fresh:
                del self._fresh[priority]
        if waiting.expires < inf:
            self._expiring.left(queued)

    @property
    def work(self) -> dict[int, int]:
        """Tokens by class, from the highest one down, those of higher classes counted in: what goes
        before a newcomer."""
        before, total = {}, 0
        for priority in sorted(self._work, reverse=True):
            total += self._work[priority]
            before[priority] = total
        return before

    def work_from(self, priority: int) -> int:
        """Tokens of this class and higher ones."""
        return sum(tokens for each, tokens in self._work.items() if each >= priority)

    @property
    def lowest(self) -> int | None:
        """The lowest class of those that have not run."""
        return min(self._fresh, default=None)

    def newest_of(self, priority: int) -> Queued:
        """Return the newest request of a class that has not run. There must be one."""
        fresh = self._fresh[priority]
        # What a dict keeps of those that went is gone through once: popitem leaves it out.
        ticket, newest = fresh.popitem()
        fresh[ticket] = newest
        return newest

    def overdue(self, moment: float) -> Queued | None:
        """Return a request that has waited for too long, if there is one."""
        first = self._expiring.first()
        if first is None or first[0] > moment:
            return None
        overdue: Queued = first[-1]
        return overdue
