"""A step that the device computes while the host plans the next one. Pure.

    planned    --launch-->  its rows count as computed, and UNKNOWN stands for each sampled token
    in flight  --commit-->  both changes are undone, so that the real results can be applied

No sequence is preempted between launch and commit, but sequences may be removed. The tokens that
the rows of removed sequences sampled are discarded. The blocks of removed sequences may already
belong to other sequences. Such reuse is safe because the device runs steps in order and the new
owners write to the blocks in a later step.
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
    """Step that was launched and is not committed yet.

    ``plan`` is its plan, without drafts, for sequences in ``batch``. Create this object before any
    sequence of the plan is removed from the batch.
    """

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self.plan = plan
        self._batch = batch
        self._sequences = batch.at(plan.rows.slots)

    @property
    def _is_present(self) -> Flags:
        """Return for each of the n rows whether its sequence is still in its slot, bool [n]."""
        slots = self.plan.rows.slots.tolist()
        pairs = zip(self._sequences, slots, strict=True)
        return np.array([sequence.slot == slot for sequence, slot in pairs], np.bool_)

    def remaining_plan(self) -> Plan:
        """Return the plan without the rows of sequences that were removed from the batch."""
        here = self._is_present
        return self.plan if here.all() else replace(self.plan, rows=self.plan.rows.select(here))

    def remaining_results(self, results: Several[RowResult]) -> list[RowResult]:
        return [*compress(results, self._is_present.tolist())]

    def removed_failures(self, results: Several[RowResult]) -> list[tuple[Sequence, int]]:
        """Return each removed sequence whose row failed, with its number of computed tokens.

        ``results`` are the results of all rows. The number of computed tokens is the value that
        ``num_computed`` would have had if the row had succeeded.
        """
        rows = self.plan.rows
        columns = (self._sequences, self._is_present.tolist(), rows.known_ends.tolist(), results)
        return [
            (sequence, end)
            for sequence, is_here, end, result in zip(*columns, strict=True)
            if not is_here and result.error is not None
        ]

    def launch(self) -> None:
        """Count the tokens of the rows as computed, in the sequences and in the slot table.

        The placeholder UNKNOWN is appended to the tokens of each sequence whose row samples. Rows
        of removed sequences are skipped.
        """
        rows = self.remaining_plan().rows
        columns = (rows.slots, rows.known_ends, rows.samples)
        for slot, end, samples in zip(*(column.tolist() for column in columns), strict=True):
            self._batch[slot].mark_launched(end, samples)
        self._batch.slot_table.mark_launched(*columns)

    def commit(self) -> Plan:
        """Undo the changes of ``launch`` in the batch, so that the real results can be added.

        Return the plan without the rows of removed sequences.
        """
        plan = self.remaining_plan()
        columns = (plan.rows.slots, plan.rows.starts, plan.rows.samples)
        for slot, start, samples in zip(*(column.tolist() for column in columns), strict=True):
            self._batch[slot].commit_step(start, samples)
        self._batch.slot_table.commit_steps(*columns)
        return plan
