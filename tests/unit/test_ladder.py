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
    with (
        patch("router.admission.ladder.RUNG", 3),
        patch("router.admission.ladder.LARGE", 9),
    ):
        yield


NUMBERS = st.one_of(st.integers(0, 2), st.floats(0, 50))
MOVES = st.tuples(NUMBERS, st.integers(0, 5)) | st.sampled_from(["pop", "sweep"]) | st.integers(0)


@given(st.lists(MOVES, max_size=200))
def test_the_smallest_leaves_first_whatever_came_and_went(
    moves: list[tuple[float, int] | str | int],
) -> None:
    """A number alone: one somewhere in the order is not wanted any more, and its tie is gone."""
    ties: dict[int, tuple[int, ...]] = {}
    ladder = Ladder(lambda ticket: ties.get(ticket, ()))
    expected: list[tuple[float, int, int]] = []
    for ticket, move in enumerate(moves):
        if isinstance(move, tuple):
            number, tie = move
            ties[ticket] = (tie,)
            ladder.push(number, ticket)
            expected.append((number, tie, ticket))
            expected.sort()
        elif isinstance(move, int):
            if expected:
                del ties[expected.pop(move % len(expected))[-1]]
        elif move == "sweep":
            ladder.sweep(ties)
        elif expected:
            assert popped(ladder, ties) == (expected[0][0], expected[0][-1])
            del ties[expected.pop(0)[-1]]
    rest = [popped(ladder, ties) for _ in expected]
    assert rest == [(number, ticket) for number, _, ticket in expected]


def popped(ladder: Ladder, wanted: dict[int, tuple[int, ...]]) -> Item | None:
    while (head := ladder.head()) is not None:
        assert ladder.pop() == head
        if head[1] in wanted:
            return head
    return None


def test_without_ties_the_smaller_ticket_is_first() -> None:
    ladder = Ladder()
    for ticket in range(40):
        ladder.push(1.0, ticket)
    assert [ladder.pop() for _ in range(40)] == [(1.0, ticket) for ticket in range(40)]


def test_an_empty_one_has_no_head() -> None:
    ladder = Ladder()
    assert ladder.head() is None
    with pytest.raises(IndexError):
        ladder.pop()


class Looked(set[int]):
    """Wants all, and keeps who was asked for."""

    def __contains__(self, ticket: object) -> bool:
        assert isinstance(ticket, int)
        self.add(ticket)
        return True


def test_a_rung_is_swept_at_a_time_and_each_has_its_turn() -> None:
    ladder = Ladder()
    for ticket in range(60):
        ladder.push(ticket, ticket)
    looked_at = [Looked() for _ in range(60)]
    for each in looked_at:
        ladder.sweep(each)
    assert set[int]().union(*looked_at) == set(range(60))
    assert max(map(len, looked_at)) < 18


def test_a_rung_of_which_nothing_is_left_goes() -> None:
    ladder = Ladder()
    for ticket in range(1000):
        ladder.push(ticket, ticket)
        ladder.sweep({0})
    assert len(ladder._rungs) == len(ladder._bounds) == len(ladder._numbers) <= 2
    late = [(7, 1007), (3, 1003), (2000, 3000)]
    for number, ticket in late:
        ladder.push(number, ticket)
    assert ladder.pop() == (0, 0)
    for _ in range(4):
        ladder.sweep({ticket for _, ticket in late})
    assert [ladder.pop() for _ in range(len(ladder))] == sorted(late)


def test_of_those_at_the_front_no_tie_is_kept_for_longer_than_they_are_there() -> None:
    ladder = Ladder()
    for ticket in range(1000):
        ladder.push(ticket // 2, ticket)
        if ticket % 10 > 4:
            ladder.sweep(set(range(ticket - 20, ticket + 1)))
        else:
            ladder.pop()
        assert set(ladder._ties) <= set(ladder._front_tickets)


class _Counted(float):
    comparisons = 0

    def __lt__(self, other: float) -> bool:
        _Counted.comparisons += 1
        return float(self) < float(other)


def test_an_operation_looks_at_about_as_much_however_much_there_is() -> None:
    """Counted in comparisons of those that are pushed, not in seconds. Of a heap they are as many
    times the levels."""
    with (
        patch("router.admission.ladder.RUNG", 64),
        patch("router.admission.ladder.LARGE", 640),
    ):
        few, many = _comparisons(100), _comparisons(100_000)
    assert many <= 3 * few


def _comparisons(size: int) -> float:
    dice = random.Random(1)
    ladder = Ladder()
    for ticket in range(size):
        ladder.push(dice.random(), ticket)
    _Counted.comparisons = 0
    for ticket in range(size, size + 1000):
        ladder.push(_Counted(ladder.pop()[0] + dice.random()), ticket)
    return _Counted.comparisons / 1000
