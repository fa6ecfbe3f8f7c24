"""Forecast of a cluster under a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.simulator.summary import Record, Slo, Summary, summarise

K = TypeVar("K", int, str)


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the cluster at one moment; ``at`` is the virtual time in seconds.

    ``queued`` requests are in the router's queue, ``running`` ones have a slot at a worker, and
    ``waiting`` ones are at a worker but have no slot. All fields except ``at`` and ``queued`` cover
    only the workers that accept requests. The requests of a lost worker count neither as running
    nor as waiting, even if the router has not detected the loss yet.
    """

    at: float
    #: requests in the admission queue
    queued: int
    running: int
    waiting: int
    workers: int
    slots: int
    blocks_used: int
    blocks: int

    @property
    def slot_occupancy(self) -> float:
        return self.running / self.slots if self.slots else 0.0

    @property
    def block_occupancy(self) -> float:
        return self.blocks_used / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Result of a simulation: ``records`` of requests by arrival, ``samples`` by time.

    ``num_steps`` is the number of engine steps of all workers. ``num_jumped`` of them were not
    scheduled separately: of n steps that are computed together, n - 1 count.
    """

    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    num_steps: int
    num_jumped: int
    #: connected time in seconds, summed over all workers
    worker_s: float

    def summary(
        self, slo: Slo | None = None, predicate: Callable[[Record], bool] = lambda _: True
    ) -> Summary:
        """Return a summary of the requests for whose record ``predicate`` is true.

        Without ``slo``, a request is good if it met its own target and deadline.
        """
        return summarise(filter(predicate, self.records), slo)

    def by_class(self, slo: Slo | None = None) -> dict[int, Summary]:
        return self._by(lambda record: record.arrival.priority, slo)

    def by_tenant(self, slo: Slo | None = None) -> dict[str, Summary]:
        return self._by(lambda record: record.arrival.tenant, slo)

    def by_application(self, slo: Slo | None = None) -> dict[str, Summary]:
        return self._by(lambda record: record.arrival.application, slo)

    def _by(self, key: Callable[[Record], K], slo: Slo | None) -> dict[K, Summary]:
        groups: dict[K, list[Record]] = {}
        for record in self.records:
            groups.setdefault(key(record), []).append(record)
        return {name: summarise(groups[name], slo) for name in sorted(groups)}
