"""Whether the generator kept its own times. Pure.

One that is behind measures itself: what it sends late counts as the endpoint's latency, and what it
reads late, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench import latencies
from cluster.bench.outcome import Outcome
from cluster.bench.spread import spread

#: Of 1 request in 100 it may be as late as this, or as this part of the median time to a first
#: piece; and as busy as this with one core.
_LEAST_S = 0.010
_PART = 0.05
_BUSY = 0.9
_PERCENTS = (50.0, 90.0, 99.0, 100.0)


@dataclass(frozen=True, slots=True)
class Lag:
    """Seconds; ``cpu_share`` of one core, which the generator took."""

    p50: float
    p90: float
    p99: float
    most: float
    cpu_share: float
    is_behind: bool


def lag(outcomes: Sequence[Outcome], cpu_share: float) -> Lag:
    found = spread([each.lag_s for each in outcomes], _PERCENTS)
    p50, p90, p99, most = found.percentiles.values() if found else (0.0,) * len(_PERCENTS)
    complete = [each for each in outcomes if each.is_complete]
    ttft = spread([latencies.ttft(each, latencies.due) for each in complete], ())
    allowed = max(_LEAST_S, _PART * ttft.median if ttft else 0.0)
    return Lag(p50, p90, p99, most, cpu_share, p99 > allowed or cpu_share > _BUSY)
