"""Steps that are launched before the previous step is committed: order, departures, failures."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise

import pytest

from everlift.errors import EngineFailed
from tests.support.worker.worker_support import Collected, limits, prompt, run, sequence
from worker.config import FakeModel, Speculation
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey, Stop
from worker.engine.plan import NO_ROWS, UNKNOWN, LaunchedStep, Plan, RowResult
from worker.runner.fake_runner import FakeRunner, expected_tokens
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import LeadingLoop, Report

KEY = SequenceKey(1, 0)


class RecordingRunner(FakeRunner):
    """Runner that records its calls by step.

    The first call for which ``breaks`` is true fails, and leaves garbage in the blocks.
    """

    def __init__(self, bounds: Limits, model: FakeModel | None = None) -> None:
        model = replace(model or FakeModel(), runs_ahead=True)
        super().__init__(bounds.num_blocks, model, bounds.num_host_blocks)
        self.asked: list[tuple[str, int]] = []
        self.plans: list[Plan] = []
        self.breaks: Callable[[str, Plan], bool] = lambda what, plan: False
        #: Steps whose rows all fail.
        self.fails: Collection[int] = ()
        #: Step whose call failed, or 0.
        self.broken = 0

    def ask(self, what: str, plan: Plan) -> None:
        """Record a call; if it breaks, raise MemoryError in a launch, otherwise RuntimeError."""
        self.asked.append((what, plan.step))
        if not self.broken and self.breaks(what, plan):
            self.broken = plan.step
            is_launch = what == "forward"
            self._spoil(plan if is_launch else replace(plan, rows=NO_ROWS))
            raise MemoryError if is_launch else RuntimeError

    def _launch(self, plan: Plan) -> LaunchedStep:
        self.plans.append(plan)
        self.ask("forward", plan)
        return RecordingStep(self, plan, super()._launch(plan))


class RecordingStep:
    def __init__(self, runner: RecordingRunner, plan: Plan, launched: LaunchedStep) -> None:
        self._runner, self._plan, self._launched = runner, plan, launched

    def sample(self) -> None:
        self._runner.ask("sample", self._plan)
        self._launched.sample()

    def results(self) -> list[RowResult]:
        self._runner.ask("results", self._plan)
        results = self._launched.results()
        if self._plan.step in self._runner.fails:
            return [RowResult(error=EngineFailed("no numbers"))] * len(results)
        return results


class Ahead:
    """Engine that launches steps ahead."""

    def __init__(self, bounds: Limits | None = None, model: FakeModel | None = None) -> None:
        self.bounds = bounds or limits()
        self.runner = RecordingRunner(self.bounds, model)
        self.engine = Engine(self.runner, self.bounds, launch=self.runner.launch)

    def add(self, epoch: int, length: int, **fields: object) -> None:
        self.engine.add(sequence(self.bounds, epoch, prompt(length, epoch), **fields))


def test_next_step_is_launched_before_the_last_results() -> None:
    this = Ahead()
    this.add(1, 3, max_tokens=3)
    collected = run(this.engine)
    assert collected.tokens[KEY] == expected_tokens(prompt(3, 1), 3)
    assert this.runner.asked == [
        *(("forward", 1), ("sample", 1)),
        *(("forward", 2), ("results", 1), ("sample", 2)),
        *(("forward", 3), ("results", 2), ("sample", 3)),
        ("results", 3),
    ]
    assert [plan.rows.tokens.tolist() for plan in this.runner.plans] == [
        prompt(3, 1),
        [UNKNOWN],
        [UNKNOWN],
    ]


def test_tokens_after_stop_token_are_discarded() -> None:
    model = FakeModel(eos_one_in=10)
    this = Ahead(model=model)
    for epoch in (1, 2, 3):
        stops = [model.eos_token_id]
        this.add(epoch, 40, max_tokens=100, stop_token_ids=stops)
    collected = run(this.engine)
    for epoch in (1, 2, 3):
        expected = expected_tokens(prompt(40, epoch), 100, model, stop_token_ids=stops)
        assert collected.tokens[SequenceKey(epoch, 0)] == expected
    assert Stop.EOS in collected.stops.values()
    assert this.engine.load().blocks_used == 0


def test_leaving_sequence_frees_slot_and_blocks_in_flight() -> None:
    this = Ahead(limits(num_blocks=4, max_num_seqs=1, watermark_blocks=0))
    this.add(1, 40, max_tokens=20)
    this.add(2, 70, max_tokens=20)
    collected = Collected()
    for _ in range(3):
        collected.take(this.engine.step())
    this.engine.abort(Abort(1))
    run(this.engine, collected)
    assert KEY not in collected.stops
    assert collected.tokens[SequenceKey(2, 0)] == expected_tokens(prompt(70, 2), 20)


def test_blocks_filled_by_decoding_are_prefix_hits() -> None:
    this = Ahead()
    this.add(1, 30, max_tokens=70)
    whole = [*prompt(30, 1), *expected_tokens(prompt(30, 1), 70)]
    run(this.engine)
    this.engine.add(sequence(this.bounds, 2, whole, max_tokens=2))
    before = this.engine.load().counters.prefix_hit_tokens
    run(this.engine)
    assert this.engine.load().counters.prefix_hit_tokens - before == 96


def left_before_its_row_failed(bounds: Limits | None = None) -> Ahead:
    """Return an engine with an aborted sequence of 70 tokens, whose row in step 2 will fail."""
    this = Ahead(bounds)
    this.runner.fails = [2]
    this.add(1, 70, max_tokens=20)
    for _ in range(2):
        this.engine.step()
    this.engine.abort(Abort(1))
    return this


def num_found(this: Ahead, epoch: int, tokens: list[int]) -> int:
    """Run another sequence with ``tokens``, and return its prefix-cache hits in tokens."""
    before = this.engine.load().counters.prefix_hit_tokens
    this.engine.add(sequence(this.bounds, epoch, tokens, max_tokens=2))
    run(this.engine)
    return this.engine.load().counters.prefix_hit_tokens - before


def test_failed_row_of_departed_sequence_leaves_no_hits() -> None:
    this = left_before_its_row_failed()
    this.engine.step()
    assert num_found(this, 2, prompt(70, 1)) == 0


def test_failed_row_leaves_no_hits_after_slot_reuse() -> None:
    this = left_before_its_row_failed(limits(num_blocks=16, max_num_seqs=1, watermark_blocks=0))
    assert num_found(this, 2, prompt(70, 2)) == 0
    assert num_found(this, 3, prompt(70, 1)) == 0


def test_reallocated_blocks_stay_valid_after_row_failure() -> None:
    this = left_before_its_row_failed(limits(num_blocks=3, max_num_seqs=1, watermark_blocks=0))
    assert num_found(this, 2, prompt(70, 2)) == 0
    assert num_found(this, 3, prompt(70, 2)) == 64


def test_preemption_with_pipelined_steps_changes_no_tokens() -> None:
    this = Ahead(limits(num_blocks=6, max_num_seqs=4))
    for epoch in range(1, 6):
        this.add(epoch, 30, max_tokens=90)
    collected = run(this.engine)
    for epoch in range(1, 6):
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(30, epoch), 90)
    assert this.engine.load().preemptions > 3


def test_drain_returns_tokens_drawn_so_far() -> None:
    this = Ahead()
    this.add(1, 3, max_tokens=50)
    reports: list[Report] = []
    loop = LeadingLoop(this.engine, Inbox(), reports.append, None)
    for _ in range(5):
        loop.run_iteration(Orders())
    loop.run_iteration(Orders(drain=True))
    collected = Collected()
    for report in reports:
        collected.take(report.outcomes)
    assert collected.stops == {KEY: Stop.RETURNED}
    assert collected.tokens[KEY] == expected_tokens(prompt(3, 1), 5)


#: Tokens of prompt and output by epoch.
LENGTHS = {epoch: (24 + 7 * epoch, 40 + 9 * epoch) for epoch in range(1, 7)}


class Swapping(Ahead):
    """Engine with too few blocks for six requests, and host memory for all preempted blocks."""

    def __init__(self) -> None:
        bounds = limits(num_blocks=7, max_num_seqs=4, watermark_blocks=0, num_host_blocks=20)
        super().__init__(bounds)
        for epoch, (length, max_tokens) in LENGTHS.items():
            self.add(epoch, length, max_tokens=max_tokens)

    def check(self, collected: Collected) -> None:
        """Check that unfailed sequences have all tokens, and that no token is wrong."""
        for epoch, (length, max_tokens) in LENGTHS.items():
            key = SequenceKey(epoch, 0)
            expected = expected_tokens(prompt(length, epoch), max_tokens)
            received = collected.tokens.get(key, [])
            assert received == expected[: len(received)]
            assert len(received) == max_tokens or collected.stops[key] is Stop.FAILED

    def in_flight(self, copies: str) -> list[int]:
        """Return the steps that made ``copies`` while the previous step was in flight."""
        asked = pairwise(self.runner.asked)
        behind = {step for (_, step), after in asked if after == ("results", step - 1)}
        return [p.step for p in self.runner.plans if getattr(p, copies) and p.step in behind]


def test_swap_copies_run_while_a_step_is_in_flight() -> None:
    this = Swapping()
    this.check(run(this.engine))
    assert this.in_flight("saves") and this.in_flight("loads")


@pytest.mark.parametrize("copies", ["saves", "loads"])
def test_restart_after_a_failed_launch_has_its_own_blocks(copies: str) -> None:
    this = Swapping()
    this.runner.breaks = lambda what, plan: (
        what == "forward" and bool(getattr(plan, copies)) and this.engine.is_in_flight
    )
    collected = run(this.engine)
    this.check(collected)
    assert this.runner.broken in this.in_flight(copies)
    assert set(collected.stops.values()) == {Stop.LENGTH}


def test_failed_launch_returns_no_earlier_result() -> None:
    this = Swapping()
    this.runner.breaks = lambda what, plan: (
        what == "results" and this.engine.load().counters.blocks_swapped_out > 0
    )
    collected = run(this.engine)
    this.check(collected)
    assert {*collected.stops.values()} == {Stop.FAILED, Stop.LENGTH}
    saved: set[int] = set()
    for plan in this.runner.plans:
        if plan.step > this.runner.broken + 1:
            saved.update(copy.host_block for copy in plan.saves)
            assert saved.issuperset(copy.host_block for copy in plan.loads)
    assert saved


def test_drafts_are_not_planned_ahead() -> None:
    with pytest.raises(AssertionError, match="planned ahead"):
        Ahead(limits(speculation=Speculation(2)))
