"""Mean length of earlier outputs, which is predicted without a model."""

from __future__ import annotations

import pytest

from router.prediction.predictor import OutputLengths


def mean(*ended: int) -> float:
    lengths = OutputLengths()
    for num_tokens in ended:
        lengths.note(num_tokens)
    return lengths.mean


def test_output_lengths_average_then_follow_recent_ones() -> None:
    assert mean(10) == 10
    assert mean(10, 20, 60) == 30
    assert mean(*[10] * 1000, *[500] * 2000) == pytest.approx(500, abs=1)


def test_output_lengths_have_a_default_mean() -> None:
    assert 0 < mean() < 1000
