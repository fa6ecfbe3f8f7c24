"""How much each tenant of a class was served, and who of those that wait got least. Pure.

Virtual token counters (VTC, "Fairness in Serving Large Language Models", OSDI '24, arXiv
2401.00588): a tenant's counter grows with every token that is computed for it. Who begins to wait
is lifted to the least counter of those that wait, so that nobody saves up by having asked for
nothing.

Let M be the tokens of all that may run at once, prompts and outputs, and each cost their own: while
two tenants of weight 1 wait, their counters differ by no more than

    U = max(cost of the longest prompt, cost of M outputs)

and what they are served in any such time by no more than 2 U (there lemma 4.3 and theorem 4.4;
the output costs no less than the prompt). Outputs that are told late add what they cost to U.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

#: Tenants that are known before it is looked who may be forgotten.
_FEW = 64


class TokenCounters:
    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        #: counters of those, as they were: they only grow. Of a tenant there is one at most
        self._least: list[tuple[float, str]] = []
        self._in_least: set[str] = set()
        #: who was the last to wait for nothing any more
        self._last = ""
        self._forget_beyond = _FEW

    def __len__(self) -> int:
        return len(self._counters)

    @property
    def waiting(self) -> Mapping[str, int]:
        """Requests that wait, of tenants that have any."""
        return self._waiting

    def of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def come(self, tenant: str, *, lift: bool) -> None:
        """A request of it waits."""
        if tenant in self._waiting:
            self._waiting[tenant] += 1
            return
        self._counters[tenant] = max(self.of(tenant), self._level() if lift else 0.0)
        self._waiting[tenant] = 1
        if tenant not in self._in_least:
            self._in_least.add(tenant)
            heapq.heappush(self._least, (self._counters[tenant], tenant))
        if len(self._counters) > self._forget_beyond:
            self._forget()

    def go(self, tenant: str) -> None:
        """One of them does not wait any more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def charge(self, tenant: str, cost: float) -> None:
        """It was served so much."""
        self._counters[tenant] = self.of(tenant) + cost

    def _level(self) -> float:
        """Where who comes begins: the least counter of those that wait, or else of who did last."""
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
        return self.of(self._last)

    def _forget(self) -> None:
        """Whoever comes back no higher than all others come."""
        level = self._level()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > level or tenant in self._waiting or tenant == self._last
        }
        self._forget_beyond = _FEW + 2 * len(self._counters)

    @property
    def gap(self) -> float:
        """Between the counters of those that wait."""
        counters = [self._counters[tenant] for tenant in self._waiting]
        return max(counters) - min(counters) if counters else 0.0

    # from one leader to the next

    def told(self, most: int) -> list[tuple[str, float]]:
        """By how much tenants were served more than who comes now would begin with: of those with
        the most, so many at most."""
        level = self._level()
        above = ((it[0], it[1] - level) for it in self._counters.items() if it[1] > level)
        return heapq.nlargest(most, above, key=lambda it: it[1])

    def recall(self, told: Iterable[tuple[str, float]]) -> None:
        """What the leader before told; what was served since stays."""
        for tenant, counter in told:
            self.charge(tenant, counter)
