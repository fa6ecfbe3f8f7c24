"""Checks that several messages share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from everlift.errors import NotUtf8, OutOfRange

T = TypeVar("T")


def one_too_many(items: Iterable[T], most: int) -> tuple[T, ...]:
    """The items, or if there are more than ``most`` no more of them than show it: of what is going
    to be refused no copy is made."""
    return tuple(islice(items, most + 1))


def check_range(name: str, value: float, low: float, high: float, *, field: str = "") -> None:
    """Raises OutOfRange unless ``value`` is a number from ``low`` to ``high``. ``field`` is what
    clients call it where that is not ``name``."""
    if not (math.isfinite(value) and low <= value <= high):
        least, most, given = map(_written, (low, high, value))
        raise OutOfRange(f"{name} must be from {least} to {most}, not {given}", field=field or name)


def _written(number: float) -> str:
    """Of a count every digit."""
    return str(number) if isinstance(number, int) else f"{number:g}"


@contextmanager
def sendable() -> Iterator[None]:
    """While a message is made: what no message can hold raises NotUtf8 or OutOfRange."""
    try:
        yield
    except UnicodeEncodeError:
        raise NotUtf8("a text is none that UTF-8 can hold") from None
    except (ValueError, OverflowError) as error:
        raise OutOfRange(str(error)) from None
