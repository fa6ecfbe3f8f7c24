"""Waits for workers with more cached tokens, against a clairvoyant policy that knows all waits.

A decision is made when a request could be dispatched, and a busy worker has more of it cached. Its
cost is the time until the request is dispatched, plus the time that the chosen worker then needs to
compute it. The clairvoyant policy has the smallest of several costs. One is to compute the request
at once. The others, for each of those busy workers, are to wait until it has credit and no request
waits for it, plus the time that it then needs. The policy knows the course of this simulation, so
it does not have to estimate waits. Workers that are not free within the time of computing at once
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.simulator.global_queue import GlobalQueue
from router.admission.parking import Parking, Wait
from router.admission.placement import Choice, Placement, Waited
from router.admission.request import Waiting
from router.admission.workers import Load
from router.config import RouterConfig


@dataclass(slots=True)
class Decision:
    """Decision at ``at`` seconds about a request; other times are in seconds after that.

    Times to compute a request include what that costs other requests.
    """

    waiting: Waiting
    at: float
    #: time to compute it with the best worker that had credit
    compute_s: float
    has_waited: bool = False
    #: shortest time with another worker, as far as it happened before ``compute_s``
    best_s: float | None = None
    #: time of the policy: until the dispatch, and to compute it then
    cost_s: float | None = None
    #: worker to which the policy dispatched it
    worker_id: str = ""

    @property
    def clairvoyant_s(self) -> float:
        return min(self.compute_s, self.compute_s if self.best_s is None else self.best_s)


class WatchedPlacement(Placement):
    """Placement that records the decisions to wait, or not to wait."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.decisions: dict[str, Decision] = {}
        #: by worker: decisions whose request it has cached
        self._watched: dict[str, list[Decision]] = {}
        self._parking = Parking()
        self._now = 0.0

    def wait_for(
        self, waiting: Waiting, choice: Choice, parking: Parking, waited: Waited, now: float
    ) -> Wait | None:
        wait = super().wait_for(waiting, choice, parking, waited, now)
        self._parking, self._now = parking, now
        if waiting.request_id not in self.decisions and choice.seconds is not None:
            warm = [worker for _, worker in self._longer_prefixes(choice)]
            if warm:
                decision = Decision(waiting, now, choice.cost_s, wait is not None)
                self.decisions[waiting.request_id] = decision
                for worker in warm:
                    self._watched.setdefault(worker, []).append(decision)
        return wait

    def report(self, worker_id: str, load: Load, now: float) -> None:
        super().report(worker_id, load, now)
        self._now = now
        if watched := self._watched.pop(worker_id, None):
            watched = [it for it in watched if now < it.at + it.compute_s]
            # A worker to which the request was dispatched caches it all then.
            watched = [it for it in watched if it.worker_id != worker_id]
            if not self._parking.ahead(worker_id)[1]:
                watched = [it for it in watched if not self._note(it, worker_id, now)]
            if watched:
                self._watched[worker_id] = watched

    def _note(self, decision: Decision, worker_id: str, now: float) -> bool:
        """Note the time with a worker if it has credit for the request now; return whether."""
        choice = self.take(worker_id, decision.waiting)
        if choice is None or choice.seconds is None:
            return False
        seconds = now - decision.at + choice.cost_s
        decision.best_s = min(seconds, seconds if decision.best_s is None else decision.best_s)
        return True

    def reserve(
        self, worker_id: str, epoch: int, waiting: Waiting, now: float, cached_tokens: int = 0
    ) -> None:
        decision = self.decisions.get(waiting.request_id)
        if decision is not None and decision.cost_s is None:
            uncached = waiting.prefill_tokens - cached_tokens
            pending = self._workers[worker_id].prefill_before(uncached)
            seconds = self._seconds(worker_id, waiting, cached_tokens, pending)
            assert seconds is not None
            seconds += self._others_s(worker_id, waiting, cached_tokens)
            decision.cost_s, decision.worker_id = now - decision.at + seconds, worker_id
            if decision.has_waited and cached_tokens:
                # The wait ended with this worker, so the clairvoyant could have waited for it, too.
                best_s = decision.cost_s if decision.best_s is None else decision.best_s
                decision.best_s = min(best_s, decision.cost_s)
        super().reserve(worker_id, epoch, waiting, now, cached_tokens)


class WatchedQueue(GlobalQueue):
    """The product's queue without classes and tenants, whose waits are recorded."""

    placement_class = WatchedPlacement

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config, occupants=lambda worker_id: ())

    def decisions(self, since: float) -> list[Decision]:
        """Return the decisions after ``since`` seconds."""
        assert isinstance(self._placement, WatchedPlacement)
        decisions = self._placement.decisions.values()
        return [it for it in decisions if it.at >= since and it.cost_s is not None]


def summary(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return the total cost of the decisions, and their ratios to the clairvoyant's costs."""
    ratios = sorted(it.cost_s / it.clairvoyant_s for it in decisions) or [1.0]
    return {
        "decisions": len(decisions),
        "waited": sum(it.has_waited for it in decisions),
        "cost_s": sum(it.cost_s for it in decisions),
        "clairvoyant_s": sum(it.clairvoyant_s for it in decisions),
        "ratio_p50": ratios[len(ratios) // 2],
        "ratio_p99": ratios[len(ratios) * 99 // 100],
        "over_twice": sum(it > 2.0 for it in ratios),
    }
