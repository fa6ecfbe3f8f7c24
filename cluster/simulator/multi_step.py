"""The engine's scheduler, with many uniform decode steps computed at once. Pure.

A step is uniform if every sequence of the batch samples one token in it and nothing else happens.
In a run of uniform steps no sequence is admitted or preempted, and a sequence can end only with the
last step.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from everlift.hashes import BLOCK_SIZE
from worker.engine.batch import Batch
from worker.engine.limits import Limits
from worker.engine.outcome import NO_NEWS, Outcome
from worker.engine.plan import NOTHING_DRAWN, Ints, Plan, RowResult
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.slot_table import SlotTable


class MultiStepScheduler(Scheduler):
    """Scheduler for sequences whose sampled tokens are known in advance."""

    _batch: MultiStepBatch

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, MultiStepBatch(limits))

    def commit_drawn(self, plan: Plan, token: int) -> list[Outcome]:
        """Commit ``plan`` as if every row had sampled ``token``, and return the outcomes.

        ``token`` must not be a stop token. A sequence that received one token and continues without
        any other change has no outcome.
        """
        self._batch.copied()
        self._executed(plan)
        slot_table, rows = self._batch.slot_table, plan.rows
        usual = slot_table.draws_one(rows)
        for index, sequence in zip(
            usual.nonzero()[0].tolist(), self._batch.at(rows.slots[usual]), strict=True
        ):
            if sequence.news is NO_NEWS:
                sequence.draw(token, 1)
            else:
                usual[index] = False
        slots = rows.slots[usual]
        slot_table.draw(slots, token, 1)
        self._output_tokens += len(slots)
        drawn, told = RowResult((token,)), self.notices()
        for index in (~usual).nonzero()[0].tolist():
            row = rows[index]
            sequence = self._batch[row.slot]
            outcome = self._commit_row(sequence, row, drawn if row.samples else NOTHING_DRAWN)
            if outcome is not None:
                told.append(outcome)
        return told

    def num_uniform_steps(self, most: int) -> int:
        """Return how many of the next ``most`` steps are uniform (see the module).

        The number is valid as long as no sequence is added or removed and no stop token is sampled.
        """
        batch, limits = self._batch, self._limits
        is_plain = not limits.speculation.num_draft_tokens and not limits.num_host_blocks
        is_plain &= not self._policy.follows_time
        if not is_plain or not 0 < len(batch) <= self._budget.tokens:
            return 0
        if self._doubtful or self._victims or not (steps := batch.num_uniform_steps(most)):
            return 0
        has_news = any(sequence.news is not NO_NEWS for sequence in batch)
        return 0 if has_news or self._may_admit(steps) else steps

    def _may_admit(self, steps: int) -> bool:
        """Return whether the head of the queue could be admitted within ``steps`` uniform steps.

        Although these steps only use up free blocks, the head of the queue may become admissible:
        if a running sequence fills the next block of its prefix, it needs one free block less.
        """
        if self._batch.is_full or (head := self._policy.head(len(self._batch))) is None:
            return False
        hits = self._batch.prefix_hits(head)
        may_hit_more = self._batch.slot_table.may_fill(len(hits), steps)
        return may_hit_more or self._batch.has_room(head, hits)

    def blocks_allocated(self, steps: int) -> list[int]:
        """Return the cumulative KV blocks allocated after each of ``steps`` uniform steps."""
        return self._batch.slot_table.allocated(steps)

    def decode(self, token: int, steps: int) -> list[Outcome]:
        """Compute ``steps`` uniform steps in which every sequence samples ``token``.

        Return the outcomes of the sequences that end with the last step. The result is the same as
        that of ``steps`` calls of ``schedule`` and ``commit_drawn``.
        """
        num_tokens = len(self._batch) * steps
        # A sequence reads all its known tokens, which are one more with each step.
        num_read = steps * self._batch.slot_table.num_known + num_tokens * (steps - 1) // 2
        self._kv_tokens += num_read
        self._num_pairs += num_read
        self._step += steps
        self._newcomers = frozenset()
        self._budget.recover(steps)
        self._computed_tokens += num_tokens
        self._output_tokens += num_tokens
        self._counters.slot_steps += num_tokens
        self._batch.decode(token, steps)
        return [self._ended(each) for each in self._batch.at(self._batch.slot_table.ended())]

    def _ended(self, sequence: Sequence) -> Outcome:
        """Remove a sequence that has reached a limit, and return its outcome."""
        offset, told = sequence.num_output - 1, sequence.tokens[-1:]
        stop = sequence.stop(self._limits)
        stop, error = (stop, None) if stop else self._outgrown(sequence)
        computed = sequence.most_computed
        self.remove(sequence)
        return Outcome(sequence.key, offset, tuple(told), stop, error, num_computed=computed)


class MultiStepBatch(Batch):
    slot_table: MultiStepSlotTable

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, MultiStepSlotTable(limits))

    def num_uniform_steps(self, most: int) -> int:
        """Return how many of the next ``most`` steps the state of the batch allows to be uniform.

        There are free blocks for all sequences in these steps, and no sequence reaches one of its
        limits before the last of them.
        """
        steps = min(most, self.slot_table.num_uniform_steps())
        free = self._pool.num_free
        if steps and self.slot_table.num_lacking(steps) > free:
            steps = bisect_right(range(1, steps), free, key=self.slot_table.num_lacking)
        return steps

    def decode(self, token: int, times: int) -> None:
        """Compute ``times`` uniform steps in which every sequence samples ``token``."""
        slot_table = self.slot_table
        changes, slots = slot_table.changes(times), slot_table.decoding()
        for sequence in self.at(slots):
            sequence.draw(token, times)
        for change in changes:
            sequence = self._slots[change.slot]
            if change.fills:
                self.publish(sequence, change.num_known - 1, change.num_known)
            else:
                self._extend(sequence, self._pool.allocate(1))
        slot_table.draw(slots, token, times)


class Change(NamedTuple):
    """Change of one block table in a run of uniform steps, of which ``step`` is the number from 0.

    The sequence in ``slot`` fills its last block if ``fills``; otherwise it allocates a block.
    Changes are sorted by step, then by ``fills``, then by ``place``. ``num_known`` is the
    sequence's number of known tokens at the start of the step.
    """

    step: int
    fills: bool
    place: int
    slot: int
    num_known: int


class MultiStepSlotTable(SlotTable):
    def draw(self, slots: Ints, token: int, times: int) -> None:
        """Append ``token`` to each of ``slots``, repeatedly: ``times`` times."""
        self._num_known[slots] += times
        self._num_computed[slots] = self._num_known[slots] - 1
        self._last_tokens[slots] = token

    def occupied(self) -> Ints:
        """Return the slots that hold a sequence."""
        return self._num_known.nonzero()[0]

    def num_uniform_steps(self) -> int:
        """Return the number of decode steps after which a limit ends the first sequence.

        Return 0 if no slot is occupied, or if a sequence has to prefill or recompute tokens.
        """
        slots = self.occupied()
        known, computed = self._num_known[slots], self._num_computed[slots]
        if not len(slots) or (known - computed > 1).any():
            return 0
        if (computed < self._num_computed_before[slots]).any():
            return 0
        return int((self._ends[slots] - known).min())

    def ended(self) -> Ints:
        """Return the slots of the sequences that have reached a limit, in order of arrival."""
        return self._by_order((self._num_known >= self._ends) & (self._num_known > 0))

    def num_lacking(self, steps: int) -> int:
        """Return the number of blocks to allocate in ``steps`` steps, over all slots."""
        slots = self.occupied()
        most = self._num_known[slots] + steps - 1
        return int((-(-most // BLOCK_SIZE) - self._num_blocks[slots]).clip(0).sum())

    def may_fill(self, index: int, steps: int) -> bool:
        """Return whether a sequence may fill block ``index`` of its table in ``steps`` steps."""
        computed = self._num_computed[self.occupied()]
        first, last = computed // BLOCK_SIZE, (computed + steps) // BLOCK_SIZE
        return bool(((first <= index) & (index <= last)).any())

    def allocated(self, steps: int) -> list[int]:
        """Return the cumulative number of blocks allocated after each of ``steps`` decode steps."""
        slots = self.occupied()
        lacks = self._num_blocks[slots] * BLOCK_SIZE - self._num_known[slots] + 1
        first = np.bincount(lacks[lacks < steps], minlength=steps)
        in_step = sum(np.pad(first, (later, 0))[:steps] for later in range(0, steps, BLOCK_SIZE))
        allocated: list[int] = np.cumsum(in_step).tolist()
        return allocated

    def changes(self, steps: int) -> list[Change]:
        """Return the changes of all block tables in ``steps`` decode steps, sorted."""
        changes: list[Change] = []
        slots = self.occupied()
        known, orders = self._num_known[slots], self._orders[slots]
        fills = -known % BLOCK_SIZE
        lacks = self._num_blocks[slots] * BLOCK_SIZE - known + 1
        soon = (fills < steps) | (lacks < steps)
        slot_table = (slots, orders, known, fills, lacks)
        for slot, order, now, fill, lack in zip(
            *(it[soon].tolist() for it in slot_table), strict=True
        ):
            for step in range(lack, steps, BLOCK_SIZE):
                changes.append(Change(step, False, slot, slot, now + step))
            for step in range(fill, steps, BLOCK_SIZE):
                changes.append(Change(step, True, order, slot, now + step))
        changes.sort()
        return changes
