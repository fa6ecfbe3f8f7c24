"""The admission queue: what waits in the whole cluster, in the policy's order. Pure.

Every operation is O(log n) amortised. A withdrawn request leaves a hole in the heap, which is
closed when it comes up or when holes outnumber what waits.
"""

from __future__ import annotations

import heapq
from itertools import count

from router.admission.policy import Key, Policy, Waiting


class AdmissionQueue:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, int]] = []
        self._tickets = count()
        self._waiting: dict[int, Waiting] = {}
        self._ticket_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ticket_of

    def push(self, waiting: Waiting) -> Waiting | None:
        """Adds a request; the one that waited under this id before is replaced, and returned."""
        replaced = self._take_out(waiting.request_id)
        ticket = next(self._tickets)
        self._waiting[ticket] = waiting
        self._ticket_of[waiting.request_id] = ticket
        heapq.heappush(self._heap, (self._policy.key(waiting), ticket))
        return replaced

    def withdraw(self, request_id: str, gateway: str) -> bool:
        """Removes a request wherever it stands; False if it does not wait for this gateway."""
        ticket = self._ticket_of.get(request_id)
        if ticket is None or self._waiting[ticket].gateway != gateway:
            return False
        self._take_out(request_id)
        return True

    def withdraw_gateway(self, gateway: str) -> None:
        """Removes everything of a gateway that is gone. O(n), once a gateway's life."""
        for waiting in [w for w in self._waiting.values() if w.gateway == gateway]:
            self._take_out(waiting.request_id)

    def _take_out(self, request_id: str) -> Waiting | None:
        ticket = self._ticket_of.pop(request_id, None)
        if ticket is None:
            return None
        waiting = self._waiting.pop(ticket)
        self._close_holes()
        return waiting

    def peek(self) -> Waiting | None:
        """The request that leaves next."""
        while self._heap:
            waiting = self._waiting.get(self._heap[0][1])
            if waiting is not None:
                return waiting
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Waiting:
        """Takes out what ``peek`` shows. Raises IndexError when nothing waits."""
        waiting = self.peek()
        if waiting is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        del self._waiting[self._ticket_of.pop(waiting.request_id)]
        return waiting

    def _close_holes(self) -> None:
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._waiting):
            self._heap = [item for item in self._heap if item[1] in self._waiting]
            heapq.heapify(self._heap)
