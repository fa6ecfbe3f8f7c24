"""What tenants were served, and who of those that wait got least: virtual token counters (VTC,
"Fairness in Serving Large Language Models", OSDI '24, arXiv 2401.00588). Pure.

A tenant's counter grows with every token that is computed for it, divided by its weight: prompts
when they are dispatched, outputs as they are told. Who begins to wait is lifted to the least
counter of those that wait, so that nobody saves up by having asked for nothing.

Let M be the tokens of all that may run at once, prompts and outputs. While two tenants of weight 1
both have requests that wait, their counters differ by no more than

    U = max(INPUT * the longest prompt, OUTPUT * M)

and what they are served in any such time by no more than 2 U (there lemma 4.3 and theorem 4.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

#: What a token costs, of a prompt and of an output, as in the paper.
INPUT, OUTPUT = 1, 2


class Services:
    """``weight_of`` answers a tenant's weight, above 0."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._counters: dict[str, float] = {}
        #: requests that wait, of tenants that have any
        self._waiting: dict[str, int] = {}
        #: counters of those, as they were: they only grow. Of a tenant there is one at most
        self._least: list[tuple[float, str]] = []
        self._in_least: set[str] = set()
        #: who was the last to wait for nothing any more
        self._last = ""

    def of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def come(self, tenant: str) -> None:
        """A request of it waits."""
        if tenant in self._waiting:
            self._waiting[tenant] += 1
            return
        least = self._counter_of_least()
        if least is None:
            least = self.of(self._last)
        self._counters[tenant] = max(self.of(tenant), least)
        self._waiting[tenant] = 1
        if tenant not in self._in_least:
            self._in_least.add(tenant)
            heapq.heappush(self._least, (self._counters[tenant], tenant))

    def go(self, tenant: str) -> None:
        """One of them does not wait any more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def charge(self, tenant: str, cost: float) -> None:
        """It was served tokens of so much."""
        self._counters[tenant] = self.of(tenant) + cost / self._weight_of(tenant)

    def _counter_of_least(self) -> float | None:
        """Of those that wait."""
        least = self._least
        while least:
            counter, tenant = least[0]
            if tenant not in self._waiting:
                heapq.heappop(least)
                self._in_least.remove(tenant)
            elif counter < self.of(tenant):
                heapq.heapreplace(least, (self.of(tenant), tenant))
            else:
                return counter
        return None

    # from one leader to the next

    def told(self, most: int) -> list[tuple[str, float]]:
        """Counters of the tenants that wait and of others, as many as ``most``, less the least."""
        known = heapq.nlargest(
            most, self._counters.items(), key=lambda it: (it[0] in self._waiting, it[1])
        )
        least = min((counter for _, counter in known), default=0.0)
        return [(tenant, counter - least) for tenant, counter in known]

    def recall(self, told: Iterable[tuple[str, float]]) -> None:
        """What the leader before knew. Before anybody waits."""
        for tenant, counter in told:
            self._counters[tenant] = max(self.of(tenant), counter)
