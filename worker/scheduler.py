"""Who computes what in the next step. Pure.

One rule: each step computes some of what is known and not computed, under a token budget. Prefill
in chunks, prefix hits, preemption, resumption and continuation are all this rule.

    waiting  --admit-->    running    it has a slot, and blocks for all its known tokens
    running  --preempt-->  waiting    its blocks are freed (they stay hashed), its order is kept
    running  --commit-->   gone       stopped, or it outgrew the whole pool
    either   --remove-->   gone

A step costs O(running), whatever waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from everlift.blockhash import BLOCK_SIZE
from everlift.errors import EngineFailed, EverliftError
from worker.blocks import BlockPool
from worker.limits import Limits, blocks_for
from worker.load import Load, Occupant
from worker.outcome import Outcome, Stop
from worker.plan import Plan, Row, RowResult
from worker.sequence import NO_SLOT, Sequence
from worker.waiting import WaitingLine


class Scheduler:
    """``schedule`` and ``commit`` alternate; ``add`` and ``remove`` come between a commit and the
    next schedule. Deterministic: the same calls make the same plans."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._waiting = WaitingLine()
        self._epochs: dict[int, list[Sequence]] = {}
        self._slots: dict[int, Sequence] = {}
        self._free_slots = list(range(limits.max_num_seqs))
        self._arrivals = 0
        self._step = 0
        self._output_tokens = 0
        self._preemptions = 0

    # who is there

    def __len__(self) -> int:
        return len(self._waiting) + len(self._slots)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._epochs.values())

    def of_epoch(self, epoch: int) -> tuple[Sequence, ...]:
        """The choices of one request that are here."""
        return tuple(self._epochs.get(epoch, ()))

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence, whose key is new here, at the end of the line."""
        sequence.order = self._arrivals
        self._arrivals += 1
        self._epochs.setdefault(sequence.key.epoch, []).append(sequence)
        self._waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is; its blocks are free at once."""
        siblings = self._epochs[sequence.key.epoch]
        siblings.remove(sequence)
        if not siblings:
            del self._epochs[sequence.key.epoch]
        if sequence.slot == NO_SLOT:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)

    # one step

    def schedule(self) -> Plan:
        """The next step's plan; without rows when nothing is there to run."""
        self._step += 1
        self._make_room()
        self._grow()
        rows = self._running_rows()
        admitted = self._admitted_rows(budget=self._budget_after(rows))
        admissions = tuple(self._slots[row.slot].admission() for row in admitted)
        return Plan(self._step, (*rows, *admitted), admissions)

    def commit(self, plan: Plan, results: Iterable[RowResult]) -> list[Outcome]:
        """Takes over what ``plan`` computed."""
        outcomes = []
        for row, result in zip(plan.rows, results, strict=True):
            sequence = self._slots[row.slot]
            if result.error is not None:
                self.remove(sequence)
                outcomes.append(_failed(sequence, result.error))
                continue
            self._count_computed(sequence, len(row.tokens))
            for token in result.tokens:
                outcomes.append(self._append(sequence, token))
        return outcomes

    def fail(self, plan: Plan, error: EverliftError) -> list[Outcome]:
        """Ends every sequence of a plan that could not be executed."""
        sequences = [self._slots[row.slot] for row in plan.rows]
        for sequence in sequences:
            self.remove(sequence)
        return [_failed(sequence, error) for sequence in sequences]

    # room

    def _make_room(self) -> None:
        """Preempts until the pool has the blocks that the next step needs. Victim is who has
        computed least: the cheapest to repeat, and who has computed most always goes on.

        A single victim leaves less room than it needs to come back in the same step.
        """
        lacking = sum(sequence.num_blocks_lacking for sequence in self._slots.values())
        if lacking <= self._pool.num_free:
            return
        for victim in sorted(self._slots.values(), key=lambda s: (s.num_computed, -s.order)):
            if lacking <= self._pool.num_free:
                break
            lacking -= victim.num_blocks_lacking
            self._preempt(victim)

    def _preempt(self, victim: Sequence) -> None:
        self._vacate(victim)
        self._waiting.push(victim)
        self._preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = ()
        sequence.num_computed = 0
        del self._slots[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT

    def _grow(self) -> None:
        for sequence in self._slots.values():
            if count := sequence.num_blocks_lacking:
                sequence.block_table += self._pool.allocate(count)

    # rows

    def _running_rows(self) -> list[Row]:
        """Decodes first, then prefills by arrival."""
        budget = self._limits.max_num_batched_tokens
        rows = []
        for sequence in sorted(self._slots.values(), key=lambda s: (s.remaining > 1, s.order)):
            if count := min(sequence.remaining, budget):
                rows.append(sequence.row(count))
                budget -= count
        return rows

    def _budget_after(self, rows: Iterable[Row]) -> int:
        return self._limits.max_num_batched_tokens - sum(len(row.tokens) for row in rows)

    def _admitted_rows(self, budget: int) -> list[Row]:
        rows = []
        while budget and self._free_slots and (head := self._waiting.head()) is not None:
            hits = self._prefix_hits(head)
            if not self._has_room(head, hits):
                break
            self._admit(head, hits)
            count = min(head.remaining, budget)
            rows.append(head.row(count))
            budget -= count
        return rows

    def _prefix_hits(self, sequence: Sequence) -> list[int]:
        """Blocks that hold how its known tokens begin. At least one token is left to compute, since
        the next one is drawn from its logits."""
        hits = []
        for index in range((sequence.num_known - 1) // BLOCK_SIZE):
            block = self._pool.lookup(sequence.block_hash(index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _has_room(self, sequence: Sequence, hits: list[int]) -> bool:
        held_by_others = sum(not self._pool.is_free(block) for block in hits)
        needed = blocks_for(sequence.num_known) - held_by_others
        watermark = self._limits.watermark_blocks if self._slots else 0
        return needed + watermark <= self._pool.num_free

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        self._waiting.remove(sequence)
        for block in hits:
            self._pool.share(block)
        sequence.block_table = tuple(hits)
        sequence.block_table += self._pool.allocate(sequence.num_blocks_lacking)
        sequence.num_computed = len(hits) * BLOCK_SIZE
        sequence.slot = heapq.heappop(self._free_slots)
        self._slots[sequence.slot] = sequence

    # results

    def _count_computed(self, sequence: Sequence, count: int) -> None:
        first_new = sequence.num_computed // BLOCK_SIZE
        sequence.num_computed += count
        for index in range(first_new, sequence.num_computed // BLOCK_SIZE):
            self._pool.register(sequence.block_table[index], sequence.block_hash(index))

    def _append(self, sequence: Sequence, token: int) -> Outcome:
        offset = sequence.num_output
        sequence.tokens.append(token)
        self._output_tokens += 1
        stop, error = sequence.stop(self._limits), None
        if stop is None and blocks_for(sequence.num_known) > self._limits.num_blocks:
            stop = Stop.FAILED
            error = EngineFailed(f"outgrew the worker's KV cache of {self._pool.num_blocks} blocks")
        if stop is not None:
            self.remove(sequence)
        return Outcome(sequence.key, offset, (token,), stop, error)

    # telling

    def load(self) -> Load:
        running = self._slots.values()
        prefill = sum(s.remaining for s in running if s.remaining > 1)
        return Load(
            num_running=len(running),
            num_waiting=len(self._waiting),
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            pending_prefill_tokens=prefill + self._waiting.num_tokens,
            committed_tokens=sum(s.num_known for s in running) + self._waiting.num_tokens,
            step=self._step,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions,
        )

    def occupants(self) -> tuple[Occupant, ...]:
        """Who has which batch slot, by slot."""
        return tuple(Occupant(slot, s.request_id) for slot, s in sorted(self._slots.items()))

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not agree. O(blocks and sequences)."""
        self._pool.check_integrity(s.block_table for s in self._slots.values())
        waiting = list(self._waiting)
        assert {*waiting, *self._slots.values()} == {*self}, "a sequence is nowhere"
        assert sum(s.num_known for s in waiting) == self._waiting.num_tokens, "waiting tokens"
        assert sorted([*self._free_slots, *self._slots]) == [*range(self._limits.max_num_seqs)]
        for slot, sequence in self._slots.items():
            assert sequence.slot == slot, f"slot {slot}"
            assert 0 < sequence.remaining <= sequence.num_known, f"computed, slot {slot}"
        for sequence in waiting:
            assert not sequence.block_table and sequence.slot == NO_SLOT, "waits with blocks"
            assert not sequence.num_computed, "waits with something computed"


def _failed(sequence: Sequence, error: EverliftError) -> Outcome:
    return Outcome(sequence.key, sequence.num_output, (), Stop.FAILED, error)
