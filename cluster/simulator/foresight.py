"""Prediction of output lengths in a simulation. Pure.

A workload has no texts for a model. Lengths are predicted as routers predicted them if that is
known; else by the mean of the outputs that ended before, as a router without a model does, or by
the true length with a random error.
"""

from __future__ import annotations

from math import exp
from random import Random
from typing import NamedTuple

from cluster.simulator.workloads.arrivals import Arrival
from router.prediction.predictor import LEAST, LengthDistribution, OutputLengths, RecentRanks

#: As in router.prediction, where nothing tells requests apart.
_NO_RANK = 0.0


class Foretold(NamedTuple):
    """Ranks of a request among recent ones, by predicted outputs and by predicted work.

    What ``is_distrusted`` leaves the queue by arrival. Nearly all outputs of which this is foretold
    get ``least_tokens``.
    """

    length: LengthDistribution
    rank: float = _NO_RANK
    work_rank: float = _NO_RANK
    is_distrusted: bool = False
    least_tokens: int = 1


class Foresight:
    """Create a prediction.

    ``sigma`` is the standard deviation of the error of the logarithm; None: only recorded
    predictions are used.
    """

    def __init__(self, sigma: float | None, seed: int) -> None:
        self._sigma = sigma
        self._dice = Random(seed)
        self._lengths = OutputLengths()
        self._ranks = RecentRanks()
        self._work_ranks = RecentRanks()

    def foretell(self, arrival: Arrival) -> Foretold:
        seen = self._seen(arrival)
        length = LengthDistribution(self._lengths.mean if seen is None else max(1.0, seen))
        if self._sigma is None and arrival.is_distrusted:
            return Foretold(length, is_distrusted=True)
        output = length.to_come(0, arrival.max_tokens)
        rank = _NO_RANK if seen is None else self._ranks.rank(output)
        work_rank = self._work_ranks.rank(arrival.prompt_tokens + output)
        return Foretold(length, rank, work_rank, least_tokens=self._least(arrival, length))

    def _least(self, arrival: Arrival, length: LengthDistribution) -> int:
        if self._sigma is None:
            return 1
        least = LengthDistribution(length.median, self._sigma).quantile(LEAST)
        return max(1, min(int(least), arrival.max_tokens))

    def _seen(self, arrival: Arrival) -> float | None:
        if self._sigma is None:
            return arrival.foreseen_tokens
        return arrival.output_tokens * exp(self._dice.gauss(0.0, self._sigma))

    def note(self, num_tokens: int) -> None:
        """Record the length of an output that ended."""
        self._lengths.note(num_tokens)
