"""How long an output probably becomes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, exp, log, sqrt
from statistics import NormalDist

_LONGEST = float(1 << 30)
#: Of a log-normal length of which so little is left, no more is told by its tail.
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A log-normal length in tokens, of one output that nothing cuts off: ``median``, and ``sigma``
    the standard deviation of its logarithm. With a sigma of 0 it is the median."""

    median: float
    sigma: float = 0.0

    def quantile(self, part: float) -> float:
        """What this part of such outputs stays within."""
        return self.median * exp(self.sigma * NormalDist().inv_cdf(part))

    def to_come(self, num_made: int, max_tokens: int) -> int:
        """Tokens that an output of ``num_made`` so far and ``max_tokens`` at most will still get;
        at least one, unless it is complete."""
        expected = max(num_made + 1, round(self._mean_beyond(num_made)))
        return max(0, min(expected, max_tokens) - num_made)

    def _mean_beyond(self, made: float) -> float:
        """Of those outputs that get longer than ``made``.

        E[X | X > m] = E[X] * Phi(sigma - z) / Phi(-z), where z = ln(m / median) / sigma."""
        if not self.sigma:
            return self.median
        mean = min(_LONGEST, self.median * exp(min(50.0, self.sigma**2 / 2)))
        if made < 1:
            return mean
        z = log(made / self.median) / self.sigma
        longer = _below(-z)
        return mean * _below(self.sigma - z) / longer if longer > _LEAST else made


def _below(z: float) -> float:
    """The standard normal distribution's Phi."""
    return erfc(-z / sqrt(2.0)) / 2
