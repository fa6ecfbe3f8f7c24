"""Linear model of step times, fitted to the steps of the workers of one kind. Pure.

    seconds = a + b * num_rows + c * num_tokens + d * kv_tokens + e * num_pairs

The sizes are the fields of a StepSize, and a to e are the coefficients. No coefficient is negative.
The fit minimises the sum of the squared relative errors, so that a step of 5 ms counts as much as a
step of 500 ms.

Samples are stored as sums. Samples with similar numbers of tokens and rows form a stratum, and the
sums of a stratum decay only when it receives new samples. The time of long prompts is therefore
not forgotten while the workers only decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everlift.step_time import StepSize

#: Number of new samples of a stratum after which the weight of an older sample is 1/e.
_DECAY_SAMPLES = 32.0
#: Smallest number of samples for which step times are predicted.
_MIN_SAMPLES = 8
#: Number of recent samples over which the mean error is taken.
_ERROR_WINDOW = 50
#: The weight of a sample is reduced if its relative error exceeds this multiple of the mean error.
_OUTLIER = 3.0
#: The weight of a sample is never reduced if its relative error is at most this.
_LEAST_OUTLIER = 0.1
#: If the mean relative error is larger than this, all samples are discarded, because the machine
#: has changed or is now shared with other work.
_RESET_ERROR = 0.5
#: Strength with which coefficients that the samples do not determine keep their previous values.
_RIDGE = 1e-5
#: The features are a constant and the fields of a StepSize.
_NUM_FEATURES = 1 + len(StepSize._fields)

_Stratum = tuple[int, int]


@dataclass(slots=True)
class _Sums:
    products: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES**2)
    totals: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)

    def add(self, features: Sequence[float], target: float, weight: float, decay: float) -> None:
        weighted = [weight * x for x in features]
        totals = zip(self.totals, weighted, strict=True)
        self.totals = [decay * total + x * target for total, x in totals]
        outer = (x * y for x in weighted for y in features)
        self.products = [decay * p + xy for p, xy in zip(self.products, outer, strict=True)]


class FittedStepTime:
    """Step-time model that is fitted to observed steps.

    Its coefficients are those of the last ``refit``, and 0 before the first one.
    """

    def __init__(self) -> None:
        self._strata: dict[_Stratum, _Sums] = {}
        self._coefficients = [0.0] * _NUM_FEATURES
        self._num_samples = self._num_fitted = 0
        self._num_errors = 0
        self._error = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_fitted >= _MIN_SAMPLES

    @property
    def error(self) -> float | None:
        """Return the mean relative error of recent predictions; None if there were none.

        Each prediction was made before its sample was added, and each error counts as at most 1.
        """
        return self._error if self._num_errors else None

    @property
    def coefficients(self) -> tuple[float, StepSize]:
        """Return the constant seconds of a step and the seconds per unit of each StepSize field."""
        constant, *others = self._coefficients
        return constant, StepSize(*others)

    def seconds(self, size: StepSize) -> float:
        constant, *others = self._coefficients
        return constant + sum(a * x for a, x in zip(others, size, strict=True))

    def observe(self, size: StepSize, seconds: float) -> None:
        """Add a sample: a step of this size, or an average of several, took ``seconds``.

        ``seconds`` must be above 0. Predictions do not change until the next ``refit``. All earlier
        samples are discarded once the mean error of ``_ERROR_WINDOW`` predictions exceeds
        ``_RESET_ERROR``.
        """
        predicted = self.seconds(size) if self.is_known else seconds
        weight = self._weigh(predicted / seconds - 1) if self.is_known else 1.0
        if self._num_errors == _ERROR_WINDOW and self._error > _RESET_ERROR:
            self._strata.clear()
            self._num_errors = 0
        # The error is relative to the larger of measurement and prediction. Otherwise, an
        # implausibly short measurement would outweigh all other samples.
        scale = max(seconds, predicted)
        features = [x / scale for x in (1.0, *size)]
        stratum = (int(size.num_tokens).bit_length(), int(size.num_rows).bit_length())
        sums = self._strata.setdefault(stratum, _Sums())
        sums.add(features, seconds / scale, weight, decay=1 - 1 / _DECAY_SAMPLES)
        self._num_samples += 1

    def _weigh(self, error: float) -> float:
        """Return the weight of a sample with this relative error (Huber's loss), at most 1.

        The error is also added to the mean error. If all samples have large errors, the mean error
        grows and such samples soon have their full weight again.
        """
        size = min(1.0, abs(error))
        usual = max(_LEAST_OUTLIER, _OUTLIER * self._error) if self._num_errors else size
        self._num_errors = min(_ERROR_WINDOW, self._num_errors + 1)
        self._error += (size - self._error) / self._num_errors
        return min(1.0, usual / size) if size else 1.0

    def refit(self) -> None:
        """Fit the coefficients to all samples; do nothing if there is no new sample."""
        if self._num_samples == self._num_fitted:
            return
        self._num_fitted = self._num_samples
        strata = self._strata.values()
        products = [sum(column) for column in zip(*(s.products for s in strata), strict=True)]
        totals = [sum(column) for column in zip(*(s.totals for s in strata), strict=True)]
        self._coefficients = _least_squares(products, totals, self._coefficients)


def _least_squares(
    products: Sequence[float], totals: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Return non-negative coefficients, fitted by least squares to samples given as sums.

    ``products`` and ``totals`` are these sums: the flattened matrix and the right-hand side of
    the normal equations. ``before`` has the previous coefficients. A coefficient that the samples
    do not determine stays near its previous value, but is 0 if its feature is 0 in all samples.
    The most negative coefficient is set to 0 and the others are fitted again, until none is
    negative.
    """
    n = len(totals)
    scales = [products[i * n + i] ** 0.5 for i in range(n)]
    used = [i for i in range(n) if scales[i] > 0]
    while used:
        rows = [
            [products[i * n + j] / (scales[i] * scales[j]) + _RIDGE * (i == j) for j in used]
            + [totals[i] / scales[i] + _RIDGE * before[i] * scales[i]]
            for i in used
        ]
        found = _solve(rows)
        worst = min(range(len(used)), key=found.__getitem__)
        if found[worst] >= 0:
            solved = dict(zip(used, found, strict=True))
            return [solved[i] / scales[i] if i in solved else 0.0 for i in range(n)]
        del used[worst]
    return [0.0] * n


def _solve(rows: list[list[float]]) -> list[float]:
    n = len(rows)
    for i in range(n):
        pivot = rows[i]
        for lower in rows[i + 1 :]:
            factor = lower[i] / pivot[i]
            for j in range(i, n + 1):
                lower[j] -= factor * pivot[j]
    found = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, n))
        found[i] = (rows[i][n] - known) / rows[i][i]
    return found
