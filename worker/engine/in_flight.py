"""A step that the device computes while the host plans the next one. Pure.

    planned    --launch-->  its rows count as computed, and its tokens as sampled but UNKNOWN
    in flight  --commit-->  the state before the launch is restored; sampled tokens can be committed

Between launch and commit no sequence is preempted, but sequences may be removed. The tokens that
the rows of removed sequences sampled are discarded. Their blocks may already belong to other
sequences, which is safe because the device runs steps in order and the new owners write to them in
a later step.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import compress

import numpy as np

from worker.engine.batch import Batch
from worker.engine.plan import Flags, Plan, RowResult
from worker.engine.sequence import Sequence


class InFlightStep:
    """Step in flight; its ``plan`` was made from ``batch`` and has no drafts."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self.plan = plan
        self._batch = batch
        self._sequences = batch.at(plan.rows.slots)

    @property
    def _here(self) -> Flags:
        """Return which rows' sequences are still in their slots, bool [n]."""
        slots = self.plan.rows.slots.tolist()
        here = [each.slot == slot for each, slot in zip(self._sequences, slots, strict=True)]
        return np.array(here, np.bool_)

    def left(self) -> Plan:
        """Return the plan without the rows of removed sequences."""
        here = self._here
        return self.plan if here.all() else replace(self.plan, rows=self.plan.rows.only(here))

    def of_those_left(self, results: Several[RowResult]) -> list[RowResult]:
        return [*compress(results, self._here.tolist())]

    def failed_of_those_gone(self, results: Several[RowResult]) -> list[tuple[Sequence, int]]:
        """Return the removed sequences whose rows failed according to ``results``.

        Each comes with the number of its tokens that this step would have computed to.
        """
        rows = self.plan.rows
        columns = (self._sequences, self._here.tolist(), rows.known_ends.tolist(), results)
        return [
            (sequence, end)
            for sequence, is_here, end, result in zip(*columns, strict=True)
            if not is_here and result.error is not None
        ]

    def launch(self) -> None:
        rows = self.left().rows
        columns = (rows.slots, rows.known_ends, rows.samples)
        for slot, end, samples in zip(*(it.tolist() for it in columns), strict=True):
            self._batch[slot].mark_launched(end, samples)
        self._batch.slot_table.mark_launched(*columns)

    def commit(self) -> Plan:
        """Restore the batch's state before ``launch``, and return the plan as ``left`` does."""
        plan = self.left()
        columns = (plan.rows.slots, plan.rows.starts, plan.rows.samples)
        for slot, start, samples in zip(*(it.tolist() for it in columns), strict=True):
            self._batch[slot].commit_step(start, samples)
        self._batch.slot_table.commit_steps(*columns)
        return plan
