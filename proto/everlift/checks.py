"""Checks that several messages share. Pure."""

from __future__ import annotations

import math

from everlift.errors import OutOfRange


def check_range(name: str, value: float, low: float, high: float, *, field: str = "") -> None:
    """Raises OutOfRange unless ``value`` is a number from ``low`` to ``high``. ``field`` is what
    clients call it where that is not ``name``."""
    if not (math.isfinite(value) and low <= value <= high):
        raise OutOfRange(
            f"{name} must be from {low:g} to {high:g}, not {value:g}", field=field or name
        )
