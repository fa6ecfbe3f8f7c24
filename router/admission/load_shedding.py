"""Rejection of requests by an overloaded cluster, in routers and at the leader's queue. Pure.

    arriving  the first token or the end would be late        DeadlineUnmeetable (refuse_late)
              the queue is full, with no lower class in it    QueueFull
    queued    the queue is full, and a higher class arrives   Shed
              the request has waited for too long             QueueTimeout (queue_ttl, refuse_late)

The columns are the request's state, the condition for its rejection, and the error that the client
receives, with the settings that enable this rejection in parentheses. A class is a priority class.
A request that has been dispatched to a worker is never rejected. The time limit for the wait of a
request is fixed when the leader receives the request, by the settings in effect then. A new leader
fixes the limit again.
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


class MissedDeadline(NamedTuple):
    """Prediction that a request will miss a deadline.

    ``is_by_output``: the first token would be in time, but the end of the output would not.
    ``shorter_s``: seconds by which the wait in the queue would have to be shorter to meet the
    deadline, at most the whole wait.
    """

    is_by_output: bool
    shorter_s: float


class Deadlines(NamedTuple):
    """Deadlines of a request's first token and of its end, in seconds after its arrival.

    Infinite means that there is none.
    """

    first_token_s: float = inf
    end_s: float = inf

    @classmethod
    def within(cls, first_token_s: float | None, end_s: float | None) -> Self:
        """Return the deadlines for two numbers of seconds; None means no deadline."""
        return cls(inf if first_token_s is None else first_token_s, inf if end_s is None else end_s)

    def missed(self, wait_s: float, prefill_s: float, output_s: float) -> MissedDeadline | None:
        """Return how a deadline will be missed, or None if both deadlines can be met.

        The request waits in the queue for at least ``wait_s`` seconds, and then needs ``prefill_s``
        seconds until its first token. The output ends at least ``output_s`` seconds after that
        token. ``prefill_s`` is ignored if ``wait_s`` is 0, because the request's worker may then
        have the prompt in its prefix cache.
        """
        first_s = wait_s + prefill_s if wait_s else 0.0
        first_late_s = first_s - min(self.first_token_s, self.end_s)
        late_s = max(first_late_s, first_s + output_s - self.end_s)
        return MissedDeadline(first_late_s <= 0, min(late_s, wait_s)) if late_s > 0 else None


#: Maximum numbers of stored refusals and tenants; beyond them the oldest entry is removed.
_MOST_REFUSALS, _MOST_TENANTS = 1 << 16, 1 << 12
#: A retry that is early by at most this many seconds is in time, because clocks and timers are not
#: exact.
_SLACK_S = 0.05
#: A refused request that has not retried this many seconds after its due time is forgotten.
_ABANDONED_S = 5.0
#: Number of outdated entries that the heap of due times may hold, beside as many as there are
#: refusals.
_FEW = 64


class RetryLimiter:
    """Limiter of premature retries of refused requests, with one token bucket per tenant.

    A retry is premature if it comes more than 0.05 s before the time that Retry-After stated. A
    premature retry takes one token from its tenant's bucket, and is not admitted without one. A
    bucket gains ``rate`` tokens per second and holds at most ``burst``. ``now`` is in seconds.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        #: time from which each refused request may retry; the newest refusal is last
        self._retry_at: dict[str, float] = {}
        #: heap of (due time, request id), also with outdated entries
        self._due_times: list[tuple[float, str]] = []
        #: by tenant: tokens in the bucket, and the time at which they were counted
        self._buckets: dict[str, tuple[float, float]] = {}

    def refused(self, request_id: str, now: float, retry_at: float) -> None:
        """Record a refused request, which may be sent again from the time ``retry_at`` on.

        A request whose id the client did not choose is not recorded: its retry has another id.
        """
        if not is_named(request_id):
            return
        self._retry_at.pop(request_id, None)
        self._retry_at[request_id] = retry_at
        heapq.heappush(self._due_times, (retry_at, request_id))
        self._forget_abandoned(now)
        if len(self._retry_at) > _MOST_REFUSALS:
            del self._retry_at[next(iter(self._retry_at))]

    def _forget_abandoned(self, now: float) -> None:
        while self._due_times[0][0] + _ABANDONED_S < now:
            due, request_id = heapq.heappop(self._due_times)
            if self._retry_at.get(request_id) == due:
                del self._retry_at[request_id]
        if len(self._due_times) > 2 * len(self._retry_at) + _FEW:
            self._due_times = [(due, request_id) for request_id, due in self._retry_at.items()]
            heapq.heapify(self._due_times)

    def withdraw(self, request_id: str) -> None:
        """Forget the refusal of a request."""
        self._retry_at.pop(request_id, None)

    def admit_retry(self, request_id: str, now: float) -> float:
        """Return the seconds by which a retry is too soon; 0 if it may be admitted.

        A retry may be admitted if the request was not refused before, if Retry-After has passed, or
        else if the tenant's bucket has a token, which is taken. The refusal of a request that may
        be admitted is forgotten.
        """
        due = self._retry_at.get(request_id)
        if due is None:
            return 0.0
        early_s = due - now
        if early_s > _SLACK_S and not self._take_token(tenant_of(request_id), now):
            return early_s
        del self._retry_at[request_id]
        return 0.0

    def _take_token(self, tenant: str, now: float) -> bool:
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
#: Drain time of the queue for Retry-After, in seconds: the minimum, which is also used if the drain
#: rate is unknown, and the maximum.
_UNKNOWN_S, _MOST_S = 1.0, 60.0
#: Retry-After is the drain time of the queue times a random factor between these two, so that the
#: retries of refused requests are spread out.
_JITTER = 0.5, 2.5
_OUTPUT_TOO_LONG = "estimated end of the output ({} tokens at least) is after the deadline"


class EarlyRejection:
    """Early rejection of requests in a router, before they reach the leader.

    ``rng`` randomises Retry-After. ``now`` is the router's clock in seconds.
    """

    def __init__(self, config: RouterConfig, rng: Random) -> None:
        self.rules = Rules.of(config)
        #: last estimate that the leader reported, by model
        self.queue_estimates: dict[str, session_pb2.QueueEstimate] = {}
        self._retry_limiter = RetryLimiter(config.retry_rate, config.retry_burst)
        self._rng = rng

    def admit(self, request_id: str, model: str, priority: int, now: float) -> None:
        """Check that a new request may join the queue of its model.

        Raises RetriedTooSoon if the request was refused before, is sent again before its
        Retry-After, and its tenant's bucket has no token for premature retries. Raises QueueFull if
        the queue is full and has no request of a lower class that has never been dispatched.
        """
        if early_s := self._retry_limiter.admit_retry(request_id, now):
            raise RetriedTooSoon("retried before the time in retry-after", retry_after_s=early_s)
        estimate = self._estimate(model)
        is_full = estimate.queued >= self.rules.max_queued
        if is_full and not (estimate.HasField("lowest") and estimate.lowest < priority):
            raise self.refuse(request_id, model, QueueFull.slug, None, now)

    def check_in_time(
        self,
        request_id: str,
        model: str,
        priority: int,
        ttft_target_s: float | None,
        timeout_s: float | None,
        least_tokens: int,
        now: float,
    ) -> None:
        """Check that a new request can meet its TTFT target and its deadline.

        Raises DeadlineUnmeetable if the TTFT target or the deadline cannot be met.
        ``ttft_target_s`` and ``timeout_s`` are in seconds after arrival; None means that there is
        no such limit. Each output has at least ``least_tokens`` tokens. Nothing is checked unless
        the rule ``refuse_late`` is set.
        """
        if not self.rules.refuse_late:
            return
        output_s = (least_tokens - 1) * self._estimate(model).least_tpot_s
        deadlines = Deadlines.within(ttft_target_s, timeout_s)
        missed = deadlines.missed(self._wait_s(request_id, model, priority), 0.0, output_s)
        if missed is not None:
            too_long = least_tokens if missed.is_by_output else 0
            slug = DeadlineUnmeetable.slug
            raise self.refuse(request_id, model, slug, missed.shorter_s, now, too_long)

    def _estimate(self, model: str) -> session_pb2.QueueEstimate:
        return self.queue_estimates.get(model) or session_pb2.QueueEstimate()

    def _wait_s(self, request_id: str, model: str, priority: int) -> float:
        """Return the wait that 95 % of requests should exceed, in seconds; 0 if unknown.

        With fair shares, queued requests of the same class do not count, because only the leader
        knows how many of them leave before this one.
        """
        is_fair = self.rules.fair_share and is_qualified(request_id)
        first = priority + is_fair
        before = [it.wait_s for it in self._estimate(model).waits if it.priority >= first]
        return before[-1] if before else 0.0

    def refuse(
        self,
        request_id: str,
        model: str,
        slug: str,
        retry_after_s: float | None,
        now: float,
        least_tokens: int = 0,
    ) -> EverliftError:
        """Record that a request is refused, and return the error to raise, with a Retry-After.

        ``slug`` names the class of the error. Retry-After is at least ``retry_after_s``, the
        seconds after which the queue is short enough for the request. If ``least_tokens`` is above
        0, the error message says that an output of this many tokens would end too late.
        """
        drained_s = self._drained_s(model) * self._rng.uniform(*_JITTER)
        retry_after_s = max(drained_s, retry_after_s or 0.0)
        self._retry_limiter.refused(request_id, now, now + retry_after_s)
        too_long = _OUTPUT_TOO_LONG.format(least_tokens) if least_tokens else ""
        error = from_slug(slug, too_long or _CAUSES.get(slug, ""))
        error.retry_after_s = retry_after_s
        return error

    def _drained_s(self, model: str) -> float:
        """Return the estimated seconds until the queue is empty, from 1 to 60; 1 if unknown."""
        queue_estimate = self._estimate(model)
        if not queue_estimate.tokens_per_s:
            return _UNKNOWN_S
        work_tokens = queue_estimate.waits[-1].work_tokens if queue_estimate.waits else 0
        return min(_MOST_S, max(_UNKNOWN_S, work_tokens / queue_estimate.tokens_per_s))

    def withdraw_rejection(self, request_id: str) -> None:
        """Forget the refusal of a request that is accepted after all."""
        self._retry_limiter.withdraw(request_id)


#: A request must leave the queue this many times its predicted prefill time before its TTFT
#: deadline, because other requests are dispatched to its worker, too. The goodput at 1.3 times the
#: load, relative to that at 1.0, is 1.02 with 2 and 0.95 with 1 (benchmarks/overload.py).
_PREFILL_MARGIN = 2
#: Additional seconds for the request's way to its worker and its first token's way back.
_ROUND_TRIP_S = 0.03


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection of a request by the leader; ``slug`` names the class of its error.

    The client may retry after ``retry_after_s`` seconds at the earliest; None means that the leader
    sets no such bound. ``least_tokens`` is above 0 if the first token would be in time, but an
    output of this many tokens would end too late.
    """

    waiting: Waiting
    slug: str
    retry_after_s: float | None = None
    least_tokens: int = 0


class Bounds:
    """Limits of the leader's queue: requests beyond them are refused on arrival or removed later.

    Times are ledger time in seconds. Every operation is O(log n), or O(classes).
    """

    def __init__(self, rules: Rules, queue: AdmissionQueue, waits: WaitEstimator) -> None:
        self.rules = rules
        self._queue = queue
        self._waits = waits

    def predict(self, waiting: Waiting) -> Waiting:
        """Return a copy of a request with predicted times and the time at which it expires.

        A request that has been dispatched before is returned unchanged.
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
        if not wait_s:
            # No queue is known, and the prompt may be cached (``Deadlines.missed``).
            prefill_s = 0.0
        by_first = waiting.ttft_deadline - _PREFILL_MARGIN * prefill_s
        by_end = waiting.deadline - self._output_s(waiting) - prefill_s
        return min(expires, min(by_first, by_end) - _ROUND_TRIP_S)

    def _output_s(self, waiting: Waiting) -> float:
        return (waiting.least_tokens - 1) * self._waits.least_tpot_s

    def refuse(self, waiting: Waiting) -> Refusal | None:
        """Return the refusal that a new request causes; None if it can be queued without any.

        Either the request itself is refused, or the newest queued request of the lowest class among
        those that have never been dispatched. This call removes the latter from the queue.
        """
        if (missed := self._missed_deadline(waiting)) is not None:
            least_tokens = waiting.least_tokens if missed.is_by_output else 0
            return Refusal(waiting, DeadlineUnmeetable.slug, missed.shorter_s, least_tokens)
        if len(self._queue) < self.rules.max_queued:
            return None
        shed = self._queue.shed(waiting.priority)
        return Refusal(waiting, QueueFull.slug) if shed is None else Refusal(shed, Shed.slug)

    def _missed_deadline(self, waiting: Waiting) -> MissedDeadline | None:
        """Return how a request misses its TTFT target or its deadline even in the best case.

        The best case is a wait and a time per output token that 95 % of requests exceed. Returns
        None if both limits can be met, or if the rule ``refuse_late`` is not set.
        """
        if not self.rules.refuse_late:
            return None
        deadlines = Deadlines(
            waiting.ttft_deadline - waiting.arrived, waiting.deadline - waiting.arrived
        )
        return deadlines.missed(
            self._waits.least_wait_s(waiting.predicted_wait_s or 0.0),
            self._waits.prefill_s(waiting),
            self._output_s(waiting),
        )

    def expire(self, ledger_now: float) -> list[Refusal]:
        """Remove the queued requests that have expired at ``ledger_now``; return their refusals."""
        expired = []
        while (waiting := self._queue.expire(ledger_now)) is not None:
            expired.append(Refusal(waiting, QueueTimeout.slug))
        return expired
