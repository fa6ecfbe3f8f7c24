"""Step times of one kind of worker, learned from the steps of such workers. Pure.

    seconds = a + b * num_rows + c * num_tokens + d * kv_tokens + e * num_pairs

None of the coefficients is negative. They are those of the least squares of relative errors:
steps of 5 ms count as much as those of 500.

Samples are kept as sums, by their size: those of about as many tokens and rows make a stratum,
whose sums forget as others of that stratum come, and only then. So what long prompts take is not
forgotten while nothing but decoding goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everlift.step_time import StepSize

#: Samples of a stratum after which an older one has a weight of 1/e.
_MEMORY = 32.0
#: With fewer samples nothing is predicted.
_ENOUGH = 8
#: What is known of the error follows the last so many samples.
_ERROR_MEMORY = 50
#: An error of more than so many times the usual one, and of more than this part, counts less.
_OUTLIER, _LEAST_OUTLIER = 3.0, 0.1
#: Who was wrong by so much over all of these begins again: the machine is another one by now, or
#: shared with something else.
_WRONG = 0.5
#: How much a coefficient that no sample tells apart from others clings to what it was.
_INERTIA = 1e-5
#: Of a constant and what a StepSize has.
_NUM_FEATURES = 1 + len(StepSize._fields)

_Stratum = tuple[int, int]


@dataclass(slots=True)
class _Sums:
    products: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES**2)
    totals: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)

    def add(self, features: Sequence[float], target: float, weight: float, keep: float) -> None:
        weighted = [weight * x for x in features]
        totals = zip(self.totals, weighted, strict=True)
        self.totals = [keep * total + x * target for total, x in totals]
        outer = (x * y for x in weighted for y in features)
        self.products = [keep * p + xy for p, xy in zip(self.products, outer, strict=True)]


class FittedStepTime:
    """A StepTime. It answers what the last ``refit`` found, and 0 as long as it knows nothing."""

    def __init__(self) -> None:
        self._strata: dict[_Stratum, _Sums] = {}
        self._coefficients = [0.0] * _NUM_FEATURES
        self._num_samples = self._num_fitted = 0
        self._num_errors = 0
        self._error = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_fitted >= _ENOUGH

    @property
    def error(self) -> float | None:
        """Return the mean relative error of recent predictions, at most 1; None without any.

        Each was made before its sample was learned from.
        """
        return self._error if self._num_errors else None

    @property
    def coefficients(self) -> tuple[float, StepSize]:
        """Seconds that any step takes, and those of each of what a StepSize counts."""
        constant, *others = self._coefficients
        return constant, StepSize(*others)

    def seconds(self, size: StepSize) -> float:
        constant, *others = self._coefficients
        return constant + sum(a * x for a, x in zip(others, size, strict=True))

    def observe(self, size: StepSize, seconds: float) -> None:
        """Step of this mean size took so long each; more than 0."""
        predicted = self.seconds(size) if self.is_known else seconds
        weight = self._weigh(predicted / seconds - 1) if self.is_known else 1.0
        if self._num_errors == _ERROR_MEMORY and self._error > _WRONG:
            self._strata.clear()
            self._num_errors = 0
        # By the larger one: what was much too short to be true would outweigh all others.
        scale = max(seconds, predicted)
        features = [x / scale for x in (1.0, *size)]
        stratum = (int(size.num_tokens).bit_length(), int(size.num_rows).bit_length())
        sums = self._strata.setdefault(stratum, _Sums())
        sums.add(features, seconds / scale, weight, keep=1 - 1 / _MEMORY)
        self._num_samples += 1

    def _weigh(self, error: float) -> float:
        """Return the weight of a sample with this relative error (Huber's loss).

        If all samples have large errors, these soon become usual.
        """
        size = min(1.0, abs(error))
        usual = max(_LEAST_OUTLIER, _OUTLIER * self._error) if self._num_errors else size
        self._num_errors = min(_ERROR_MEMORY, self._num_errors + 1)
        self._error += (size - self._error) / self._num_errors
        return min(1.0, usual / size) if size else 1.0

    def refit(self) -> None:
        """Refit to the observations. Takes some tenths of a millisecond."""
        if self._num_samples == self._num_fitted:
            return
        self._num_fitted = self._num_samples
        every = self._strata.values()
        products = [sum(column) for column in zip(*(it.products for it in every), strict=True)]
        totals = [sum(column) for column in zip(*(it.totals for it in every), strict=True)]
        self._coefficients = _least_squares(products, totals, self._coefficients)


def _least_squares(
    products: Sequence[float], totals: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Return the best-fitting non-negative coefficients, near ``before`` where samples do not tell.

    Coefficients that would be negative are left out one after the other.
    """
    n = len(totals)
    scales = [products[i * n + i] ** 0.5 for i in range(n)]
    used = [i for i in range(n) if scales[i] > 0]
    while used:
        rows = [
            [products[i * n + j] / (scales[i] * scales[j]) + _INERTIA * (i == j) for j in used]
            + [totals[i] / scales[i] + _INERTIA * before[i] * scales[i]]
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
