"""The sequences in the batch, with their slots and KV blocks. Pure.

A block is published, which means that it enters the prefix cache under its hash, as soon as a row
(a sequence's part of a step) that fills it is planned. Later rows of the same plan can thus share
it. If the step fails, the block is unpublished: its hash is removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several

from everlift.hashes import BLOCK_SIZE, BLOCKS_PER_CHUNK
from worker.engine.blocks import BlockPool, ChunkChanges
from worker.engine.chunk import Chunk
from worker.engine.host_store import HostStore
from worker.engine.limits import Limits, blocks_for
from worker.engine.plan import BlockCopy, Ints, Plan, Row
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.slot_table import SlotTable


class Batch:
    """Batch of at most ``limits.max_num_seqs`` sequences, and the pool of their KV blocks.

    A sequence is in the batch from ``admit`` to ``remove`` or ``preempt``. The known tokens of a
    sequence are its prompt and its output so far.
    """

    def __init__(self, limits: Limits, slot_table: SlotTable | None = None) -> None:
        self._limits = limits
        self._store = HostStore(limits.num_host_blocks)
        retention = limits.session_retention_s, limits.max_retained_blocks
        self._pool = BlockPool(limits.num_blocks, self._store, *retention)
        self._slots: dict[int, Sequence] = {}
        self.slot_table = SlotTable(limits) if slot_table is None else slot_table
        self._free_slots = list(range(limits.max_num_seqs))
        #: slots that were vacated since ``take_vacated``
        self._vacated: set[int] = set()
        #: chunks whose last block was published since ``take_chunk_changes``, by its hash
        self._stored_chunks: dict[bytes, Chunk] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._slots.values())

    def __getitem__(self, slot: int) -> Sequence:
        return self._slots[slot]

    def at(self, slots: Ints) -> list[Sequence]:
        """Return the sequences in these slots, in the order of ``slots``; none may be empty."""
        by_slot = self._slots
        return [by_slot[slot] for slot in slots.tolist()]

    @property
    def is_full(self) -> bool:
        """Return whether no slot is free."""
        return not self._free_slots

    @property
    def num_blocks_used(self) -> int:
        return self._pool.num_used

    @property
    def num_blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def num_blocks_cached(self) -> int:
        """Number of free blocks that are in the prefix cache."""
        return self._pool.num_cached

    @property
    def num_blocks_retained(self) -> int:
        """Number of free blocks that are retained for a session."""
        return self._pool.num_retained

    def num_retained_after(self, now: float, num_allocated: int) -> int:
        """Return the number of free blocks that sessions will retain at a later time.

        ``now`` is that time, in seconds. ``num_allocated`` is the number of further blocks that are
        allocated before it. Retained blocks are allocated last.
        """
        return self._pool.num_retained_after(now, num_allocated)

    def take_chunk_changes(self) -> ChunkChanges:
        """Return the changes of the prefix cache since the last call. Call between steps."""
        stored, self._stored_chunks = self._stored_chunks, {}
        device, host = self._pool.take_chunk_changes(), self._store.take_chunk_changes()
        return ChunkChanges(device, host, stored)

    # admission and removal

    def prefix_hits(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the leading blocks of ``sequence`` that are in the prefix cache.

        The blocks may be in the pool or in host memory. Blocks with tokens that must be computed
        anyway (see ``Sequence.num_reusable``) are left out.
        """
        hits = []
        for index in range(sequence.num_reusable // BLOCK_SIZE):
            block_hash = sequence.block_hash(index)
            if block_hash not in self._pool:
                break
            hits.append(block_hash)
        return hits

    def can_admit(self, sequence: Sequence, hits: Iterable[bytes]) -> bool:
        """Return whether enough blocks are free to admit ``sequence``.

        ``hits`` are the hashes from ``prefix_hits``. Each block of the known tokens needs a free
        block, except for hits that other sequences are using. If the batch is not empty,
        ``limits.watermark_blocks`` further blocks must be free. Free slots are not checked.
        """
        needed = blocks_for(sequence.num_known) - sum(map(self._pool.is_used, hits))
        watermark = self._limits.watermark_blocks if self._slots else 0
        return needed + watermark <= self._pool.num_free

    def admit(self, sequence: Sequence, hits: Several[bytes]) -> None:
        """Give a sequence a slot, and blocks for its known tokens.

        ``hits`` are the hashes that ``prefix_hits`` returned; the cached blocks with these hashes
        become the sequence's first blocks. ``can_admit`` must be true.
        """
        self.stop_swapping(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        self._slots[sequence.slot] = sequence
        self._vacated.discard(sequence.slot)
        sequence.num_hits = len(hits)
        sequence.num_computed = len(hits) * BLOCK_SIZE
        self.slot_table.write(sequence)
        self._extend(sequence, self._pool.claim(hits))
        self.allocate_blocks(sequence, sequence.num_known)

    def remove(self, sequence: Sequence, *, is_finished: bool = False) -> None:
        """Remove a sequence from the batch: free its slot and blocks; full blocks stay cached.

        If it is finished, its session retains the full blocks.
        """
        self._pool.free(sequence.block_table, sequence.session if is_finished else 0)
        sequence.block_table = ()
        sequence.num_computed = 0
        self.slot_table.clear(sequence.slot)
        del self._slots[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)
        self._vacated.add(sequence.slot)
        sequence.slot = NO_SLOT

    def preempt(self, sequence: Sequence) -> None:
        """Remove a sequence that will be admitted again: free its slot and blocks.

        Its full blocks stay in the prefix cache. A full block that is evicted before the sequence
        is admitted again is copied to host memory, if there is room.
        """
        sequence.num_computed_before = sequence.most_computed
        sequence.num_to_restore = max(sequence.num_to_restore, sequence.num_computed)
        self._store.mark_needed(sequence.hashes_to_restore())
        self.remove(sequence)

    def stop_swapping(self, sequence: Sequence) -> None:
        """Stop copying the evicted blocks of a preempted sequence to host memory.

        Does nothing for a sequence that was never preempted.
        """
        self._store.unmark_needed(sequence.hashes_to_restore())

    @property
    def vacated(self) -> tuple[int, ...]:
        """Slots that became empty since the last ``take_vacated`` and are still empty."""
        return tuple(self._vacated)

    def take_vacated(self) -> tuple[int, ...]:
        """Return the slots in ``vacated``; from now on they are no longer in it."""
        slots = self.vacated
        self._vacated.clear()
        return slots

    # blocks

    def set_time(self, now: float) -> None:
        """Set the time to that of the step that is being planned, for the retention of blocks."""
        self._pool.set_time(now)

    def allocate_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the block table of a sequence until it covers ``num_tokens`` tokens.

        Does nothing if it covers them already. Enough blocks must be free.
        """
        count = blocks_for(num_tokens) - len(sequence.block_table)
        if count > 0:
            self._extend(sequence, self._pool.allocate(count))

    def allocate_one_each(self, slots: Ints) -> None:
        """Allocate one block for each sequence in ``slots``; enough blocks must be free."""
        blocks = self._pool.allocate(len(slots))
        for sequence, block in zip(self.at(slots), blocks, strict=True):
            sequence.block_table += (block,)
        self.slot_table.extend_by_one(slots, blocks)

    def _extend(self, sequence: Sequence, blocks: tuple[int, ...]) -> None:
        sequence.block_table += blocks
        self.slot_table.extend(sequence.slot, blocks)

    def release_drafts(self) -> None:
        """Free, in all sequences, the blocks that hold no known token but only draft tokens."""
        for sequence in self:
            needed = blocks_for(sequence.num_known)
            self._pool.free(sequence.block_table[needed:])
            sequence.block_table = sequence.block_table[:needed]
            self.slot_table.truncate(sequence.slot, len(sequence.block_table))

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Add to the prefix cache the blocks that a range of tokens of ``sequence`` fills.

        The range is positions ``start`` to ``end`` - 1. A block is added if its last position is in
        the range.
        """
        for index in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
            block_hash = sequence.block_hash(index)
            self._pool.publish(sequence.block_table[index], block_hash, index)
            if (index + 1) % BLOCKS_PER_CHUNK == 0:
                self._stored_chunks[block_hash] = sequence.chunk(index // BLOCKS_PER_CHUNK)

    def unpublish_row(self, row: Row) -> None:
        """Remove from the prefix cache the blocks that ``row`` was to fill."""
        for block in row.block_table[row.start // BLOCK_SIZE : row.known_end // BLOCK_SIZE]:
            self._pool.unpublish(block)

    def invalidate_all(self) -> None:
        """Empty the prefix cache: remove all blocks' hashes, and drop the blocks in host memory."""
        self._store.invalidate_all()
        for block in range(self._limits.num_blocks):
            self._pool.unpublish(block)

    def invalidate_row(self, sequence: Sequence) -> None:
        """Drop from the prefix cache the blocks of a sequence whose row failed.

        The content of these blocks may be wrong. Blocks that the sequence took from the prefix
        cache stay there if another sequence also uses them.
        """
        for index, block in enumerate(sequence.block_table):
            if index >= sequence.num_hits or not self._pool.is_shared(block):
                self._pool.invalidate(block)

    def invalidate_removed(self, sequence: Sequence, num_computed: int) -> None:
        """Drop from the prefix cache the blocks of a removed sequence whose row failed afterwards.

        The slot and blocks of the sequence may belong to other sequences by now. The blocks are
        therefore found by the block hashes of its first ``num_computed`` tokens. A block that the
        sequence took from the prefix cache stays there if another sequence uses it.
        """
        for index in range(num_computed // BLOCK_SIZE):
            block_hash = sequence.block_hash(index)
            if index >= sequence.num_hits or not self._pool.is_used(block_hash):
                self._pool.invalidate_content(block_hash)

    # one step

    def planned_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Return the block copies of the step that is being planned.

        The first tuple has the copies to host memory, the second the copies from host memory.
        """
        return self._store.planned_copies()

    def commit_copies(self) -> None:
        """Record that the planned copies were made, or will be made before any later step runs."""
        self._store.commit_copies()

    def roll_back(self, plan: Plan) -> None:
        """Undo the caching of the blocks that the failed step of ``plan`` was to write.

        The hashes of blocks that it was to fill, or to load from host memory, are removed. Its
        copies to host memory are discarded.
        """
        self._store.discard_copies()
        for copy in plan.loads:
            self._pool.unpublish(copy.block)
        for row in plan.rows:
            self.unpublish_row(row)

    def check_integrity(self, preempted: Iterable[Sequence]) -> None:
        """Check invariants between steps; raise AssertionError if one is violated. O(blocks).

        ``preempted`` must include all preempted sequences that are waiting.
        """
        self._pool.check_integrity(s.block_table for s in self)
        self.slot_table.check_integrity(self)
        self._store.check_integrity(h for s in preempted for h in s.hashes_to_restore())
        assert sorted([*self._free_slots, *self._slots]) == [*range(self._limits.max_num_seqs)]
        for slot, sequence in self._slots.items():
            assert sequence.slot == slot, f"slot {slot}"
            self._check_blocks(sequence)

    def _check_blocks(self, sequence: Sequence) -> None:
        slot, table = sequence.slot, sequence.block_table
        assert 0 < sequence.remaining <= sequence.num_known, f"computed, slot {slot}"
        most = sequence.num_known + self._limits.speculation.num_draft_tokens
        assert blocks_for(sequence.num_computed) <= len(table) <= blocks_for(most), f"slot {slot}"
        assert sequence.num_blocks_lacking <= 1, f"lacks several blocks, slot {slot}"
        for index, block in enumerate(table):
            if (block_hash := self._pool.hash_of(block)) is not None:
                assert index < sequence.num_computed // BLOCK_SIZE, f"hashed too early, slot {slot}"
                assert block_hash == sequence.block_hash(index), f"another's block, slot {slot}"
