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

from everlift.request_id import tenant_of
from router.admission.classes import Classes
from router.admission.overtaking import Overtaking
from router.admission.policy import Policy
from router.admission.services import INPUT, Services
from router.admission.waiting import Waiting

#: Requests whose place in another order is found at once, in some milliseconds.
_AT_ONCE = 1024

#: Dispatches, about, after which it is looked who has waited longest.
_FORGET_EVERY = 1 << 15

_Row: TypeAlias = tuple[Any, ...]

_REQUEST_ID, _GATEWAY = map(Waiting._fields.index, ("request_id", "gateway"))


class AdmissionQueue:
    """``class_floor``: of the work that higher classes get while a class waits, the part that it
    gets as well. Where there are ``services``, tenants of a class take turns by them. Times are
    ledger time in seconds."""

    def __init__(
        self, policy: Policy, class_floor: float = 0.0, services: Services | None = None
    ) -> None:
        self._tickets = count()
        #: by ticket, which names one stay of a request
        self._rows: dict[int, _Row] = {}
        self._ticket_of: dict[str, int] = {}
        #: tokens to be computed for all that wait, as predicted
        self.work_tokens = 0
        #: by class, none of which nobody waits
        self._numbers: dict[int, int] = {}
        self._classes = Classes(policy, self._rows, self._numbers, class_floor, services)
        self._overtaking = Overtaking()
        self._services = services

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ticket_of

    def push(self, waiting: Waiting) -> Waiting | None:
        """Adds a request; the one that waited under this id before is replaced, and returned."""
        replaced = self._take_out(waiting.request_id)
        ticket = self._ticket_of[waiting.request_id] = next(self._tickets)
        self._rows[ticket] = tuple(waiting)
        self.work_tokens += waiting.work_tokens
        self._numbers[waiting.priority] = self._numbers.get(waiting.priority, 0) + 1
        if self._services is not None:
            self._services.come(tenant_of(waiting.request_id))
        self._classes.push(waiting, ticket)
        return replaced

    def withdraw(self, request_id: str, gateway: str) -> bool:
        """Removes a request wherever it stands; False if it does not wait for this gateway."""
        ticket = self._ticket_of.get(request_id)
        if ticket is None or self._rows[ticket][_GATEWAY] != gateway:
            return False
        self._take_out(request_id)
        return True

    def withdraw_gateway(self, gateway: str) -> None:
        """Removes everything of a gateway that is gone. O(n): an index would cost every request,
        and gateways go rarely."""
        rows = self._rows.values()
        for request_id in [row[_REQUEST_ID] for row in rows if row[_GATEWAY] == gateway]:
            self._take_out(request_id)

    def _take_out(self, request_id: str) -> Waiting | None:
        ticket = self._ticket_of.get(request_id)
        if ticket is None:
            return None
        waiting = Waiting._make(self._rows[ticket])
        self._remove(waiting, ticket)
        return waiting

    def _remove(self, waiting: Waiting, ticket: int) -> None:
        del self._ticket_of[waiting.request_id], self._rows[ticket]
        self.work_tokens -= waiting.work_tokens
        self._numbers[waiting.priority] -= 1
        if not self._numbers[waiting.priority]:
            del self._numbers[waiting.priority]
        if self._services is not None:
            self._services.go(tenant_of(waiting.request_id))
        self._classes.left(waiting)

    def peek(self, moment: float | None = None) -> Waiting | None:
        """The request that leaves next at this moment. Without one: by class and key alone."""
        ticket = self._classes.head(moment)
        return None if ticket is None else Waiting._make(self._rows[ticket])

    def pop(self, moment: float | None = None) -> Waiting:
        """Takes out what ``peek`` shows. Raises IndexError when nothing waits."""
        head = self.peek(moment)
        if head is None:
            raise IndexError("nothing waits")
        self.dispatch(head)
        return head

    def dispatch(self, waiting: Waiting) -> int:
        """It leaves for a worker; how many that came later did so while it waited here. Who was
        told before keeps an older place, and overtakes nobody."""
        ticket = self._ticket_of[waiting.request_id]
        overtaken = self._overtaking.count(ticket)
        self._classes.serve(waiting)
        # What is computed again is not the tenant's to pay.
        if self._services is not None and not waiting.accepted:
            tenant = tenant_of(waiting.request_id)
            self._services.charge(tenant, INPUT * waiting.prefill_tokens)
        self._remove(waiting, ticket)
        if not waiting.accepted:
            self._overtaking.leave(ticket)
        if not ticket % _FORGET_EVERY:
            self._overtaking.forget(next(iter(self._rows), ticket))
        return overtaken

    def reorder(self, policy: Policy) -> Iterator[None]:
        """What waits leaves in this order when all of it has been gone through, part by part; until
        then in the one before. O(n)."""
        floor, services = self._classes.floor, self._services
        classes = Classes(policy, self._rows, self._numbers, floor, services)
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
