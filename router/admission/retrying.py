"""Who was refused and comes again too soon. Pure.

A refused request is told when to come again. Who comes then finds the door open; who comes sooner
takes a token of its tenant's bucket, and where there is none it is refused without another look, so
that who keeps asking gets no room before those that wait for their time.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from everlift.request_id import is_named, tenant_of

#: Refusals and tenants that are remembered; of more the oldest are forgotten.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: So much before its time is in time: clocks and timers are not exact.
SLACK_S = 0.05
#: Who has not come so long after its time does not come any more.
GIVEN_UP_S = 5.0
#: Moments that may be kept of those that have come since, beside as many as there are others.
_FEW = 64
#: The part that comes again is of the last so many.
_MEMORY = 100


class Told(NamedTuple):
    """Who was refused, why and when; when it may come again, and how many rooms are to have come
    free by then. Seconds."""

    slug: str
    at: float
    due: float
    #: as they are numbered; None where nobody knows how fast they come
    rooms: float | None = None


class Retrying:
    """``rate`` tokens a second for each tenant, of which ``burst`` may be saved. ``now`` is in
    seconds."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        #: by request id, who was refused last is last
        self._told: dict[str, Told] = {}
        #: when each of them is due, and of others that have come since, as a heap
        self._dues: list[tuple[float, str]] = []
        #: by tenant, tokens as of a moment
        self._buckets: dict[str, tuple[float, float]] = {}
        #: of those with names that were refused, the part that came again
        self.part = 1.0

    def told(self, request_id: str) -> Told | None:
        """When it was refused last; None: it was not, or has come again since."""
        return self._told.get(request_id)

    def refused(self, request_id: str, told: Told) -> None:
        """Who has no name is not remembered: it comes again as somebody else, and would take the
        place of those that are known again."""
        if not is_named(request_id):
            return
        self._told.pop(request_id, None)
        self._told[request_id] = told
        heapq.heappush(self._dues, (told.due, request_id))
        self._give_up(told.at)
        if len(self._told) > _MOST_REFUSALS:
            self._does_not_come(next(iter(self._told)))

    def _give_up(self, now: float) -> None:
        """Those whose time is over. Some are told to come after an hour: they keep no others."""
        while self._dues[0][0] + GIVEN_UP_S < now:
            due, request_id = heapq.heappop(self._dues)
            if (told := self._told.get(request_id)) is not None and told.due == due:
                self._does_not_come(request_id)
        if len(self._dues) > 2 * len(self._told) + _FEW:
            self._dues = [(told.due, request_id) for request_id, told in self._told.items()]
            heapq.heapify(self._dues)

    def _does_not_come(self, request_id: str) -> None:
        del self._told[request_id]
        self._note(0.0)

    def forget(self, request_id: str) -> None:
        """It was not refused."""
        self._told.pop(request_id, None)

    def too_soon_s(self, request_id: str, now: float) -> float:
        """Seconds by which it comes too soon; 0 where it may come in."""
        told = self._told.get(request_id)
        if told is None:
            return 0.0
        early_s = told.due - now
        if early_s > SLACK_S and not self._take(tenant_of(request_id), now):
            return early_s
        del self._told[request_id]
        self._note(1.0)
        return 0.0

    def _take(self, tenant: str, now: float) -> bool:
        tokens, since = self._buckets.pop(tenant, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        has_one = tokens >= 1
        self._buckets[tenant] = (tokens - has_one, now)
        if len(self._buckets) > _MOST_TENANTS:
            del self._buckets[next(iter(self._buckets))]
        return has_one

    def _note(self, came: float) -> None:
        self.part += (came - self.part) / _MEMORY
