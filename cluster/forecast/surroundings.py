"""Those that were in the cluster together with a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Self

from cluster.forecast.past import Past
from cluster.workloads.arrival import Arrival

#: Requests before it that are enough to say how far a simulation is from what was.
_ENOUGH = 100


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``requests`` are by arrival, and the request itself is at ``own``."""

    requests: tuple[Past, ...]
    own: int

    @classmethod
    def among(cls, requests: Iterable[Past], request_id: str) -> Self | None:
        """From a moment when nobody was there, if there is one with enough behind it. None where
        the request is not among them."""
        found = sorted(requests, key=_arrived)
        for own, past in enumerate(found):
            if past.request_id == request_id:
                begin = _begin(found, own)
                return cls(tuple(found[begin:]), own - begin)
        return None

    @property
    def arrivals(self) -> list[Arrival]:
        """Of all their choices; the first is at 0."""
        begin = _arrived(self.requests[0])
        arrivals = (record.arrival for past in self.requests for record in past.records)
        return [replace(arrival, at=arrival.at - begin) for arrival in arrivals]

    @property
    def choices(self) -> list[slice]:
        """Where in ``arrivals`` each request's are."""
        ends = [*accumulate(len(past.records) for past in self.requests)]
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def link_s(self) -> float:
        """To a worker or back, on the average."""
        return fmean(past.way_s for past in self.requests) / 2


def _begin(requests: Sequence[Past], own: int) -> int:
    """The last one that came when nobody was there, and has enough behind it; else the first."""
    begin, last_end = 0, -inf
    for index in range(max(0, own - _ENOUGH + 1)):
        if _arrived(requests[index]) >= last_end:
            begin = index
        last_end = max(last_end, requests[index].records[0].finished)
    return begin


def _arrived(past: Past) -> float:
    return past.records[0].arrival.at
