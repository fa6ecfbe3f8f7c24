"""How many requests a second are too many. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from cluster.bench import latencies
from cluster.bench.goodput import Slo
from cluster.bench.outcome import Outcome

#: From one rate to the next, until one is too much.
_FACTOR = 2.0
#: So near to each other the two rates come that saturation is between.
_PRECISION = 1.1
#: More failures, or fewer good ones where there is a target, are not kept up with.
_FAILED_SHARE = 0.01
_GOOD_SHARE = 0.9
#: So much of what came in the second half may be left over at its end.
_LEFT_SHARE = 0.1


class Ramp:
    """Rates to try, one after the other: each twice the one before, until one is too much or
    ``most`` is reached; then what is between is halved (by ratio). It takes for granted that more
    is not easier.

    ``kept`` is the highest rate that was kept up with, ``too_much`` the lowest one that was not.
    """

    def __init__(self, first: float, most: float) -> None:
        assert 0 < first <= most
        self._first = first
        self._most = most
        self.kept: float | None = None
        self.too_much: float | None = None

    def next_rate(self) -> float | None:
        """None: enough is known."""
        if self.kept is None:
            return self._first if self.too_much is None else None
        if self.too_much is None:
            return min(_FACTOR * self.kept, self._most) if self.kept < self._most else None
        if self.too_much <= _PRECISION * self.kept:
            return None
        return sqrt(self.kept * self.too_much)

    def tell(self, rate: float, is_kept: bool) -> None:
        if is_kept:
            self.kept = rate
        else:
            self.too_much = rate


def is_kept_up(outcomes: Sequence[Outcome], duration_s: float, slo: Slo) -> bool:
    """Whether requests that came for so long did not pile up: those that ended in the second half
    are not fewer than those that came in it by more than a tenth and what chance explains. And
    hardly one failed, and most are good.

    ``duration_s`` must be well above what a request takes, or everything piles up."""
    if sum(not each.is_complete for each in outcomes) > _FAILED_SHARE * len(outcomes):
        return False
    good = sum(slo.is_good(each, latencies.due) for each in outcomes)
    if good < _GOOD_SHARE * len(outcomes):
        return False
    half = duration_s / 2
    came = sum(each.due >= half for each in outcomes)
    went = sum(half <= each.ended < duration_s for each in outcomes)
    return came - went <= _LEFT_SHARE * came + sqrt(came)
