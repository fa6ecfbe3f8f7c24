"""How long a batch will take that runs until all of it are done. Pure."""

from __future__ import annotations

from collections import deque
from heapq import nsmallest
from typing import NamedTuple

#: What is estimated from: so many of the last batches, and the nearest of these.
_BATCHES, _NEAREST = 64, 3


class BatchSize(NamedTuple):
    """``prompt`` and ``output`` are the longest of its sequences', in tokens, the output as it is
    predicted."""

    num_sequences: int
    prompt: int
    output: int


class ServingTime:
    """Regression by the nearest neighbours among the last batches, as in Magnus (arXiv 2406.04785):
    the mean of what a predicted token took them, times the batch's own. Distances are relative, so
    that none of the three numbers counts more for its unit.

    No logarithm and no root, so that all ranks get the same bits.
    """

    def __init__(self) -> None:
        #: each batch, and its seconds for a token of its longest output
        self._batches: deque[tuple[BatchSize, float]] = deque(maxlen=_BATCHES)

    def learn(self, size: BatchSize, seconds: float) -> None:
        """``seconds`` above 0."""
        self._batches.append((size, seconds / size.output))

    def estimate(self, size: BatchSize) -> float:
        """Seconds; while nothing was learned, as if each token took one."""
        nearest = nsmallest(_NEAREST, self._batches, key=lambda batch: _distance(size, batch[0]))
        if not nearest:
            return float(size.output)
        return size.output * sum(token_s for _, token_s in nearest) / len(nearest)


def _distance(one: BatchSize, other: BatchSize) -> float:
    """Sum of squares of the relative differences."""
    differences = (abs(a - b) / max(a, b) for a, b in zip(one, other, strict=True))
    return sum(difference * difference for difference in differences)
