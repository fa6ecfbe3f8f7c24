"""Who was refused and comes again too soon. Pure.

A refused request is told when to come again. Who comes then finds the door open; who comes sooner
takes a token of its tenant's bucket, and where there is none it is refused without another look, so
that who keeps asking gets no room before those that wait for their time.
"""

from __future__ import annotations

import heapq

from everlift.request_id import is_named, tenant_of

#: Refusals and tenants that are remembered; of more the oldest are forgotten.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: So much before its time is in time: clocks and timers are not exact.
SLACK_S = 0.05
#: Who has not come so long after its time does not come any more.
GIVEN_UP_S = 5.0
#: Moments that may be kept of those that have come since, beside as many as there are others.
_FEW = 64


class Retrying:
    """``rate`` tokens a second for each tenant, of which ``burst`` may be saved. ``now`` is in
    seconds."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        #: by request id, when it is due; the newest refusal is last
        self._told: dict[str, float] = {}
        #: when each of them is due, and of others that have come since, as a heap
        self._dues: list[tuple[float, str]] = []
        #: by tenant, tokens as of a moment
        self._buckets: dict[str, tuple[float, float]] = {}

    def refused(self, request_id: str, now: float, due: float) -> None:
        """Who has no name is not remembered: it comes again as somebody else, and would take the
        place of those that are known again."""
        if not is_named(request_id):
            return
        self._told.pop(request_id, None)
        self._told[request_id] = due
        heapq.heappush(self._dues, (due, request_id))
        self._give_up(now)
        if len(self._told) > _MOST_REFUSALS:
            del self._told[next(iter(self._told))]

    def _give_up(self, now: float) -> None:
        """Those whose time is over. Some are told to come after an hour: they keep no others."""
        while self._dues[0][0] + GIVEN_UP_S < now:
            due, request_id = heapq.heappop(self._dues)
            if self._told.get(request_id) == due:
                del self._told[request_id]
        if len(self._dues) > 2 * len(self._told) + _FEW:
            self._dues = [(due, request_id) for request_id, due in self._told.items()]
            heapq.heapify(self._dues)

    def forget(self, request_id: str) -> None:
        """It was not refused."""
        self._told.pop(request_id, None)

    def too_soon_s(self, request_id: str, now: float) -> float:
        """Seconds by which it comes too soon; 0 where it may come in."""
        due = self._told.get(request_id)
        if due is None:
            return 0.0
        early_s = due - now
        if early_s > SLACK_S and not self._take(tenant_of(request_id), now):
            return early_s
        del self._told[request_id]
        return 0.0

    def _take(self, tenant: str, now: float) -> bool:
        tokens, since = self._buckets.pop(tenant, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        has_one = tokens >= 1
        self._buckets[tenant] = (tokens - has_one, now)
        if len(self._buckets) > _MOST_TENANTS:
            del self._buckets[next(iter(self._buckets))]
        return has_one
