"""Distributions of prompt and output lengths in tokens. Pure; random generators are parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from random import Random
from typing import Protocol


class Lengths(Protocol):
    def sample(self, rng: Random) -> int:
        """Return a random length in tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Exactly:
    tokens: int

    def sample(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal length of at most ``most`` tokens.

    ``sigma`` is the standard deviation of the natural logarithm of the length.
    """

    median: float
    sigma: float
    most: int

    def sample(self, rng: Random) -> int:
        return _clipped(self.median * exp(self.sigma * rng.gauss(0.0, 1.0)), self.most)


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    deviation: float
    most: int

    def sample(self, rng: Random) -> int:
        return _clipped(rng.gauss(self.mean, self.deviation), self.most)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixture of two distributions: ``first`` with probability ``share``, else ``second``."""

    share: float
    first: Lengths
    second: Lengths

    def sample(self, rng: Random) -> int:
        chosen = self.first if rng.random() < self.share else self.second
        return chosen.sample(rng)


class Quantiles:
    """Distribution of lengths with known quantiles.

    Between two known quantiles the logarithm of the length is interpolated linearly.
    """

    def __init__(self, *known: tuple[float, float]) -> None:
        """Create the distribution from pairs (share, length), with shares rising from 0 to 1.

        A pair states that this share of all lengths is at most ``length`` tokens.
        """
        self._parts = [part for part, _ in known]
        self._logs = [log(length) for _, length in known]
        assert self._parts[0] == 0 and self._parts[-1] == 1 and _rises(self._parts)

    def sample(self, rng: Random) -> int:
        part = rng.random()
        above = bisect_right(self._parts, part)
        begin, end = self._parts[above - 1], self._parts[above]
        low, high = self._logs[above - 1], self._logs[above]
        return max(1, round(exp(low + (high - low) * (part - begin) / (end - begin))))


def _rises(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


def _clipped(length: float, most: int) -> int:
    return max(1, min(most, round(length)))
