"""What this router counted of its requests, read from its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Protocol

from prometheus_client.samples import Sample

from router.observability.metrics.catalogue import CATALOGUE, OK

_REQUESTS = "everlift_requests_total"


class Instruments(Protocol):
    def samples(self, name: str) -> Iterable[Sample]: ...


class MeasuredRequests:
    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def bounds(self, name: str) -> Sequence[float]:
        return (*CATALOGUE[name].buckets, inf)

    def cumulative(self, name: str) -> Sequence[int]:
        counts: Counter[float] = Counter()
        for sample in self._instruments.samples(name):
            if sample.name.endswith("_bucket"):
                counts[float(sample.labels["le"])] += int(sample.value)
        return [counts[bound] for bound in self.bounds(name)]

    def failures(self) -> Mapping[str, int]:
        return {
            outcome: int(sample.value)
            for sample in self._instruments.samples(_REQUESTS)
            if sample.name == _REQUESTS and (outcome := sample.labels["outcome"]) != OK
        }
