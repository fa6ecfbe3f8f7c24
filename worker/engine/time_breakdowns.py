"""Time breakdowns of all sequences of an engine. Pure: rank 0's clock is passed in.

    arrived --waiting--> in the batch --> ended
                            |  ^
                        preempted

Each step's time is divided, for every sequence in the batch, into the time of the step's decodes
and the time that chunks of prompts add. A row is the part of a sequence in the step:

                       |----------- decodes -----------|----------- prompts -----------|
    a decoding row     | decode | decode interference  |     prefill interference      |
    a prompt's chunk   |      decode interference      | prefill interf. |   prefill   |
    without a row      |                         not scheduled                         |

The time of a chunk's tokens that were computed before, at this or an earlier worker, counts as
recompute instead of prefill. ``StepCosts`` estimates how long a row would have taken alone, and by
how much chunks make a step longer.

A step that was launched ahead counts as begun when the previous step ends, because the device
computes the previous one until then. Sequences that the plan of the step admits count as waiting
until then.

Most of the time of a step belongs to the same part for all sequences in the batch. The time is
therefore added to running totals that all slots share; each part has one, its clock. A slot stores
only the differences between the parts of its sequence and the clocks. The time that a decoding
sequence would have taken alone follows from other sums (``Decodes``). A step therefore causes work
per sequence only for chunks of prompts, for drafts, and for sequences without a row.

Every message to a router contains the clocks (``TimeBreakdowns.decoding``). A router can extend the
last breakdown of a decoding sequence by their growth, as if the sequence had been an average one
since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np

from worker.engine.decodes import Decodes
from worker.engine.outcome import SequenceKey
from worker.engine.plan import Flags, Ints, Rows
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.step_costs import Floats, StepCosts
from worker.engine.time_breakdown import Part, TimeBreakdown

#: Seconds in which each slot is reported once in turn.
_ROUND_S = 5.0


class SequenceBreakdown(NamedTuple):
    key: SequenceKey
    breakdown: TimeBreakdown


class _Chunk(NamedTuple):
    slot: int
    start: int
    num_tokens: int
    num_drafts: int


class TimeBreakdowns:
    """Time breakdowns of the sequences of an engine with ``num_slots`` batch slots.

    Call ``begin_step`` before and ``end_step`` after each step, and ``drop_slots`` whenever slots
    become empty. ``clock`` returns seconds, and all times are on that clock.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._num_occupied = 0
        self._is_occupied = np.zeros(num_slots, np.bool_)
        self._clocks = [0.0] * len(Part)
        #: [parts, slots]: what to add to a part's clock for the sequence in the slot
        self._columns = np.zeros((len(Part), num_slots))
        #: by slot: a row that begins before this position is a chunk of a prompt
        self._prompt_ends = np.zeros(num_slots, np.int64)
        self._computed_before = [0] * num_slots
        #: slots whose prompts are not computed yet, and whether rows may be chunks of prompts
        self._prefilling: set[int] = set()
        self._may_have_chunks = False
        self._decodes = Decodes(num_slots)
        #: sum over steps of the seconds that the average decoding row would have taken alone
        self._decode_s = 0.0
        self._costs = StepCosts()
        #: end of the last step, or start of the step in progress
        self._now = 0.0
        #: rows of the step in progress, whether it ran out of memory, and slots emptied during it
        self._rows: Rows | None = None
        self._step_failed = False
        self._vacated: set[int] = set()
        #: since the last report: sequences that left the batch, and slots whose prompts were
        #: computed
        self._removed: list[Sequence] = []
        self._prefilled: set[int] = set()
        #: slot that is reported next in turn, and the time at which the previous one was due
        self._next_slot = 0
        self._round_since = 0.0

    # steps, arrivals and departures

    def begin_step(
        self, rows: Rows, vacated: Iterable[int], newcomers: Iterable[Sequence], now: float
    ) -> None:
        """Begin a step that computes ``rows``, at ``now`` or when the last step ended, if later.

        ``vacated`` are the slots that became empty, and ``newcomers`` the sequences that the step's
        plan admitted.
        """
        started_at = max(now, self._now)
        self._clocks[Part.BETWEEN_STEPS] += started_at - self._now
        self._now, self._rows, self._step_failed = started_at, rows, False
        newcomers = tuple(newcomers)
        removed = self._remove_slots((*vacated, *(sequence.slot for sequence in newcomers)))
        for sequence in newcomers:
            self._add_sequence(sequence)
        removed = [*self._removed, *removed]
        self._removed = [sequence for sequence in removed if sequence.slot == NO_SLOT]

    def mark_step_failed(self) -> None:
        """Record that the step in progress computed nothing, for lack of memory."""
        self._step_failed = True

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Record that the sequences in ``slots`` left the batch.

        Slots that were empty before are ignored. If a step is in progress, its time still counts
        for these sequences.
        """
        if self._rows is not None:
            self._vacated.update(slots)
            return
        removed = self._remove_slots(slots)
        self._removed += [sequence for sequence in removed if sequence.is_preempted]

    def end_step(self) -> None:
        """End the step in progress, and divide its time among the sequences in the batch.

        Does nothing if no step is in progress.
        """
        rows, self._rows = self._rows, None
        if rows is None:
            return
        now = self._clock()
        self._charge(rows, now)
        self._now = now
        self._removed += self._remove_slots(self._vacated)
        self._vacated.clear()

    def report(self) -> list[SequenceBreakdown]:
        """Return the breakdowns to send to routers, up to the end of the last step.

        The report includes sequences that were preempted, ended during a step, or
        completed their prefill since the last report. The sequences of a few slots are added in
        turn, so that each slot is reported every 5 s.
        """
        removed, self._removed = self._removed, []
        slots = self._prefilled.union(self._due_slots(self._now))
        self._prefilled.clear()
        occupied = ((slot, it) for slot in slots if (it := self._sequences[slot]) is not None)
        current = (SequenceBreakdown(it.key, self._read(slot, self._now)) for slot, it in occupied)
        return [*map(self._last_breakdown, removed), *current]

    def _last_breakdown(self, sequence: Sequence) -> SequenceBreakdown:
        if sequence.is_preempted or sequence.breakdown is None:
            return self.breakdown_of(sequence, self._now)
        return SequenceBreakdown(sequence.key, sequence.breakdown)

    def breakdown_of(self, sequence: Sequence, now: float) -> SequenceBreakdown:
        """Return the breakdown of a sequence, running or waiting, up to ``now``.

        Call between two steps.
        """
        if sequence.slot == NO_SLOT:
            return SequenceBreakdown(sequence.key, _breakdown_outside(sequence, now))
        return SequenceBreakdown(sequence.key, self._read(sequence.slot, now))

    @property
    def decoding(self) -> TimeBreakdown:
        """Breakdown of an average sequence that decoded in every step since the engine started."""
        breakdown = TimeBreakdown(self._now, *self._clocks)
        decode_interference_s = breakdown.decode_interference_s - self._decode_s
        return breakdown._replace(
            decode_s=self._decode_s, decode_interference_s=decode_interference_s
        )

    def _due_slots(self, now: float) -> list[int]:
        num_slots = len(self._sequences)
        due = int((now - self._round_since) / _ROUND_S * num_slots)
        if due >= num_slots:
            due, self._round_since = num_slots, now
        else:
            self._round_since += due * _ROUND_S / num_slots
        slots = [(self._next_slot + i) % num_slots for i in range(due)]
        self._next_slot = (self._next_slot + due) % num_slots
        return slots

    # by slot

    def _add_sequence(self, sequence: Sequence) -> None:
        slot, breakdown = sequence.slot, _breakdown_outside(sequence, self._now)
        self._sequences[slot], self._is_occupied[slot] = sequence, True
        self._num_occupied += 1
        pairs = zip(breakdown.parts, self._clocks, strict=True)
        self._columns[:, slot] = [part - clock for part, clock in pairs]
        # Rows count the tokens of images, which sequences leave out.
        more = sequence.num_image_tokens
        known = sequence.num_known + more
        before = sequence.num_computed_before and sequence.num_computed_before + more
        self._computed_before[slot] = before
        # The prompt of a continued sequence includes all known tokens but the last one. Computing
        # that one yields the next token of its output.
        self._prompt_ends[slot] = end = max(sequence.num_prompt + more, known - 1, before)
        if sequence.num_computed + more < end:
            self._prefilling.add(slot)
            self._may_have_chunks = True
        else:
            self._start_decode(slot, sequence.num_computed + more)

    def _start_decode(self, slot: int, position: int) -> None:
        self._prefilling.discard(slot)
        self._decodes.begin_decode(slot, position)
        self._prefilled.add(slot)

    def _remove_slots(self, slots: Iterable[int]) -> list[Sequence]:
        removed = []
        for slot in slots:
            if (sequence := self._sequences[slot]) is None:
                continue
            sequence.breakdown = self._read(slot, self._now)
            self._sequences[slot], self._is_occupied[slot] = None, False
            self._prefilling.discard(slot)
            self._prefilled.discard(slot)
            self._decodes.drop(slot)
            removed.append(sequence)
        self._num_occupied -= len(removed)
        return removed

    def _read(self, slot: int, now: float) -> TimeBreakdown:
        pairs = zip(self._columns[:, slot].tolist(), self._clocks, strict=True)
        parts = [part + clock for part, clock in pairs]
        alone_s = self._decodes.seconds(slot)
        parts[Part.DECODE] += alone_s
        parts[Part.DECODE_INTERFERENCE] -= alone_s
        parts[Part.BETWEEN_STEPS] += now - self._now
        return TimeBreakdown(now, *(part if part > 0.0 else 0.0 for part in parts))

    # a step

    def _charge(self, rows: Rows, now: float) -> None:
        seconds, costs, chunks = now - self._now, self._costs.now, self._chunks(rows)
        chunk_costs = [costs.row(chunk.start, chunk.num_tokens) for chunk in chunks]
        prompts, together = sum(chunk_costs), costs.rows(rows)
        is_shared = len(chunks) < len(rows)
        part = prompts / (costs.step + together) if is_shared else 1.0
        prompts_s = seconds * part
        decodes_s = seconds - prompts_s
        self._clocks[Part.PREFILL_INTERFERENCE] += prompts_s
        self._clocks[Part.DECODE_INTERFERENCE] += decodes_s
        self._clocks[Part.STEPS] += 1
        absent = self._absent(rows)
        if is_shared:
            self._charge_decodes(rows, chunks, together - prompts, decodes_s, absent)
        for chunk, cost in zip(chunks, chunk_costs, strict=True):
            self._charge_chunk(chunk, prompts_s * cost / prompts)
        self._count_neighbours(rows, absent)
        if absent is not None:
            self._charge_not_scheduled(absent, decodes_s, prompts_s)
        self._costs.observe(rows, seconds, bool(chunks), now)

    def _chunks(self, rows: Rows) -> list[_Chunk]:
        if not self._may_have_chunks:
            return []
        is_prompt: Flags = rows.starts < self._prompt_ends[rows.slots]
        indices = is_prompt.nonzero()[0]
        fields = rows.slots, rows.starts, rows.counts, rows.num_drafts
        slot_table = (field[indices].tolist() for field in fields)
        # A sequence that leaves in this step still counts here, because it may have a chunk in the
        # next step if that was launched ahead.
        self._may_have_chunks = bool(self._prefilling)
        return [_Chunk(*values) for values in zip(*slot_table, strict=True)]

    def _absent(self, rows: Rows) -> Ints | None:
        # A sequence that ended in the previous step may still have a row in this one.
        if np.count_nonzero(self._is_occupied[rows.slots]) == self._num_occupied:
            return None
        is_absent = self._is_occupied.copy()
        is_absent[rows.slots] = False
        return is_absent.nonzero()[0]

    def _charge_chunk(self, chunk: _Chunk, own_s: float) -> None:
        slot, start, num_tokens, num_drafts = chunk
        computed_before = min(max(self._computed_before[slot] - start, 0), num_tokens)
        recompute_s = own_s * computed_before / num_tokens
        column = self._columns[:, slot]
        column[Part.PREFILL_INTERFERENCE] -= own_s
        column[Part.RECOMPUTE] += recompute_s
        column[Part.PREFILL] += own_s - recompute_s
        end = start + num_tokens - num_drafts
        is_last = end >= self._prompt_ends[slot] and not self._step_failed
        if is_last and slot in self._prefilling:
            self._start_decode(slot, end)

    def _charge_decodes(
        self,
        rows: Rows,
        chunks: Collection[_Chunk],
        together: float,
        seconds: float,
        absent: Ints | None,
    ) -> None:
        """Record how long each decoding row of a step would have taken alone.

        ``seconds`` is the part of the step's time that is due to decodes, and ``together`` the cost
        of all decoding rows. ``absent`` are the occupied slots that have no row in the step, or
        None if there are none.
        """
        costs, num_decodes = self._costs.now, len(rows) - len(chunks)
        self._decode_s += seconds * costs.fraction_alone(together / num_decodes, together)
        has_drafts = rows.num_tokens - sum(chunk.num_tokens for chunk in chunks) > num_decodes
        if has_drafts or self._step_failed:
            self._charge_each(rows, together, seconds)
            return
        waiting = None if absent is None else absent[self._decodes.is_tracked[absent]]
        if waiting is not None:
            self._flush_decodes(waiting)
        self._correct_positions(rows, chunks, waiting)
        if costs.is_known:
            scale = seconds / (costs.step + together)
            self._decodes.add(scale * costs.first, scale * costs.position)
        else:
            self._decodes.add(seconds, 0.0)
        if waiting is not None:
            self._decodes.undo_add(waiting)
        if self._decodes.is_long:
            self._flush_decodes(self._decodes.is_tracked.nonzero()[0])
            self._decodes.restart_sums()

    def _charge_each(self, rows: Rows, together: float, seconds: float) -> None:
        """Do the work of ``_charge_decodes`` row by row, without ``Decodes``.

        This is necessary if rows have drafts or the step failed: ``Decodes`` requires that every
        row advances by one position.
        """
        is_decode: Flags = rows.starts >= self._prompt_ends[rows.slots]
        costs = self._costs.now
        alone_s: Floats | float = seconds
        if costs.is_known:
            by_row = costs.by_row(rows)[is_decode]
            alone_s = seconds * (costs.step + by_row) / (costs.step + together)
        self._move(Part.DECODE_INTERFERENCE, Part.DECODE, rows.slots[is_decode], alone_s)

    def _correct_positions(
        self, rows: Rows, chunks: Collection[_Chunk], waiting: Ints | None
    ) -> None:
        """Set the positions in ``Decodes`` to those of the decoding rows, if any of them differ.

        Accepted drafts move a row ahead of its position in ``Decodes``, and nothing moves a row
        behind it, so comparing the sums of positions is sufficient. ``waiting`` are the decoding
        slots that have no row in the step, or None if there are none.
        """
        expected = self._decodes.positions
        if waiting is not None:
            expected -= self._decodes.positions_of(waiting)
        starts = rows.kv_tokens - rows.num_tokens - sum(chunk.start for chunk in chunks)
        if starts != expected:
            is_tracked = self._decodes.is_tracked[rows.slots]
            slots = rows.slots[is_tracked]
            self._flush_decodes(slots)
            self._decodes.set_positions(slots, rows.starts[is_tracked])

    def _count_neighbours(self, rows: Rows, absent: Ints | None) -> None:
        most, now = self._columns[Part.MOST_NEIGHBOURS], float(len(rows) - 1)
        if absent is None:
            np.maximum(most, now, out=most)
        else:
            most[rows.slots] = np.maximum(most[rows.slots], now)

    def _charge_not_scheduled(self, absent: Ints, decodes_s: float, prompts_s: float) -> None:
        self._move(Part.DECODE_INTERFERENCE, Part.NOT_SCHEDULED, absent, decodes_s)
        self._move(Part.PREFILL_INTERFERENCE, Part.NOT_SCHEDULED, absent, prompts_s)
        self._columns[Part.STEPS][absent] -= 1

    def _flush_decodes(self, slots: Ints) -> None:
        """Add the seconds that ``Decodes`` has for each of ``slots`` to the slot's decode time.

        The same seconds are subtracted from the decode interference, and restart at 0 in
        ``Decodes``. All of ``slots`` must be tracked by ``Decodes``, as the slots of decoding
        sequences are.
        """
        self._move(Part.DECODE_INTERFERENCE, Part.DECODE, slots, self._decodes.pop_seconds(slots))

    def _move(self, source: Part, target: Part, slots: Ints, seconds: Floats | float) -> None:
        self._columns[source][slots] -= seconds
        self._columns[target][slots] += seconds


def _breakdown_outside(sequence: Sequence, now: float) -> TimeBreakdown:
    if sequence.breakdown is None:
        return TimeBreakdown.waiting(sequence.arrived_at, now)
    return sequence.breakdown.preempted(now)
