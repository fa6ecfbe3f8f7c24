"""What a gateway refuses before ledger and leader hear of it, by the leader's last word; and when
those that are refused, here or there, should come again. Pure.
"""

from __future__ import annotations

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
from everlift.request_id import is_qualified
from everlift.v1 import session_pb2
from router.admission.policy import Rules
from router.admission.retrying import Retrying
from router.admission.wanted import Wanted
from router.config import RouterConfig

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


class Entrance:
    """Early rejection in a gateway. ``now`` is the router's clock in seconds."""

    def __init__(self, config: RouterConfig, dice: Random) -> None:
        self.rules = Rules.of(config)
        #: the leader's last word
        self.outlook = session_pb2.Outlook()
        self._retrying = Retrying(config.retry_rate, config.retry_burst)
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
