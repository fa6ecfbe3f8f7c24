"""The engine's scheduler, with many uniform decode steps computed at once. Pure.

A step is uniform if every sequence of the batch samples one token in it and nothing else happens.
In a run of uniform steps no sequence is admitted or preempted, and a sequence can end only with the
last step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE
from worker.engine.batch import Batch
from worker.engine.limits import Limits
from worker.engine.outcome import NO_UPDATE, Outcome
from worker.engine.plan import NOTHING_SAMPLED, Ints, Plan, RowResult
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.slot_table import SlotTable


class MultiStepScheduler(Scheduler):
    """Scheduler for sequences whose sampled tokens are known in advance.

    A uniform step is one in which every sequence of the batch samples one token and nothing else
    happens. An outcome is the result of a step for one sequence.
    """

    _batch: MultiStepBatch

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, MultiStepBatch(limits))

    @property
    def may_defer(self) -> bool:
        """Return whether the policy may leave out decoding sequences in a step."""
        return self._policy.follows_time

    def commit_sampled(self, plan: Plan, token: int) -> list[Outcome]:
        """Apply the scheduled step ``plan`` as if every row that samples had sampled ``token``.

        ``token`` must not be a stop token. Return the results of the step. Unless the policy may
        defer decodes (``may_defer``), a sequence that received one token and continues without any
        other change is not among them.
        """
        self._batch.commit_copies()
        self._count_step(plan)
        slot_table, rows = self._batch.slot_table, plan.rows
        usual = slot_table.is_plain_decode(rows)
        if self.may_defer:
            usual[:] = False
        for index, sequence in zip(
            usual.nonzero()[0].tolist(), self._batch.at(rows.slots[usual]), strict=True
        ):
            if sequence.pending_update is NO_UPDATE:
                sequence.append_repeated(token, 1)
            else:
                usual[index] = False
        slots = rows.slots[usual]
        slot_table.append_tokens(slots, token, 1)
        self._output_tokens += len(slots)
        sampled, outcomes = RowResult((token,)), self.take_preemption_outcomes()
        for index in (~usual).nonzero()[0].tolist():
            row = rows[index]
            sequence = self._batch[row.slot]
            outcome = self._commit_row(sequence, row, sampled if row.samples else NOTHING_SAMPLED)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def num_uniform_steps(self, most: int) -> int:
        """Return a lower bound, at most ``most``, of the number of uniform steps that follow.

        Steps after these may be uniform too; even the next step may be if the result is 0. The
        bound is valid as long as no sequence is added or removed and no stop token is sampled.
        """
        batch, limits = self._batch, self._limits
        is_plain = not limits.speculation.num_draft_tokens and not limits.num_host_blocks
        is_plain &= not self._policy.follows_time
        if not is_plain or not 0 < len(batch) <= self._budget.tokens:
            return 0
        if self._stale_slots or self._victims or not (steps := batch.num_uniform_steps(most)):
            return 0
        has_update = any(sequence.pending_update is not NO_UPDATE for sequence in batch)
        return 0 if has_update or self._may_admit(steps) else steps

    def _may_admit(self, steps: int) -> bool:
        """Return whether the head of the queue could be admitted within ``steps`` uniform steps.

        This is possible although these steps allocate blocks and free none. If a running sequence
        fills a block that the head shares as its next prefix block, the head needs one block less.
        """
        if self._batch.is_full or (head := self._policy.head(len(self._batch))) is None:
            return False
        hits = self._batch.prefix_hits(head)
        may_hit_more = self._batch.slot_table.may_fill(len(hits), steps)
        return may_hit_more or self._batch.can_admit(head, hits)

    def blocks_allocated(self, steps: int) -> list[int]:
        """Return how many KV blocks the next steps allocate.

        Item i of the list is the number of blocks that the first i + 1 of ``steps`` uniform steps
        allocate together.
        """
        return self._batch.slot_table.allocated(steps)

    def blocks_retained(self, start: float, num_allocated: int) -> int:
        """Return the number of free blocks that are retained for sessions after uniform steps.

        ``start`` is the time in seconds at which the last step begins; retentions that have expired
        by then do not count. All steps together allocate ``num_allocated`` blocks; retained blocks
        are allocated last.
        """
        return self._batch.num_retained_after(start, num_allocated)

    def decode(self, token: int, starts: Several[float]) -> list[Outcome]:
        """Compute uniform steps at once, as if all sequences sampled ``token`` in each.

        ``starts`` are the times at which the steps begin, in seconds. Sequences can end only with
        the last step; return the outcomes of those that do. The state of the scheduler and the
        outcomes are the same as after calls of ``schedule`` and ``commit_sampled`` for each step.
        """
        steps = len(starts)
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
        self._batch.decode(token, starts)
        return [self._ended(each) for each in self._batch.at(self._batch.slot_table.ended())]

    def _ended(self, sequence: Sequence) -> Outcome:
        """Remove a sequence that has reached a limit; return the outcome with its last token."""
        offset, last = sequence.num_output - 1, sequence.tokens[-1:]
        stop = sequence.stop(self._limits)
        stop, error = (stop, None) if stop else self._check_outgrown(sequence)
        computed = sequence.most_computed
        self.remove(sequence, is_finished=error is None)
        return Outcome(sequence.key, offset, tuple(last), stop, error, num_computed=computed)


class MultiStepBatch(Batch):
    slot_table: MultiStepSlotTable

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, MultiStepSlotTable(limits))

    def num_uniform_steps(self, most: int) -> int:
        """Return how many next steps, at most ``most``, can be uniform according to the batch.

        All sequences decode in these steps, and enough blocks are free for them. No prefix chunk is
        stored in or evicted from the prefix cache, and no sequence reaches one of its limits before
        the last step. The result is a lower bound; it is 0 if the batch is empty, or if a sequence
        has to prefill or recompute tokens.
        """
        table = self.slot_table
        if not (steps := min(most, table.num_uniform_steps(), table.num_before_chunk())):
            return 0
        lacking = table.num_lacking(steps)
        free = min(self._pool.num_free, self._pool.num_before_chunk(lacking))
        if lacking > free:
            steps = bisect_right(range(1, steps), free, key=table.num_lacking)
        return steps

    def decode(self, token: int, starts: Several[float]) -> None:
        """Update sequences and blocks as if each sequence had sampled ``token`` in several steps.

        ``starts``, not empty, are the start times of the steps in seconds. All of these steps must
        be uniform. Sequences that reach a limit are not removed.
        """
        slot_table, times = self.slot_table, len(starts)
        changes, slots = slot_table.changes(times), slot_table.decoding()
        for sequence in self.at(slots):
            sequence.append_repeated(token, times)
        for change in changes:
            self.set_time(starts[change.step])
            sequence = self._slots[change.slot]
            if change.fills:
                self.publish(sequence, change.num_known - 1, change.num_known)
            else:
                self._extend(sequence, self._pool.allocate(1))
        self.set_time(starts[-1])
        slot_table.append_tokens(slots, token, times)


class Change(NamedTuple):
    """Change of the block table of the sequence in ``slot``, in a run of uniform steps.

    It happens in step number ``step`` of the run, from 0. The sequence fills its last block if
    ``fills``; otherwise it allocates a block. ``num_known`` is the sequence's number of prompt and
    output tokens at the start of the step. Changes are sorted by ``step``, then by ``fills``, then
    by ``place``: the order of arrival for a filled block, the slot for an allocated one.
    """

    step: int
    fills: bool
    place: int
    slot: int
    num_known: int


class MultiStepSlotTable(SlotTable):
    def append_tokens(self, slots: Ints, token: int, times: int) -> None:
        """Append ``token`` to the sequence in each of ``slots``, ``times`` times."""
        self._num_known[slots] += times
        self._num_computed[slots] = self._num_known[slots] - 1
        self._last_tokens[slots] = token

    def occupied(self) -> Ints:
        """Return the slots that hold a sequence."""
        return self._num_known.nonzero()[0]

    def num_uniform_steps(self) -> int:
        """Return the number of decode steps after which at least one sequence reaches a limit.

        Return 0 if no slot is occupied, or if a sequence has to prefill or recompute tokens.
        """
        slots = self.occupied()
        known, computed = self._num_known[slots], self._num_computed[slots]
        if not len(slots) or (known - computed > 1).any():
            return 0
        if (computed < self._num_computed_before[slots]).any():
            return 0
        return int((self._ends[slots] - known).min())

    def num_before_chunk(self) -> int:
        """Return the number of decode steps before the first one that completes a prefix chunk.

        A prefix chunk is CHUNK_SIZE tokens of a sequence. Return 0 if no slot is occupied.
        """
        known = self._num_known[self.occupied()]
        return int((-known % CHUNK_SIZE).min()) if len(known) else 0

    def ended(self) -> Ints:
        """Return the slots of the sequences that have reached a limit, in order of arrival."""
        return self._by_order((self._num_known >= self._ends) & (self._num_known > 0))

    def num_lacking(self, steps: int) -> int:
        """Return how many blocks all slots together must allocate for ``steps`` decode steps."""
        slots = self.occupied()
        most = self._num_known[slots] + steps - 1
        return int((-(-most // BLOCK_SIZE) - self._num_blocks[slots]).clip(0).sum())

    def may_fill(self, index: int, steps: int) -> bool:
        """Return whether a sequence may fill its block number ``index`` within ``steps`` steps."""
        computed = self._num_computed[self.occupied()]
        first, last = computed // BLOCK_SIZE, (computed + steps) // BLOCK_SIZE
        return bool(((first <= index) & (index <= last)).any())

    def allocated(self, steps: int) -> list[int]:
        """Return how many blocks the next steps allocate, over all slots.

        Item i of the list is the number of blocks that the first i + 1 of ``steps`` decode steps
        allocate together.
        """
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
