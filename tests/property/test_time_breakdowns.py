"""Time breakdowns add up and are right, whatever happens to the sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_worker_engine import MODEL, Event, Faulty, bounds, crowds, events
from tests.support.example_counts import examples
from worker.config import Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, Residence, SequenceKey
from worker.engine.plan import LaunchedStep, Plan, Row, RowResult
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.time_breakdown import Part, TimeBreakdown
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import LeadingLoop, Report


@dataclass
class Seen:
    """Expected times of a sequence, counted for every sequence in every step."""

    waiting: float = 0.0
    prefill: float = 0.0
    stalled: float = 0.0
    decode: float = 0.0
    co_tenancy: float = 0.0
    preempted: float = 0.0
    recompute: float = 0.0
    passed_over: float = 0.0
    between: float = 0.0
    steps: int = 0
    most_neighbours: int = 0


@dataclass(frozen=True)
class Share:
    start: int
    count: int
    is_prompt: bool
    num_again: int


@dataclass(frozen=True)
class View:
    """Rows of a step by sequence, and all sequences in the batch."""

    rows: dict[SequenceKey, Share]
    members: frozenset[SequenceKey]


class Watched(Faulty):
    """Runner whose steps take random times."""

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

    def _launch(self, plan: Plan) -> LaunchedStep:
        self._run.planned(plan)
        return WatchedStep(super()._launch(plan), self._run)


class WatchedStep:
    def __init__(self, launched: LaunchedStep, run: Run) -> None:
        self._launched, self._run = launched, run

    def sample(self) -> None:
        self._launched.sample()

    def results(self) -> list[RowResult]:
        self._run.compute()
        return self._launched.results()


class Run:
    """Loop under a list of events.

    With ``ahead``, steps are launched ahead, and only rows fail.
    """

    def __init__(self, bounds: Limits, dice: Random, ahead: bool = False) -> None:
        self.dice, self.ahead = dice, ahead
        self.now = dice.choice([0.0, 1e3, 1e6])
        self.runner = Watched(bounds, self, ahead)
        self.engine = Engine(self.runner, bounds, launch=self.runner.launch)
        #: the running step, and the one that was launched before its end
        self.passing: View | None = None
        self.next: View | None = None
        #: seconds that the running step has taken
        self.step_s = 0.0
        #: by sequence of the batch: end of its prefill, and tokens computed before its admission
        self.entries: dict[SequenceKey, tuple[int, int]] = {}
        #: times at which steps of this turn ended
        self.ends: list[float] = []
        self.loop = LeadingLoop(self.engine, Inbox(), self.check, None, self.clock)
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.seen: dict[SequenceKey, Seen] = defaultdict(Seen)
        self.begun: set[SequenceKey] = set()
        self.reported: dict[SequenceKey, TimeBreakdown] = {}
        self.aborted: set[SequenceKey] = set()
        self.num_requests = 0

    def clock(self) -> float:
        return self.now

    def planned(self, plan: Plan) -> None:
        for sequence in self.engine._scheduler.newcomers:
            before, known = sequence.num_computed_before, sequence.num_known
            end = max(sequence.num_prompt, known - 1, before)
            self.entries[sequence.key] = end, before
        there = {it.slot: it.key for it in self.engine.sequences() if it.slot != NO_SLOT}
        shares = {there[row.slot]: self.share(there[row.slot], row) for row in plan.rows}
        view = View(shares, frozenset(there.values()))
        if self.passing is None:
            self.begin(view)
        else:
            self.next = view

    def share(self, key: SequenceKey, row: Row) -> Share:
        end, before = self.entries[key]
        count = len(row.tokens)
        num_again = min(max(before - row.start, 0), count)
        return Share(row.start, count, row.start < end, num_again)

    def begin(self, view: View) -> None:
        self.passing, self.next, self.step_s = view, None, 0.0
        self.begun |= view.rows.keys()

    def compute(self) -> None:
        """Let the running step take a random time, and end it."""
        self.pass_time(self.dice.choice([0.0, 0.001, 0.02, 0.3]))
        self.ends.append(self.now)
        view, self.passing = self.passing, None
        assert view is not None
        for key in self.there(view):
            seen = self.seen[key]
            seen.steps += 1
            seen.most_neighbours = max(seen.most_neighbours, len(view.rows) - 1)
        self.share_out(view)
        if self.next is not None:
            self.begin(self.next)

    def there(self, view: View) -> list[SequenceKey]:
        """Return the sequences of the step's rows that did not end in the step before."""
        there = {it.key for it in self.engine.sequences()}
        return [key for key in view.rows if key in there]

    def share_out(self, view: View) -> None:
        """Distribute the step's time to its rows by the measured costs of steps."""
        costs = self.loop._breakdowns._costs.now
        cost = {key: costs.row(it.start, it.count) for key, it in view.rows.items()}
        prompts = sum(cost[key] for key, it in view.rows.items() if it.is_prompt)
        decodes = sum(cost[key] for key, it in view.rows.items() if not it.is_prompt)
        prompts_s = self.step_s * (prompts / (costs.step + prompts + decodes) if decodes else 1.0)
        decodes_s = self.step_s - prompts_s
        for key in self.there(view):
            seen, share, own_s = self.seen[key], view.rows[key], 0.0
            if share.is_prompt:
                own_s, alone_s = prompts_s * cost[key] / prompts, 0.0
                seen.recompute += own_s * share.num_again / share.count
                seen.prefill += own_s * (1.0 - share.num_again / share.count)
            else:
                alone_s = decodes_s * costs.fraction_alone(cost[key], decodes)
                seen.decode += alone_s
            seen.stalled += prompts_s - own_s
            seen.co_tenancy += decodes_s - alone_s

    def pass_time(self, seconds: float, starting: Collection[Sequence] = ()) -> None:
        self.now += seconds
        self.step_s += seconds
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
                sequence.arrived_at = self.now
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
        # Time passes between two iterations; a step may be in flight.
        self.pass_time(self.dice.choice([0.0, 0.0, 0.001, 0.4]), orders.starts)
        self.ends.clear()
        self.loop.run_iteration(orders)
        self.engine.check_integrity()

    def check(self, report: Report) -> None:
        breakdowns = {it.key: it.breakdown for it in report.breakdowns}
        assert len(breakdowns) == len(report.breakdowns), "reported twice"
        for outcome in report.outcomes:
            preempted = outcome.update.residence is Residence.PREEMPTED and not outcome.tokens
            if outcome.stop is not None or preempted:
                assert outcome.key in breakdowns
        for it in report.breakdowns:
            if it.key not in self.aborted:
                self.check_account(it.key, it.breakdown)
        self.reported.update(breakdowns)

    def check_account(self, key: SequenceKey, breakdown: TimeBreakdown) -> None:
        close = 1e-9 * max(1.0, self.now)
        assert breakdown.until in (self.now, *self.ends)
        assert breakdown.seconds == pytest.approx(
            breakdown.until - self.sequences[key].arrived_at, abs=close
        )
        before = self.reported.get(key, TimeBreakdown(self.now))
        pairs = zip(before.parts, breakdown.parts, strict=True)
        assert all(now >= then - close for then, now in pairs), "a part became less"
        seen = self.seen[key]
        assert breakdown.parts[: Part.STEPS] == pytest.approx(
            (
                *(seen.waiting, seen.prefill, seen.stalled, seen.decode, seen.co_tenancy),
                *(seen.preempted, seen.recompute, seen.passed_over, seen.between),
            ),
            abs=close,
        )
        assert breakdown.parts[Part.STEPS :] == (seen.steps, seen.most_neighbours)


@settings(max_examples=examples(100))
@given(bounds, crowds, events, st.booleans(), st.randoms(use_true_random=False))
def test_time_breakdown_parts_add_up_to_elapsed_time(
    bounds: Limits, crowd: Event, events: list[Event], drains: bool, dice: Random
) -> None:
    check_all(Run(bounds, dice), [crowd, *events], drains)


@settings(max_examples=examples(50))
@given(bounds, crowds, events, st.booleans(), st.randoms(use_true_random=False))
def test_time_breakdown_parts_add_up_when_launching_ahead(
    bounds: Limits, crowd: Event, events: list[Event], drains: bool, dice: Random
) -> None:
    bounds = replace(bounds, speculation=Speculation())
    check_all(Run(bounds, dice, ahead=True), [crowd, *events], drains)


def check_all(this: Run, events: list[Event], drains: bool) -> None:
    # Sums over steps restart after this number of steps.
    with patch("worker.engine.decodes._MAX_STEPS", this.dice.choice([3, 4096])):
        for event in events:
            this.happen(event)
        if drains:
            this.happen(Event([]), drain=True)
        while this.engine.has_work:
            this.happen(Event([]))
    breakdowns = this.loop._breakdowns
    assert not breakdowns._num_occupied and not any(breakdowns._sequences)
