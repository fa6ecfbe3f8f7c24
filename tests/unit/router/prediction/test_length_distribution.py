"""Remaining length of an output whose length distribution is known."""

from __future__ import annotations

import random
from math import log
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prediction.predictor import LengthDistribution


def test_length_without_spread_is_exact() -> None:
    assert LengthDistribution(100).expected_remaining(0, 1000) == 100
    assert LengthDistribution(100).expected_remaining(30, 1000) == 70
    assert LengthDistribution(100).expected_remaining(100, 1000) == 1
    assert LengthDistribution(100).expected_remaining(400, 1000) == 1


def test_length_is_capped_at_max_tokens() -> None:
    assert LengthDistribution(100).expected_remaining(0, 16) == 16
    assert LengthDistribution(100).expected_remaining(15, 16) == 1
    assert LengthDistribution(100).expected_remaining(16, 16) == 0
    assert LengthDistribution(100, 3.0).expected_remaining(0, 16) == 16


def test_remaining_length_is_the_conditional_mean() -> None:
    dice = random.Random(5)
    drawn = [dice.lognormvariate(log(200), 0.7) for _ in range(200_000)]
    forecast = LengthDistribution(200, 0.7)
    for made in (0, 50, 200, 600):
        left = [each - made for each in drawn if each > made]
        assert forecast.expected_remaining(made, 1 << 30) == pytest.approx(fmean(left), rel=0.03)


def test_quantile_covers_its_share_of_outputs() -> None:
    dice = random.Random(6)
    drawn = [dice.lognormvariate(log(200), 0.7) for _ in range(20_000)]
    for part in (0.1, 0.5, 0.9):
        within = fmean(each <= LengthDistribution(200, 0.7).quantile(part) for each in drawn)
        assert within == pytest.approx(part, abs=0.01)


@given(st.floats(1, 1 << 30), st.floats(0, 50), st.integers(0, 1 << 20), st.integers(1, 1 << 20))
def test_remaining_length_is_between_1_and_the_maximum(
    median: float, sigma: float, made: int, max_tokens: int
) -> None:
    to_come = LengthDistribution(median, sigma).expected_remaining(made, max_tokens)
    assert to_come == max(0, max_tokens - made) or 1 <= to_come <= max_tokens - made
