"""Rejection of requests by an overloaded cluster, in a gateway and at the leader's queue. Pure.

    arriving  the first token or the end would be late        DeadlineUnmeetable (refuse_late)
              the queue is full of its class and higher ones  QueueFull
    queued    the queue is full, and a higher class arrives   Shed
              the request has waited for too long             QueueTimeout (queue_ttl, refuse_late)

A gateway is a router in its role towards the leader. A request that has been dispatched to a worker
is never rejected. How long a request may wait is fixed on arrival, by the rules in effect then.
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
    """Missed deadline of a request.

    ``is_by_output``: the first token would be in time, but the end of the output would not.
    ``shorter_s``: seconds by which the queue wait must shrink to meet the deadline, at most the
    whole wait.
    """

    is_by_output: bool
    shorter_s: float


class Wanted(NamedTuple):
    """Deadlines of a request's first token and of its end, in seconds after its arrival.

    Infinite means that there is none.
    """

    first_token_s: float = inf
    end_s: float = inf

    @classmethod
    def within(cls, first_token_s: float | None, end_s: float | None) -> Self:
        """Return the deadlines of a request, for which None means that there is none."""
        return cls(inf if first_token_s is None else first_token_s, inf if end_s is None else end_s)

    def late(self, wait_s: float, prefill_s: float, output_s: float) -> Late | None:
        """Return by how much a deadline is missed, or None if it can be met.

        The request waits in the queue for ``wait_s`` at least, needs ``prefill_s`` until its first
        token, and its output ends ``output_s`` after that at least. A request that need not wait is
        not late because of its prefill, because its worker may have its prompt in the prefix cache.
        """
        first_s = wait_s + prefill_s if wait_s else 0.0
        first_late_s = first_s - min(self.first_token_s, self.end_s)
        late_s = max(first_late_s, first_s + output_s - self.end_s)
        return Late(first_late_s <= 0, min(late_s, wait_s)) if late_s > 0 else None


#: Most refusals and tenants that are remembered; beyond that the oldest are forgotten.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: A retry that is early by at most this many seconds is in time: clocks and timers are not exact.
_SLACK_S = 0.05
#: A refused request that has not retried this many seconds after its due time is forgotten.
_GIVEN_UP_S = 5.0
#: Outdated entries that the heap of due times may hold, beside as many as there are refusals.
_FEW = 64


class RetryLimiter:
    """Limiter of premature retries, with one token bucket per tenant.

    A bucket gains ``rate`` tokens per second and holds at most ``burst``. A premature retry costs
    one token. ``now`` is in seconds.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        #: time from which each refused request may retry; the newest refusal is last
        self._told: dict[str, float] = {}
        #: heap of (due time, request id), also with outdated entries
        self._dues: list[tuple[float, str]] = []
        #: by tenant: tokens, and the time as of which they were counted
        self._buckets: dict[str, tuple[float, float]] = {}

    def refused(self, request_id: str, now: float, due: float) -> None:
        """Record a refused request, which may retry from ``due`` on.

        A request whose id the client did not choose is not recorded: its retry has another id.
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
        """Forget the refusal of a request."""
        self._told.pop(request_id, None)

    def too_soon_s(self, request_id: str, now: float) -> float:
        """Return the seconds by which a retry is too soon; 0 if it may be admitted.

        If the tenant's bucket has a token, a premature retry takes the token and is admitted.
        """
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
#: Least drain time of the queue for Retry-After, also used if the drain rate is unknown, and the
#: largest one, in seconds.
_UNKNOWN_S, _MOST_S = 1.0, 60.0
#: Retry-After is the drain time of the queue times a random factor between these two, so that the
#: retries of refused requests are spread out.
_JITTER = 0.5, 2.5
_OUTPUT_TOO_LONG = "estimated end of the output ({} tokens at least) is after the deadline"


class EarlyRejection:
    """Early rejection of requests in a gateway, before they reach the leader.

    ``now`` is the router's clock in seconds.
    """

    def __init__(self, config: RouterConfig, dice: Random) -> None:
        self.rules = Rules.of(config)
        #: last estimate that the leader reported
        self.queue_estimate = session_pb2.QueueEstimate()
        self._retrying = RetryLimiter(config.retry_rate, config.retry_burst)
        self._dice = dice

    def admit(self, request_id: str, priority: int, queued: int, now: float) -> None:
        """Check that a new request may queue beside ``queued`` others.

        Raises RetriedTooSoon if it was refused and comes before its Retry-After, and QueueFull if
        the queue is full and holds no request of a lower class.
        """
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
        """Check that a new request can meet its TTFT target and its deadline.

        Nothing is checked unless the rule ``refuse_late`` is set. ``ttft_target_s`` and
        ``timeout_s`` are in seconds after arrival, None for none. Its outputs have at least
        ``least_tokens`` tokens. Raises DeadlineUnmeetable.
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
        """Return the least wait of a request in seconds; 0 if unknown.

        With fair shares, requests of its own class do not count, because only the leader knows how
        much of them precedes it.
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
        """Record a refusal, and return its error, with the class of ``slug`` and a Retry-After.

        Retry-After is at least ``retry_after_s``, the seconds after which the queue is short enough
        for the request. ``least_tokens`` is above 0 only if an output of that many tokens would end
        too late.
        """
        drained_s = self._drained_s() * self._dice.uniform(*_JITTER)
        retry_after_s = max(drained_s, retry_after_s or 0.0)
        self._retrying.refused(request_id, now, now + retry_after_s)
        too_long = _OUTPUT_TOO_LONG.format(least_tokens) if least_tokens else ""
        error = from_slug(slug, too_long or _CAUSES.get(slug, ""))
        error.retry_after_s = retry_after_s
        return error

    def _drained_s(self) -> float:
        """Return the estimated seconds until all queued work has left the queue."""
        queue_estimate = self.queue_estimate
        if not queue_estimate.tokens_per_s:
            return _UNKNOWN_S
        work_tokens = queue_estimate.waits[-1].work_tokens if queue_estimate.waits else 0
        return min(_MOST_S, max(_UNKNOWN_S, work_tokens / queue_estimate.tokens_per_s))

    def withdraw_rejection(self, request_id: str) -> None:
        """Forget the refusal of a request that is accepted after all."""
        self._retrying.withdraw(request_id)


#: A request must leave the queue this many times its predicted prefill time before its TTFT
#: deadline, because other requests are dispatched to its worker, too. The goodput at 1.3 times the
#: load, relative to that at 1.0, is 1.02 with 2 and 0.95 with 1 (benchmarks/overload.py).
_PREFILL_MARGIN = 2
#: Additional seconds for the request's way to its worker and its first token's way back.
_ON_THE_WAY_S = 0.03


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection of a request by the leader; ``slug`` names the class of its error.

    The client may retry when the queue has room, but not before ``retry_after_s`` seconds.
    ``least_tokens`` is above 0 if the first token would be in time, but the end of an output of
    that many tokens would not.
    """

    waiting: Waiting
    slug: str
    retry_after_s: float | None = None
    least_tokens: int = 0


class Bounds:
    """Limits of the leader's queue, by which requests are refused, shed or expired.

    Times are ledger time in seconds. Every operation is O(log n), or O(classes).
    """

    def __init__(self, rules: Rules, queue: AdmissionQueue, waits: WaitEstimator) -> None:
        self.rules = rules
        self._queue = queue
        self._waits = waits

    def predict(self, waiting: Waiting) -> Waiting:
        """Return a request with its predicted times and the time at which it expires.

        A request that has run is returned as it is.
        """
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
        """Return the refusal that a new request causes; None if it can simply be queued.

        The refusal is of the request itself, or of a queued request of a lower class, which is
        removed for it.
        """
        if (late := self._late(waiting)) is not None:
            least_tokens = waiting.least_tokens if late.is_by_output else 0
            return Refusal(waiting, DeadlineUnmeetable.slug, late.shorter_s, least_tokens)
        if len(self._queue) < self.rules.max_queued:
            return None
        shed = self._queue.shed(waiting.priority)
        return Refusal(waiting, QueueFull.slug) if shed is None else Refusal(shed, Shed.slug)

    def _late(self, waiting: Waiting) -> Late | None:
        """Return by how much the request misses a deadline in the best case; None if by nothing.

        The best case is a shorter wait and faster tokens than nearly all other requests had.
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
        """Remove the requests that have waited for too long, and return their refusals."""
        expired = []
        while (waiting := self._queue.expire(ledger_now)) is not None:
            expired.append(Refusal(waiting, QueueTimeout.slug))
        return expired
