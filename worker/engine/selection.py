"""Selection of the sequences of a step, and of the number of tokens of each. Pure.

The batching policy decides the order. The token budget, free slots and free blocks limit how many
sequences and tokens are selected. A slot is held while its grammar mask (the tokens that the
grammar allows next) is not ready: nothing is sampled in a held slot. One held slot is exempted if
nothing else can be computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from worker.engine.batch import Batch
from worker.engine.load import Counters
from worker.engine.plan import Ints, Row
from worker.engine.policies.policy import Policy
from worker.engine.sequence import Sequence


class ScheduledChunk(NamedTuple):
    """Part of a sequence to compute in a step: the first ``num_known`` tokens that have no KV yet.

    All of these tokens are known: they belong to the prompt or to the output so far.
    """

    sequence: Sequence
    num_known: int

    def row(self) -> Row:
        return self.sequence.row(self.num_known)


def num_tokens(chunks: Iterable[ScheduledChunk]) -> int:
    return sum(chunk.num_known for chunk in chunks)


class Selected(NamedTuple):
    """Selection for one step: slots that decode one token each, and chunks of other sequences.

    ``decoding`` has the slots. ``prefills`` are chunks of sequences that were already in the batch,
    and ``admitted`` chunks of sequences that the selection admitted to it.
    """

    decoding: Ints
    prefills: list[ScheduledChunk]
    admitted: list[ScheduledChunk]

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return [*self.prefills, *self.admitted]

    @property
    def num_tokens(self) -> int:
        return len(self.decoding) + num_tokens(self.prefills) + num_tokens(self.admitted)


class BatchSelection:
    """Selector of each step's sequences; it admits waiting ones to ``batch`` as ``policy`` decides.

    ``counters`` counts the known tokens of each admitted sequence, and how many of them were found
    in the prefix cache.
    """

    def __init__(self, batch: Batch, policy: Policy, counters: Counters) -> None:
        self._batch = batch
        self.policy = policy
        self._counters = counters
        #: by slot, the number of consecutive steps in which it was held
        self._steps_held: dict[int, int] = {}

    def select(self, budget: int, held_slots: Collection[int], now: float) -> Selected:
        """Select at most ``budget`` tokens for the step at ``now``, and admit waiting sequences.

        Slots in ``held_slots`` must not sample in this step, because their grammar masks are not
        ready. They do not decode, and they prefill only chunks that leave at least one known token
        to compute. If nothing at all can be selected under this rule, the slot that was held for
        the most consecutive steps is exempted. The step then waits for the mask of that slot only.
        """
        self.policy.begin_step(self._batch.slot_table, now)
        self._steps_held = {slot: self._steps_held.get(slot, 0) + 1 for slot in held_slots}
        selected = self._select(budget, held_slots, now)
        if (
            held_slots
            and not selected.num_tokens
            and (longest := self._longest_held_slot()) is not None
        ):
            del self._steps_held[longest]
            return self._select(budget, self._steps_held.keys(), now)
        return selected

    def _longest_held_slot(self) -> int | None:
        """Return the slot that has been held for the most consecutive steps.

        If there are several, the first one in the policy's order is returned. The result is None if
        no held slot has any token to compute.
        """
        urgent, deferrable = self.policy.decodes(self._batch.slot_table.decoding())
        prefilling = self._batch.at(self._batch.slot_table.prefilling())
        prefills = [sequence.slot for sequence in self.policy.prefills(prefilling)]
        slots = [*urgent.tolist(), *prefills, *deferrable.tolist()]
        held_slots = [slot for slot in slots if slot in self._steps_held]
        return max(held_slots, key=self._steps_held.__getitem__, default=None)

    def _select(self, budget: int, held_slots: Collection[int], now: float) -> Selected:
        urgent, deferrable = self.policy.decodes(self._may_decode(held_slots))
        decoding = self._decode(urgent[:budget])
        prefills, admitted = self._prefill(budget - len(decoding), held_slots, now)
        selected = Selected(decoding, prefills, admitted)
        if len(deferrable):
            more = self._decode(deferrable[: budget - selected.num_tokens])
            return selected._replace(decoding=np.concatenate([decoding, more]))
        return selected

    def _may_decode(self, held_slots: Collection[int]) -> Ints:
        slots = self._batch.slot_table.decoding()
        return slots[~np.isin(slots, list(held_slots))] if held_slots else slots

    def _decode(self, slots: Ints) -> Ints:
        """Add to the prefix cache the blocks that ``slots`` fill in this step; return ``slots``.

        Each slot computes one token. A block is added later if the token that fills it is UNKNOWN,
        because the step in flight still samples that token.
        """
        for sequence in self._batch.at(self._batch.slot_table.filling(slots)):
            if not sequence.is_sampling:
                self._batch.publish(sequence, sequence.num_computed, sequence.num_known)
        return slots

    def _prefill(
        self, budget: int, held_slots: Collection[int], now: float
    ) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        prefills: list[ScheduledChunk] = []
        admitted: list[ScheduledChunk] = []
        for sequence in self.policy.prefills(self._batch.at(self._batch.slot_table.prefilling())):
            before = self._admit(budget, now, sequence)
            admitted += before
            budget -= num_tokens(before)
            if not budget:
                return prefills, admitted
            if sequence.slot not in held_slots or sequence.remaining > budget:
                prefills.append(self._chunk(sequence, budget))
                budget -= prefills[-1].num_known
        return prefills, [*admitted, *self._admit(budget, now)]

    def _admit(
        self, budget: int, now: float, before: Sequence | None = None
    ) -> list[ScheduledChunk]:
        chunks = []
        while budget and (head := self._head(before)) is not None:
            hits = self._batch.prefix_hits(head)
            if not self._batch.can_admit(head, hits):
                break
            self.policy.waiting.remove(head)
            self._batch.admit(head, hits)
            head.mark_admitted(now)
            self._counters.prompt_tokens += head.num_known
            self._counters.prefix_hit_tokens += head.num_computed
            chunks.append(self._chunk(head, _first_count(head, budget)))
            budget -= chunks[-1].num_known
        return chunks

    def _head(self, before: Sequence | None) -> Sequence | None:
        if self._batch.is_full or (head := self.policy.head(len(self._batch))) is None:
            return None
        return head if before is None or self.policy.precedes(head, before) else None

    def _chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk:
        count = min(sequence.remaining, budget)
        self._batch.publish(sequence, sequence.num_computed, sequence.num_computed + count)
        return ScheduledChunk(sequence, count)


def _first_count(sequence: Sequence, budget: int) -> int:
    """Return the maximum number of tokens that ``sequence`` computes in its first step.

    The result is at most ``budget``. If the sequence has a grammar, its last known token is left
    for a later step if possible, so that the first step samples nothing: the time to compute the
    grammar's mask is unknown.
    """
    if sequence.sampling.grammar is None:
        return budget
    return max(1, min(budget, sequence.remaining - 1))
