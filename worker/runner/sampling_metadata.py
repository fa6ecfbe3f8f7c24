"""Sampling parameters of the tokens of a step, and the interface of the sampling function."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.plan import Ints
from worker.runner.uniform import U64, uniform


class SamplingMetadata(NamedTuple):
    """Sampling parameters of n tokens, as columns.

    ``filters`` float64 [n, 4] are temperature, top_k, top_p and min_p; top_k and top_p are inf if
    they keep all tokens. ``keys`` uint64 [n, 2] are the seed and the index of the choice in its
    request. ``positions`` [n] are the tokens' positions in the output.
    """

    filters: NDArray[np.float64]
    keys: U64
    positions: Ints

    def take(self, index: Ints) -> SamplingMetadata:
        return SamplingMetadata(self.filters[index], self.keys[index], self.positions[index])

    def uniform(self) -> NDArray[np.float64]:
        """Return one uniform number in [0, 1) per token, [n]."""
        seeds, choices = self.keys.T
        return uniform(seeds, choices, self.positions.astype(np.uint64))


class SampleFn(Protocol):
    def __call__(self, logits: Tensor) -> Tensor:
        """Return token ids int64 [n] sampled from ``logits`` fp32 [n, vocab].

        The id is NOT_FINITE if a logit is NaN or +inf, NOTHING_LEFT if all are -inf.
        """
        ...
