"""Many values in a few numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Those that a curve of all values is drawn from.
_CURVE = range(101)


@dataclass(frozen=True, slots=True)
class Spread:
    """``percentiles`` by percent."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


def spread(values: Sequence[float], percents: Sequence[float]) -> Spread | None:
    """A percentile between two values is on the straight line between them, as numpy and vLLM have
    it; the deviation is that of these values themselves. None where there are none."""
    if not len(values):
        return None
    found = np.asarray(values, dtype=float)
    at = np.percentile(found, list(percents)) if percents else []
    return Spread(
        float(found.mean()),
        float(np.median(found)),
        float(found.std()),
        dict(zip(percents, map(float, at), strict=True)),
    )


def curve(values: Sequence[float]) -> list[float]:
    """The percentiles 0, 1, ..., 100; none of nothing."""
    return [float(each) for each in np.percentile(values, list(_CURVE))] if len(values) else []
