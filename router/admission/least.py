"""What of a predicted time nearly all requests take at the least. Pure."""

from __future__ import annotations

from math import exp

#: Of all requests, the part that takes less than the least that is told.
_QUANTILE = 0.05
#: Who takes less lowers it by so much.
_STEP = 0.1


class Least:
    """The part of what was predicted that all but a twentieth of the requests have taken. By
    stochastic approximation of a quantile (Robbins and Monro, 1951), of the logarithm."""

    def __init__(self) -> None:
        self.part = 0.8

    def note(self, ratio: float) -> None:
        """One took ``ratio`` times as long as was predicted."""
        is_below = ratio < self.part
        self.part = min(1.0, self.part * exp(_STEP * (_QUANTILE - is_below)))
