"""Estimated cost in seconds of each row of a step, by a model fitted to this worker's steps. Pure.

    seconds of a step = cost of any step + sum of the costs of its rows

A row is the part of one sequence in the step. Routers use the same model (``everlift.step_fit``).
They fit it to sums over many steps of all workers of one kind, while a worker fits it to single
steps of its own.
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

#: Minimum time in seconds between two observed steps (separately for steps with and without
#: prompts), and between two refits. After the first ``_NUM_FREQUENT`` observations both intervals
#: are ``_INTERVAL_FACTOR`` times as long.
_OBSERVE_S = 0.05
_REFIT_S = 1.0
_NUM_FREQUENT = 64
_INTERVAL_FACTOR = 10.0
#: Minimum cost of a token, so that a step's time can always be divided in proportion to costs.
_MIN_TOKEN_S = 1e-12


class Costs(NamedTuple):
    """Coefficients of the cost model, in seconds.

    ``step`` is the cost that every step has, whatever its rows. The fields of ``each`` are the
    costs of one row, one computed token, one token whose KV is read, and one pair of a computed
    token and a token that it attends to. While the model is not fitted, ``is_known`` is False and
    the cost of a row is its number of tokens.
    """

    step: float
    each: StepSize
    is_known: bool

    def row(self, start: int, count: int) -> float:
        """Return the cost of a row of ``count`` tokens that begins at position ``start``."""
        pairs = count * start + count * (count + 1) / 2
        each = self.each
        tokens = count * each.num_tokens + (start + count) * each.kv_tokens
        return each.num_rows + tokens + pairs * each.num_pairs

    def rows(self, rows: Rows) -> float:
        """Return the sum of the costs of all ``rows``."""
        each = self.each
        tokens = rows.num_tokens * each.num_tokens + rows.kv_tokens * each.kv_tokens
        return len(rows) * each.num_rows + tokens + rows.num_pairs * each.num_pairs

    def by_row(self, rows: Rows) -> Floats:
        """Return the cost of each row, float [n]."""
        each, counts = self.each, rows.counts
        pairs = counts * rows.starts + counts * (counts + 1) / 2
        tokens = counts * each.num_tokens + (rows.starts + counts) * each.kv_tokens
        return each.num_rows + tokens + pairs * each.num_pairs

    def fraction_alone(self, cost: float, together: float) -> float:
        """Return the fraction of a step's time that the step would take with only one of its rows.

        ``cost`` is the cost of that row, and ``together`` the sum of the costs of all rows. Return
        1 if the model is not fitted.
        """
        return (self.step + cost) / (self.step + together) if self.is_known else 1.0

    @property
    def first(self) -> float:
        """Cost of a step with a single row of one token, excluding the cost of its attention.

        The attention costs ``position`` for each token whose KV it reads.
        """
        return self.step + self.each.num_rows + self.each.num_tokens

    @property
    def position(self) -> float:
        """Cost that each token whose KV is read adds to a row of one token."""
        return self.each.kv_tokens + self.each.num_pairs


class StepCosts:
    """Cost model of an engine's steps, refitted to observed steps from time to time.

    The attribute ``now`` has the current coefficients. Call ``observe`` after each step.
    """

    def __init__(self) -> None:
        self._fit = FittedStepTime()
        #: time of the last observed step with prompts (True) and without (False)
        self._observed_at = {True: -inf, False: -inf}
        self._refitted_at = -inf
        self._num_observed = 0
        self.now = Costs(0.0, StepSize(0.0, 1.0, 0.0, 0.0), is_known=False)

    def observe(self, rows: Rows, seconds: float, has_prompts: bool, now: float) -> None:
        """Record that a step of ``rows`` took ``seconds`` and ended at ``now``, in seconds.

        ``has_prompts`` means that some rows are chunks of prompts. A step is ignored if one with
        the same ``has_prompts`` was recorded shortly before. The coefficients are refitted only
        from time to time.
        """
        factor = 1.0 if self._num_observed < _NUM_FREQUENT else _INTERVAL_FACTOR
        if seconds > 0 and now - self._observed_at[has_prompts] >= factor * _OBSERVE_S:
            self._observed_at[has_prompts] = now
            self._num_observed += 1
            size = StepSize(len(rows), rows.num_tokens, rows.kv_tokens, rows.num_pairs)
            self._fit.observe(size, seconds)
        if now - self._refitted_at >= factor * _REFIT_S:
            self._refitted_at = now
            self._refit()

    def _refit(self) -> None:
        self._fit.refit()
        if self._fit.is_known:
            step_s, each = self._fit.coefficients
            each = each._replace(num_tokens=max(_MIN_TOKEN_S, each.num_tokens))
            self.now = Costs(step_s, each, is_known=True)
