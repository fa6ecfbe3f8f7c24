"""Estimates of the durations of batches and of steps. Pure."""

from __future__ import annotations

from collections import deque
from heapq import nsmallest
from typing import NamedTuple

#: Number of recent batches that are remembered, and number of the most similar ones whose times an
#: estimate averages.
_BATCHES, _NEAREST = 64, 3


class BatchSize(NamedTuple):
    """Size of a batch, for an estimate of its time.

    ``prompt`` is the largest number of tokens that one of its sequences already has, in prompt and
    output together. ``output`` is the largest predicted number of tokens of a whole output,
    including those that exist already.
    """

    num_sequences: int
    prompt: int
    output: int


class ServingTime:
    """Nearest-neighbour regression of the time of a batch, as in Magnus (arXiv 2406.04785).

    The time per token of a batch is its duration divided by its ``BatchSize.output``. The estimate
    is ``output`` times the mean time per token of the three most similar of the last 64 batches.
    The distance between two sizes is computed from relative differences, so that none of the three
    numbers of a BatchSize outweighs the others because of its unit.

    No logarithm and no root is computed, so that all ranks get the same bits.
    """

    def __init__(self) -> None:
        #: size of each batch, and its time per token in seconds
        self._batches: deque[tuple[BatchSize, float]] = deque(maxlen=_BATCHES)

    def learn(self, size: BatchSize, seconds: float) -> None:
        """Record that a batch of ``size`` took ``seconds``, which must be more than 0."""
        self._batches.append((size, seconds / size.output))

    def estimate(self, size: BatchSize) -> float:
        """Return the estimated seconds of a batch of ``size``.

        Before the first batch is recorded, it is one second per token of ``size.output``.
        """
        nearest = nsmallest(_NEAREST, self._batches, key=lambda batch: _distance(size, batch[0]))
        if not nearest:
            return float(size.output)
        return size.output * sum(token_s for _, token_s in nearest) / len(nearest)


def _distance(one: BatchSize, other: BatchSize) -> float:
    differences = (abs(a - b) / max(a, b) for a, b in zip(one, other, strict=True))
    return sum(difference * difference for difference in differences)


#: Number of last steps that are considered.
_STEPS = 16


class LongestStep:
    """Duration of the longest of the last 16 steps of an engine.

    The maximum is used because steps with prefill take several times as long as others, so that a
    mean says little about the next step.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._started_at: float | None = None

    @property
    def seconds(self) -> float:
        """Duration of the longest step, in seconds; 0 before the end of the first step."""
        return max(self._steps, default=0.0)

    def begin_step(self, now: float, is_busy: bool) -> None:
        """Record that a step begins at ``now``, which ends the previous one.

        If ``is_busy`` is false, the engine may have been idle since the previous step, so the
        previous step's duration is unknown and not recorded.
        """
        if is_busy and self._started_at is not None:
            self._steps.append(max(0.0, now - self._started_at))
        self._started_at = now
