"""Forecast of a cluster under a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.simulator.summary import Record, Slo, Summary, summarise

K = TypeVar("K", int, str)


@dataclass(frozen=True, slots=True)
class Sample:
    """Cluster at one moment.

    ``waiting`` are at workers, without a slot there. All of it but ``queued`` is of workers that
    take requests: what a lost one had runs nowhere, though the router does not know it yet.
    """

    at: float
    #: in the admission queue
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
    """Result of a simulation: ``records`` by arrival, ``samples`` by time.

    ``num_steps`` were computed by all workers together, ``num_jumped`` of them several at once.
    """

    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    num_steps: int
    num_jumped: int
    #: seconds that workers were there, of all together
    worker_s: float

    def summary(
        self, slo: Slo | None = None, where: Callable[[Record], bool] = lambda _: True
    ) -> Summary:
        """Return a summary of the requests that ``where`` selects."""
        return summarise(filter(where, self.records), slo)

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
