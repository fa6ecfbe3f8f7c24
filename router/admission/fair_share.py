"""What the tenants were served, by class. Pure.

A tenant's counter grows by a request's prompt when that is dispatched for the first time, and by
its outputs as gateways tell of them, both divided by the tenant's weight. What is computed again,
because a worker was lost or somebody had to make room, was not the tenant's choice: it costs
nothing.

Each class has counters of its own: who is served in a higher one has no less of a lower one, and
who waits in a lower one has nothing saved up for a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nlargest

from everlift.request_id import tenant_of
from everlift.v1 import session_pb2
from router.admission.request import Ordered, Waiting
from router.admission.token_counters import TokenCounters

#: Counters of a class that the next leader is told.
_MOST_TOLD = 512
#: Tenants' queues that the cluster's load tells of.
_MOST_QUEUES = 64


class FairShare:
    """``prompt_token`` and ``output_token`` are what one costs; ``weight_of`` answers a tenant's
    weight, above 0."""

    def __init__(
        self, prompt_token: float, output_token: float, weight_of: Callable[[str], float]
    ) -> None:
        self._prompt_token = prompt_token
        self._output_token = output_token
        self._weight_of = weight_of
        self._of_class: dict[int, TokenCounters] = {}
        #: tokens to be computed for what waits, as predicted, by class and tenant
        self._work: dict[tuple[int, str], int] = {}
        #: who waited under the leader before is not taken for one who comes
        self._lifts = False

    def counters(self, priority: int) -> TokenCounters:
        """Of a class."""
        counters = self._of_class.get(priority)
        if counters is None:
            counters = self._of_class[priority] = TokenCounters()
        return counters

    def come(self, waiting: Waiting) -> None:
        """It waits."""
        tenant = tenant_of(waiting.request_id)
        self.counters(waiting.priority).come(tenant, lift=self._lifts)
        key = waiting.priority, tenant
        self._work[key] = self._work.get(key, 0) + waiting.work_tokens

    def go(self, waiting: Waiting) -> None:
        """It does not wait any more."""
        tenant = tenant_of(waiting.request_id)
        self.counters(waiting.priority).go(tenant)
        key = waiting.priority, tenant
        self._work[key] -= waiting.work_tokens
        if not self._work[key]:
            del self._work[key]

    def work_before(self, ordered: Ordered) -> int:
        """Tokens of its class that leave before one that comes now, as predicted: its tenant's, and
        what each other one that waits is served meanwhile, of weight 1, if it has as much."""
        tenant = tenant_of(ordered.request_id)
        own = self._work.get((ordered.priority, tenant), 0)
        if not own:
            return 0
        others = len(self.counters(ordered.priority).waiting) - 1
        return round(own * (1 + others / self._weight_of(tenant)))

    def of(self, ordered: Ordered) -> float:
        """What its tenant was served in its class; of two the one with less has its turn."""
        return self.counters(ordered.priority).of(tenant_of(ordered.request_id))

    def dispatched(self, waiting: Waiting) -> None:
        """Its prompt will be computed."""
        if not waiting.has_run:
            tenant = tenant_of(waiting.request_id)
            cost = self._prompt_token * waiting.prefill_tokens
            self._charge(tenant, waiting.priority, cost)

    def told(self, outputs: Iterable[session_pb2.ServedTokens]) -> None:
        """A gateway has had them."""
        for each in outputs:
            self._charge(each.tenant, each.priority, self._output_token * each.tokens)

    def _charge(self, tenant: str, priority: int, cost: float) -> None:
        self.counters(priority).charge(tenant, cost / self._weight_of(tenant))

    @property
    def gap(self) -> float:
        """The largest difference between counters of tenants that wait in the same class."""
        return max((counters.gap for counters in self._of_class.values()), default=0.0)

    def queues(self) -> list[session_pb2.TenantQueue]:
        """Of whom most requests wait. O(tenants)."""
        waiting = (
            (queued, tenant, priority)
            for priority, counters in self._of_class.items()
            for tenant, queued in counters.waiting.items()
        )
        return [
            session_pb2.TenantQueue(tenant=tenant, priority=priority, queued=queued)
            for queued, tenant, priority in nlargest(_MOST_QUEUES, waiting)
        ]

    # from one leader to the next

    def roll_called(self) -> None:
        """Whoever waited under the leader before has been told: who comes now was not waiting."""
        self._lifts = True

    def report(self) -> list[session_pb2.TenantService]:
        return [
            session_pb2.TenantService(tenant=tenant, priority=priority, counter=counter)
            for priority, counters in self._of_class.items()
            for tenant, counter in counters.told(_MOST_TOLD)
        ]

    def recall(self, reported: Iterable[session_pb2.TenantService]) -> None:
        """What the leader before reported. Also late: what was served since is added to it."""
        for each in reported:
            self.counters(each.priority).recall([(each.tenant, each.counter)])
