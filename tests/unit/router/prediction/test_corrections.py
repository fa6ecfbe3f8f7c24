"""Corrections of wrong predictions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prediction.corrections import _MAX_GROUPS, RATE, Corrections
from tests.support.example_counts import examples

QUANTILES = (0.5, 0.9)
#: Range of the natural logarithms of actual and predicted lengths.
LOW, HIGH = 0.0, 8.0
LOGS = st.floats(LOW, HIGH)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(LOGS, LOGS, LOGS), min_size=1, max_size=300))
def test_coverage_error_is_bounded_for_any_outputs(
    outputs: list[tuple[float, float, float]],
) -> None:
    corrections = Corrections(QUANTILES)
    within = [0, 0]
    for low, high, actual in outputs:
        corrected = corrections.apply("g", (low, high))
        corrections.note("g", (low, high), actual)
        within = [count + (actual <= it) for count, it in zip(within, corrected, strict=True)]
    bound = (HIGH - LOW + RATE) / (RATE * len(outputs))
    for count, quantile in zip(within, QUANTILES, strict=True):
        assert abs(count / len(outputs) - quantile) <= bound + 1e-9


def test_censored_outputs_teach_only_a_lower_bound() -> None:
    """Outputs with a median of 5 are cut off at 4; without these, they would seem much shorter."""
    dice = random.Random(1)
    seen, alone = Corrections((0.05,)), Corrections((0.05,))
    for _ in range(20_000):
        length = dice.gauss(5.0, 1.0)
        for corrections in (seen, alone):
            if length < 4.0:
                corrections.note("g", (6.0,), length)
            elif corrections is seen:
                corrections.note_longer("g", (6.0,), 4.0)
    quantile = 5.0 - 1.645
    assert seen.apply("g", (6.0,)) == [pytest.approx(quantile, abs=0.2)]
    assert alone.apply("g", (6.0,))[0] < quantile - 0.7


def test_correction_follows_one_template_and_no_other() -> None:
    corrections, dice = Corrections(QUANTILES), random.Random(3)
    for _ in range(400):
        for group, mean in (("longer", 6.0), ("as before", 3.0)):
            corrections.note(group, (3.0, 3.9), dice.gauss(mean, 0.5))
    assert corrections.apply("longer", (3.0, 3.9))[0] == pytest.approx(6.0, abs=0.3)
    assert corrections.apply("as before", (3.0, 3.9))[0] == pytest.approx(3.0, abs=0.3)


def test_correction_of_a_new_group_follows_other_groups() -> None:
    corrections = Corrections(QUANTILES)
    assert corrections.apply("new", (3.0, 4.0)) == [3.0, 4.0]
    for number in range(4000):
        group = f"g{number % 5}"
        corrections.note(group, (3.0, 4.0), 5.0 + number % 2)
    assert 1.5 < corrections.apply("new", (3.0, 4.0))[0] - 3.0 < 3.5


def test_corrections_remember_a_bounded_number_of_groups() -> None:
    corrections = Corrections(QUANTILES)
    for number in range(_MAX_GROUPS + 10):
        corrections.note(str(number), (3.0, 4.0), 5.0)
    assert len(corrections._shifts) == _MAX_GROUPS
    assert "9" not in corrections._shifts and "10" in corrections._shifts
