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
    """Record of a request, in seconds since the start of the workload at the gateway.

    Infinite means never.

    ``refused`` is the error's slug where it did not come to its end: ``queue_full``,
    ``deadline_exceeded``, ...
    """

    #: its place in the workload, from 0
    index: int
    arrival: Arrival
    #: to its first worker
    dispatched: float = inf
    first_token: float = inf
    finished: float = inf
    #: the last that it went to
    worker: str = ""
    output_tokens: int = 0
    attempts: int = 0
    #: times that it gave up its KV blocks
    preemptions: int = 0
    #: attempts that went on with tokens of an earlier one
    migrations: int = 0
    #: of its prompt, in the cache of its first worker
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    #: requests that came later and left the queue before it
    bypassed: int = 0
    refused: str = ""

    @property
    def is_finished(self) -> bool:
        return isfinite(self.finished)

    @property
    def queued_s(self) -> float:
        """Return the seconds until the first dispatch."""
        return self.dispatched - self.arrival.at

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrival.at

    @property
    def latency_s(self) -> float:
        return self.finished - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Return the mean seconds between output tokens; 0 if there is only one."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def normalised_latency_s(self) -> float:
        """Latency per output token."""
        return self.latency_s / max(1, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a good request: seconds to the first token, and mean seconds between tokens."""

    ttft_s: float = inf
    tpot_s: float = inf

    def holds(self, record: Record) -> bool:
        """Return whether it finished within the limits, its own deadline and its own target."""
        arrival = record.arrival
        return (
            record.is_finished
            and record.ttft_s <= min(self.ttft_s, arrival.ttft_target_s)
            and record.tpot_s <= self.tpot_s
            and record.latency_s <= arrival.deadline_s
        )


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of values, all 0 without values.

    At least 99 % of the values do not exceed p99.
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
    """Summary of requests; ``queued_s`` is the time until the first dispatch.

    Rates are a second of ``duration_s``, from the first arrival to the last end. ``goodput`` counts
    the requests that kept the SLO and their own targets. ``refused`` are counted by the cause.
    """

    requests: int
    finished: int
    refused: dict[str, int]
    duration_s: float
    queued_s: Quantiles
    ttft_s: Quantiles
    tpot_s: Quantiles
    latency_s: Quantiles
    #: seconds for each output token
    normalised_latency_s: Quantiles
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    #: part of all requests that kept the SLO
    good_share: float
    preemptions: int
    migrations: int
    recomputed_tokens: int
    bypassed: Quantiles


def summarise(records: Iterable[Record], slo: Slo | None = None) -> Summary:
    every = list(records)
    finished = [record for record in every if record.is_finished]
    duration_s = _duration_s(every)
    good = sum(map((slo or Slo()).holds, finished))

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
