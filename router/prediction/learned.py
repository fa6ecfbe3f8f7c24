"""A trained model at work: asked, and told what came. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from router.prediction.asked import Asked, narrowest
from router.prediction.corrections import Corrections
from router.prediction.histories import Histories
from router.prediction.length_distribution import LengthDistribution
from router.prediction.model import QUANTILES, Model
from router.prediction.trust import Trust

#: Standard deviations between the two quantiles of a normal distribution.
_APART = NormalDist().inv_cdf(QUANTILES[1]) - NormalDist().inv_cdf(QUANTILES[0])
#: Of a log-normal length: with a larger sigma its mean would lie above its 0.9 quantile. Outputs
#: that are either short or long have such quantiles, and no such mean.
_WIDEST = 2 * _APART
#: Of a length in tokens, natural logarithms.
_SHORTEST, _LONGEST = 0.0, log(1 << 30)


@dataclass(frozen=True, slots=True)
class Guess:
    """What was predicted of a request's outputs, believed or not: ``logs``, the
    corrected quantiles' natural logarithms, and the ``length`` that follows from them. Of the
    request it keeps its ``groups`` alone: a million may wait."""

    groups: tuple[str, ...]
    logs: tuple[float, ...]
    length: LengthDistribution
    #: expected of an output
    tokens: int


class Learned:
    def __init__(self, model: Model, histories: Histories, min_tau: float) -> None:
        """``histories`` are what ended until now."""
        self._forest = model.forest
        self._histories = histories
        self._corrections = Corrections(QUANTILES)
        self.trust = Trust(min_tau, model.tau)

    def guess(self, asked: Asked) -> Guess:
        logs = self._forest.sums(self._histories.features(asked))
        corrected = tuple(self._corrections.apply(narrowest(asked.groups), logs))
        length = _length(corrected)
        return Guess(asked.groups, corrected, length, length.to_come(0, asked.max_tokens))

    def note(self, guess: Guess, num_tokens: int) -> None:
        """An output ended."""
        log_length = log(max(1, num_tokens))
        self._histories.note(guess.groups, log_length)
        self._corrections.note(narrowest(guess.groups), guess.logs, log_length)
        within = [log_length <= each for each in guess.logs]
        self.trust.note(guess.tokens, within, num_tokens)


def _length(logs: Sequence[float]) -> LengthDistribution:
    """With these quantiles."""
    low, high = sorted(min(max(_SHORTEST, each), _LONGEST) for each in logs)
    return LengthDistribution(exp(low), min(_WIDEST, (high - low) / _APART))
