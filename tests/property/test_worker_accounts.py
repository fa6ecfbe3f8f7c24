"""Whatever happens to a sequence, what is told of its time adds up, and is where it went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_worker_engine import MODEL, Event, Faulty, bounds, crowds, events
from worker.account import Account, Part
from worker.config import Speculation
from worker.engine import Engine
from worker.limits import Limits
from worker.loop import LeadingLoop, Report
from worker.orders import Inbox, Orders
from worker.outcome import Abort, Residence, SequenceKey
from worker.plan import Launched, Plan, RowResult
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


@dataclass(frozen=True)
class View:
    """Who computes something in a step, and who is in the batch by its plan."""

    rows: frozenset[SequenceKey]
    members: frozenset[SequenceKey]


class Watched(Faulty):
    """Steps take as long as the dice say."""

    def __init__(self, bounds: Limits, run: Run, ahead: bool) -> None:
        model = replace(MODEL, runs_ahead=ahead)
        super().__init__(bounds.num_blocks, model, bounds.num_host_blocks)
        self._run = run

    def unready_slots(self) -> frozenset[int]:
        dice = self._run.dice
        return frozenset(slot for slot in range(5) if dice.random() < 0.2)

    def execute(self, plan: Plan) -> list[RowResult]:
        self._run.planned(plan)
        self._run.compute()
        return super().execute(plan)

    def _launch(self, plan: Plan) -> Launched:
        self._run.planned(plan)
        return WatchedStep(super()._launch(plan), self._run)


class WatchedStep:
    def __init__(self, launched: Launched, run: Run) -> None:
        self._launched, self._run = launched, run

    def sample(self) -> None:
        self._launched.sample()

    def results(self) -> list[RowResult]:
        self._run.compute()
        return self._launched.results()


class Run:
    """A loop under a list of events. ``ahead``, steps are launched so, and only rows fail."""

    def __init__(self, bounds: Limits, dice: Random, ahead: bool = False) -> None:
        self.dice, self.ahead = dice, ahead
        self.now = dice.choice([0.0, 1e3, 1e6])
        self.runner = Watched(bounds, self, ahead)
        self.engine = Engine(self.runner, bounds, launch=self.runner.launch)
        #: the step whose time passes, and the one that was launched ahead of its end
        self.passing: View | None = None
        self.next: View | None = None
        #: of the steps that were over in this turn
        self.ends: list[float] = []
        self.loop = LeadingLoop(self.engine, Inbox(), self.check, None, self.clock)
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.seen: dict[SequenceKey, Seen] = defaultdict(Seen)
        self.begun: set[SequenceKey] = set()
        self.told: dict[SequenceKey, Account] = {}
        self.aborted: set[SequenceKey] = set()
        self.num_requests = 0

    def clock(self) -> float:
        return self.now

    def planned(self, plan: Plan) -> None:
        slots = set(plan.rows.slots.tolist())
        there = [it for it in self.engine.sequences() if it.slot != NO_SLOT]
        view = View(
            frozenset(it.key for it in there if it.slot in slots),
            frozenset(it.key for it in there),
        )
        if self.passing is None:
            self.begin(view)
        else:
            self.next = view

    def begin(self, view: View) -> None:
        self.passing, self.next = view, None
        self.begun |= view.rows

    def compute(self) -> None:
        """The step whose time passes goes on for a while, and is over."""
        self.pass_time(self.dice.choice([0.0, 0.001, 0.02, 0.3]))
        self.ends.append(self.now)
        view, self.passing = self.passing, None
        assert view is not None
        for key in view.rows:
            seen = self.seen[key]
            seen.steps += 1
            seen.most_neighbours = max(seen.most_neighbours, len(view.rows) - 1)
        if self.next is not None:
            self.begin(self.next)

    def pass_time(self, seconds: float, starting: Collection[Sequence] = ()) -> None:
        self.now += seconds
        for sequence in (*self.engine.sequences(), *starting):
            seen = self.seen[sequence.key]
            if self.passing is not None and sequence.key in self.passing.rows:
                continue
            if self.passing is not None and sequence.key in self.passing.members:
                seen.passed_over += seconds
            elif self.passing is None and sequence.slot != NO_SLOT:
                seen.between += seconds
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
        if event.preempt is not None and not self.ahead:
            running = [it for it in self.engine.sequences() if it.slot != NO_SLOT]
            for sequence in running[event.preempt :]:
                self.engine.preempt(sequence)
        self.runner.fault = event.fault if not self.ahead or (event.fault or 0) >= 0 else None
        # Between two turns; a step may be in flight.
        self.pass_time(self.dice.choice([0.0, 0.0, 0.001, 0.4]), orders.starts)
        self.ends.clear()
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
            if it.key not in self.aborted:
                self.check_account(it.key, it.account)
        self.told.update(accounts)

    def check_account(self, key: SequenceKey, account: Account) -> None:
        close = 1e-9 * max(1.0, self.now)
        assert account.until in (self.now, *self.ends)
        assert account.seconds == pytest.approx(account.until - self.sequences[key].came, abs=close)
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
    check_all(Run(bounds, dice), [crowd, *events], drains)


@settings(max_examples=50)
@given(bounds, crowds, events, st.booleans(), st.randoms(use_true_random=False))
def test_the_same_where_steps_are_launched_ahead(
    bounds: Limits, crowd: Event, events: list[Event], drains: bool, dice: Random
) -> None:
    bounds = replace(bounds, num_host_blocks=0, speculation=Speculation())
    check_all(Run(bounds, dice, ahead=True), [crowd, *events], drains)


def check_all(this: Run, events: list[Event], drains: bool) -> None:
    for event in events:
        this.happen(event)
    if drains:
        this.happen(Event([]), drain=True)
    while this.engine.has_work:
        this.happen(Event([]))
    accounts = this.loop._accounts
    assert not accounts._num_there and not any(accounts._there)
