"""Whether predictions are worth being ordered by. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.prediction.rank_correlation import kendall_tau

#: Outputs that tau and coverage are of, the last ones that ended.
_WINDOW = 500
#: Outputs between two looks at tau, which takes O(n log n) of the window.
_LOOK = 100
#: So much above the limit predictions are trusted again.
_MARGIN = 0.05


class Trust:
    """Kendall's tau between what was predicted and what came, and the part of outputs within each
    predicted quantile. Below ``limit`` nothing is trusted until tau is 0.05 above it.

    Of an order that says nothing, tau over 500 outputs has a standard deviation of
    sqrt(2 (2 n + 5) / (9 n (n - 1))) = 0.03 (Kendall 1945).
    """

    def __init__(self, limit: float, tau: float) -> None:
        """``tau`` is by what the model's training found; it holds until enough outputs ended."""
        self._limit = limit
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._within: deque[tuple[bool, ...]] = deque(maxlen=_WINDOW)
        self._since_look = 0
        self.tau = tau
        self.is_trusted = tau >= limit

    def note(self, predicted: float, within: Sequence[bool], actual: float) -> None:
        """An output ended, ``within`` these of the quantiles."""
        self._pairs.append((predicted, actual))
        self._within.append(tuple(within))
        self._since_look += 1
        if self._since_look == _LOOK:
            self._since_look = 0
            self.tau = kendall_tau(self._pairs)
            self.is_trusted = self.tau >= self._limit + (0 if self.is_trusted else _MARGIN)

    @property
    def coverage(self) -> list[float]:
        """Of each quantile, the part of the outputs within it; nothing while none has ended."""
        if not self._within:
            return []
        return [sum(each) / len(self._within) for each in zip(*self._within, strict=True)]
