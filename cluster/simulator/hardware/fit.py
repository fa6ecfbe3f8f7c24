"""Fit of a roofline to measured steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from everlift.step_time import Roofline, StepSize

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """Size of a measured step, and the seconds that it took."""

    size: StepSize
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted roofline, with the mean and the largest relative error over the fitted steps."""

    roofline: Roofline
    mean_error: float
    largest_error: float


def fitted(steps: Sequence[Step]) -> Fit:
    """Fit a roofline to ``steps``, so that the sum of squared relative errors is small.

    No coefficient is negative. A roofline is linear in its coefficients except at the ridge: the
    number of tokens above which the matrix products take longer than the read of the weights. A
    linear fit is therefore made for each possible ridge, and the fit with the smallest sum is
    returned. Possible ridges are the midpoints between neighbouring measured numbers of tokens, one
    value below all these numbers, and one above them.
    """
    numbers = sorted({step.size.num_tokens for step in steps})
    places = [0.0, *((low + high) / 2 for low, high in pairwise(numbers)), numbers[-1] + 1.0]
    tried = (_with_error(_roofline(steps, place), steps) for place in places)
    return min(tried, key=lambda each: each[0])[1]


def _roofline(steps: Sequence[Step], ridge: float) -> Roofline:
    features = np.array([_features(step.size, ridge) for step in steps])
    relative = features / np.array([[step.seconds] for step in steps])
    overhead_s, weights_s, token_s, kv_token_s, pair_s, row_s = _least_squares(relative)
    return Roofline(overhead_s, weights_s, token_s, kv_token_s, pair_s, row_s)


def _features(size: StepSize, ridge: float) -> tuple[float, ...]:
    reads = size.num_tokens < ridge
    products = 0.0 if reads else size.num_tokens
    return 1.0, float(reads), products, size.kv_tokens, size.num_pairs, size.num_rows


def _with_error(roofline: Roofline, steps: Sequence[Step]) -> tuple[float, Fit]:
    errors = [abs(roofline.seconds(step.size) / step.seconds - 1) for step in steps]
    return fmean(error**2 for error in errors), Fit(roofline, fmean(errors), max(errors))


def _least_squares(features: _Floats) -> list[float]:
    """Return non-negative coefficients whose product with each row of ``features`` is about 1.

    While a coefficient is negative, the most negative one is set to 0 and the others are fitted
    again.
    """
    used = [column for column in range(features.shape[1]) if features[:, column].any()]
    found = np.zeros(features.shape[1])
    while used:
        part = features[:, used]
        scale = np.linalg.norm(part, axis=0)
        solution = np.linalg.lstsq(part / scale, np.ones(len(part)), rcond=None)[0]
        if (worst := int(solution.argmin())) >= 0 and solution[worst] >= 0:
            found[used] = solution / scale
            break
        del used[worst]
    return [float(value) for value in found]
