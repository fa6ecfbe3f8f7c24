"""The decimal numbers of a range, against arithmetic."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tests.support.worker.json_schema_support import TRIE
from worker.grammar.numbers import Range, integer_terminal, number_terminal
from worker.grammar.vocabulary import token_matcher


def matches(terminal: str | None, text: str) -> bool:
    if terminal is None:
        return False
    matcher = token_matcher(TRIE, f"start: T\nT: {terminal}\n")
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def is_inside(numbers: Range, number: Fraction) -> bool:
    return (number in (numbers.low, numbers.high) and not (
        (number == numbers.low and numbers.excludes_low)
        or (number == numbers.high and numbers.excludes_high)
    )) or (
        (numbers.low is None or number > numbers.low)
        and (numbers.high is None or number < numbers.high)
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_terminals_agree_with_arithmetic(seed: int) -> None:
    chance = random.Random(seed)
    scale = chance.choice((1, 10, 100))
    ends = sorted(Fraction(chance.randint(-3000, 3000), scale) for _ in range(2))
    low, high = (end if chance.random() < 0.8 else None for end in ends)
    numbers = Range(
        low,
        high,
        low is not None and chance.random() < 0.5,
        high is not None and chance.random() < 0.5,
    )
    integers, decimals = integer_terminal(numbers), number_terminal(numbers)
    near = [int(end) + step for end in ends for step in (-1, 0, 1)]
    for number in [*near, *(chance.randint(-4000, 4000) for _ in range(10))]:
        if number:
            assert matches(integers, str(number)) == is_inside(numbers, Fraction(number))
    for hundredths in [
        *(int(end * 100) + step for end in ends for step in (-1, 0, 1)),
        *(chance.randint(-4000, 4000) for _ in range(10)),
    ]:
        if hundredths:
            sign, size = "-" * (hundredths < 0), abs(hundredths)
            text = f"{sign}{size // 100}.{size % 100:02d}{'0' * chance.randint(0, 2)}"
            assert matches(decimals, text) == is_inside(numbers, Fraction(hundredths, 100)), text


@pytest.mark.parametrize("bound", [2**53 + 1, 2**63, 2**64 + 1, 10**30])
def test_integer_bounds_are_exact_beyond_64_bits(bound: int) -> None:
    above = integer_terminal(Range(low=Fraction(bound)))
    below = integer_terminal(Range(high=Fraction(bound)))
    assert [matches(above, str(bound + step)) for step in (-1, 0, 1)] == [False, True, True]
    assert [matches(below, str(bound + step)) for step in (-1, 0, 1)] == [True, True, False]


def test_a_fraction_never_rounds_onto_an_excluded_bound() -> None:
    below = number_terminal(Range(high=Fraction(1), excludes_high=True))
    assert matches(below, "0." + "9" * 14)
    assert not matches(below, "0." + "9" * 20)


@pytest.mark.parametrize(
    "numbers", [Range(Fraction(2), Fraction(1)), Range(Fraction(1), Fraction(1), True)]
)
def test_empty_ranges_have_no_terminal(numbers: Range) -> None:
    assert integer_terminal(numbers) is None
    assert number_terminal(numbers) is None
