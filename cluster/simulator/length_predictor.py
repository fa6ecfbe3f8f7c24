"""Prediction of output lengths in a simulation. Pure.

A workload has no texts that a prediction model could read. If an error is configured, the
prediction is the true length with a random error of that size. Otherwise it is the prediction that
a router recorded with the request. Without a record it is the mean length of the outputs that have
ended, as in a router without a model.
"""

from __future__ import annotations

from math import exp
from random import Random
from typing import NamedTuple

from cluster.simulator.workloads.arrivals import Arrival
from router.admission.recent_ranks import RecentRanks
from router.prediction.predictor import LEAST, LengthDistribution, OutputLengths

#: ``rank`` of all requests without a prediction of their own, and both ranks of requests whose
#: prediction is distrusted, as in ``router.prediction``.
_NO_RANK = 0.0


class LengthPrediction(NamedTuple):
    """Predicted output length of a request, and its ranks among recent requests.

    A rank is the share of recent requests with a smaller prediction, and 0 if this is unknown.
    ``rank`` compares predicted output tokens, ``work_rank`` the sum of prompt and predicted output
    tokens. If ``is_distrusted``, the queue does not use the prediction to order the request. Nearly
    all outputs with this prediction have at least ``least_tokens`` tokens.
    """

    length: LengthDistribution
    rank: float = _NO_RANK
    work_rank: float = _NO_RANK
    is_distrusted: bool = False
    least_tokens: int = 1


class LengthPredictor:
    """Predictor of the output lengths of simulated requests.

    ``sigma`` is the standard deviation of the error: the natural logarithm of predicted / true
    length. If it is None, recorded predictions or the mean of ended outputs are used instead.
    """

    def __init__(self, sigma: float | None, seed: int) -> None:
        self._sigma = sigma
        self._rng = Random(seed)
        self._lengths = OutputLengths()
        self._ranks = RecentRanks()
        self._work_ranks = RecentRanks()

    def predict(self, arrival: Arrival) -> LengthPrediction:
        predicted = self._predicted_length(arrival)
        length = LengthDistribution(
            self._lengths.mean if predicted is None else max(1.0, predicted)
        )
        if self._sigma is None and arrival.is_distrusted:
            return LengthPrediction(length, is_distrusted=True)
        output = length.expected_remaining(0, arrival.max_tokens)
        rank = _NO_RANK if predicted is None else self._ranks.rank(output)
        work_rank = self._work_ranks.rank(arrival.prompt_tokens + output)
        return LengthPrediction(length, rank, work_rank, least_tokens=self._least(arrival, length))

    def _least(self, arrival: Arrival, length: LengthDistribution) -> int:
        if self._sigma is None:
            return 1
        least = LengthDistribution(length.median, self._sigma).quantile(LEAST)
        return max(1, min(int(least), arrival.max_tokens))

    def _predicted_length(self, arrival: Arrival) -> float | None:
        if self._sigma is None:
            return arrival.predicted_tokens
        return arrival.output_tokens * exp(self._rng.gauss(0.0, self._sigma))

    def note(self, num_tokens: int) -> None:
        """Record the length in tokens of an output that has ended."""
        self._lengths.note(num_tokens)
