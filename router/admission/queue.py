"""The admission queue: what waits in the whole cluster, by class and in the policy's order. Pure.

Every operation is O(log n) amortised, but for a gateway's loss.

A million may wait: what is kept of each is tuples of plain values alone, which Python's garbage
collector leaves out of its rounds. Rounds over a million objects would stop the router for tenths
of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from typing import Any, TypeAlias

from everlift.v1 import session_pb2
from router.admission.backlog import Backlog
from router.admission.classes import Classes
from router.admission.fair_share import FairShare
from router.admission.policy import Policy
from router.admission.stays import Arrival, Stays
from router.admission.waiting import Waiting

#: Requests whose place in another order is found at once, in some milliseconds.
_AT_ONCE = 1024

#: After about so many dispatches it is forgotten what only those asked for that wait no more.
_FORGET_EVERY = 1 << 15

_Row: TypeAlias = tuple[Any, ...]

_REQUEST_ID, _GATEWAY = map(Waiting._fields.index, ("request_id", "gateway"))


class AdmissionQueue:
    """``class_floor``: of the work that higher classes get while a class waits, the part that it
    gets as well. ``fair_share`` is told what tenants are served; if ``in_turns``, those of a class
    take turns by it. Moments are ledger time, and ``now`` is the leader's clock, in seconds."""

    def __init__(
        self,
        policy: Policy,
        class_floor: float = 0.0,
        fair_share: FairShare | None = None,
        *,
        in_turns: bool = False,
    ) -> None:
        self._tickets = count()
        #: by ticket, which names one stay of a request
        self._rows: dict[int, _Row] = {}
        self._ticket_of: dict[str, int] = {}
        #: by class, none of which nobody waits
        self._numbers: dict[int, int] = {}
        self._fair_share = fair_share
        self._classes = self._make_classes(policy, class_floor, in_turns)
        self.backlog = Backlog(self._rows)
        self.stays = Stays()
        self._arrivals: dict[int, Arrival] = {}

    def _make_classes(self, policy: Policy, floor: float, in_turns: bool) -> Classes:
        fair_share = self._fair_share if in_turns else None
        return Classes(policy, self._rows, self._numbers, floor, fair_share)

    @property
    def class_floor(self) -> float:
        return self._classes.floor

    @class_floor.setter
    def class_floor(self, floor: float) -> None:
        self._classes.floor = floor

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ticket_of

    @property
    def numbers(self) -> dict[int, int]:
        """Requests by class, of the classes in which somebody waits, the highest first."""
        return dict(sorted(self._numbers.items(), reverse=True))

    @property
    def work_tokens(self) -> int:
        """To be computed for all that wait, as predicted."""
        return self.backlog.work_tokens

    def work_before(self, waiting: Waiting) -> int:
        """To be computed for those that probably leave before one that comes now, as predicted:
        where tenants take turns those of others do not all go before it."""
        ahead = self.backlog.work_from(waiting.priority)
        if not self._classes.in_turns:
            return ahead
        assert self._fair_share is not None
        higher = self.backlog.work_from(waiting.priority + 1)
        return min(ahead, higher + self._fair_share.work_before(waiting))

    def push(self, waiting: Waiting, now: float = 0.0) -> Waiting | None:
        """Adds a request; the one that waited under this id before is replaced, and returned."""
        # First: who is replaced by itself does not go meanwhile.
        if self._fair_share is not None:
            self._fair_share.come(waiting)
        ticket = next(self._tickets)
        before = self._ticket_of.setdefault(waiting.request_id, ticket)
        replaced = None
        if before != ticket:
            replaced = self._take(before)
            self._ticket_of[waiting.request_id] = ticket
        self._arrivals[ticket] = self.stays.come(waiting, len(self._rows), now)
        self._rows[ticket] = tuple(waiting)
        self._numbers[waiting.priority] = self._numbers.get(waiting.priority, 0) + 1
        self._classes.push(waiting, ticket)
        self.backlog.add(waiting, ticket)
        return replaced

    def get(self, request_id: str, gateway: str) -> Waiting | None:
        """None if it does not wait for this gateway."""
        waiting = self._waiting_of(self._ticket_of.get(request_id))
        return waiting if waiting is not None and waiting.gateway == gateway else None

    def withdraw(self, request_id: str, gateway: str) -> bool:
        """Removes a request wherever it stands; False if it does not wait for this gateway."""
        if self.get(request_id, gateway) is None:
            return False
        self._take_out(request_id)
        return True

    def withdraw_gateway(self, gateway: str) -> None:
        """Removes everything of a gateway that is gone. O(n): an index would cost every request,
        and gateways go rarely."""
        rows = self._rows.values()
        for request_id in [row[_REQUEST_ID] for row in rows if row[_GATEWAY] == gateway]:
            self._take_out(request_id)

    def shed(self, priority: int) -> Waiting | None:
        """Removes the newest of the lowest class that is below this one, if there is one that has
        not run."""
        lowest = self.backlog.lowest
        if lowest is None or lowest >= priority:
            return None
        return self._take(self.backlog.newest_of(lowest))

    def expire(self, moment: float) -> Waiting | None:
        """Removes one that has waited for too long at this moment."""
        ticket = self.backlog.overdue(moment)
        return None if ticket is None else self._take(ticket)

    def _take(self, ticket: int) -> Waiting:
        waiting = Waiting._make(self._rows[ticket])
        self._remove(waiting, ticket)
        return waiting

    def _take_out(self, request_id: str) -> Waiting | None:
        ticket = self._ticket_of.get(request_id)
        return None if ticket is None else self._take(ticket)

    def _remove(self, waiting: Waiting, ticket: int) -> None:
        del self._ticket_of[waiting.request_id], self._rows[ticket], self._arrivals[ticket]
        self._numbers[waiting.priority] -= 1
        if not self._numbers[waiting.priority]:
            del self._numbers[waiting.priority]
        if self._fair_share is not None:
            self._fair_share.go(waiting)
        self._classes.left(waiting, ticket)
        self.backlog.remove(waiting, ticket)

    def peek(self, moment: float | None = None) -> Waiting | None:
        """The request that leaves next at this moment. Without one: by class and place alone."""
        ticket = self._classes.head(moment)
        return self._waiting_of(ticket)

    def peek_highest(self, moment: float) -> Waiting | None:
        """The same, whatever lower classes are owed."""
        return self._waiting_of(self._classes.highest(moment))

    def _waiting_of(self, ticket: int | None) -> Waiting | None:
        return None if ticket is None else Waiting._make(self._rows[ticket])

    def pop(self, moment: float | None = None) -> Waiting:
        """Takes out what ``peek`` shows. Raises IndexError when nothing waits."""
        head = self.peek(moment)
        if head is None:
            raise IndexError("nothing waits")
        self.dispatch(head)
        return head

    def dispatch(self, waiting: Waiting) -> None:
        """It leaves for a worker."""
        ticket = self._ticket_of[waiting.request_id]
        arrival = self._arrivals[ticket]
        self._classes.serve(waiting)
        if self._fair_share is not None:
            self._fair_share.dispatched(waiting)
        self._remove(waiting, ticket)
        self.stays.leave(arrival, waiting)
        if not ticket % _FORGET_EVERY:
            self.stays.forget(next(iter(self._arrivals.values()), None))

    def waited_s(self, waiting: Waiting, now: float) -> float:
        """Since it came into the queue, or back into it."""
        came: float = self._arrivals[self._ticket_of[waiting.request_id]][0]
        return now - came

    def stay(self, waiting: Waiting, order: str, now: float, *, in_turns: bool) -> session_pb2.Stay:
        """Of one that leaves now by these rules."""
        arrival = self._arrivals[self._ticket_of[waiting.request_id]]
        return self.stays.told(arrival, waiting, order, now, in_turns=in_turns)

    def pass_by(self, waiting: Waiting) -> None:
        """It leaves for a worker without having waited."""
        if self._fair_share is not None:
            self._fair_share.come(waiting)
            self._fair_share.dispatched(waiting)
            self._fair_share.go(waiting)

    def reorder(self, policy: Policy, *, in_turns: bool = False) -> Iterator[None]:
        """What waits leaves in this order when all of it has been gone through, part by part; until
        then in the one before. O(n)."""
        classes = self._make_classes(policy, self._classes.floor, in_turns)
        tickets, after = tuple(self._rows), next(self._tickets)
        for start in range(0, len(tickets), _AT_ONCE):
            self._fill(classes, tickets[start : start + _AT_ONCE])
            yield
        self._fill(classes, takewhile(lambda ticket: ticket > after, reversed(self._rows)))
        classes.clear()
        self._classes = classes

    def _fill(self, classes: Classes, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if (row := self._rows.get(ticket)) is not None:
                classes.push(Waiting._make(row), ticket)
