"""Where the time of all sequences goes that are here. Pure: rank 0's clock comes in.

    came --waiting--> in the batch --> gone
                         |  ^
                     preempted

In the batch, a step's time is that of its decodes and what its prompts make it longer:

                       |---------- decodes ----------|-------- prompts --------|
    one that decodes   |  decode  |    co-tenancy    |         stalled         |
    a prompt's chunk   |         co-tenancy          | stalled |    prefill    |
    one without a row  |                      passed over                      |

A chunk that was computed before is no prefill, but recompute. What of a row would have been alone,
and what a prompt makes a step longer, says ``StepCosts``.

A step that was launched ahead of the one before it begins when that is over: until then it is the
other one that is computed. Who comes into the batch by its plan has waited so long.

What passes for all in the batch alike goes on clocks, and into columns by slot only how a sequence
differs from them. So a step is a few operations on columns, and to come or to go is one on a slot.
The clocks are told with every frame: who has an account of a sequence knows without another one,
but for how it differs from the others, where its time went while it decoded on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from worker.account import Account, Part
from worker.outcome import SequenceKey
from worker.plan import Flags, Ints, Rows
from worker.sequence import NO_SLOT, Sequence
from worker.step_costs import Costs, Floats, StepCosts

#: Every slot has its turn to be told of in so long.
_ROUND_S = 5.0


class Told(NamedTuple):
    key: SequenceKey
    account: Account


class Accounts:
    """Of the sequences of an engine with ``num_slots`` batch slots. ``begin`` and ``end`` surround
    the time of a step; ``left`` comes whenever slots were left. ``clock`` is that of all times."""

    def __init__(self, num_slots: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._there: list[Sequence | None] = [None] * num_slots
        self._num_there = 0
        self._is_there = np.zeros(num_slots, np.bool_)
        self._clocks = [0.0] * len(Part)
        #: of each part and slot, what is to be added to the clock
        self._columns = np.zeros((len(Part), num_slots))
        #: a row that begins before these known tokens is a chunk of a prompt
        self._prompt_ends = np.zeros(num_slots, np.int64)
        self._computed_before = np.zeros(num_slots, np.int64)
        #: on average of those that decoded in a step, what they would have taken alone
        self._decode_s = 0.0
        self._costs = StepCosts()
        #: when the last step was over, or the one in progress began
        self._now = 0.0
        #: of the step in progress
        self._rows: Rows | None = None
        self._left: set[int] = set()
        #: since anything was told: who has left the batch, and the slots whose prompts are computed
        self._gone: list[Sequence] = []
        self._computed: set[int] = set()
        #: of whose turn it is to be told of
        self._next_slot = 0
        self._round_since = 0.0

    # who comes and goes

    def begin(
        self, rows: Rows, left: Iterable[int], newcomers: Iterable[Sequence], now: float
    ) -> None:
        """A step that computes ``rows`` begins ``now``, or when the last one was over, if that was
        later. By its plan the slots ``left`` are empty, whose sequences were preempted, and
        ``newcomers`` have theirs."""
        began = max(now, self._now)
        self._clocks[Part.BETWEEN_STEPS] += began - self._now
        self._now, self._rows = began, rows
        newcomers = tuple(newcomers)
        gone = self._leave((*left, *(it.slot for it in newcomers)))
        for sequence in newcomers:
            self._enter(sequence)
        self._gone = [it for it in (*self._gone, *gone) if it.slot == NO_SLOT]

    def left(self, slots: Iterable[int]) -> None:
        """Nobody is in ``slots`` any more."""
        if self._rows is not None:
            self._left.update(slots)
            return
        gone = self._leave(slots)
        self._gone += [sequence for sequence in gone if sequence.is_preempted]

    def end(self) -> None:
        """The step in progress, if there is one, is over."""
        rows, self._rows = self._rows, None
        if rows is None:
            return
        now = self._clock()
        self._charge(rows, now)
        self._now = now
        self._gone += self._leave(self._left)
        self._left.clear()

    def tell(self) -> list[Told]:
        """As of the end of the last step: of those that lost their blocks, of those whose prompts
        are computed by it, and of those whose turn it is; of those that ended, as of then."""
        gone, self._gone = self._gone, []
        slots = self._computed.union(self._turns(self._now))
        self._computed.clear()
        read = self._read(slots, self._now)
        return [*map(self._last_of, gone), *(Told(it.key, account) for _, it, account in read)]

    def _last_of(self, sequence: Sequence) -> Told:
        """Of one that is gone."""
        if sequence.is_preempted or sequence.account is None:
            return self.so_far(sequence, self._now)
        return Told(sequence.key, sequence.account)

    def so_far(self, sequence: Sequence, now: float) -> Told:
        """Between two steps."""
        if sequence.slot == NO_SLOT:
            return Told(sequence.key, _outside(sequence, now))
        ((_, _, account),) = self._read([sequence.slot], now)
        return Told(sequence.key, account)

    @property
    def decoding(self) -> Account:
        """Of a sequence that would have decoded in every step, as others did on average."""
        account = Account(self._now, *self._clocks)
        co_tenancy_s = account.co_tenancy_s - self._decode_s
        return account._replace(decode_s=self._decode_s, co_tenancy_s=co_tenancy_s)

    def _turns(self, now: float) -> list[int]:
        """Slots have their turns one after the other, evenly over the time."""
        num_slots = len(self._there)
        due = int((now - self._round_since) / _ROUND_S * num_slots)
        if due >= num_slots:
            due, self._round_since = num_slots, now
        else:
            self._round_since += due * _ROUND_S / num_slots
        slots = [(self._next_slot + i) % num_slots for i in range(due)]
        self._next_slot = (self._next_slot + due) % num_slots
        return slots

    # by slot

    def _enter(self, sequence: Sequence) -> None:
        """It has its slot from now on."""
        slot, account = sequence.slot, _outside(sequence, self._now)
        self._there[slot], self._is_there[slot] = sequence, True
        self._num_there += 1
        self._columns[:, slot] = np.subtract(account.parts, self._clocks)
        before, known = sequence.num_computed_before, sequence.num_known
        self._computed_before[slot] = before
        # Of one that goes on, all that is known but the last token, which is next in its output.
        self._prompt_ends[slot] = end = max(sequence.num_prompt, known - 1, before)
        if sequence.num_computed >= end:
            self._computed.add(slot)

    def _leave(self, slots: Iterable[int]) -> list[Sequence]:
        """Whoever has them leaves them now, with an account."""
        read = self._read(slots, self._now)
        for slot, sequence, account in read:
            sequence.account = account
            self._there[slot], self._is_there[slot] = None, False
            self._computed.discard(slot)
        self._num_there -= len(read)
        return [sequence for _, sequence, _ in read]

    def _read(self, slots: Iterable[int], now: float) -> list[tuple[int, Sequence, Account]]:
        """Who has them, by the books here, and how they stand."""
        there = [(slot, it) for slot in slots if (it := self._there[slot]) is not None]
        if not there:
            return []
        clocks = np.array(self._clocks)
        clocks[Part.BETWEEN_STEPS] += now - self._now
        parts = self._columns[:, [slot for slot, _ in there]] + clocks[:, np.newaxis]
        accounts = (Account(now, *values) for values in parts.clip(0.0).T.tolist())
        return [(*who, account) for who, account in zip(there, accounts, strict=True)]

    # a step

    def _charge(self, rows: Rows, now: float) -> None:
        """It is over."""
        seconds, costs = now - self._now, self._costs.of(rows)
        is_prompt: Flags = rows.starts < self._prompt_ends[rows.slots]
        has_prompts = bool(np.count_nonzero(is_prompt))
        prompts_s = seconds * costs.part(is_prompt) if has_prompts else 0.0
        decodes_s = seconds - prompts_s
        self._clocks[Part.STALLED] += prompts_s
        self._clocks[Part.CO_TENANCY] += decodes_s
        self._clocks[Part.STEPS] += 1
        if has_prompts:
            self._charge_prompts(rows, costs, is_prompt, prompts_s)
        decoding = ~is_prompt if has_prompts else slice(None)
        each, mean = costs.alone(decoding)
        self._decode_s += decodes_s * mean
        self._move(Part.CO_TENANCY, Part.DECODE, rows.slots[decoding], decodes_s * each)
        # Who ended by the step before may have a row still.
        if np.count_nonzero(self._is_there[rows.slots]) < self._num_there:
            self._pass_over(rows.slots, decodes_s, prompts_s)
        neighbours = self._columns[Part.MOST_NEIGHBOURS]
        neighbours[rows.slots] = np.maximum(neighbours[rows.slots], len(rows) - 1)
        self._costs.observe(rows, seconds, has_prompts, now)

    def _charge_prompts(self, rows: Rows, costs: Costs, is_prompt: Flags, prompts_s: float) -> None:
        """To each of these rows its own chunk."""
        slots, starts, counts = (it[is_prompt] for it in (rows.slots, rows.starts, rows.counts))
        own = costs.rows[is_prompt]
        own_s = prompts_s * own / own.sum()
        computed_before = (self._computed_before[slots] - starts).clip(0, counts)
        again_s = own_s * computed_before / counts
        self._move(Part.STALLED, Part.RECOMPUTE, slots, again_s)
        self._move(Part.STALLED, Part.PREFILL, slots, own_s - again_s)
        self._computed.update(slots[starts + counts >= self._prompt_ends[slots]].tolist())

    def _pass_over(self, slots: Ints, decodes_s: float, prompts_s: float) -> None:
        """Whoever is there in none of ``slots``, which are those of the step."""
        is_absent = self._is_there.copy()
        is_absent[slots] = False
        absent = is_absent.nonzero()[0]
        self._move(Part.CO_TENANCY, Part.PASSED_OVER, absent, decodes_s)
        self._move(Part.STALLED, Part.PASSED_OVER, absent, prompts_s)
        self._columns[Part.STEPS][absent] -= 1

    def _move(self, source: Part, target: Part, slots: Ints, seconds: Floats | float) -> None:
        """From one part of their accounts to another."""
        self._columns[source][slots] -= seconds
        self._columns[target][slots] += seconds


def _outside(sequence: Sequence, now: float) -> Account:
    """Of one that is not in the batch, or is only now."""
    if sequence.account is None:
        return Account.waiting(sequence.came, now)
    return sequence.account.preempted(now)
