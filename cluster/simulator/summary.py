"""Many records in a few numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean

from cluster.simulator.record import Record


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is to keep to be good: seconds to its first token, and between two tokens on
    its own average."""

    ttft_s: float = inf
    tpot_s: float = inf

    def holds(self, record: Record) -> bool:
        """It also has to come to its end, before its own deadline and with its first token by its
        own target."""
        arrival = record.arrival
        return (
            record.is_finished
            and record.ttft_s <= min(self.ttft_s, arrival.ttft_target_s)
            and record.tpot_s <= self.tpot_s
            and record.latency_s <= arrival.deadline_s
        )


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of the values that there are; of none all are 0. p99 is a value that at least 99 % of them
    do not exceed."""

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
    """``queued_s`` is the time until the first dispatch. Rates are a second of ``duration_s``, from
    the first arrival to the last end. ``goodput`` counts the requests that kept the SLO and their
    own targets. ``refused`` are counted by the cause."""

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
    overtaken: Quantiles


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
        overtaken=quantiles(lambda record: record.overtaken),
    )


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    ends = [record.finished for record in records if record.is_finished]
    ends.append(max(record.arrival.at for record in records))
    return max(ends) - min(record.arrival.at for record in records)


def _rate(number: float, seconds: float) -> float:
    return number / seconds if seconds else 0.0
