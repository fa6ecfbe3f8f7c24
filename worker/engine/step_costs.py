"""Cost of each row of a step, by a model that is learned from the steps. Pure.

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
from worker.engine.plan import Rows

Floats = NDArray[np.floating[Any]]

#: Of steps that compute prompts, and of those that do not, one is learned from so often, and what
#: was learned is used: at first, and so much more seldom after so many steps.
_OBSERVE_S = 0.05
_REFIT_S = 1.0
_AT_FIRST = 64
_MORE_SELDOM = 10.0
#: What a token costs where the model has it free: so that there is always something to share by.
_LEAST_S = 1e-12


class Costs(NamedTuple):
    """Seconds, or tokens where ``is_known`` is False: ``step``, and each of what rows have."""

    step: float
    each: StepSize
    is_known: bool

    def row(self, start: int, count: int) -> float:
        """Return the cost of ``count`` tokens from position ``start``."""
        pairs = count * start + count * (count + 1) / 2
        each = self.each
        tokens = count * each.num_tokens + (start + count) * each.kv_tokens
        return each.num_rows + tokens + pairs * each.num_pairs

    def rows(self, rows: Rows) -> float:
        """Return the cost of all rows together."""
        each = self.each
        tokens = rows.num_tokens * each.num_tokens + rows.kv_tokens * each.kv_tokens
        return len(rows) * each.num_rows + tokens + rows.num_pairs * each.num_pairs

    def by_row(self, rows: Rows) -> Floats:
        """Return the cost of each row, [n]."""
        each, counts = self.each, rows.counts
        pairs = counts * rows.starts + counts * (counts + 1) / 2
        tokens = counts * each.num_tokens + (rows.starts + counts) * each.kv_tokens
        return each.num_rows + tokens + pairs * each.num_pairs

    def alone(self, cost: float, together: float) -> float:
        """Return the share of the common time that one row would take alone; 1 if unknown."""
        return (self.step + cost) / (self.step + together) if self.is_known else 1.0

    @property
    def first(self) -> float:
        """Return the cost of a step with a row of one token, without what it reads."""
        return self.step + self.each.num_rows + self.each.num_tokens

    @property
    def position(self) -> float:
        """Return the cost of each token that a row of one token reads."""
        return self.each.kv_tokens + self.each.num_pairs


class StepCosts:
    """Costs of steps; ``observe`` is called after each step."""

    def __init__(self) -> None:
        self._fit = FittedStepTime()
        #: when a step with prompts, and one without, was learned from
        self._observed = {True: -inf, False: -inf}
        self._refitted = -inf
        self._num_observed = 0
        self.now = Costs(0.0, StepSize(0.0, 1.0, 0.0, 0.0), is_known=False)

    def observe(self, rows: Rows, seconds: float, has_prompts: bool, now: float) -> None:
        """Learn from a step that took ``seconds``."""
        pace = 1.0 if self._num_observed < _AT_FIRST else _MORE_SELDOM
        if seconds > 0 and now - self._observed[has_prompts] >= pace * _OBSERVE_S:
            self._observed[has_prompts] = now
            self._num_observed += 1
            size = StepSize(len(rows), rows.num_tokens, rows.kv_tokens, rows.num_pairs)
            self._fit.observe(size, seconds)
        if now - self._refitted >= pace * _REFIT_S:
            self._refitted = now
            self._refit()

    def _refit(self) -> None:
        self._fit.refit()
        if self._fit.is_known:
            step_s, each = self._fit.coefficients
            each = each._replace(num_tokens=max(_LEAST_S, each.num_tokens))
            self.now = Costs(step_s, each, is_known=True)
