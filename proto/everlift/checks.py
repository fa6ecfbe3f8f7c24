"""Checks that several messages share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from everlift.errors import NotUtf8, OutOfRange

T = TypeVar("T")

#: of a number in an error message
_MAX_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a numeric field: from ``low`` to ``high``, with ``above`` excluding ``low``."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: float, *, field: str = "") -> None:
        """Raise OutOfRange unless the value is in the range.

        ``field`` is the field's name where that is not ``name``.
        """
        is_high_enough = self.low < value if self.above else self.low <= value
        # Infinity and NaN are in no range.
        if not (is_high_enough and value <= self.high):
            raise OutOfRange(f"{name} must be {self}, not {_written(value)}", field=field or name)

    def __str__(self) -> str:
        low, high = _written(self.low), _written(self.high)
        return f"above {low} and at most {high}" if self.above else f"from {low} to {high}"


def one_too_many(items: Iterable[T], most: int) -> tuple[T, ...]:
    """Return the items, or just enough of them to show that there are more than ``most``.

    A refused list is not copied.
    """
    return tuple(islice(items, most + 1))


def check_range(name: str, value: float, low: float, high: float, *, field: str = "") -> None:
    """Raise OutOfRange unless ``value`` is a number from ``low`` to ``high``.

    ``field`` is the field's name where that is not ``name``.
    """
    Range(low, high).check(name, value, field=field)


def _written(number: float) -> str:
    """Return every digit of a count, and few digits of another number."""
    if not isinstance(number, int):
        return f"{number:g}"
    digits = str(number)
    return digits if len(digits) <= _MAX_DIGITS else f"{digits[:_MAX_DIGITS]}..."


@contextmanager
def sendable() -> Iterator[None]:
    """Raise NotUtf8 or OutOfRange for values that no message can hold."""
    try:
        yield
    except UnicodeEncodeError:
        raise NotUtf8("a text is none that UTF-8 can hold") from None
    except (ValueError, OverflowError) as error:
        raise OutOfRange(str(error)) from None
