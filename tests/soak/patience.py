"""Duration of a soak."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

#: Of each soak of engine and models.
_MINUTES = 10.0


def minutes(default: float) -> float:
    """SOAK_MINUTES sets another time."""
    return float(os.environ.get("SOAK_MINUTES", default))


def rounds() -> Iterator[int]:
    """Numbers from 0, as many as there is time for, and at least one."""
    end = time.monotonic() + 60 * minutes(_MINUTES)
    number = 0
    while number == 0 or time.monotonic() < end:
        yield number
        number += 1
