"""Checks of values that several types of messages share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from everlift.errors import NotUtf8, OutOfRange

T = TypeVar("T")

#: Largest number of digits of a number in an error message.
_MAX_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a numeric field from ``low`` to ``high``, inclusive.

    With ``exclusive_low``, ``low`` itself is out of range. NaN is always out of range.
    """

    low: float
    high: float
    exclusive_low: bool = False

    def check(self, name: str, value: float, *, field: str = "") -> None:
        """Raise OutOfRange unless ``value`` is in the range.

        ``name`` names the value in the message of the error. The error's attribute ``field`` is
        ``field``, or ``name`` if that is empty.
        """
        is_high_enough = self.low < value if self.exclusive_low else self.low <= value
        # This comparison also rejects infinity and NaN.
        if not (is_high_enough and value <= self.high):
            raise OutOfRange(
                f"{name} must be {self}, not {_format_number(value)}", field=field or name
            )

    def __str__(self) -> str:
        low, high = _format_number(self.low), _format_number(self.high)
        return f"above {low} and at most {high}" if self.exclusive_low else f"from {low} to {high}"


def limit_plus_one(items: Iterable[T], limit: int) -> tuple[T, ...]:
    """Return the first ``limit`` + 1 items, or all items if there are fewer.

    The result is long enough for a check that there are at most ``limit`` items. A longer list is
    not copied as a whole, because the check will reject it.
    """
    return tuple(islice(items, limit + 1))


def check_range(name: str, value: float, low: float, high: float, *, field: str = "") -> None:
    """Raise OutOfRange unless ``value`` is a number from ``low`` to ``high``.

    ``name`` names the value in the message of the error. The error's attribute ``field`` is
    ``field``, or ``name`` if that is empty.
    """
    Range(low, high).check(name, value, field=field)


def _format_number(number: float) -> str:
    """Return ``number`` as text for an error message.

    "..." replaces what exceeds _MAX_DIGITS characters of an integer. An integer that is too long
    for Python to convert is only described. A float has up to 6 significant digits.
    """
    if not isinstance(number, int):
        return f"{number:g}"
    try:
        digits = str(number)
    except ValueError:
        # Python's limit is 4300 digits, unless it is set to another value.
        return "an integer of thousands of digits"
    return digits if len(digits) <= _MAX_DIGITS else f"{digits[:_MAX_DIGITS]}..."


@contextmanager
def sendable() -> Iterator[None]:
    """Context manager: convert protobuf's errors for values that a message cannot hold.

    Raises NotUtf8 for a text that UTF-8 cannot encode, and OutOfRange for another value that the
    message's field cannot hold.
    """
    try:
        yield
    except UnicodeEncodeError:
        raise NotUtf8("a text contains characters that UTF-8 cannot encode") from None
    except (ValueError, OverflowError) as error:
        raise OutOfRange(str(error)) from None
