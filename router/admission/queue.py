"""The admission queue: what waits in the whole cluster, in the policy's order. Pure.

Every operation is O(log n) amortised. A withdrawn request leaves a hole in the heap, which is
closed when it comes up or when holes outnumber what waits.

A million may wait: what is kept of each is tuples of plain values alone, which Python's garbage
collector leaves out of its rounds. Rounds over a million objects would stop the router for tenths
of a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import count, takewhile
from operator import attrgetter
from typing import Any, TypeAlias

from router.admission.policy import Key, Policy, Waiting

#: Requests whose place in another order is found at once, in some milliseconds.
_AT_ONCE = 1024

_Row: TypeAlias = tuple[Any, ...]

_row = attrgetter(*(field.name for field in fields(Waiting)))


class AdmissionQueue:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        #: a ticket names one stay of a request
        self._heap: list[tuple[Key, int]] = []
        self._tickets = count()
        self._rows: dict[int, _Row] = {}
        self._ticket_of: dict[str, int] = {}
        #: tokens to be computed for all that wait, as predicted
        self.work_tokens = 0
        #: request ids, no gateway without any
        self._of_gateway: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ticket_of

    def push(self, waiting: Waiting) -> Waiting | None:
        """Adds a request; the one that waited under this id before is replaced, and returned."""
        replaced = self._take_out(waiting.request_id)
        ticket = self._ticket_of[waiting.request_id] = next(self._tickets)
        self._rows[ticket] = _row(waiting)
        self.work_tokens += waiting.work_tokens
        self._of_gateway.setdefault(waiting.gateway, {})[waiting.request_id] = None
        heapq.heappush(self._heap, (self._policy.key(waiting), ticket))
        return replaced

    def withdraw(self, request_id: str, gateway: str) -> bool:
        """Removes a request wherever it stands; False if it does not wait for this gateway."""
        if request_id not in self._of_gateway.get(gateway, ()):
            return False
        self._take_out(request_id)
        return True

    def withdraw_gateway(self, gateway: str) -> None:
        """Removes everything of a gateway that is gone. O(what it has waiting)."""
        for request_id in tuple(self._of_gateway.get(gateway, ())):
            self._take_out(request_id)

    def _take_out(self, request_id: str) -> Waiting | None:
        ticket = self._ticket_of.get(request_id)
        if ticket is None:
            return None
        waiting = self._leave(ticket)
        self._close_holes()
        return waiting

    def _leave(self, ticket: int) -> Waiting:
        waiting = Waiting(*self._rows.pop(ticket))
        del self._ticket_of[waiting.request_id]
        self.work_tokens -= waiting.work_tokens
        siblings = self._of_gateway[waiting.gateway]
        del siblings[waiting.request_id]
        if not siblings:
            del self._of_gateway[waiting.gateway]
        return waiting

    def peek(self) -> Waiting | None:
        """The request that leaves next."""
        while self._heap:
            row = self._rows.get(self._heap[0][1])
            if row is not None:
                return Waiting(*row)
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Waiting:
        """Takes out what ``peek`` shows. Raises IndexError when nothing waits."""
        if self.peek() is None:
            raise IndexError("nothing waits")
        return self._leave(heapq.heappop(self._heap)[1])

    def reorder(self, policy: Policy) -> Iterator[None]:
        """What waits leaves in this order when all of it has been gone through, part by part; until
        then in the one before. O(n)."""
        heap: list[tuple[Key, int]] = []
        tickets, after = tuple(self._rows), next(self._tickets)
        for start in range(0, len(tickets), _AT_ONCE):
            heap += self._keyed(policy, tickets[start : start + _AT_ONCE])
            yield
        heap += self._keyed(policy, takewhile(lambda ticket: ticket > after, reversed(self._rows)))
        heapq.heapify(heap)
        self._policy, self._heap = policy, heap

    def _keyed(self, policy: Policy, tickets: Iterable[int]) -> Iterator[tuple[Key, int]]:
        for ticket in tickets:
            if (row := self._rows.get(ticket)) is not None:
                yield policy.key(Waiting(*row)), ticket

    def _close_holes(self) -> None:
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._rows):
            self._heap = [item for item in self._heap if item[1] in self._rows]
            heapq.heapify(self._heap)
