"""Time breakdowns of sequences at a worker, in steps of virtual time."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from everlift.sampling import SamplingParams
from tests.support.worker.worker_support import BY_ARRIVAL, limits, prompt, sequence
from worker.config import FakeModel, Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.sequence import Sequence
from worker.engine.time_breakdown import TimeBreakdown
from worker.engine.time_breakdowns import SequenceBreakdown
from worker.runner.fake_runner import FakeRunner
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import LeadingLoop, Report

#: A step takes 16 ms, and 1 ms per token; the output is repetitive enough for drafts.
MODEL = FakeModel(step_time=16e-3, token_time=1e-3, surprise_one_in=5)
LIMITS = limits(
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    model=MODEL,
    scheduling=BY_ARRIVAL,
)


class Worker:
    """Loop of rank 0 in virtual time, which steps advance.

    With ``ahead``, time passes during the wait for the results.
    """

    def __init__(self, bounds: Limits = LIMITS, ahead: bool = False) -> None:
        self.now = 100.0
        self.limits = bounds
        self.reports: list[Report] = []
        model = replace(MODEL, runs_ahead=ahead)
        runner = FakeRunner(bounds.num_blocks, model, sleep=self.sleep)
        self.engine = Engine(runner, bounds, launch=runner.launch)
        self.loop = LeadingLoop(
            self.engine, Inbox(), self.reports.append, None, self.clock, self.sleep
        )

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def sequence(self, epoch: int, length: int, max_tokens: int = 1000, **fields: Any) -> Sequence:
        tokens = prompt(length, 10 * epoch)
        this = sequence(self.limits, epoch, tokens, max_tokens=max_tokens, **fields)
        this.arrived_at = self.now
        return this

    def turn(self, *starts: Sequence, aborts: Several[int] = (), drain: bool = False) -> Report:
        self.loop.run_iteration(Orders([*starts], [Abort(epoch) for epoch in aborts], drain=drain))
        self.engine.check_integrity()
        return self.reports[-1]

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def learn(self) -> None:
        """Train the model of step times with batches of one to four, and their prompts."""
        for epoch in range(1001, 1005):
            self.turn(self.sequence(epoch, 40))
            self.turns(60)
        self.turn(aborts=range(1001, 1005))

    def breakdown(self, this: Sequence) -> TimeBreakdown:
        return self.loop._breakdowns.breakdown_of(this, self.now).breakdown


def by_epoch(report: Report) -> dict[int, SequenceBreakdown]:
    return {it.key.epoch: it for it in report.breakdowns}


def milliseconds(breakdown: TimeBreakdown) -> dict[str, float]:
    """Return the parts that are not 0, by name."""
    seconds = zip(TimeBreakdown._fields[1:10], breakdown.parts, strict=False)
    return {name[:-2]: round(1e3 * it, 3) for name, it in seconds if round(1e3 * it, 3)}


def between(one: TimeBreakdown, other: TimeBreakdown) -> TimeBreakdown:
    return TimeBreakdown(*(b - a for a, b in zip(one, other, strict=True)))


def test_breakdown_of_lone_sequence_has_no_interference() -> None:
    worker = Worker()
    this = worker.sequence(1, 20, max_tokens=3)
    worker.sleep(0.5)
    worker.turn(this)
    worker.sleep(0.25)
    worker.turn()
    end = by_epoch(worker.turn())[1]
    assert milliseconds(end.breakdown) == {
        "waiting": 500.0,
        "prefill": 36.0,
        "decode": 34.0,
        "between_steps": 250.0,
    }
    assert (end.breakdown.steps, end.breakdown.most_neighbours) == (3, 0)
    assert end.breakdown.until == worker.now


def test_breakdown_splits_step_by_tokens_before_fit() -> None:
    worker = Worker()
    one = worker.sequence(1, 20)
    worker.turn(one)
    before, other = worker.breakdown(one), worker.sequence(2, 49)
    worker.turn(other)
    assert milliseconds(between(before, worker.breakdown(one))) == {
        "decode": 1.32,
        "prefill_interference": 64.68,
    }
    assert milliseconds(worker.breakdown(other)) == {"prefill": 64.68, "decode_interference": 1.32}
    assert worker.breakdown(other).most_neighbours == 1


def test_breakdown_of_concurrent_prompts_has_interference() -> None:
    worker = Worker()
    one, other = worker.sequence(1, 16), worker.sequence(2, 48)
    worker.turn(one, other)
    assert milliseconds(worker.breakdown(one)) == {"prefill": 20.0, "prefill_interference": 60.0}
    assert milliseconds(worker.breakdown(other)) == {"prefill": 60.0, "prefill_interference": 20.0}


def test_breakdown_of_decode_has_interference_of_new_prompt() -> None:
    worker = Worker()
    worker.learn()
    one = worker.sequence(1, 20)
    worker.turn(one)
    before = worker.breakdown(one)
    other = worker.sequence(2, 32)
    worker.turn(other)
    parts = between(before, worker.breakdown(one))
    assert parts.decode_s == pytest.approx(17e-3, rel=0.02)
    assert parts.prefill_interference_s == pytest.approx(32e-3, rel=0.02)
    parts = worker.breakdown(other)
    assert parts.prefill_s == pytest.approx(32e-3, rel=0.02)
    assert parts.decode_interference_s == pytest.approx(17e-3, rel=0.02)


def test_breakdown_decode_interference_is_excess_over_alone() -> None:
    worker = Worker()
    worker.learn()
    these = [worker.sequence(epoch, 8) for epoch in range(1, 5)]
    worker.turn(*these)
    before = [worker.breakdown(it) for it in these]
    worker.turns(10)
    for this, then in zip(these, before, strict=True):
        parts = between(then, worker.breakdown(this))
        assert parts.decode_s == pytest.approx(10 * 17e-3, rel=0.03)
        assert parts.decode_interference_s == pytest.approx(10 * 3e-3, rel=0.15)
        assert parts.seconds == pytest.approx(0.2)
        assert worker.breakdown(this).most_neighbours == 3


def test_breakdown_counts_own_drafts_as_decode() -> None:
    bounds = limits(
        num_blocks=64, max_num_seqs=2, speculation=Speculation(num_draft_tokens=3), model=MODEL
    )
    worker = Worker(bounds)
    worker.learn()
    this = worker.sequence(1, 20, max_tokens=200)
    worker.turn(this)
    before = worker.breakdown(this)
    worker.turns(20)
    assert worker.engine.load().counters.draft_tokens
    parts = between(before, worker.breakdown(this))
    assert milliseconds(parts).keys() == {"decode"}
    assert parts.steps == 20


def preempting() -> tuple[Worker, Sequence, Sequence]:
    """Return a worker with a sequence that continues, and one that is preempted for it."""
    bounds = limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=200, model=MODEL)
    worker = Worker(bounds)
    long, short = worker.sequence(1, 60, max_tokens=9), worker.sequence(2, 40)
    worker.turn(long, short)
    return worker, long, short


def test_breakdown_of_preempted_has_wait_and_recompute() -> None:
    worker, long, short = preempting()
    while not short.is_preempted:
        before, began = worker.breakdown(short), worker.now
        report = worker.turn()
    step_s = worker.now - began
    breakdown = by_epoch(report)[2].breakdown
    assert milliseconds(between(before, breakdown)) == {"preempted": round(1e3 * step_s, 3)}
    worker.sleep(0.5)
    while long.slot >= 0:
        report = worker.turn()
    assert 2 not in by_epoch(report), "it has reported everything"
    waited_s = worker.breakdown(short).preempted_s
    assert waited_s == pytest.approx(worker.now - began)
    worker.turn()
    parts = between(breakdown, worker.breakdown(short))
    recomputed = worker.engine.load().counters.recomputed_tokens
    assert recomputed and parts.recompute_s > 0
    assert parts.preempted_s == pytest.approx(waited_s - step_s)


def test_breakdown_of_unready_sequence_is_not_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    one, other = worker.sequence(1, 10), worker.sequence(2, 10)
    worker.turn(one, other)
    before = worker.breakdown(other)
    monkeypatch.setattr(worker.engine, "unready_slots", lambda: frozenset({other.slot}))
    worker.turn()
    parts = between(before, worker.breakdown(other))
    assert milliseconds(parts) == {"not_scheduled": 17.0}
    assert parts.steps == 0
    before = worker.breakdown(other)
    worker.turn(worker.sequence(3, 10))
    parts = between(before, worker.breakdown(other))
    assert milliseconds(parts) == {"not_scheduled": 27.0}, "prompts make no difference to it"


def test_drain_reports_breakdown_of_each_sequence() -> None:
    worker = Worker()
    one = worker.sequence(1, 10)
    worker.turn(one)
    worker.sleep(0.25)
    late = worker.sequence(2, 10)
    worker.sleep(0.5)
    report = worker.turn(late, drain=True)
    assert {o.stop for o in report.outcomes} == {Stop.RETURNED}
    breakdowns = {epoch: milliseconds(it.breakdown) for epoch, it in by_epoch(report).items()}
    assert breakdowns == {1: {"prefill": 26.0, "between_steps": 750.0}, 2: {"waiting": 500.0}}


def test_breakdowns_are_reported_every_5_s() -> None:
    worker = Worker(replace(LIMITS, num_blocks=256))
    these = [worker.sequence(epoch, 5) for epoch in range(1, 6)]
    worker.turn(*these)
    times: dict[SequenceKey, list[float]] = {it.key: [worker.now] for it in these}
    while worker.now < 118.0:
        for it in worker.turn().breakdowns:
            assert it.breakdown.until == worker.now
            times[it.key].append(worker.now)
    for series in times.values():
        gaps = [b - a for a, b in pairwise(series)]
        assert max(gaps) <= 5.1 and min(gaps[1:]) > 4.9


@pytest.mark.parametrize("ahead", [False, True])
def test_breakdown_is_reported_after_prefill(ahead: bool) -> None:
    worker = Worker(ahead=ahead)
    worker.turn(worker.sequence(9, 5))
    worker.turns(2)
    reports = [worker.turn(worker.sequence(1, 100), worker.sequence(2, 20))]
    reports += [worker.turn() for _ in range(4)]
    assert [[*by_epoch(it)] for it in reports[ahead:]][:3] == [[], [1, 2], []]


def test_breakdown_of_cached_sequence_is_reported_at_first_step() -> None:
    worker = Worker()
    before = worker.sequence(1, 64, max_tokens=40)
    worker.turn(before)
    while worker.engine.has_work:
        worker.turn()
    prompt, output = before.tokens[:64], before.tokens[64:97]
    moved = sequence(LIMITS, 2, prompt, output=output, max_tokens=40, num_computed=96)
    moved.arrived_at = worker.now
    assert milliseconds(by_epoch(worker.turn(moved))[2].breakdown) == {"decode": 17.0}


@pytest.mark.parametrize("ahead", [False, True])
def test_decoding_breakdown_is_reported_every_step(ahead: bool) -> None:
    worker = Worker(ahead=ahead)
    worker.learn()
    these = [worker.sequence(epoch, 8) for epoch in range(1, 5)]
    worker.turn(*these)
    worker.turn()
    breakdowns = [worker.breakdown(it) for it in these]
    before = worker.reports[-1].decoding
    worker.turns(3)
    worker.turn(worker.sequence(5, 32))
    worker.turns(2)
    worker.sleep(0.25)
    worker.turn()
    passed = between(before, worker.reports[-1].decoding)
    assert passed.seconds == pytest.approx(passed.until)
    of_these = [
        between(then, worker.breakdown(it)) for it, then in zip(these, breakdowns, strict=True)
    ]
    for parts in of_these:
        assert parts[:9] == pytest.approx(passed[:9], rel=0.01)


def test_breakdown_is_reset_when_slot_is_reused() -> None:
    worker = Worker()
    worker.turn(worker.sequence(1, 10), worker.sequence(2, 10))
    worker.turns(5)
    worker.turn(aborts=[1, 2])
    worker.sleep(3.0)
    this = worker.sequence(3, 10, max_tokens=2)
    worker.turn(this)
    breakdown = by_epoch(worker.turn())[3].breakdown
    assert milliseconds(breakdown) == {"prefill": 26.0, "decode": 17.0}
    assert (breakdown.steps, breakdown.most_neighbours) == (2, 0)


def test_breakdown_charges_failed_step_to_its_sequences() -> None:
    worker = Worker()
    worker.engine._runner._faults = {2: RuntimeError("broken")}  # type: ignore[attr-defined]
    worker.turn(worker.sequence(1, 10))
    report = worker.turn()
    assert [o.stop for o in report.outcomes] == [Stop.FAILED]
    assert milliseconds(by_epoch(report)[1].breakdown) == {"prefill": 26.0, "decode": 17.0}


def test_breakdown_counts_moved_tokens_as_recompute() -> None:
    worker = Worker()
    tokens = worker.sequence(1, 20)
    moved = sequence(LIMITS, 2, tokens.tokens, output=range(1, 13), max_tokens=50, num_computed=31)
    moved.arrived_at = worker.now
    worker.turn(moved)
    parts = worker.breakdown(moved)
    assert parts.recompute_s == pytest.approx(48e-3 * 31 / 32)
    assert parts.prefill_s == pytest.approx(48e-3 / 32), "and its last token for the first time"


def test_breakdown_counts_earlier_output_as_prefill() -> None:
    worker = Worker()
    moved = worker.sequence(1, 20, output=[5] * 80)
    worker.turn(moved)
    worker.turn()
    assert milliseconds(worker.breakdown(moved)) == {"prefill": 80.0 + 52.0}
    worker.turn()
    assert milliseconds(worker.breakdown(moved)) == {"prefill": 80.0 + 52.0, "decode": 17.0}


# launched ahead


def test_breakdown_charges_ahead_step_when_computed() -> None:
    worker = Worker(ahead=True)
    this = worker.sequence(1, 20, max_tokens=3)
    worker.sleep(0.5)
    worker.turn(this)
    assert milliseconds(worker.breakdown(this)) == {"waiting": 500.0}
    worker.turn()
    assert milliseconds(worker.breakdown(this)) == {"waiting": 500.0, "prefill": 36.0}
    worker.turn()
    end = by_epoch(worker.turn())[1]
    assert milliseconds(end.breakdown) == {"waiting": 500.0, "prefill": 36.0, "decode": 34.0}
    assert (end.breakdown.steps, end.breakdown.most_neighbours) == (3, 0)
    assert end.breakdown.until == worker.now


def test_breakdown_has_no_gap_while_step_is_in_flight() -> None:
    worker = Worker(ahead=True)
    this = worker.sequence(1, 20, max_tokens=2)
    worker.turn(this)
    worker.sleep(0.25)
    worker.turn()
    end = by_epoch(worker.turn())[1]
    assert milliseconds(end.breakdown) == {"prefill": 286.0, "decode": 17.0}
    worker.sleep(1.0)
    other = worker.sequence(2, 20, max_tokens=1)
    worker.turn(other)
    assert milliseconds(by_epoch(worker.turn())[2].breakdown) == {"prefill": 36.0}


def test_breakdown_of_ahead_step_has_the_wait() -> None:
    worker = Worker(ahead=True)
    one = worker.sequence(1, 20)
    worker.turn(one)
    worker.turn()
    before, other = worker.breakdown(one), worker.sequence(2, 49)
    worker.turn(other)
    assert milliseconds(between(before, worker.breakdown(one))) == {"decode": 17.0}
    assert milliseconds(worker.breakdown(other)) == {"waiting": 17.0}
    before = worker.breakdown(one)
    worker.turn()
    assert milliseconds(between(before, worker.breakdown(one))) == {
        "decode": 1.32,
        "prefill_interference": 64.68,
    }
    parts = {"waiting": 17.0, "prefill": 64.68, "decode_interference": 1.32}
    assert milliseconds(worker.breakdown(other)) == parts


def test_breakdown_of_aborted_neighbour_has_step_in_flight() -> None:
    worker = Worker(limits(max_num_seqs=2, model=MODEL), ahead=True)
    one, other = worker.sequence(1, 16), worker.sequence(2, 16)
    worker.turn(one, other)
    worker.turn(aborts=[2])
    assert milliseconds(worker.breakdown(one)) == {"prefill": 24.0, "prefill_interference": 24.0}
    third = worker.sequence(3, 16)
    worker.turn(third)
    worker.turn()
    assert worker.breakdown(one).most_neighbours == 1
    assert milliseconds(worker.breakdown(third)).keys() == {
        "waiting",
        "prefill",
        "decode_interference",
    }


def test_breakdown_separates_back_to_back_steps() -> None:
    worker = Worker(ahead=True)
    one = worker.sequence(1, 20)
    worker.turn(one)
    worker.turn()
    before = worker.breakdown(one)
    scored = worker.sequence(2, 49, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))
    worker.turn(scored)
    parts = {"decode": 18.32, "prefill_interference": 64.68}
    assert milliseconds(between(before, worker.breakdown(one))) == parts
    parts = {"waiting": 17.0, "prefill": 64.68, "decode_interference": 1.32}
    assert milliseconds(worker.breakdown(scored)) == parts
