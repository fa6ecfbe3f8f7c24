"""Corrections of predictions by their outcomes. Pure.

Each quantile of each group has a shift of its logarithm. After every output it goes up by
rate * q where the output was longer, and down by rate * (1 - q) where it was not: so the part of
outputs within it tends to q whatever the model says and the outputs do (Gibbs and Candes, adaptive
conformal inference, arXiv 2106.00170). Over n outputs in a row of a group it is off by at most

    (r + rate) / (rate * n)

where r is how far the shift has to go: the range of ln(output / predicted).

An output is held against the quantile as it is when it ends, and not as it was told when it came.
Else each of those that were under way meanwhile would move the shift for the same reason: with a
few hundred of a group it would swing by several orders of magnitude, however good the model is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Of a shift, natural logarithm: an output that is longer than the median moves it by 2.5 %.
RATE = 0.05
#: Groups that have shifts of their own; then those that were not heard of for longest lose them.
_MOST = 4096


class Corrections:
    def __init__(self, quantiles: Sequence[float]) -> None:
        self._quantiles = tuple(quantiles)
        self._all = [0.0] * len(self._quantiles)
        self._shifts: OrderedDict[str, list[float]] = OrderedDict()

    def apply(self, group: str, logs: Sequence[float]) -> list[float]:
        """Return the corrected logarithms of the quantiles.

        A group without outcomes is shifted like the average of the others.
        """
        shifts = self._shifts.get(group, self._all)
        return [each + shift for each, shift in zip(logs, shifts, strict=True)]

    def note(self, group: str, logs: Sequence[float], log_length: float) -> None:
        """Record the length of an output with the uncorrected prediction ``logs``."""
        is_longer = [log_length > each for each in self.apply(group, logs)]
        moves = zip(is_longer, self._quantiles, strict=True)
        self._move(group, [longer - (1 - quantile) for longer, quantile in moves])

    def note_longer(self, group: str, logs: Sequence[float], log_length: float) -> None:
        """Record an output that was cut off with at least this length.

        It teaches nothing about the quantiles above.
        """
        is_longer = [log_length > each for each in self.apply(group, logs)]
        moves = zip(is_longer, self._quantiles, strict=True)
        self._move(group, [longer * quantile for longer, quantile in moves])

    def _move(self, group: str, moves: Sequence[float]) -> None:
        if group not in self._shifts:
            self._shifts[group] = list(self._all)
            if len(self._shifts) > _MOST:
                self._shifts.popitem(last=False)
        self._shifts.move_to_end(group)
        shifts = self._shifts[group]
        for place, move in enumerate(moves):
            shifts[place] += RATE * move
            self._all[place] += RATE * (shifts[place] - self._all[place])
