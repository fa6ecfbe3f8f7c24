"""Rejection of requests by an overloaded cluster: in a router, and at the leader's queue. Pure.

    comes   its first token or its end would be late   DeadlineUnmeetable  (refuse_late)
            the queue is full of its class and higher  QueueFull
    waits   the queue is full, and a higher class came Shed
            it has waited for as long as it may        QueueTimeout        (queue_ttl, refuse_late)

A request that a worker has had is never rejected. How long a request may wait is fixed when it
comes, by the rules of that moment.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple, Self

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
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from router.admission.wait_estimate import WaitEstimator
from router.config import RouterConfig


class Late(NamedTuple):
    """Missed deadline of a request, and by how much.

    ``is_by_output``: its first token would come in time, and its end would not. By ``shorter_s``
    the queue has to be shorter, if that helps.
    """

    is_by_output: bool
    shorter_s: float


class Wanted(NamedTuple):
    """Deadlines of a request, in seconds after its arrival.

    They are those of its first token and of its end. Infinite means that there is none.
    """

    first_token_s: float = inf
    end_s: float = inf

    @classmethod
    def within(cls, first_token_s: float | None, end_s: float | None) -> Self:
        """Return the limits of a request; None: there is none."""
        return cls(inf if first_token_s is None else first_token_s, inf if end_s is None else end_s)

    def late(self, wait_s: float, prefill_s: float, output_s: float) -> Late | None:
        """Return by how much a deadline is missed, or None if it can be met.

        At the least it waits for ``wait_s``, and its output goes on for ``output_s`` after its
        first token. Who need not wait is not late for its prompt's sake, which its worker may have
        computed for another one.
        """
        first_s = wait_s + prefill_s if wait_s else 0.0
        first_late_s = first_s - min(self.first_token_s, self.end_s)
        late_s = max(first_late_s, first_s + output_s - self.end_s)
        return Late(first_late_s <= 0, min(late_s, wait_s)) if late_s > 0 else None


#: Refusals and tenants that are remembered; of more the oldest are forgotten.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: So much before its time is in time: clocks and timers are not exact.
_SLACK_S = 0.05
#: Who has not come so long after its time does not come any more.
_GIVEN_UP_S = 5.0
#: Moments that may be kept of those that have come since, beside as many as there are others.
_FEW = 64


class RetryLimiter:
    """Token bucket per tenant: ``rate`` a second, at most ``burst`` saved.

    ``now`` is in seconds.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        #: by request id, when it is due; the newest refusal is last
        self._told: dict[str, float] = {}
        #: when each of them is due, and of others that have come since, as a heap
        self._dues: list[tuple[float, str]] = []
        #: by tenant, tokens as of a moment
        self._buckets: dict[str, tuple[float, float]] = {}

    def refused(self, request_id: str, now: float, due: float) -> None:
        """Remember a rejected request.

        An unnamed request is not remembered: it comes back under another name.
        """
        if not is_named(request_id):
            return
        self._told.pop(request_id, None)
        self._told[request_id] = due
        heapq.heappush(self._dues, (due, request_id))
        self._give_up(now)
        if len(self._told) > _MOST_REFUSALS:
            del self._told[next(iter(self._told))]

    def _give_up(self, now: float) -> None:
        while self._dues[0][0] + _GIVEN_UP_S < now:
            due, request_id = heapq.heappop(self._dues)
            if self._told.get(request_id) == due:
                del self._told[request_id]
        if len(self._dues) > 2 * len(self._told) + _FEW:
            self._dues = [(due, request_id) for request_id, due in self._told.items()]
            heapq.heapify(self._dues)

    def withdraw(self, request_id: str) -> None:
        """Forget a rejection."""
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
    QueueFull.slug: "the queue is full",
    Shed.slug: "displaced from the full queue by requests of a higher class",
    QueueTimeout.slug: "queued for longer than router.queue_ttl",
    DeadlineUnmeetable.slug: "estimated queue wait exceeds the request's TTFT target or deadline",
}
#: Retry-After where the drain rate of the queue is unknown, and the longest one, in seconds.
_UNKNOWN_S, _MOST_S = 1.0, 60.0
#: Retry-After is the time in which the queue drains times a random factor between these two, so
#: that refused requests come back spread out.
_JITTER = 0.5, 2.5
_OUTPUT_TOO_LONG = "estimated end of the output ({} tokens at least) is after the deadline"


class EarlyRejection:
    """Early rejection in a gateway. ``now`` is the router's clock in seconds."""

    def __init__(self, config: RouterConfig, dice: Random) -> None:
        self.rules = Rules.of(config)
        #: the leader's last word
        self.queue_estimate = session_pb2.QueueEstimate()
        self._retrying = RetryLimiter(config.retry_rate, config.retry_burst)
        self._dice = dice

    def admit(self, request_id: str, priority: int, queued: int, now: float) -> None:
        """Admit a request beside ``queued`` others. Raises RetriedTooSoon, QueueFull."""
        if early_s := self._retrying.too_soon_s(request_id, now):
            raise RetriedTooSoon("retried before the time in retry-after", retry_after_s=early_s)
        if queued >= self.rules.max_queued and not self._takes_place(priority):
            raise self.refuse(request_id, QueueFull.slug, None, now)

    def check_in_time(
        self,
        request_id: str,
        priority: int,
        ttft_target_s: float | None,
        timeout_s: float | None,
        least_tokens: int,
        now: float,
    ) -> None:
        """Check that the first token and the end of ``least_tokens`` can come in time.

        Raises DeadlineUnmeetable.
        """
        if not self.rules.refuse_late:
            return
        output_s = (least_tokens - 1) * self.queue_estimate.least_tpot_s
        wanted = Wanted.within(ttft_target_s, timeout_s)
        late = wanted.late(self._wait_s(request_id, priority), 0.0, output_s)
        if late is not None:
            too_long = least_tokens if late.is_by_output else 0
            slug = DeadlineUnmeetable.slug
            raise self.refuse(request_id, slug, late.shorter_s, now, too_long)

    def _takes_place(self, priority: int) -> bool:
        return self.queue_estimate.HasField("lowest") and self.queue_estimate.lowest < priority

    def _wait_s(self, request_id: str, priority: int) -> float:
        """Return the least wait of a request.

        With fair shares, other tenants' requests of its class do not count: only the leader knows.
        """
        is_fair = self.rules.fair_share and is_qualified(request_id)
        first = priority + is_fair
        before = [it.wait_s for it in self.queue_estimate.waits if it.priority >= first]
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
        queue_estimate = self.queue_estimate
        if not queue_estimate.tokens_per_s:
            return _UNKNOWN_S
        work_tokens = queue_estimate.waits[-1].work_tokens if queue_estimate.waits else 0
        return min(_MOST_S, max(_UNKNOWN_S, work_tokens / queue_estimate.tokens_per_s))

    def withdraw_rejection(self, request_id: str) -> None:
        """Forget a rejection whose request is accepted after all."""
        self._retrying.withdraw(request_id)


#: So many times its predicted prefill before its first token is wanted a request must leave: others
#: come to its worker, too. With 1 a part of those that left last came a little late, and goodput at
#: 1.3 times the load was 0.95 of that at 1.0; with 2 it was 1.02 (benchmarks/overload.py).
_PREFILL_MARGIN = 2
#: Beside that, for a request on its way to its worker and its first token on the way back.
_ON_THE_WAY_S = 0.03


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection with the ``slug`` of its error.

    It may come again when the queue has room, and not before ``retry_after_s``. ``least_tokens``:
    its first token would come in time, and the end of so long an output would not; 0: it is not
    that.
    """

    waiting: Waiting
    slug: str
    retry_after_s: float | None = None
    least_tokens: int = 0


class Bounds:
    """Times are ledger time in seconds. Every operation is O(log n), or O(classes)."""

    def __init__(self, rules: Rules, queue: AdmissionQueue, waits: WaitEstimator) -> None:
        self.rules = rules
        self._queue = queue
        self._waits = waits

    def predict(self, waiting: Waiting) -> Waiting:
        """Add predictions to a queued request, and the time at which it expires."""
        if waiting.has_run:
            return waiting
        wait_s = self._waits.wait_s(self._queue.work_before(waiting))
        prefill_s = self._waits.prefill_s(waiting)
        ttft_s = None if wait_s is None or not prefill_s else wait_s + prefill_s
        return waiting._replace(
            expires=self._expires(waiting, wait_s or 0.0, prefill_s),
            predicted_wait_s=wait_s,
            predicted_ttft_s=ttft_s,
            predicted_tpot_s=self._waits.tpot_s,
        )

    def _expires(self, waiting: Waiting, wait_s: float, prefill_s: float) -> float:
        expires = waiting.arrived + (self.rules.queue_ttl or inf)
        if not self.rules.refuse_late:
            return expires
        by_first = waiting.ttft_deadline - _PREFILL_MARGIN * prefill_s
        by_end = waiting.deadline - self._output_s(waiting) - (prefill_s if wait_s else 0.0)
        return min(expires, min(by_first, by_end) - _ON_THE_WAY_S)

    def _output_s(self, waiting: Waiting) -> float:
        return (waiting.least_tokens - 1) * self._waits.least_tpot_s

    def refuse(self, waiting: Waiting) -> Refusal | None:
        """Reject a new request, or shed one of a lower class for it; None if it may wait."""
        if (late := self._late(waiting)) is not None:
            least_tokens = waiting.least_tokens if late.is_by_output else 0
            return Refusal(waiting, DeadlineUnmeetable.slug, late.shorter_s, least_tokens)
        if len(self._queue) < self.rules.max_queued:
            return None
        shed = self._queue.shed(waiting.priority)
        return Refusal(waiting, QueueFull.slug) if shed is None else Refusal(shed, Shed.slug)

    def _late(self, waiting: Waiting) -> Late | None:
        """Return by how much the request misses its deadlines at best; None if it can meet them.

        The best case is a shorter wait and faster tokens than nearly all others had.
        """
        if not self.rules.refuse_late:
            return None
        wanted = Wanted(waiting.ttft_deadline - waiting.arrived, waiting.deadline - waiting.arrived)
        return wanted.late(
            self._waits.least_wait_s(waiting.predicted_wait_s or 0.0),
            self._waits.prefill_s(waiting),
            self._output_s(waiting),
        )

    def expire(self, ledger_now: float) -> list[Refusal]:
        """Remove and refuse requests that have waited for too long."""
        expired = []
        while (waiting := self._queue.expire(ledger_now)) is not None:
            expired.append(Refusal(waiting, QueueTimeout.slug))
        return expired
