"""What a step is planned from, of every batch slot, as columns: a step that decodes is planned by a
few operations on them, and not by one for each sequence. Pure.

The sequences have the same in their fields, for everything else; ``put`` and ``extend`` follow a
change there, ``draw_one`` is what most rows of most steps come to.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

import numpy as np

from everlift.blockhash import BLOCK_SIZE
from worker.engine.limits import Limits, blocks_for
from worker.engine.plan import UNKNOWN, Flags, Ints, Row, Rows
from worker.engine.sequence import Sequence


class SlotTable:
    """Of ``limits.max_num_seqs`` slots. In an empty one nothing is known and nothing remains."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        num_slots = limits.max_num_seqs
        width = min(blocks_for(limits.max_model_len), limits.num_blocks)
        self._numbers = np.zeros((7, num_slots), np.int64)
        (
            self._orders,
            self._num_known,
            self._num_computed,
            self._num_computed_before,
            self._last_tokens,
            #: with fewer known tokens only a stop token ends it
            self._ends,
            self._num_blocks,
        ) = self._numbers
        self._tables = np.zeros((num_slots, width), np.int32)

    # what changes

    def put(self, sequence: Sequence) -> None:
        """What stands in the fields of a sequence with a slot, but for its block table."""
        self._numbers[:-1, sequence.slot] = (
            sequence.order,
            sequence.num_known,
            sequence.num_computed,
            sequence.num_computed_before,
            sequence.tokens[-1],
            sequence.earliest_end(self._limits),
        )

    def extend(self, slot: int, blocks: Several[int]) -> None:
        """Adds ``blocks`` to its block table."""
        begin = self._num_blocks[slot]
        end = begin + len(blocks)
        self._tables[slot, begin:end] = blocks
        self._num_blocks[slot] = end

    def extend_by_one(self, slots: Ints, blocks: Several[int]) -> None:
        """Adds one of ``blocks`` to the block table of each of ``slots``."""
        self._tables[slots, self._num_blocks[slots]] = blocks
        self._num_blocks[slots] += 1

    def cut(self, slot: int, num_blocks: int) -> None:
        """Leaves the first ``num_blocks`` in its block table."""
        self._num_blocks[slot] = num_blocks

    def clear(self, slot: int) -> None:
        self._numbers[:, slot] = 0

    def draw_one(self, slots: Ints, tokens: Several[int]) -> None:
        """Behind all that is computed in each of ``slots`` by now, another token is known."""
        self._num_computed[slots] = self._num_known[slots]
        self._num_known[slots] += 1
        self._last_tokens[slots] = tokens

    def take_off(self, slots: Ints, num_computed: Ints, draws: Flags) -> None:
        """``num_computed`` [n] of ``slots`` [n] count as computed, and where one ``draws`` another
        token as known."""
        self._num_computed[slots] = num_computed
        self._num_known[slots] += draws
        self._last_tokens[slots[draws]] = UNKNOWN

    def land(self, slots: Ints, num_computed: Ints, drew: Flags) -> None:
        """Takes that back; no more than ``num_computed`` are. The last tokens of those that drew
        mean nothing until they are drawn."""
        self._num_computed[slots] = num_computed
        self._num_known[slots] -= drew

    # what a step makes of it

    @property
    def known_by_slot(self) -> Ints:
        """Known tokens; 0 in an empty slot. Not a copy."""
        return self._num_known

    def decoding(self) -> Ints:
        """Slots where one known token is not computed, by arrival, but for those that end by it:
        of these there are some only while a step is in flight."""
        return self._by_order((self._remaining == 1) & self._goes_on)

    def prefilling(self) -> Ints:
        """Those where more are, by arrival."""
        return self._by_order(self._remaining > 1)

    def lacking(self) -> Ints:
        """Slots whose known tokens need more blocks than their tables have."""
        lacks: Flags = self._num_known > self._num_blocks * BLOCK_SIZE
        return (lacks & self._goes_on).nonzero()[0]

    def filling(self, decoding: Ints) -> Ints:
        """Those of the slots ``decoding`` whose next token is the last of its block."""
        is_last: Flags = (self._num_computed[decoding] + 1) % BLOCK_SIZE == 0
        return decoding[is_last]

    def rows(self, decoding: Ints, others: Iterable[Row]) -> Rows:
        """One for each of the slots ``decoding``, then ``others``."""
        starts, tokens = self._num_computed[decoding], self._last_tokens[decoding]
        rows = Rows.decoding(decoding, starts, tokens, self._tables)
        others = tuple(others)
        return rows.then(Rows.of(others, self._tables)) if others else rows

    def draws_one(self, rows: Rows) -> Flags:
        """Return bool [n]: whether a row draws one token that no limit makes the last, and
        recomputes nothing."""
        is_new: Flags = rows.starts >= self._num_computed_before[rows.slots]
        goes_on: Flags = rows.starts + 2 < self._ends[rows.slots]
        is_single: Flags = rows.counts == 1
        return is_single & rows.samples & ~rows.scores_prompt & is_new & goes_on

    # sums

    @property
    def num_known(self) -> int:
        """Tokens, of all slots."""
        return int(self._num_known.sum())

    @property
    def num_prefilling(self) -> int:
        """Tokens that remain where more than one does."""
        remaining = self._remaining
        return int(remaining[remaining > 1].sum())

    @property
    def num_unfilled(self) -> int:
        """Places for tokens in the tables' blocks in which none was computed."""
        return int(self._num_blocks.sum()) * BLOCK_SIZE - int(self._num_computed.sum())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Compares them with all ``sequences`` that have a slot. Raises AssertionError."""
        right = SlotTable(self._limits)
        for sequence in sequences:
            right.put(sequence)
            right.extend(sequence.slot, sequence.block_table)
        differs = (self._numbers != right._numbers).any(axis=0)
        assert not differs.any(), f"slots {np.flatnonzero(differs)}"
        within = np.arange(self._tables.shape[1]) < self._num_blocks[:, np.newaxis]
        assert (self._tables == right._tables)[within].all(), "block tables"

    @property
    def _remaining(self) -> Ints:
        return self._num_known - self._num_computed

    @property
    def _goes_on(self) -> Flags:
        """bool [slots]: whom no limit ends."""
        goes_on: Flags = self._num_known < self._ends
        return goes_on

    def _by_order(self, chosen: Flags) -> Ints:
        (slots,) = chosen.nonzero()
        return slots[self._orders[slots].argsort()] if len(slots) > 1 else slots
