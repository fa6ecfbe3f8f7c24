"""What each row of a step adds to the step's time, by a model that is learned from the steps. Pure.

    seconds = step + the sum of what its rows cost

Alone, a row would have taken ``step`` and what it costs itself. The model is that of the routers
(``everlift.step_fit``). They learn of a kind of workers from sums over many steps; here it is of
this worker alone, from single steps.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everlift.step_fit import FittedStepTime
from everlift.step_time import StepSize
from worker.plan import Flags, Rows

Floats = NDArray[np.floating[Any]]

#: Of steps that compute prompts, and of those that do not, one is learned from so often.
_OBSERVE_S = 0.05
_REFIT_S = 1.0
#: What a token costs where the model has it free: so that there is always something to share by.
_LEAST_S = 1e-12


class Costs(NamedTuple):
    """``rows`` [n] are seconds, or tokens where ``is_known`` is False."""

    step: float
    rows: Floats
    is_known: bool

    def alone(self, chosen: Flags | slice) -> tuple[Floats | float, float]:
        """Of the time that the rows ``chosen`` take together, the part that each would take alone,
        and the mean of these: all of it where nobody knows."""
        costs = self.rows[chosen]
        if not self.is_known or not len(costs):
            return 1.0, 1.0
        sum_ = float(costs.sum())
        together = self.step + sum_
        return (self.step + costs) / together, (self.step + sum_ / len(costs)) / together

    def part(self, chosen: Flags) -> float:
        """Of the time that all rows take, what the rows ``chosen`` make it longer: all of it where
        there are no others."""
        if np.count_nonzero(chosen) == len(chosen):
            return 1.0
        return float(self.rows[chosen].sum() / (self.step + self.rows.sum()))


class StepCosts:
    """``observe`` follows each step."""

    def __init__(self) -> None:
        self._fit = FittedStepTime()
        #: when a step with prompts, and one without, was learned from
        self._observed = {True: -inf, False: -inf}
        self._refitted = -inf
        self._step_s = 0.0
        self._each = StepSize(0.0, 1.0, 0.0, 0.0)

    def of(self, rows: Rows) -> Costs:
        each = self._each
        if len(rows) == rows.num_tokens:
            by_row = (rows.starts + 1) * (each.kv_tokens + each.num_pairs)
            by_row = by_row + (each.num_rows + each.num_tokens)
        else:
            counts, reads = rows.counts, rows.starts + rows.counts
            pairs = counts * rows.starts + counts * (counts + 1) / 2
            by_row = each.num_rows + counts * each.num_tokens
            by_row = by_row + reads * each.kv_tokens + pairs * each.num_pairs
        return Costs(self._step_s, by_row, self._fit.is_known)

    def observe(self, rows: Rows, seconds: float, has_prompts: bool, now: float) -> None:
        """The step took ``seconds`` and is over."""
        if seconds > 0 and now - self._observed[has_prompts] >= _OBSERVE_S:
            self._observed[has_prompts] = now
            size = StepSize(len(rows), rows.num_tokens, rows.kv_tokens, rows.num_pairs)
            self._fit.observe(size, seconds)
        if now - self._refitted >= _REFIT_S:
            self._refitted = now
            self._refit()

    def _refit(self) -> None:
        self._fit.refit()
        if self._fit.is_known:
            self._step_s, each = self._fit.coefficients
            self._each = each._replace(num_tokens=max(_LEAST_S, each.num_tokens))
