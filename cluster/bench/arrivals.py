"""When requests are due. Pure: randomness is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from math import inf, isinf
from random import Random

from cluster.simulator.workloads.traffic import Traffic


def times(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Seconds, without end: ``rate`` requests a second on average.

    Gaps are Gamma-distributed with the shape ``burstiness``: 1 is a Poisson process, less comes in
    bursts, more is more even, infinity is constant. At an infinite rate all are due at once.
    """
    if isinf(rate):
        return repeat(0.0)
    if burstiness == inf:
        return (number / rate for number in count(1))
    return Traffic(rate, cv=burstiness**-0.5).times(rng)
