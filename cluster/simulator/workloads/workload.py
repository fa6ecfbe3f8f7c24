"""Synthetic workloads: endless requests that follow given statistics. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from operator import attrgetter
from random import Random
from typing import Self, TypeVar
from zlib import crc32

from cluster.simulator.workloads.arrivals import Arrival, Conversations, Traffic
from cluster.simulator.workloads.lengths import Lengths

T = TypeVar("T")

_PART_TOKENS = 512
#: Assumptions: a few tenants send most of the requests (Zipf's law). One request in ten has a
#: higher class than the normal one, and one in ten has a lower class.
TENANTS = {f"t{rank}": 1 / rank for rank in range(1, 9)}
CLASSES = {1: 0.1, 0: 0.8, -1: 0.1}


@dataclass(frozen=True, slots=True)
class Workload:
    """Synthetic workload; ``traffic`` has the rate and the burstiness of its arrivals.

    ``continued`` is the probability that a prompt extends an earlier one. Each request gets a
    random tenant and a random priority class; ``tenants`` and ``classes`` have their relative
    frequencies.
    """

    name: str
    application: str
    prompt: Lengths
    output: Lengths
    max_tokens: int
    traffic: Traffic
    continued: float = 0.0
    #: this target and the deadline are in seconds after a request's arrival
    ttft_target_s: float = inf
    deadline_s: float = inf
    tenants: Mapping[str, float] = field(default_factory=lambda: TENANTS)
    classes: Mapping[int, float] = field(default_factory=lambda: CLASSES)

    def at_rate(self, rate: float) -> Self:
        """Return this workload with ``rate`` requests per second and the same burstiness."""
        return replace(self, traffic=replace(self.traffic, rate=rate))

    def without_drift(self) -> Self:
        return replace(self, traffic=replace(self.traffic, drift=0.0))

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Yield requests in order of arrival, endlessly.

        Only the arrival times depend on the rate; everything else depends on ``seed`` alone.
        """
        times = self.traffic.times(self._random(seed, "times"))
        lengths, who = self._random(seed, "lengths"), self._random(seed, "who")
        conversations = self._conversations(seed)
        for at in times:
            tenant = _one_of(self.tenants, who)
            prompt_tokens = self.prompt.sample(lengths)
            yield Arrival(
                at,
                prompt_tokens,
                output_tokens=self.output.sample(lengths),
                max_tokens=self.max_tokens,
                priority=_one_of(self.classes, who),
                tenant=tenant,
                application=self.application,
                ttft_target_s=self.ttft_target_s,
                deadline_s=self.deadline_s,
                prefix=conversations[tenant].prompt(prompt_tokens // _PART_TOKENS)
                if self.continued
                else (),
                prefix_part_tokens=_PART_TOKENS,
            )

    def _conversations(self, seed: int) -> Mapping[str, Conversations]:
        """Return new conversations by tenant, so that tenants share no prefix."""
        names, rng = count(crc32(self.name.encode()) << 32), self._random(seed, "prefixes")
        return {tenant: Conversations(self.continued, names, rng) for tenant in self.tenants}

    def _random(self, seed: int, purpose: str) -> Random:
        return Random(f"{self.name}/{seed}/{purpose}")


def merged(workloads: Sequence[Workload], seed: int) -> Iterator[Arrival]:
    """Yield the requests of several workloads, merged by arrival time."""
    return heapq.merge(*(each.arrivals(seed) for each in workloads), key=attrgetter("at"))


def _one_of(weights: Mapping[T, float], rng: Random) -> T:
    return rng.choices(tuple(weights), tuple(weights.values()))[0]
