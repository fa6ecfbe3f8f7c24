"""What waits, by what an overloaded queue looks at: who is to go first, and how much is before
whom. Pure.

It is told who comes and goes; every operation is O(log n), or O(classes).
"""

from __future__ import annotations

from collections.abc import Container
from math import inf

from router.admission.lanes import Line
from router.admission.waiting import Waiting


class Backlog:
    """``present`` are the tickets of those that wait. Times are ledger time in seconds."""

    def __init__(self, present: Container[int]) -> None:
        #: to be computed for all, as predicted, and by class
        self.work_tokens = 0
        self._work: dict[int, int] = {}
        #: tickets of those that have not run, by class, the newest last
        self._fresh: dict[int, dict[int, None]] = {}
        self._expiring = Line(present)

    def add(self, waiting: Waiting, ticket: int) -> None:
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens += work
        self._work[priority] = self._work.get(priority, 0) + work
        if not waiting.has_run:
            if priority not in self._fresh:
                self._fresh[priority] = {}
            self._fresh[priority][ticket] = None
        if waiting.expires < inf:
            self._expiring.push(waiting.expires, ticket)

    def remove(self, waiting: Waiting, ticket: int) -> None:
        """It is not present any more."""
        priority, work = waiting.priority, waiting.work_tokens
        self.work_tokens -= work
        left = self._work[priority] = self._work.get(priority, 0) - work
        if not left:
            del self._work[priority]
        if not waiting.has_run:
            fresh = self._fresh[priority]
            del fresh[ticket]
            if not fresh:
                del self._fresh[priority]
        if waiting.expires < inf:
            self._expiring.left(ticket)

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

    def newest_of(self, priority: int) -> int:
        """The ticket of who came last, of those of this class that have not run. There must be
        one."""
        fresh = self._fresh[priority]
        # What a dict keeps of those that went is gone through once: popitem leaves it out.
        ticket, _ = fresh.popitem()
        fresh[ticket] = None
        return ticket

    def overdue(self, moment: float) -> int | None:
        """The ticket of who has waited for too long, if anybody has."""
        first = self._expiring.first()
        return first[1] if first is not None and first[0] <= moment else None
