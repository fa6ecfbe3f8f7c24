"""Duration of a soak."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

#: Duration of each soak of the engine, the ledger and models, in minutes.
_MINUTES = 10.0


def minutes(default: float) -> float:
    """Return the duration in minutes: SOAK_MINUTES if it is set, else ``default``."""
    return float(os.environ.get("SOAK_MINUTES", default))


def rounds() -> Iterator[int]:
    """Yield numbers from 0 until the duration has passed; at least one."""
    end = time.monotonic() + 60 * minutes(_MINUTES)
    number = 0
    while number == 0 or time.monotonic() < end:
        yield number
        number += 1
