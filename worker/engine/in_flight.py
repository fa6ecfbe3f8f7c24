"""A step that the device is computing while the next one is planned. Pure.

    planned, launched  --take_off-->  its rows count as computed and its tokens as drawn, UNKNOWN
    in flight          --land-->      all as it was planned from; what was drawn can be committed

Between the two nobody is preempted, but some may go: what their rows drew is thrown away. Their
blocks may belong to others by then; these write to them in a later step of the device, which takes
its steps one after the other.
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
    """``plan`` was made of ``batch`` just now, and has no drafts."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self.plan = plan
        self._batch = batch
        self._sequences = batch.at(plan.rows.slots)

    @property
    def _here(self) -> Flags:
        """bool [n]: whose sequences are."""
        slots = self.plan.rows.slots.tolist()
        here = [each.slot == slot for each, slot in zip(self._sequences, slots, strict=True)]
        return np.array(here, np.bool_)

    def left(self) -> Plan:
        """The plan, of those who are here."""
        here = self._here
        return self.plan if here.all() else replace(self.plan, rows=self.plan.rows.only(here))

    def of_those_left(self, results: Several[RowResult]) -> list[RowResult]:
        return [*compress(results, self._here.tolist())]

    def failed_of_those_gone(self, results: Several[RowResult]) -> list[tuple[Sequence, int]]:
        """Those who are not here any more whose rows failed, and of how many tokens keys and values
        had been computed with that."""
        rows = self.plan.rows
        columns = (self._sequences, self._here.tolist(), rows.known_ends.tolist(), results)
        return [
            (sequence, end)
            for sequence, is_here, end, result in zip(*columns, strict=True)
            if not is_here and result.error is not None
        ]

    def take_off(self) -> None:
        rows = self.left().rows
        columns = (rows.slots, rows.known_ends, rows.samples)
        for slot, end, samples in zip(*(it.tolist() for it in columns), strict=True):
            self._batch[slot].take_off(end, samples)
        self._batch.columns.take_off(*columns)

    def land(self) -> Plan:
        """What is left of the plan."""
        plan = self.left()
        columns = (plan.rows.slots, plan.rows.starts, plan.rows.samples)
        for slot, start, samples in zip(*(it.tolist() for it in columns), strict=True):
            self._batch[slot].land(start, samples)
        self._batch.columns.land(*columns)
        return plan
