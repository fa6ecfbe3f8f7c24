"""Corrections of predicted output lengths by the actual lengths. Pure.

Each quantile of each group of requests has a shift, which is added to the quantile's logarithm.
After every output of the group, the shift of quantile q increases by rate * q if the output was
longer than the quantile, and decreases by rate * (1 - q) if it was not. An output that was cut off
can only increase it. Without such outputs, the share of outputs within the quantile therefore tends
to q, whatever the model predicts and however the outputs are distributed (Gibbs and Candes,
adaptive conformal inference, arXiv 2106.00170). Over n consecutive outputs of a group, the error of
this share is at most

    (r + rate) / (rate * n)

where r is the distance that the shift has to cover: the range of ln(output / predicted).

An output is compared with the quantile as corrected when it ends, not as corrected when its request
arrived. Otherwise all outputs that run at the same time would move the shift for the same reason.
With a few hundred of them in a group the shift would swing by several orders of magnitude, however
good the model is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Rate of the shifts of natural logarithms: an output that is longer than the predicted median
#: raises the median by 2.5 %.
RATE = 0.05
#: Maximum number of groups with shifts of their own; the least recently updated groups lose theirs
#: first.
_MAX_GROUPS = 4096


class Corrections:
    """Shifts of the predicted ``quantiles`` of output lengths, by group of requests."""

    def __init__(self, quantiles: Sequence[float]) -> None:
        self._quantiles = tuple(quantiles)
        self._all = [0.0] * len(self._quantiles)
        self._shifts: OrderedDict[str, list[float]] = OrderedDict()

    def apply(self, group: str, logs: Sequence[float]) -> list[float]:
        """Return the corrected natural logarithms of the quantiles for a group.

        ``logs`` are the logarithms before correction. A group without recorded outputs gets the
        running average of the shifts of all groups.
        """
        shifts = self._shifts.get(group, self._all)
        return [each + shift for each, shift in zip(logs, shifts, strict=True)]

    def note(self, group: str, logs: Sequence[float], log_length: float) -> None:
        """Record an ended output of a group, to correct later predictions.

        ``logs`` are the natural logarithms of its quantiles as predicted, before corrections.
        ``log_length`` is the natural logarithm of its actual length in tokens.
        """
        is_longer = [log_length > each for each in self.apply(group, logs)]
        moves = zip(is_longer, self._quantiles, strict=True)
        self._move(group, [longer - (1 - quantile) for longer, quantile in moves])

    def note_longer(self, group: str, logs: Sequence[float], log_length: float) -> None:
        """Record an output of a group that was cut off, to correct later predictions.

        ``log_length`` is the natural logarithm of a lower bound of its full length in tokens. Only
        quantiles below this bound are shifted. ``logs`` are the natural logarithms of the quantiles
        as predicted, before corrections.
        """
        is_longer = [log_length > each for each in self.apply(group, logs)]
        moves = zip(is_longer, self._quantiles, strict=True)
        self._move(group, [longer * quantile for longer, quantile in moves])

    def _move(self, group: str, moves: Sequence[float]) -> None:
        if group not in self._shifts:
            self._shifts[group] = list(self._all)
            if len(self._shifts) > _MAX_GROUPS:
                self._shifts.popitem(last=False)
        self._shifts.move_to_end(group)
        shifts = self._shifts[group]
        for place, move in enumerate(moves):
            shifts[place] += RATE * move
            self._all[place] += RATE * (shifts[place] - self._all[place])
