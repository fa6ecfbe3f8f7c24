"""Kendall's tau-b, against its definition."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prediction.trust import kendall_tau


def by_definition(pairs: list[tuple[float, float]]) -> float:
    balance = x_untied = y_untied = 0
    for (ax, ay), (bx, by) in combinations(pairs, 2):
        x, y = (ax > bx) - (ax < bx), (ay > by) - (ay < by)
        balance, x_untied, y_untied = balance + x * y, x_untied + abs(x), y_untied + abs(y)
    return balance / sqrt(x_untied * y_untied) if x_untied and y_untied else 0.0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40))
def test_kendall_tau_matches_its_definition(pairs: list[tuple[float, float]]) -> None:
    assert kendall_tau(pairs) == pytest.approx(by_definition(pairs))


def test_kendall_tau_of_same_reverse_and_no_order() -> None:
    assert kendall_tau([(n, n * n) for n in range(9)]) == 1
    assert kendall_tau([(n, -n) for n in range(9)]) == -1
    assert kendall_tau([(1, n) for n in range(9)]) == 0
    assert kendall_tau([]) == 0
