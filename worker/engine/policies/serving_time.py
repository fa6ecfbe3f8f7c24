"""Estimates of how long steps and batches take. Pure."""

from __future__ import annotations

from collections import deque
from heapq import nsmallest
from typing import NamedTuple

#: What is estimated from: so many of the last batches, and the nearest of these.
_BATCHES, _NEAREST = 64, 3


class BatchSize(NamedTuple):
    """Batch for an estimate: the longest ``prompt`` and predicted ``output`` of its sequences."""

    num_sequences: int
    prompt: int
    output: int


class ServingTime:
    """Regression by nearest neighbours among the last batches, as in Magnus (arXiv 2406.04785).

    The mean time of a predicted token in them, times the batch's own tokens. Distances are
    relative, so that none of the three numbers counts more for its unit.

    No logarithm and no root, so that all ranks get the same bits.
    """

    def __init__(self) -> None:
        #: each batch, and its seconds for a token of its longest output
        self._batches: deque[tuple[BatchSize, float]] = deque(maxlen=_BATCHES)

    def learn(self, size: BatchSize, seconds: float) -> None:
        """Learn a step of ``seconds``, above 0."""
        self._batches.append((size, seconds / size.output))

    def estimate(self, size: BatchSize) -> float:
        """Return the seconds; before the first step, one per token."""
        nearest = nsmallest(_NEAREST, self._batches, key=lambda batch: _distance(size, batch[0]))
        if not nearest:
            return float(size.output)
        return size.output * sum(token_s for _, token_s in nearest) / len(nearest)


def _distance(one: BatchSize, other: BatchSize) -> float:
    differences = (abs(a - b) / max(a, b) for a, b in zip(one, other, strict=True))
    return sum(difference * difference for difference in differences)


#: The last ones that are looked at.
_STEPS = 16


class LongestStep:
    """Longest of the last 16 steps of an engine.

    Steps with prefill take several times as long as others, so a mean says little about the next
    one.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds; 0 before the first step."""
        return max(self._steps, default=0.0)

    def begin_step(self, now: float, is_busy: bool) -> None:
        """Note that a step begins; the time since the last one is its duration if ``is_busy``."""
        if is_busy and self._began is not None:
            self._steps.append(max(0.0, now - self._began))
        self._began = now
