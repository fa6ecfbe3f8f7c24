"""Slot table: the state of all batch slots as arrays. Pure.

A batch slot belongs to one sequence while that sequence is in the batch. The table lets a decode
step be planned with a few array operations instead of a loop over sequences. ``Sequence`` objects
hold the same values in their fields. ``write`` and ``extend`` copy changes of a sequence to the
table, and ``append_sampled`` does so for the common case, rows that decode one token.

Known tokens are those of the prompt and the output so far. An array of shape [slots] has one
element per batch slot; an array of shape [n] has one per element of the argument ``slots``.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

import numpy as np

from everlift.hashes import BLOCK_SIZE
from worker.engine.limits import Limits, blocks_for
from worker.engine.plan import UNKNOWN, Flags, Ints, Row, Rows
from worker.engine.sequence import Sequence


class SlotTable:
    """State of ``limits.max_num_seqs`` slots; an empty slot has zero known tokens."""

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
            #: number of known tokens below which only a stop token ends the sequence
            self._ends,
            self._num_blocks,
        ) = self._numbers
        self._tables = np.zeros((num_slots, width), np.int32)

    # changes

    def write(self, sequence: Sequence) -> None:
        """Copy the fields of ``sequence``, except its block table, to its slot of the table."""
        self._numbers[:-1, sequence.slot] = (
            sequence.order,
            sequence.num_known,
            sequence.num_computed,
            sequence.num_computed_before,
            sequence.tokens[-1],
            sequence.earliest_end(self._limits),
        )

    def extend(self, slot: int, blocks: Several[int]) -> None:
        """Append ``blocks`` to the block table of a slot."""
        begin = self._num_blocks[slot]
        end = begin + len(blocks)
        self._tables[slot, begin:end] = blocks
        self._num_blocks[slot] = end

    def extend_by_one(self, slots: Ints, blocks: Several[int]) -> None:
        """Append ``blocks[i]`` to the block table of slot ``slots[i]``, for all i."""
        self._tables[slots, self._num_blocks[slots]] = blocks
        self._num_blocks[slots] += 1

    def truncate(self, slot: int, num_blocks: int) -> None:
        """Keep only the first ``num_blocks`` blocks of a slot's block table."""
        self._num_blocks[slot] = num_blocks

    def clear(self, slot: int) -> None:
        self._numbers[:, slot] = 0

    def append_sampled(self, slots: Ints, tokens: Several[int]) -> None:
        """Append ``tokens[i]``, a sampled token, in slot ``slots[i]``, for all i.

        All earlier tokens of these slots then count as computed.
        """
        self._num_computed[slots] = self._num_known[slots]
        self._num_known[slots] += 1
        self._last_tokens[slots] = tokens

    def mark_launched(self, slots: Ints, num_computed: Ints, samples: Flags) -> None:
        """Record that a row for each of ``slots`` [n] was launched, as if it had been computed.

        ``num_computed`` [n] has the numbers of computed tokens after these rows. ``samples`` [n]
        tells which rows sample a token. The placeholder UNKNOWN is appended in the slots of the
        rows that sample.
        """
        self._num_computed[slots] = num_computed
        self._num_known[slots] += samples
        self._last_tokens[slots[samples]] = UNKNOWN

    def commit_steps(self, slots: Ints, num_computed: Ints, sampled: Flags) -> None:
        """Undo ``mark_launched`` for the rows of ``slots`` [n], so that their results can be added.

        ``num_computed`` [n] has the numbers of computed tokens before these rows. ``sampled`` [n]
        tells which rows sample a token. UNKNOWN is removed from the slots of the rows that sample.
        The last token of these sampling slots is then invalid until ``write`` or ``append_sampled``
        sets it.
        """
        self._num_computed[slots] = num_computed
        self._num_known[slots] -= sampled

    # planning a step

    @property
    def known_by_slot(self) -> Ints:
        """Number of known tokens of each slot, [slots]; 0 in an empty slot.

        The array is the table's own, and changes with it.
        """
        return self._num_known

    def decoding(self) -> Ints:
        """Return the slots with exactly one token left to compute, in the order of arrival.

        Slots whose sequences have reached a length limit are left out; such sequences are in the
        batch only while a step is in flight.
        """
        return self._by_order((self._remaining == 1) & self._is_below_limit)

    def prefilling(self, above: int = 1) -> Ints:
        """Return the slots with more than ``above`` tokens to compute, in the order of arrival."""
        return self._by_order(self._remaining > above)

    def lacking(self) -> Ints:
        """Return the slots whose block tables are too short for their known tokens.

        Slots whose sequences have reached a length limit are left out.
        """
        lacks: Flags = self._num_known > self._num_blocks * BLOCK_SIZE
        return (lacks & self._is_below_limit).nonzero()[0]

    def filling(self, decoding: Ints) -> Ints:
        """Return the slots in ``decoding`` whose next decode step fills a KV block.

        The step fills a block if the known token that it computes has the block's last position.
        """
        is_last: Flags = (self._num_computed[decoding] + 1) % BLOCK_SIZE == 0
        return decoding[is_last]

    def rows(self, decoding: Ints, others: Iterable[Row]) -> Rows:
        """Return the rows of a step: one token of each slot in ``decoding``, then ``others``."""
        starts, tokens = self._num_computed[decoding], self._last_tokens[decoding]
        rows = Rows.decoding(decoding, starts, tokens, self._tables)
        others = tuple(others)
        return rows.concat(Rows.of(others, self._tables)) if others else rows

    def is_plain_decode(self, rows: Rows) -> Flags:
        """Return for each of n rows whether it is a plain decode, bool [n].

        A plain decode computes one token for the first time, and samples one token without reaching
        a length limit. It computes no log probabilities of the prompt.
        """
        is_new: Flags = rows.starts >= self._num_computed_before[rows.slots]
        is_below_limit: Flags = rows.starts + 2 < self._ends[rows.slots]
        is_single: Flags = rows.counts == 1
        return is_single & rows.samples & ~rows.scores_prompt & is_new & is_below_limit

    # sums

    @property
    def num_known(self) -> int:
        """Number of known tokens in all slots."""
        return int(self._num_known.sum())

    @property
    def num_prefilling(self) -> int:
        """Number of tokens left to compute in all slots that have more than one left."""
        remaining = self._remaining
        return int(remaining[remaining > 1].sum())

    @property
    def num_unfilled(self) -> int:
        """Number of token positions without a computed token, in the blocks of all slots."""
        return int(self._num_blocks.sum()) * BLOCK_SIZE - int(self._num_computed.sum())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Compare the table with ``sequences``, which must be all sequences that have a slot.

        Raises AssertionError if they differ.
        """
        right = SlotTable(self._limits)
        for sequence in sequences:
            right.write(sequence)
            right.extend(sequence.slot, sequence.block_table)
        differs = (self._numbers != right._numbers).any(axis=0)
        assert not differs.any(), f"slots {np.flatnonzero(differs)}"
        within = np.arange(self._tables.shape[1]) < self._num_blocks[:, np.newaxis]
        assert (self._tables == right._tables)[within].all(), "block tables"

    @property
    def _remaining(self) -> Ints:
        return self._num_known - self._num_computed

    @property
    def _is_below_limit(self) -> Flags:
        """Return for each slot whether it has not reached a length limit, bool [slots]."""
        is_below_limit: Flags = self._num_known < self._ends
        return is_below_limit

    def _by_order(self, chosen: Flags) -> Ints:
        (slots,) = chosen.nonzero()
        return slots[self._orders[slots].argsort()] if len(slots) > 1 else slots
