"""Fair share of tenants by virtual token counters (VTC, arXiv 2401.00588). Pure.

A tenant's counter is the cost of the tokens that it was served, divided by its weight; the tenant
with the smallest counter is served next. When a request is first dispatched, the counter grows by
the tokens of its prompt that its worker has not cached, and later by the output tokens that routers
report. Tokens that are recomputed after a lost worker or a preemption are free. Each priority class
has its own counters, so tokens that are served in one class do not affect the order of tenants in
another.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest

from everlift.request_id import tenant_of
from everlift.v1 import session_pb2
from router.admission.request import Ordered, Waiting

#: Number of tenants up to which no counter is dropped.
_FEW = 64


class TokenCounters:
    """Virtual token counters of tenants in one priority class, and numbers of their requests.

    A tenant is backlogged while it has a queued request of this class. A request that is parked for
    no particular worker (``Wait``) does not count, because its tenant cannot be served.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        #: heap of (counter, tenant) that yields the smallest counter of a backlogged tenant. A
        #: tenant has one entry at most. Entries may be outdated, because counters grow
        self._least: list[tuple[float, str]] = []
        self._in_least: set[str] = set()
        #: tenant whose last queued request left most recently
        self._last = ""
        self._prune_threshold = _FEW

    def __len__(self) -> int:
        return len(self._counters)

    @property
    def waiting(self) -> Mapping[str, int]:
        """Number of queued requests of each backlogged tenant."""
        return self._waiting

    def counter_of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def note_queued(self, tenant: str, *, lift: bool) -> None:
        """Record that a request of the tenant is queued.

        If the tenant had no queued request and ``lift`` is set, its counter is raised to the
        smallest counter of the backlogged tenants, so that idle time earns no advantage.
        """
        if tenant in self._waiting:
            self._waiting[tenant] += 1
            return
        self._counters[tenant] = max(self.counter_of(tenant), self._level() if lift else 0.0)
        self._waiting[tenant] = 1
        if tenant not in self._in_least:
            self._in_least.add(tenant)
            heapq.heappush(self._least, (self._counters[tenant], tenant))
        if len(self._counters) > self._prune_threshold:
            self._prune()

    def note_removed(self, tenant: str) -> None:
        """Record that a request of the tenant has left the queue or no longer counts."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def charge(self, tenant: str, cost: float) -> None:
        """Add ``cost``, which is already divided by the weight, to the tenant's counter."""
        self._counters[tenant] = self.counter_of(tenant) + cost

    def _level(self) -> float:
        least = self._least
        while least:
            counter, tenant = least[0]
            if tenant not in self._waiting:
                heapq.heappop(least)
                self._in_least.remove(tenant)
            elif counter < self.counter_of(tenant):
                heapq.heapreplace(least, (self.counter_of(tenant), tenant))
            else:
                return counter
        return self.counter_of(self._last)

    def _prune(self) -> None:
        level = self._level()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > level or tenant in self._waiting or tenant == self._last
        }
        self._prune_threshold = _FEW + 2 * len(self._counters)

    @property
    def gap(self) -> float:
        """Largest difference between counters of backlogged tenants; 0 without any."""
        counters = [self._counters[tenant] for tenant in self._waiting]
        return max(counters) - min(counters) if counters else 0.0

    # handover to the next leader

    def largest_leads(self, most: int) -> list[tuple[str, float]]:
        """Return the tenants with the largest counters, at most ``most``, each with its lead.

        The lead is the tenant's counter minus the one that a newly backlogged tenant would get.
        Only tenants whose lead is above 0 are returned, the largest lead first.
        """
        level = self._level()
        above = ((it[0], it[1] - level) for it in self._counters.items() if it[1] > level)
        return heapq.nlargest(most, above, key=lambda it: it[1])

    def restore_leads(self, leads: Iterable[tuple[str, float]]) -> None:
        """Add leads, as ``largest_leads`` returned them at the previous leader, to the counters."""
        for tenant, counter in leads:
            self.charge(tenant, counter)


class ServedOutputs:
    """Output tokens that a router has not reported to the leader yet.

    They are counted by model, tenant and class.
    """

    def __init__(self) -> None:
        self._tokens: Counter[tuple[str, str, int]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, model: str, tenant: str, priority: int, tokens: int) -> None:
        self._tokens[model, tenant, priority] += tokens

    def drain(self) -> list[session_pb2.ServedTokens]:
        """Remove and return all tokens, as one message for each model, tenant and class."""
        tokens, self._tokens = self._tokens, Counter()
        return [
            session_pb2.ServedTokens(model=model, tenant=tenant, priority=priority, tokens=number)
            for (model, tenant, priority), number in tokens.items()
        ]


#: Maximum number of counters of a class that are reported for the next leader.
_MAX_REPORTED = 512
#: Maximum number of tenants' queues in the report of the cluster's load.
_MOST_QUEUES = 64


class FairShare:
    """Fair share of tenants, with counters for each priority class.

    ``prompt_token`` and ``output_token`` are the costs of a prompt and of an output token.
    ``weight_of`` returns a tenant's weight, above 0, by which its costs are divided.
    """

    def __init__(
        self, prompt_token: float, output_token: float, weight_of: Callable[[str], float]
    ) -> None:
        self._prompt_token = prompt_token
        self._output_token = output_token
        self._weight_of = weight_of
        self._of_class: dict[int, TokenCounters] = {}
        #: number of queued requests, and predicted tokens to compute for them, by class and tenant
        self._numbers: dict[tuple[int, str], int] = {}
        self._work: dict[tuple[int, str], int] = {}
        #: False during the handover: tenants that were backlogged under the previous leader are not
        #: newly backlogged, so their counters are not raised
        self._lifts = False

    def counters(self, priority: int) -> TokenCounters:
        """Return the counters of class ``priority``; they are created if there are none."""
        counters = self._of_class.get(priority)
        if counters is None:
            counters = self._of_class[priority] = TokenCounters()
        return counters

    def note_queued(self, waiting: Waiting) -> None:
        """Record that a request is queued."""
        tenant = tenant_of(waiting.request_id)
        self.counters(waiting.priority).note_queued(tenant, lift=self._lifts)
        key = waiting.priority, tenant
        self._numbers[key] = self._numbers.get(key, 0) + 1
        self._work[key] = self._work.get(key, 0) + waiting.work_tokens

    def note_removed(self, waiting: Waiting) -> None:
        """Record that a request is no longer queued."""
        tenant = tenant_of(waiting.request_id)
        self.counters(waiting.priority).note_removed(tenant)
        key = waiting.priority, tenant
        self._numbers[key] -= 1
        self._work[key] -= waiting.work_tokens
        if not self._numbers[key]:
            del self._numbers[key], self._work[key]

    def note_parked(self, waiting: Waiting) -> None:
        """Record that a queued request is parked for no particular worker.

        The request no longer makes its tenant backlogged. Otherwise, the tenant's counter would
        stay the smallest one, to which the counters of other tenants are raised.
        """
        self.counters(waiting.priority).note_removed(tenant_of(waiting.request_id))

    def note_unparked(self, waiting: Waiting) -> None:
        """Record that a queued request is no longer parked for no particular worker."""
        tenant = tenant_of(waiting.request_id)
        self.counters(waiting.priority).note_queued(tenant, lift=self._lifts)

    def work_before(self, ordered: Ordered) -> int:
        """Estimate the queued work, in tokens, that leaves before the new request ``ordered``.

        Only work of the request's class counts. The queued work W of the request's tenant leaves
        first and raises the tenant's counter by W / weight. The counters of all other backlogged
        tenants rise as much meanwhile. The estimate is thus W, plus W / weight for each of them,
        which are assumed to have weight 1 and enough queued work. Return 0 if the request's tenant
        has no queued request.
        """
        tenant = tenant_of(ordered.request_id)
        own = self._work.get((ordered.priority, tenant), 0)
        if not own:
            return 0
        backlogged = self.counters(ordered.priority).waiting
        others = len(backlogged) - (tenant in backlogged)
        return round(own * (1 + others / self._weight_of(tenant)))

    def counter_of(self, ordered: Ordered) -> float:
        """Return the counter of the request's tenant in its class.

        Requests of the tenant with the smallest counter leave the queue first.
        """
        return self.counters(ordered.priority).counter_of(tenant_of(ordered.request_id))

    def charge_prompt(self, waiting: Waiting, cached_tokens: int) -> None:
        """Add the cost of a dispatched request's prompt, unless the request has run before.

        The first ``cached_tokens`` tokens are free: the request's worker has them in its cache.
        """
        if not waiting.has_run:
            tenant = tenant_of(waiting.request_id)
            cost = self._prompt_token * (waiting.prefill_tokens - cached_tokens)
            self._charge(tenant, waiting.priority, cost)

    def charge_outputs(self, outputs: Iterable[session_pb2.ServedTokens]) -> None:
        """Add the costs of the output tokens that a router reports."""
        for each in outputs:
            self._charge(each.tenant, each.priority, self._output_token * each.tokens)

    def _charge(self, tenant: str, priority: int, cost: float) -> None:
        self.counters(priority).charge(tenant, cost / self._weight_of(tenant))

    @property
    def gap(self) -> float:
        """Largest difference between counters of backlogged tenants of the same class."""
        return max((counters.gap for counters in self._of_class.values()), default=0.0)

    def queues(self) -> list[session_pb2.TenantQueue]:
        """Return the 64 longest queues by tenant and class, the longest first. O(tenants)."""
        waiting = (
            (queued, tenant, priority) for (priority, tenant), queued in self._numbers.items()
        )
        return [
            session_pb2.TenantQueue(tenant=tenant, priority=priority, queued=queued)
            for queued, tenant, priority in nlargest(_MOST_QUEUES, waiting)
        ]

    # handover to the next leader

    def handover_ended(self) -> None:
        """Record that this leader knows all requests that were queued under the previous one.

        From now on, when a tenant without queued requests sends one, the tenant's counter is raised
        as ``TokenCounters.note_queued`` describes, so that idle time earns no advantage.
        """
        self._lifts = True

    def report(self) -> list[session_pb2.TenantService]:
        return [
            session_pb2.TenantService(tenant=tenant, priority=priority, counter=counter)
            for priority, counters in self._of_class.items()
            for tenant, counter in counters.largest_leads(_MAX_REPORTED)
        ]

    def restore_counters(self, reported: Iterable[session_pb2.TenantService]) -> None:
        """Add the leads that the previous leader reported to this leader's counters.

        Costs that were charged in this leader's term before this call are kept.
        """
        for each in reported:
            self.counters(each.priority).restore_leads([(each.tenant, each.counter)])
