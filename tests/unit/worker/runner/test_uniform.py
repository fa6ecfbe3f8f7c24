"""Uniform numbers of tokens: equal in all versions, and evenly distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from worker.runner import uniform as uniform_module

BINS = 64
DRAWS = 16_000


def uniform(seed: int, choice: int, position: int) -> float:
    (number,) = uniforms(seed, choice, [position])
    return number


def uniforms(*points: int | Sequence[int]) -> list[float]:
    """Return the uniform numbers of ``points``: seed, choice and position, which are broadcast."""
    columns = np.broadcast_arrays(*(np.array(point, np.uint64) for point in points))
    return uniform_module.uniform(*columns).tolist()


def test_uniform_numbers_never_change_between_versions() -> None:
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(7, 0, 1) == 0.9633517225922468
    assert uniform(2**64 - 1, 3, 2**20) == 0.9222960302900421


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_uniform_numbers_of_consecutive_counters_are_even(varied: str) -> None:
    point: dict[str, int | Sequence[int]] = {"seed": 1, "choice": 0, "position": 0}
    values = uniforms(*(point | {varied: range(DRAWS)}).values())
    assert all(0 <= value < 1 for value in values)
    assert chi_square(Counter(int(value * BINS) for value in values), BINS) < 115  # p = 0.0001


def test_uniform_numbers_of_neighbours_are_uncorrelated() -> None:
    values = uniforms(5, 0, range(DRAWS))
    pairs = Counter(
        (int(a * 8), int(b * 8)) for a, b in zip(values[::2], values[1::2], strict=True)
    )
    assert chi_square(pairs, 64) < 115


def chi_square(counts: Counter[object] | Counter[int], bins: int) -> float:
    expected = counts.total() / bins
    empty = bins - len(counts)
    return sum((n - expected) ** 2 / expected for n in counts.values()) + empty * expected
