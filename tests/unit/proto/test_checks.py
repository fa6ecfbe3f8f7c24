"""Error messages of range checks."""

from __future__ import annotations

import pytest

from everlift.checks import Range
from everlift.errors import OutOfRange


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2, "2"),
        (-(10**30), "-10000000000000000000000..."),
        (1.25, "1.25"),
        (float("nan"), "nan"),
    ],
)
def test_range_check_error_shows_the_value(value: float, shown: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        Range(0, 1).check("a", value)
    assert str(caught.value) == f"a must be from 0 to 1, not {shown}"


def test_range_check_error_describes_a_huge_integer() -> None:
    for value in (10**5000, -(10**5000)):
        with pytest.raises(OutOfRange, match="not an integer of thousands of digits"):
            Range(0, 1).check("a", value)
