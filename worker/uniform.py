"""One uniform number per sampled token, from a counter instead of a generator. Pure.

The number depends on (seed, choice, position) alone, so it is the same on every rank, in any batch,
and after preemption or a move to another worker; there is no state to carry along.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1) with 53 random bits, for output token ``position`` of choice ``choice``."""
    return (_mix(_mix(_mix(seed) ^ choice) ^ position) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """SplitMix64's step and finaliser (Steele, Lea, Flood: OOPSLA 2014): a bijection of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
