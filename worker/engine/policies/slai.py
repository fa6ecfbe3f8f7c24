"""Decodes by deadline, prefills by length: SLAI (arXiv 2508.01002). Pure.

A step's budget goes, in this order, to

    decodes whose deadline is near  ->  prefills, the shortest first  ->  the other decodes

The deadline of a token is ``tbt_target`` seconds after the previous token of its sequence. A
deadline is near if the step after the current one is not expected to end before that deadline. A
decode whose deadline is not near is deferred only as long as prefills use the whole budget.
"""

from __future__ import annotations

import numpy as np

from worker.config import Scheduling
from worker.engine.plan import Ints
from worker.engine.policies.continuous import Continuous
from worker.engine.policies.serving_time import LongestStep
from worker.engine.slot_table import SlotTable


class Slai(Continuous):
    """Policy that defers decodes in favour of prefills until their deadlines are near.

    A step that begins after a decode's deadline does not defer that decode, provided that the
    budget suffices for all decodes with near deadlines. The token of a deferred decode may still be
    late, by less than the duration of two steps. The two steps are the last one that defers the
    decode, and the next one, which computes the token. The token is on time if neither of the two
    takes longer than the longest of the 16 steps before.

    Prefills are sorted as in ``Continuous``.
    """

    follows_time = True

    def __init__(self, config: Scheduling, num_slots: int) -> None:
        super().__init__(config)
        self._tbt_target = config.tbt_target
        self._longest_step = LongestStep()
        self._now = 0.0
        #: by slot: number of known tokens when the last step began, and arrival time of the newest
        #: one
        self._num_known = np.zeros(num_slots, np.int64)
        self._last_token_at = np.zeros(num_slots)

    def begin_step(self, slot_table: SlotTable, now: float) -> None:
        num_known = slot_table.known_by_slot
        self._longest_step.begin_step(now, is_busy=bool(num_known.any()))
        self._last_token_at[num_known != self._num_known] = now
        self._num_known[:] = num_known
        self._now = now

    def decodes(self, slots: Ints) -> tuple[Ints, Ints]:
        slots = slots[self._last_token_at[slots].argsort(kind="stable")]
        deadlines = self._last_token_at[slots] + self._tbt_target
        num_near = deadlines.searchsorted(self._now + 2 * self._longest_step.seconds, side="right")
        return slots[:num_near], slots[num_near:]
