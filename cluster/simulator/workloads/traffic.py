"""When requests come. Pure: randomness is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log1p, sqrt
from random import Random

#: Steps in which the rate drifts, in each ``drift_s``.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Gaps between requests are Gamma-distributed, at a rate that drifts.

    With the coefficient of variation ``cv`` the Gamma distribution has the shape 1 / cv²; with 1
    this is a Poisson process. The rate is ``rate`` (requests a second) times exp(z - var(z) / 2)
    with z an Ornstein-Uhlenbeck process that forgets in ``drift_s`` seconds; ``drift`` is the
    standard deviation of that factor. The index of dispersion of the requests in w seconds, as long
    as w is short against ``drift_s``, is about cv² + rate * w * drift².
    """

    rate: float
    cv: float = 1.0
    drift: float = 0.0
    drift_s: float = 120.0

    def times(self, rng: Random) -> Iterator[float]:
        """Seconds, without end."""
        shape = 1 / self.cv**2
        scale = 1 / (shape * self.rate)
        factors = self._factors(Random(rng.random()))
        now, factor, step = 0.0, next(factors), self.drift_s / _STEPS
        end = step
        while True:
            # in seconds of the average rate
            gap = rng.gammavariate(shape, scale)
            while gap > (end - now) * factor:
                gap -= (end - now) * factor
                now, end, factor = end, end + step, next(factors)
            now += gap / factor
            yield now

    def _factors(self, rng: Random) -> Iterator[float]:
        """The drifting rate over ``rate``, step by step."""
        variance = log1p(self.drift**2)
        kept = exp(-1 / _STEPS)
        fresh = sqrt(variance * (1 - kept**2))
        z = rng.gauss(0.0, sqrt(variance))
        while True:
            yield exp(z - variance / 2)
            z = kept * z + rng.gauss(0.0, fresh)
