"""Whatever happens to a sequence, what is told of its time adds up, and is where it went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_worker_engine import MODEL, Event, Faulty, bounds, crowds, events
from worker.account import Account, Part
from worker.engine import Engine
from worker.limits import Limits
from worker.loop import LeadingLoop, Report
from worker.orders import Inbox, Orders
from worker.outcome import Abort, Residence, SequenceKey
from worker.plan import Plan, RowResult
from worker.sequence import NO_SLOT, Sequence


@dataclass
class Seen:
    """What somebody counts who looks at every sequence in every step."""

    waiting: float = 0.0
    preempted: float = 0.0
    passed_over: float = 0.0
    between: float = 0.0
    steps: int = 0
    most_neighbours: int = 0


class Watched(Faulty):
    """Steps take as long as the dice say. Keeps who was in the last plan, and who was not."""

    def __init__(self, bounds: Limits, run: Run) -> None:
        super().__init__(bounds.num_blocks, MODEL, bounds.num_host_blocks)
        self._run = run

    def unready_slots(self) -> frozenset[int]:
        dice = self._run.dice
        return frozenset(slot for slot in range(5) if dice.random() < 0.2)

    def execute(self, plan: Plan) -> list[RowResult]:
        self._run.look(plan)
        return super().execute(plan)


class Run:
    """A loop under a list of events."""

    def __init__(self, bounds: Limits, dice: Random) -> None:
        self.dice = dice
        self.now = dice.choice([0.0, 1e3, 1e6])
        self.runner = Watched(bounds, self)
        self.engine = Engine(self.runner, bounds)
        self.loop = LeadingLoop(self.engine, Inbox(), self.check, None, self.clock)
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.seen: dict[SequenceKey, Seen] = defaultdict(Seen)
        self.begun: set[SequenceKey] = set()
        self.told: dict[SequenceKey, Account] = {}
        self.aborted: set[SequenceKey] = set()
        self.num_requests = 0

    def clock(self) -> float:
        return self.now

    def look(self, plan: Plan) -> None:
        """At a step that goes on for a while."""
        seconds = self.dice.choice([0.0, 0.001, 0.02, 0.3])
        self.now += seconds
        slots = set(plan.rows.slots.tolist())
        for sequence in self.engine.sequences():
            seen = self.seen[sequence.key]
            if sequence.slot in slots:
                self.begun.add(sequence.key)
                seen.steps += 1
                seen.most_neighbours = max(seen.most_neighbours, len(slots) - 1)
            elif sequence.slot != NO_SLOT:
                seen.passed_over += seconds
            else:
                self.pause(sequence, seconds)

    def idle(self, starting: Collection[Sequence]) -> None:
        """Between two steps."""
        seconds = self.dice.choice([0.0, 0.0, 0.001, 0.4])
        self.now += seconds
        for sequence in (*self.engine.sequences(), *starting):
            if sequence.slot != NO_SLOT:
                self.seen[sequence.key].between += seconds
            else:
                self.pause(sequence, seconds)

    def pause(self, sequence: Sequence, seconds: float) -> None:
        if sequence.key in self.begun:
            self.seen[sequence.key].preempted += seconds
        else:
            self.seen[sequence.key].waiting += seconds

    def happen(self, event: Event, drain: bool = False) -> None:
        orders = Orders(drain=drain)
        for request in event.requests:
            self.num_requests += 1
            for job in request:
                sequence = job.sequence(self.num_requests, self.engine.limits)
                sequence.came = self.now
                self.sequences[sequence.key] = sequence
                orders.starts.append(sequence)
        if event.abort is not None and event.abort[0] < self.num_requests:
            arrival, choice = event.abort
            abort = Abort(arrival + 1, () if choice is None else (choice,))
            orders.aborts.append(abort)
            self.aborted.update(key for key in self.sequences if key in abort)
        if event.preempt is not None:
            running = [it for it in self.engine.sequences() if it.slot != NO_SLOT]
            for sequence in running[event.preempt :]:
                self.engine.preempt(sequence)
        self.runner.fault = event.fault
        self.idle(orders.starts)
        self.loop.turn(orders)
        self.engine.check_integrity()

    def check(self, report: Report) -> None:
        accounts = {it.key: it.account for it in report.accounts}
        assert len(accounts) == len(report.accounts), "told twice"
        for outcome in report.outcomes:
            preempted = outcome.news.residence is Residence.PREEMPTED and not outcome.tokens
            if outcome.stop is not None or preempted:
                assert outcome.key in accounts
        for it in report.accounts:
            assert it.offset == self.sequences[it.key].num_output
            if it.key not in self.aborted:
                self.check_account(it.key, it.account)
        self.told.update(accounts)

    def check_account(self, key: SequenceKey, account: Account) -> None:
        close = 1e-9 * max(1.0, self.now)
        assert account.until == self.now
        assert account.seconds == pytest.approx(self.now - self.sequences[key].came, abs=close)
        before = self.told.get(key, Account(self.now))
        pairs = zip(before.parts, account.parts, strict=True)
        assert all(now >= then - close for then, now in pairs), "a part became less"
        seen = self.seen[key]
        assert account.waiting_s == pytest.approx(seen.waiting, abs=close)
        assert account.preempted_s == pytest.approx(seen.preempted, abs=close)
        assert account.passed_over_s == pytest.approx(seen.passed_over, abs=close)
        assert account.between_steps_s == pytest.approx(seen.between, abs=close)
        assert account.parts[Part.STEPS :] == (seen.steps, seen.most_neighbours)


@settings(max_examples=100)
@given(bounds, crowds, events, st.booleans(), st.randoms(use_true_random=False))
def test_the_parts_add_up_to_the_time_since_a_sequence_came(
    bounds: Limits, crowd: Event, events: list[Event], drains: bool, dice: Random
) -> None:
    this = Run(bounds, dice)
    for event in (crowd, *events):
        this.happen(event)
    if drains:
        this.happen(Event([]), drain=True)
    while this.engine.has_work:
        this.happen(Event([]))
    accounts = this.loop._accounts
    assert not accounts._num_there and not any(accounts._there)
