"""Latency targets of a cluster, such as ``ttft_p99=1s,tpot_p99=50ms``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from statistics import fmean

from cluster.errors import ForecastFailed
from cluster.simulator.summary import Record, Slo

MEASURES: Mapping[str, Callable[[Record], float]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "latency": lambda record: record.latency_s,
}
_UNITS = {"s": 1.0, "ms": 1e-3}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_STATISTIC = re.compile(r"p(\d\d?(?:\.\d+)?)|mean")


@dataclass(frozen=True, slots=True)
class Target:
    """Limit of ``most_s`` seconds for a statistic of a measure, such as the p99.9 of ttft."""

    measure: str
    statistic: str
    most_s: float

    @property
    def name(self) -> str:
        return f"{self.measure}_{self.statistic}"

    def attained(self, records: Sequence[Record]) -> float:
        """Return the value of the statistic in seconds over ``records``.

        An unfinished request counts as infinite. Without records the value is infinite.
        """
        value = MEASURES[self.measure]
        ascending = sorted(value(each) if each.is_finished else inf for each in records)
        if not ascending:
            return inf
        if self.statistic == "mean":
            return fmean(ascending)
        # A Fraction is exact: as a float, 99.9 / 100 * 1000 is more than 999.
        part = Fraction(self.statistic[1:]) / 100
        return ascending[max(0, ceil(part * len(ascending)) - 1)]


def targets(text: str) -> tuple[Target, ...]:
    """Parse targets such as ``ttft_p99=1s``, separated by commas. Raises ForecastFailed."""
    return tuple(_target(name, most) for name, most in _pairs(text))


def slo(text: str | None) -> Slo:
    """Parse limits such as ``ttft=1s,tpot=50ms``; None sets no limits. Raises ForecastFailed."""
    if text is None:
        return Slo()
    limits = {name: _seconds(most) for name, most in _pairs(text)}
    if not limits.keys() <= {"ttft", "tpot"}:
        raise ForecastFailed(f"{text}: must be limits of ttft and tpot, such as ttft=1s,tpot=50ms")
    return Slo(**{f"{name}_s": most_s for name, most_s in limits.items()})


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for name, _, most in (each.partition("=") for each in text.split(",")):
        if (name := name.strip()) in seen:
            raise ForecastFailed(f"{text}: {name} is given twice")
        seen.add(name)
        yield name, most


def _target(name: str, most: str) -> Target:
    measure, _, statistic = name.partition("_")
    if measure not in MEASURES or not _STATISTIC.fullmatch(statistic):
        raise ForecastFailed(
            f"{name}: must be ttft, tpot or latency with _p50, _p99 or _mean, such as ttft_p99=1s"
        )
    return Target(measure, statistic, _seconds(most))


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]) > 0:
        raise ForecastFailed(f"{text.strip()!r} must be a duration, such as 1.5s or 50ms")
    return float(match[1]) * _UNITS[match[2]]
