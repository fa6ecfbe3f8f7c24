"""Uniform random number per sampled token, from a counter instead of a generator. Pure.

The number depends only on (seed, choice, position). It therefore needs no state, and is the same on
every rank, in any batch, and after a preemption or migration.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


def uniform(seeds: U64, choices: U64, positions: U64) -> NDArray[np.float64]:
    """Return uniform numbers of 53 bits in [0, 1), one per output token, [n].

    ``seeds``, ``choices`` and ``positions`` are those of the tokens, [n].
    """
    mixed = _mix(_mix(_mix(seeds) ^ choices) ^ positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: U64) -> U64:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
