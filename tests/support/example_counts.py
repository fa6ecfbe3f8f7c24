"""Numbers of examples in tests with Hypothesis: fewer in `make test` than in `make test-long`."""

from __future__ import annotations

import os

#: The share of its examples that a test tries.
_SHARE = float(os.environ.get("EXAMPLES", "0.4"))


def examples(number: int) -> int:
    """Return how many of a test's ``number`` examples this run tries."""
    return max(1, round(number * _SHARE))
