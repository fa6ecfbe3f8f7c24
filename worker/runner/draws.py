"""Sampling requests of a step, and the interface of what samples them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.plan import Ints
from worker.runner.uniform import U64, uniform


class Draws(NamedTuple):
    """Tokens that are to be drawn, as columns [n]: how, and for whom.

    ``filters`` float64 [n, 4] are temperature, top_k, top_p and min_p, inf where top_k or top_p
    keep all; ``keys`` uint64 [n, 2] are seed and choice, ``positions`` where in the output each
    token comes.
    """

    filters: NDArray[np.float64]
    keys: U64
    positions: Ints

    def take(self, index: Ints) -> Draws:
        return Draws(self.filters[index], self.keys[index], self.positions[index])

    def uniform(self) -> NDArray[np.float64]:
        """Return a uniform number for each draw [n]."""
        seeds, choices = self.keys.T
        return uniform(seeds, choices, self.positions.astype(np.uint64))


class DrawFrom(Protocol):
    def __call__(self, logits: Tensor) -> Tensor:
        """Return token ids int64 [n] for ``logits`` fp32 [n, vocab]; NOT_FINITE, NOTHING_LEFT."""
        ...
