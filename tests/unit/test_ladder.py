"""The ladder against a sorted list, and what an operation costs with much in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.ladder import Item, Ladder


@pytest.fixture(autouse=True)
def short_rungs() -> Iterator[None]:
    with patch("router.admission.ladder.RUNG", 3):
        yield


@given(st.lists(st.one_of(st.integers(0, 50), st.sampled_from(["pop", "sweep"])), max_size=200))
def test_the_smallest_leaves_first_whatever_came_and_went(moves: list[int | str]) -> None:
    ladder: Ladder = Ladder()
    expected: list[tuple[int, int]] = []
    unwanted: set[tuple[int, int]] = set()
    for number, move in enumerate(moves):
        if isinstance(move, int):
            ladder.push((move, number))
            expected.append((move, number))
            expected.sort()
        elif move == "sweep":
            unwanted.update(expected[::3])
            for _ in range(len(expected) + 2):
                ladder.sweep(lambda item: item not in unwanted)
            expected = [item for item in expected if item not in unwanted]
        elif expected:
            assert ladder.head() == expected[0]
            assert ladder.pop() == expected.pop(0)
        assert len(ladder) == len(expected)
    assert [ladder.pop() for _ in range(len(ladder))] == expected


def test_an_empty_one_has_no_head() -> None:
    ladder: Ladder = Ladder()
    assert ladder.head() is None
    with pytest.raises(IndexError):
        ladder.pop()


def test_a_rung_is_swept_at_a_time_and_each_has_its_turn() -> None:
    ladder: Ladder = Ladder()
    for number in range(60):
        ladder.push((number,))
    looked_at: list[list[Item]] = []
    for _ in range(60):
        looked_at.append([])
        ladder.sweep(lambda item: looked_at[-1].append(item) or True)  # type: ignore[func-returns-value]
    assert {number for part in looked_at for (number,) in part} == set(range(60))
    assert max(map(len, looked_at)) <= 6


def test_a_rung_of_which_nothing_is_left_goes() -> None:
    ladder: Ladder = Ladder()
    for number in range(1000):
        ladder.push((number,))
        ladder.sweep(lambda item: item == (0,))
    assert len(ladder._rungs) == len(ladder._bounds) == len(ladder._numbers) <= 2
    late = [(7,), (3,), (2000,)]
    for item in late:
        ladder.push(item)
    assert ladder.pop() == (0,)
    for _ in range(4):
        ladder.sweep(lambda item: item in late)
    assert [ladder.pop() for _ in range(len(ladder))] == sorted(late)


class _Counted(float):
    comparisons = 0

    def __lt__(self, other: float) -> bool:
        _Counted.comparisons += 1
        return float(self) < float(other)


def test_an_operation_costs_about_as_much_however_much_there_is() -> None:
    """Counted in comparisons, not seconds. Of a heap they are as many times the levels."""
    with patch("router.admission.ladder.RUNG", 64):
        few, many = _comparisons(100), _comparisons(100_000)
    assert many <= 3 * few


def _comparisons(size: int) -> float:
    dice = random.Random(1)
    ladder: Ladder = Ladder()
    for _ in range(size):
        ladder.push((_Counted(dice.random()),))
    _Counted.comparisons = 0
    for _ in range(1000):
        ladder.push((_Counted(ladder.pop()[0] + dice.random()),))
    return _Counted.comparisons / 1000
