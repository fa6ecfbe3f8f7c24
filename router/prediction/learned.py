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
#: Of outputs, the part that is shorter than what is told as the least.
LEAST = 0.05
_LEAST_Z = NormalDist().inv_cdf(LEAST)
#: Of a length in tokens, natural logarithms.
_SHORTEST, _LONGEST = 0.0, log(1 << 30)


@dataclass(frozen=True, slots=True)
class Guess:
    """What was predicted of a request's outputs, believed or not: ``logs``, the
    corrected quantiles' natural logarithms, ``least_log`` that of LEAST, and the ``length`` that
    follows from ``logs``; ``uncorrected`` are these three logarithms as the model has them. Of the
    request it keeps its ``groups`` alone: a million may wait."""

    groups: tuple[str, ...]
    uncorrected: tuple[float, ...]
    logs: tuple[float, ...]
    least_log: float
    length: LengthDistribution
    #: expected of an output
    tokens: int

    @property
    def least_tokens(self) -> int:
        """That all but a twentieth of such outputs get."""
        return int(exp(min(max(_SHORTEST, self.least_log), _LONGEST)))


class Learned:
    def __init__(self, model: Model, histories: Histories, min_tau: float) -> None:
        """``histories`` are what ended until now."""
        self._forest = model.forest
        self._histories = histories
        self._corrections = Corrections((*QUANTILES, LEAST))
        self.trust = Trust(min_tau, model.tau)

    def guess(self, asked: Asked) -> Guess:
        logs = self._forest.sums(self._histories.features(asked))
        group, uncorrected = narrowest(asked.groups), (*logs, _least_log(logs))
        *corrected, least_log = self._corrections.apply(group, uncorrected)
        length = _length(corrected)
        tokens = length.to_come(0, asked.max_tokens)
        return Guess(asked.groups, uncorrected, tuple(corrected), least_log, length, tokens)

    def note(self, guess: Guess, num_tokens: int) -> None:
        """An output ended."""
        log_length = log(max(1, num_tokens))
        self._histories.note(guess.groups, log_length)
        self._corrections.note(narrowest(guess.groups), guess.uncorrected, log_length)
        within = [log_length <= each for each in guess.logs]
        self.trust.note(guess.tokens, within, num_tokens)

    def note_cut_off(self, guess: Guess, num_tokens: int) -> None:
        """An output had so many tokens, and would have got more."""
        group = narrowest(guess.groups)
        self._corrections.note_longer(group, guess.uncorrected, log(num_tokens + 1))


def _least_log(logs: Sequence[float]) -> float:
    """The logarithm of LEAST, of a length with these quantiles."""
    length = _length(logs)
    return log(length.median) + length.sigma * _LEAST_Z


def _length(logs: Sequence[float]) -> LengthDistribution:
    """With these quantiles."""
    low, high = sorted(min(max(_SHORTEST, each), _LONGEST) for each in logs)
    return LengthDistribution(exp(low), min(_WIDEST, (high - low) / _APART))
