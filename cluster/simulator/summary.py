"""Records of simulated requests, and their summary. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from statistics import fmean

from cluster.simulator.workloads.arrivals import Arrival


@dataclass(slots=True)
class Record:
    """Record of a request; times are in seconds since the start of the workload.

    Times are taken at the gateway; an event that never happened has the time infinity. If the
    request did not finish, ``refused`` is the slug of the error that ended it: ``queue_full``,
    ``deadline_exceeded``, ...
    """

    #: position in the workload, from 0
    index: int
    arrival: Arrival
    #: time of the first dispatch to a worker
    dispatched: float = inf
    first_token: float = inf
    finished: float = inf
    #: id of the worker to which the request was last dispatched
    worker: str = ""
    output_tokens: int = 0
    attempts: int = 0
    #: number of preemptions of the request
    preemptions: int = 0
    #: number of attempts that continued with output tokens of an earlier attempt
    migrations: int = 0
    #: prefix-cache hits of the first attempt, in tokens
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    #: number of later requests that left the queue before this one
    bypassed: int = 0
    refused: str = ""

    @property
    def is_finished(self) -> bool:
        return isfinite(self.finished)

    @property
    def queued_s(self) -> float:
        """Seconds from the arrival to the first dispatch."""
        return self.dispatched - self.arrival.at

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrival.at

    @property
    def latency_s(self) -> float:
        return self.finished - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Mean seconds between output tokens; 0 if there are fewer than two."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def normalised_latency_s(self) -> float:
        """Latency in seconds, divided by the number of output tokens."""
        return self.latency_s / max(1, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits for a good request: seconds to the first token, and mean seconds between tokens."""

    ttft_s: float = inf
    tpot_s: float = inf

    def is_good(self, record: Record) -> bool:
        """Return whether a request finished within these limits and its own target and deadline."""
        arrival = record.arrival
        return (
            record.is_finished
            and record.ttft_s <= min(self.ttft_s, arrival.ttft_target_s)
            and record.tpot_s <= self.tpot_s
            and record.latency_s <= arrival.deadline_s
        )


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of some values; without values all of them are 0.

    p99 is the smallest value that at least 99 % of the values do not exceed; p50 and p90 likewise.
    """

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        ascending = sorted(values)
        if not ascending:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (ascending[ceil(q * len(ascending)) - 1] for q in (0.5, 0.9, 0.99))
        return cls(fmean(ascending), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of requests; quantiles cover only the finished requests.

    ``queued_s`` is the time until the first dispatch. Rates are per second of ``duration_s``, which
    lasts from the first arrival to the last arrival or end. ``goodput_per_s`` counts the requests
    that met the SLO and their own targets. ``refused`` counts unfinished requests by the slug of
    their error.
    """

    requests: int
    finished: int
    refused: dict[str, int]
    duration_s: float
    queued_s: Quantiles
    ttft_s: Quantiles
    tpot_s: Quantiles
    latency_s: Quantiles
    #: latency in seconds per output token
    normalised_latency_s: Quantiles
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    #: share of all requests that met the SLO and their own targets
    good_share: float
    preemptions: int
    migrations: int
    recomputed_tokens: int
    bypassed: Quantiles


def summarise(records: Iterable[Record], slo: Slo | None = None) -> Summary:
    every = list(records)
    finished = [record for record in every if record.is_finished]
    duration_s = _duration_s(every)
    good = sum(map((slo or Slo()).is_good, finished))

    def quantiles(value: Callable[[Record], float]) -> Quantiles:
        return Quantiles.of(map(value, finished))

    return Summary(
        requests=len(every),
        finished=len(finished),
        refused=dict(Counter(record.refused for record in every if record.refused)),
        duration_s=duration_s,
        queued_s=quantiles(lambda record: record.queued_s),
        ttft_s=quantiles(lambda record: record.ttft_s),
        tpot_s=quantiles(lambda record: record.tpot_s),
        latency_s=quantiles(lambda record: record.latency_s),
        normalised_latency_s=quantiles(lambda record: record.normalised_latency_s),
        requests_per_s=_rate(len(finished), duration_s),
        output_tokens_per_s=_rate(sum(record.output_tokens for record in every), duration_s),
        goodput_per_s=_rate(good, duration_s),
        good_share=good / len(every) if every else 0.0,
        preemptions=sum(record.preemptions for record in every),
        migrations=sum(record.migrations for record in every),
        recomputed_tokens=sum(record.recomputed_tokens for record in every),
        bypassed=quantiles(lambda record: record.bypassed),
    )


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    ends = [record.finished for record in records if record.is_finished]
    ends.append(max(record.arrival.at for record in records))
    return max(ends) - min(record.arrival.at for record in records)


def _rate(number: float, seconds: float) -> float:
    return number / seconds if seconds else 0.0
