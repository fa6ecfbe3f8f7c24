"""What a gateway refuses before ledger and leader hear of it, by the leader's last word; and when
those that are refused, here or there, should come again. Pure.
"""

from __future__ import annotations

import heapq
from random import Random

from everlift.errors import (
    DeadlineUnmeetable,
    EverliftError,
    QueueFull,
    QueueTimeout,
    RetriedTooSoon,
    Shed,
    from_slug,
)
from everlift.request_id import is_named, is_qualified, tenant_of
from everlift.v1 import session_pb2
from router.admission.policy import Rules
from router.admission.request import Wanted
from router.config import RouterConfig

#: Refusals and tenants that are remembered; of more the oldest are forgotten.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: So much before its time is in time: clocks and timers are not exact.
_SLACK_S = 0.05
#: Who has not come so long after its time does not come any more.
_GIVEN_UP_S = 5.0
#: Moments that may be kept of those that have come since, beside as many as there are others.
_FEW = 64


class RetryLimiter:
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
        while self._dues[0][0] + _GIVEN_UP_S < now:
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
        if early_s > _SLACK_S and not self._take(tenant_of(request_id), now):
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


_CAUSES = {
    QueueFull.slug: "too many requests wait",
    Shed.slug: "requests of a higher class came, and too many wait",
    QueueTimeout.slug: "it waited for as long as it may",
    DeadlineUnmeetable.slug: "by all that waits its first token would come too late",
}
#: Retry-After where the drain rate of the queue is unknown, and the longest one, in seconds.
_UNKNOWN_S, _MOST_S = 1.0, 60.0
#: Retry-After is the time in which the queue drains times a random factor between these two, so
#: that refused requests come back spread out.
_JITTER = 0.5, 2.5
_OUTPUT_TOO_LONG = (
    "its first token would come in time, but its output, {} tokens at the least, would end too late"
)


class EarlyRejection:
    """Early rejection in a gateway. ``now`` is the router's clock in seconds."""

    def __init__(self, config: RouterConfig, dice: Random) -> None:
        self.rules = Rules.of(config)
        #: the leader's last word
        self.outlook = session_pb2.Outlook()
        self._retrying = RetryLimiter(config.retry_rate, config.retry_burst)
        self._dice = dice

    def admit(self, request_id: str, priority: int, queued: int, now: float) -> None:
        """``queued`` wait. Raises RetriedTooSoon, QueueFull."""
        if early_s := self._retrying.too_soon_s(request_id, now):
            raise RetriedTooSoon("it was refused, and comes again too soon", retry_after_s=early_s)
        if queued >= self.rules.max_queued and not self._takes_place(priority):
            raise self.refuse(request_id, QueueFull.slug, None, now)

    def check_in_time(
        self, request_id: str, priority: int, wanted: Wanted, least_tokens: int, now: float
    ) -> None:
        """Each of its outputs gets so many tokens at the least. Raises DeadlineUnmeetable."""
        if not self.rules.refuse_late:
            return
        output_s = (least_tokens - 1) * self.outlook.least_tpot_s
        late = wanted.late(self._wait_s(request_id, priority), 0.0, output_s)
        if late is not None:
            too_long = least_tokens if late.is_by_output else 0
            slug = DeadlineUnmeetable.slug
            raise self.refuse(request_id, slug, late.shorter_s, now, too_long)

    def _takes_place(self, priority: int) -> bool:
        """Somebody of a lower class waits."""
        return self.outlook.HasField("lowest") and self.outlook.lowest < priority

    def _wait_s(self, request_id: str, priority: int) -> float:
        """At the least. Where tenants take turns those of its class that wait may be others', who
        do not go before it: who leads knows."""
        in_turns = self.rules.fair_share and is_qualified(request_id)
        first = priority + in_turns
        before = [it.wait_s for it in self.outlook.waits if it.priority >= first]
        return before[-1] if before else 0.0

    def refuse(
        self,
        request_id: str,
        slug: str,
        retry_after_s: float | None,
        now: float,
        least_tokens: int = 0,
    ) -> EverliftError:
        """Return the error of a refusal, with the time to retry after.

        That is not before ``retry_after_s``, by which the queue is short enough for the request.
        ``least_tokens`` as in Refusal.
        """
        drained_s = self._drained_s() * self._dice.uniform(*_JITTER)
        retry_after_s = max(drained_s, retry_after_s or 0.0)
        self._retrying.refused(request_id, now, now + retry_after_s)
        too_long = _OUTPUT_TOO_LONG.format(least_tokens) if least_tokens else ""
        error = from_slug(slug, too_long or _CAUSES.get(slug, ""))
        error.retry_after_s = retry_after_s
        return error

    def _drained_s(self) -> float:
        """Return the seconds in which the queued work leaves the queue."""
        outlook = self.outlook
        if not outlook.tokens_per_s:
            return _UNKNOWN_S
        work_tokens = outlook.waits[-1].work_tokens if outlook.waits else 0
        return min(_MOST_S, max(_UNKNOWN_S, work_tokens / outlook.tokens_per_s))

    def unsay(self, request_id: str) -> None:
        """It is not refused after all."""
        self._retrying.forget(request_id)
