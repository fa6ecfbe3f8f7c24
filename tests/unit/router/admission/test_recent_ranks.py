"""Ranks of lengths among the most recent ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.recent_ranks import WINDOW, RecentRanks


def test_recent_ranks_put_equal_lengths_in_the_middle() -> None:
    ranks = RecentRanks()
    assert [ranks.rank(7) for _ in range(5)] == [0.5] * 5
    assert ranks.rank(8) == pytest.approx(5.5 / 6)
    assert ranks.rank(6) == pytest.approx(0.5 / 7)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_recent_ranks_increase_with_length(lengths: list[int]) -> None:
    ranks = RecentRanks()
    for number, length in enumerate(lengths):
        rank, before = ranks.rank(length), lengths[:number]
        shorter = sum(each < length for each in before)
        equal = sum(each == length for each in before)
        assert rank == pytest.approx((shorter + (equal + 1) / 2) / (number + 1))
        assert 0 < rank < 1


def test_recent_ranks_forget_old_lengths() -> None:
    ranks = RecentRanks()
    for _ in range(WINDOW):
        ranks.rank(1000)
    for _ in range(WINDOW):
        ranks.rank(10)
    assert ranks.rank(11) > 0.99
    assert len(ranks._sorted) == WINDOW
