"""Loop of the engine on rank 0 and on other ranks, without a socket."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from everlift.v1 import chaos_pb2, session_pb2
from tests.support.worker.worker_support import (
    POLICIES,
    Collected,
    engine,
    limits,
    prompt,
    sequence,
)
from worker.config import FakeModel, Scheduling, Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.sequence import Sequence
from worker.runner.fake_runner import FakeRunner, expected_tokens
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import FirstSteps, LeadingLoop, RanksDisagree, Report, follow

MODEL = FakeModel(surprise_one_in=5)
LIMITS = limits(
    num_blocks=6,
    max_num_seqs=3,
    watermark_blocks=0,
    num_host_blocks=4,
    speculation=Speculation(num_draft_tokens=3),
)


class Log:
    """Step log that keeps its entries as other ranks would receive them."""

    def __init__(self) -> None:
        self.entries: list[session_pb2.StepLog] = []

    def write(self, entry: session_pb2.StepLog) -> None:
        self.entries.append(session_pb2.StepLog.FromString(entry.SerializeToString()))


class Lead:
    """Rank 0's loop in its thread; leaving the context stops it."""

    def __init__(self, bounds: Limits = LIMITS) -> None:
        self.inbox, self.log = Inbox(), Log()
        self.engine = engine(bounds, MODEL)
        self.reports: list[Report] = []
        self._reported = threading.Condition()
        loop = LeadingLoop(self.engine, self.inbox, self._report, self.log)
        self._thread = threading.Thread(target=loop.run)

    def __enter__(self) -> "Lead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.stop()
        self._thread.join(timeout=10.0)
        assert not self._thread.is_alive()

    def _report(self, report: Report) -> None:
        with self._reported:
            self.reports.append(report)
            self._reported.notify_all()

    def collected(self) -> Collected:
        collected = Collected()
        for report in self.reports:
            collected.take(report.outcomes)
        return collected

    def until_ended(self, *epochs: int) -> Collected:
        keys = {SequenceKey(epoch, 0) for epoch in epochs}
        with self._reported:
            assert self._reported.wait_for(lambda: keys <= {*self.collected().stops}, timeout=10.0)
        return self.collected()


def work(lead: Lead, before: int = 0) -> None:
    for epoch in range(before + 1, before + 8):
        tokens = prompt(30 + epoch, epoch)
        lead.inbox.start(sequence(LIMITS, epoch, tokens, max_tokens=60, predicted_tokens=9))
    lead.inbox.abort(Abort(before + 3))


@pytest.mark.parametrize(
    "scheduling", [*POLICIES.values(), Scheduling("slai", tbt_target=0.002)], ids=str
)
def test_step_log_reproduces_outcomes_on_another_rank(
    scheduling: Scheduling,
) -> None:
    bounds = replace(LIMITS, scheduling=scheduling)
    with Lead(bounds) as lead:
        work(lead)
        collected = lead.until_ended(1, 2, 4, 5, 6, 7)
    assert SequenceKey(3, 0) not in collected.stops
    for epoch in (1, 2, 4, 5, 6, 7):
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(30 + epoch, epoch), 60, MODEL)

    other = engine(bounds, MODEL)
    follow(other, lead.log.entries)
    assert other.digest() == lead.engine.digest()
    assert other.load() == lead.engine.load()
    load = other.load()
    assert load.preemptions and load.counters.accepted_tokens and load.counters.blocks_swapped_in


def test_policy_changes_at_same_step_on_every_rank() -> None:
    with Lead() as lead:
        for epoch, policy in enumerate(("static", "slai", "magnus", "continuous"), 1):
            work(lead, 10 * epoch)
            lead.until_ended(10 * epoch + 1)
            lead.inbox.set_policy(policy)  # type: ignore[arg-type]
        epochs = [10 * epoch + each for epoch in (1, 2, 3, 4) for each in (1, 2, 4, 5, 6, 7)]
        collected = lead.until_ended(*epochs)
    for epoch in epochs:
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(30 + epoch, epoch), 60, MODEL)
    policies = [entry.engine_policy for entry in lead.log.entries if entry.engine_policy]
    assert policies == ["static", "slai", "magnus", "continuous"]

    other = engine(LIMITS, MODEL)
    follow(other, lead.log.entries)
    assert other.digest() == lead.engine.digest()
    assert other.load() == lead.engine.load()
    incomplete = [session_pb2.StepLog.FromString(it.SerializeToString()) for it in lead.log.entries]
    for entry in incomplete:
        entry.engine_policy = ""
    with pytest.raises(RanksDisagree):
        follow(engine(LIMITS, MODEL), incomplete)


def test_rank_with_differing_plan_ends_at_next_entry() -> None:
    with Lead() as lead:
        work(lead)
        lead.until_ended(1)
    other = engine(limits(num_blocks=6, max_num_seqs=2), MODEL)
    with pytest.raises(RanksDisagree, match="step 1"):
        follow(other, lead.log.entries)


def test_held_slots_are_followed_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lead = Lead()
    turns = count()
    monkeypatch.setattr(
        lead.engine, "unready_slots", lambda: frozenset({0, 2} if next(turns) % 3 else ())
    )
    with lead:
        work(lead)
        collected = lead.until_ended(1, 2, 4, 5, 6, 7)
    assert any(entry.held_slots for entry in lead.log.entries)
    for epoch in (1, 2, 4, 5, 6, 7):
        tokens = expected_tokens(prompt(30 + epoch, epoch), 60, MODEL)
        assert collected.tokens[SequenceKey(epoch, 0)] == tokens
    follow(engine(LIMITS, MODEL), lead.log.entries)


def test_drain_returns_everything_on_every_rank() -> None:
    with Lead() as lead:
        lead.inbox.start(sequence(LIMITS, 1, prompt(30), max_tokens=3000))
        lead.inbox.start(sequence(LIMITS, 2, prompt(30), max_tokens=3000, output=[1, 2]))
        lead.inbox.drain()
        collected = lead.until_ended(1, 2)
        assert {*collected.stops.values()} == {Stop.RETURNED}
        assert collected.tokens == {SequenceKey(1, 0): [], SequenceKey(2, 0): []}
    other = engine(LIMITS, MODEL)
    follow(other, lead.log.entries)
    assert not other.has_work and not lead.engine.has_work


def test_drain_does_not_return_aborted_sequences() -> None:
    with Lead() as lead:
        for epoch in (1, 2):
            lead.inbox.start(sequence(LIMITS, epoch, prompt(30), max_tokens=3000))
        lead.inbox.abort(Abort(1))
        lead.inbox.drain()
        assert {*lead.until_ended(2).stops} == {SequenceKey(2, 0)}


class IdleInbox(Inbox):
    """Inbox that is empty while the loop limits the wait, and then returns the stop order."""

    def wait(self, timeout_s: float | None) -> Orders:
        return Orders(stop=timeout_s is None)


@pytest.mark.parametrize("checks_integrity", [False, True])
def test_idle_loop_checks_integrity_only_if_configured(
    checks_integrity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, checks = engine(LIMITS, MODEL), list[None]()
    monkeypatch.setattr(this, "check_integrity", lambda: checks.append(None))
    LeadingLoop(this, IdleInbox(), print, None, checks_integrity=checks_integrity).run()
    assert len(checks) == checks_integrity


def test_idle_loop_uses_no_cpu_time() -> None:
    with Lead() as lead:
        lead.inbox.start(sequence(LIMITS, 1, prompt(3), max_tokens=2))
        lead.until_ended(1)
        reports, used = len(lead.reports), time.process_time()
        threading.Event().wait(0.3)
        assert len(lead.reports) == reports
        assert time.process_time() - used < 0.1


def kill(rank: int) -> chaos_pb2.Fault:
    return chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_KILL, rank=rank)


def test_fault_reaches_its_rank_beside_other_orders() -> None:
    with Lead() as lead:
        lead.inbox.inject(kill(2))
        lead.inbox.inject(kill(1))
        lead.inbox.inject(kill(2))
        lead.inbox.start(sequence(LIMITS, 1, prompt(3), max_tokens=3))
        lead.until_ended(1)
    struck: dict[int, list[int]] = {1: [], 2: []}
    for rank, faults in struck.items():
        follow(
            engine(LIMITS, MODEL), lead.log.entries, rank, lambda f, to=faults: to.append(f.rank)
        )
    assert struck == {1: [1], 2: [2, 2]}


class Clock:
    """Clock that advances only during sleeps, which it records."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def test_loop_counts_injected_slowness_as_busy() -> None:
    clock, reports = Clock(), list[Report]()
    model = FakeModel(step_time=0.25)
    bounds = limits(model=model)
    this = Engine(FakeRunner(bounds.num_blocks, model, sleep=clock.sleep), bounds)
    loop = LeadingLoop(this, Inbox(), reports.append, None, clock.read, clock.sleep)
    loop.run_iteration(Orders(starts=[sequence(bounds, 1, prompt(3), max_tokens=9)]))
    slow = chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_SLOW, factor=4, seconds=1.0)
    loop.run_iteration(Orders(faults=[slow]))
    loop.run_iteration(Orders())
    assert clock.naps == [0.25, 0.25, 0.75, 0.25], "when that is over, it is as quick as before"
    assert [report.busy_s for report in reports] == [0.25, 1.25, 1.5]


class Announced:
    """Loop whose announcements are kept, each with the number of steps before it."""

    def __init__(self, **bounds: int) -> None:
        self.clock, self.reports = Clock(), list[Report]()
        self.began = self.clock.now
        self.announcements: list[tuple[int, FirstSteps]] = []
        self.limits = limits(model=FakeModel(step_time=0.04), **bounds)
        model = FakeModel(step_time=0.04)
        self.engine = Engine(
            FakeRunner(self.limits.num_blocks, model, sleep=self.clock.sleep), self.limits
        )
        self.loop = LeadingLoop(
            self.engine,
            Inbox(),
            self.reports.append,
            None,
            self.clock.read,
            self.clock.sleep,
            lambda first: self.announcements.append((len(self.clock.naps), first)),
        )

    def turns(self, count: int, *starts: Sequence) -> None:
        for turn in range(count):
            self.loop.run_iteration(Orders(starts=[*starts] if not turn else []))


def test_loop_announces_first_step_before_running_it() -> None:
    this = Announced()
    first, second = (sequence(this.limits, epoch, prompt(3), max_tokens=9) for epoch in (1, 2))
    second.confirms_first_step = True
    this.turns(2, first)
    this.turns(2, second)
    (steps_before, announced), (later, confirmed) = this.announcements
    assert (steps_before, announced.to_confirm) == (0, frozenset())
    assert [outcome.update.waited_s for outcome in announced.outcomes] == [
        this.began - first.arrived_at
    ]
    assert (later, confirmed.to_confirm) == (2, {SequenceKey(2, 0)})


def test_loop_does_not_announce_waiting_sequence() -> None:
    this = Announced(max_num_seqs=1)
    starts = [sequence(this.limits, epoch, prompt(3), max_tokens=9) for epoch in (1, 2)]
    this.turns(9, *starts)
    assert [outcome.key.epoch for _, it in this.announcements for outcome in it.outcomes] == [1]
    this.turns(1)
    assert [outcome.key.epoch for _, it in this.announcements for outcome in it.outcomes] == [1, 2]


def test_loop_does_not_announce_resumed_sequence_again() -> None:
    this = Announced()
    only = sequence(this.limits, 1, prompt(3), max_tokens=9)
    this.turns(2, only)
    this.engine.preempt(only)
    this.turns(2)
    assert len(this.announcements) == 1


def test_prefill_progress_is_reported_in_intervals() -> None:
    this = Announced(max_num_batched_tokens=16, num_blocks=64)
    this.turns(12, sequence(this.limits, 1, prompt(160), max_tokens=9))
    progress = [(round(0.04 * n, 2), it.prefilling) for n, it in enumerate(this.reports, 1)]
    seen = [(at, each.prefilled_tokens) for at, them in progress for each in them]
    assert seen == [(0.04, 16), (0.16, 64), (0.28, 112), (0.4, 160)][:3]


def test_follower_raises_step_log_error() -> None:
    def broken() -> Iterator[session_pb2.StepLog]:
        raise ConnectionError("gone")
        yield

    with pytest.raises(ConnectionError, match="gone"):
        follow(engine(LIMITS), broken())
