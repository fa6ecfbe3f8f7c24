"""Outputs become as long as those before them."""

from __future__ import annotations

import pytest

from router.admission.predictor import OutputLengths


def lengths(*ended: int) -> OutputLengths:
    made = OutputLengths()
    for num_tokens in ended:
        made.note(num_tokens)
    return made


def test_the_first_ones_are_averaged_and_later_ones_followed() -> None:
    assert lengths(10).predict(0, 1000) == 10
    assert lengths(10, 20, 60).predict(0, 1000) == 30
    assert lengths(*[10] * 1000, *[500] * 2000).predict(0, 1000) == pytest.approx(500, abs=1)


def test_what_is_made_already_is_not_to_come() -> None:
    assert lengths(100).predict(30, 1000) == 70
    assert lengths(100).predict(100, 1000) == 1
    assert lengths(100).predict(400, 1000) == 1


def test_no_output_gets_longer_than_it_may() -> None:
    assert lengths(100).predict(0, 16) == 16
    assert lengths(100).predict(15, 16) == 1
    assert lengths(100).predict(16, 16) == 0
    assert 0 < OutputLengths().predict(0, 1 << 30) < 1000
