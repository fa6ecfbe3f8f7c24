"""The sequences in the batch: their slots and their blocks. Pure.

A block is hashed as soon as a row that fills it is planned, so that rows behind it in the same plan
share it; what was not computed after all is forgotten when the step has failed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several

from everlift.blockhash import BLOCK_SIZE
from worker.engine.blocks import BlockPool
from worker.engine.host_store import HostStore
from worker.engine.limits import Limits, blocks_for
from worker.engine.plan import BlockCopy, Ints, Plan, Row
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.slot_table import SlotTable


class Batch:
    """At most ``limits.max_num_seqs`` sequences over one pool of blocks. Those that were preempted
    are not in it, but what they had computed is kept for them if possible."""

    def __init__(self, limits: Limits, columns: SlotTable | None = None) -> None:
        self._limits = limits
        self._store = HostStore(limits.num_host_blocks)
        self._pool = BlockPool(limits.num_blocks, self._store)
        self._slots: dict[int, Sequence] = {}
        self.columns = SlotTable(limits) if columns is None else columns
        self._free_slots = list(range(limits.max_num_seqs))
        #: since somebody asked
        self._vacated: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._slots.values())

    def __getitem__(self, slot: int) -> Sequence:
        return self._slots[slot]

    def at(self, slots: Ints) -> list[Sequence]:
        """Who is in these."""
        by_slot = self._slots
        return [by_slot[slot] for slot in slots.tolist()]

    @property
    def is_full(self) -> bool:
        """No slot is free."""
        return not self._free_slots

    @property
    def num_blocks_used(self) -> int:
        return self._pool.num_used

    @property
    def num_blocks_free(self) -> int:
        return self._pool.num_free

    @property
    def num_blocks_cached(self) -> int:
        """Free ones that hold a known prefix."""
        return self._pool.num_cached

    # coming and going

    def prefix_hits(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks that hold how its known tokens begin."""
        hits = []
        for index in range(sequence.num_reusable // BLOCK_SIZE):
            block_hash = sequence.block_hash(index)
            if block_hash not in self._pool:
                break
            hits.append(block_hash)
        return hits

    def has_room(self, sequence: Sequence, hits: Iterable[bytes]) -> bool:
        """For all of its known tokens."""
        needed = blocks_for(sequence.num_known) - sum(map(self._pool.is_used, hits))
        watermark = self._limits.watermark_blocks if self._slots else 0
        return needed + watermark <= self._pool.num_free

    def admit(self, sequence: Sequence, hits: Several[bytes]) -> None:
        """Gives it the lowest free slot and blocks for its known tokens, the first ones by
        ``hits``."""
        self.give_up(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        self._slots[sequence.slot] = sequence
        self._vacated.discard(sequence.slot)
        sequence.num_hits = len(hits)
        sequence.num_computed = len(hits) * BLOCK_SIZE
        self.columns.put(sequence)
        self._extend(sequence, self._pool.claim(hits))
        self.take_blocks(sequence, sequence.num_known)

    def remove(self, sequence: Sequence) -> None:
        """Its slot and its blocks are free at once; full ones stay hashed."""
        self._pool.free(sequence.block_table)
        sequence.block_table = ()
        sequence.num_computed = 0
        self.columns.clear(sequence.slot)
        del self._slots[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)
        self._vacated.add(sequence.slot)
        sequence.slot = NO_SLOT

    def preempt(self, sequence: Sequence) -> None:
        """Removes a sequence that will come back: until then, or until it gives up, it wants its
        blocks kept."""
        sequence.num_computed_before = sequence.most_computed
        sequence.num_wanted = max(sequence.num_wanted, sequence.num_computed)
        self._store.want(sequence.hashes_before())
        self.remove(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """One that is not in the batch wants nothing kept any more."""
        self._store.unwant(sequence.hashes_before())

    @property
    def vacated(self) -> tuple[int, ...]:
        """The slots that were left since they were last taken, and that nobody has again."""
        return tuple(self._vacated)

    def take_vacated(self) -> tuple[int, ...]:
        """Answers ``vacated``, and empties it."""
        slots = self.vacated
        self._vacated.clear()
        return slots

    # blocks

    def take_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes the blocks that ``num_tokens`` need beyond its table; enough are free."""
        count = blocks_for(num_tokens) - len(sequence.block_table)
        if count > 0:
            self._extend(sequence, self._pool.allocate(count))

    def take_one(self, slots: Ints) -> None:
        """Takes a block for each sequence in ``slots``; enough are free."""
        blocks = self._pool.allocate(len(slots))
        for sequence, block in zip(self.at(slots), blocks, strict=True):
            sequence.block_table += (block,)
        self.columns.extend_by_one(slots, blocks)

    def _extend(self, sequence: Sequence, blocks: tuple[int, ...]) -> None:
        sequence.block_table += blocks
        self.columns.extend(sequence.slot, blocks)

    def take_back(self) -> None:
        """Frees the blocks that were taken for drafts alone."""
        for sequence in self:
            needed = blocks_for(sequence.num_known)
            self._pool.free(sequence.block_table[needed:])
            sequence.block_table = sequence.block_table[:needed]
            self.columns.cut(sequence.slot, len(sequence.block_table))

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Its tokens from ``start`` to before ``end`` are computed, or planned to be: from here on
        others find the blocks that they fill."""
        for index in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
            self._pool.register(sequence.block_table[index], sequence.block_hash(index))

    def forget(self, row: Row) -> None:
        """What the row was to fill, nobody finds any more."""
        for block in row.block_table[row.start // BLOCK_SIZE : row.known_end // BLOCK_SIZE]:
            self._pool.forget(block)

    def forget_all(self) -> None:
        """Nobody finds anything any more that was computed so far, here or in the host's
        memory."""
        self._store.forget_all()
        for block in range(self._limits.num_blocks):
            self._pool.forget(block)

    def distrust(self, sequence: Sequence) -> None:
        """A row of it failed, so that all it has computed may be wrong. Nobody finds that any more,
        nor what it found here itself, unless others use that too."""
        for index, block in enumerate(sequence.block_table):
            if index >= sequence.num_hits or not self._pool.is_shared(block):
                self._pool.distrust(block)

    def distrust_gone(self, sequence: Sequence, num_computed: int) -> None:
        """``distrust`` of a sequence that was removed before the failure of its row was known: its
        blocks may be others' by now, and its slot as well."""
        for index in range(num_computed // BLOCK_SIZE):
            block_hash = sequence.block_hash(index)
            if index >= sequence.num_hits or not self._pool.is_used(block_hash):
                self._pool.distrust_content(block_hash)

    # one step

    def planned_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Saves and loads of the step that is being planned."""
        return self._store.planned()

    def copied(self) -> None:
        """What is computed from here on finds these copies made."""
        self._store.done()

    def failed(self, plan: Plan) -> None:
        """The step was not executed, or who knows how far."""
        self._store.failed()
        for copy in plan.loads:
            self._pool.forget(copy.block)
        for row in plan.rows:
            self.forget(row)

    def check_integrity(self, preempted: Iterable[Sequence]) -> None:
        """Between steps; ``preempted`` are all that want something. O(blocks). Raises
        AssertionError."""
        self._pool.check_integrity(s.block_table for s in self)
        self.columns.check_integrity(self)
        self._store.check_integrity(h for s in preempted for h in s.hashes_before())
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
