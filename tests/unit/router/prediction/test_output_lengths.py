"""Outputs become as long as those before them, where nothing better is known."""

from __future__ import annotations

import pytest

from router.prediction.predictor import OutputLengths


def mean(*ended: int) -> float:
    lengths = OutputLengths()
    for num_tokens in ended:
        lengths.note(num_tokens)
    return lengths.mean


def test_the_first_ones_are_averaged_and_later_ones_followed() -> None:
    assert mean(10) == 10
    assert mean(10, 20, 60) == 30
    assert mean(*[10] * 1000, *[500] * 2000) == pytest.approx(500, abs=1)


def test_before_the_first_one_something_is_expected() -> None:
    assert 0 < mean() < 1000
