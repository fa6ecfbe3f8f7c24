"""Recovery from steps that run out of memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from everlift.errors import EngineFailed
from tests.support.worker.scheduler_bench import TOKEN, Bench
from tests.support.worker.worker_support import Collected, limits, prompt, run, sequence
from worker.config import FakeModel, Speculation
from worker.engine.engine import Engine, EngineBroken
from worker.engine.limits import TokenBudget
from worker.engine.outcome import Outcome, Residence, SequenceKey, SequenceUpdate, Stop
from worker.engine.plan import LaunchedStep, Plan, RowResult
from worker.engine.sequence import NO_SLOT, Sequence
from worker.runner.fake_runner import FakeRunner, FakeStep, expected_tokens

ERROR = EngineFailed("out of memory")


def decoding(count: int, **fields: int) -> tuple[Bench, list[Sequence]]:
    """Return ``count`` decoding sequences, with prompts of 8, 9, ... tokens."""
    bounds = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 200} | fields
    bench = Bench(limits(**bounds))
    sequences = [bench.add(i, 7 + i, first=100 * i) for i in range(1, count + 1)]
    bench.step()
    return bench, sequences


def shed(bench: Bench) -> list[Outcome]:
    """Let the next step run out of memory; return the outcomes."""
    outcomes = bench.scheduler.retract(bench.plan(), ERROR)
    bench.scheduler.check_integrity()
    return outcomes


def test_least_computed_half_of_decodes_is_preempted() -> None:
    bench, sequences = decoding(5)
    update = SequenceUpdate(Residence.PREEMPTED, preemptions=1)
    assert shed(bench) == [
        Outcome(SequenceKey(epoch, 0), 1, num_computed=7 + epoch, update=update)
        for epoch in (1, 2, 3)
    ]
    assert [s.slot for s in sequences] == [NO_SLOT, NO_SLOT, NO_SLOT, 3, 4]
    assert [s.num_computed for s in sequences] == [0, 0, 0, 11, 12], "as before the step"


def test_memory_shortage_preempts_largest_share_first() -> None:
    bench, sequences = decoding(4, max_num_batched_tokens=40)
    chunked = bench.add(9, 100, first=800)
    bench.step()
    shed(bench)
    assert (chunked.slot, chunked.num_computed_before) == (NO_SLOT, 36)
    assert NO_SLOT not in [s.slot for s in sequences]


def test_memory_shortage_preempts_lower_priority_of_equals() -> None:
    bench, sequences = decoding(2)
    sequences[1].priority = -1
    shed(bench)
    assert [s.slot for s in sequences] == [0, NO_SLOT]


def test_token_budget_shrinks_then_recovers_slowly() -> None:
    bench, _ = decoding(4, max_num_batched_tokens=40)
    bench.add(9, 100, first=800)
    shed(bench)
    assert [sum(tokens for *_, tokens in bench.step()) for _ in range(3)] == [20, 21, 22]


def test_token_budget_recovers_fully_in_about_512_steps() -> None:
    budget = TokenBudget(8192)
    budget.shrink(2)
    assert budget.tokens == 1
    steps = 0
    while budget.tokens < 8192:
        budget.recover()
        steps += 1
    assert 450 < steps <= 512


def test_retracted_step_frees_uncomputed_shared_blocks() -> None:
    """The second prompt counts blocks as hits that the same step computes for the first one."""
    bench = Bench(limits(max_num_batched_tokens=200))
    first, second = bench.add(1, 70), bench.add(2, 70)
    plan = bench.plan()
    assert second.num_computed == 64
    bench.scheduler.retract(plan, ERROR)
    bench.scheduler.check_integrity()
    assert bench.scheduler.load().blocks_used == 0
    assert (first.num_computed_before, second.num_computed_before) == (0, 0)
    assert bench.step() == [(0, 0, 38)], "half of 70 and 6"


def test_memory_shortage_shrinks_single_row() -> None:
    bench = Bench(limits(max_num_batched_tokens=40))
    bench.add(1, 100)
    bench.step()
    assert shed(bench) == []
    assert bench.step() == [(0, 40, 20)]


def test_memory_shortage_of_single_token_ends_sequence() -> None:
    bench, _ = decoding(1)
    assert shed(bench) == [
        Outcome(SequenceKey(1, 0), 1, stop=Stop.FAILED, error=ERROR, num_computed=8)
    ]
    bench.add(2, 1, first=500)
    bench.scheduler.commit(plan := bench.plan(), [RowResult((TOKEN,))])
    assert [row.slot for row in plan.rows] == [0], "others go on"


def test_retracted_step_blocks_are_not_prefix_hits() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=100))
    first = bench.add(1, 130)
    bench.step()
    shed(bench)
    bench.scheduler.remove(first)
    second = bench.add(2, 130)
    bench.step()
    assert second.num_hits == 3, "of the 100 tokens that were computed before"


def test_retracted_sequence_is_readmitted_to_runner_once() -> None:
    bench, sequences = decoding(2)
    shed(bench)
    plan = bench.plan()
    assert [(a.slot, a.tokens) for a in plan.admissions] == [(1, tuple(sequences[1].tokens))]
    bench.commit(plan)
    assert [a.slot for a in bench.plan().admissions] == [0], "the other one comes back"


def test_remaining_row_of_retracted_step_continues() -> None:
    """The step was launched ahead, and one of its two sequences has ended."""
    bench, sequences = decoding(2)
    plan = bench.plan()
    bench.scheduler.remove(sequences[0])
    left = replace(plan, rows=plan.rows.select(np.array([False, True])))
    assert bench.scheduler.retract(left, ERROR) == []
    bench.scheduler.check_integrity()
    assert bench.step() == [(1, 9, 1)]


def test_retracted_step_without_rows_halves_next_step() -> None:
    bench, sequences = decoding(4, max_num_batched_tokens=40)
    plan = bench.plan()
    for each in sequences:
        bench.scheduler.remove(each)
    left = replace(plan, rows=plan.rows.select(np.zeros(4, np.bool_)))
    assert bench.scheduler.retract(left, ERROR) == []
    bench.add(9, 100, first=800)
    assert bench.step() == [(0, 0, 2)]


class SamplingFails(FakeRunner):
    """Runner whose steps run out of memory in the sampling, not in the launch."""

    def __init__(self, num_blocks: int, model: FakeModel, steps: Collection[int]) -> None:
        super().__init__(num_blocks, replace(model, runs_ahead=True))
        self._short = frozenset(steps)

    def _launch(self, plan: Plan) -> LaunchedStep:
        launched = super()._launch(plan)
        if plan.step not in self._short:
            return launched
        return FakeStep(lambda: self._fall_short(plan), lambda: None)

    def _fall_short(self, plan: Plan) -> list[RowResult]:
        # The launch has already made the copies of the step.
        self._spoil(replace(plan, saves=()))
        raise MemoryError


EXECUTED, LAUNCHED, DRAWN = "executed", "launched ahead", "drawn in a step that was launched ahead"
WAYS = [EXECUTED, LAUNCHED, DRAWN]


def short(*steps: int, way: str = EXECUTED, model: FakeModel | None = None) -> Engine:
    """Return an engine whose steps with these numbers run out of memory."""
    bounds = limits(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=200)
    model, faults = model or FakeModel(), dict.fromkeys(steps, MemoryError())
    runner = FakeRunner(
        bounds.num_blocks, replace(model, runs_ahead=way == LAUNCHED), faults=faults
    )
    if way == DRAWN:
        runner = SamplingFails(bounds.num_blocks, model, steps)
    return Engine(runner, bounds, launch=runner.launch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [(1,), (2,), (7,), (7, 8), (1, 2, 3, 40, 60, 61)])
def test_memory_shortage_at_any_step_changes_no_tokens(steps: tuple[int, ...], way: str) -> None:
    this = short(*steps, way=way)
    for epoch in range(1, 7):
        this.add(sequence(this.limits, epoch, prompt(30 + epoch, epoch), max_tokens=40))
    collected = run(this)
    for epoch in range(1, 7):
        tokens = collected.tokens[SequenceKey(epoch, 0)]
        assert tokens == expected_tokens(prompt(30 + epoch, epoch), 40)
    assert {*collected.stops.values()} == {Stop.LENGTH}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", range(2, 10))
def test_memory_shortage_with_ended_sequence_changes_no_tokens(step: int, way: str) -> None:
    model = FakeModel(eos_one_in=8)
    this = short(step, way=way, model=model)
    stops = [model.eos_token_id]
    for epoch in range(1, 7):
        tokens = prompt(30 + epoch, epoch)
        this.add(sequence(this.limits, epoch, tokens, max_tokens=40, stop_token_ids=stops))
    collected = run(this)
    for epoch in range(1, 7):
        expected = expected_tokens(prompt(30 + epoch, epoch), 40, model, stop_token_ids=stops)
        assert collected.tokens[SequenceKey(epoch, 0)] == expected
    assert Stop.FAILED not in collected.stops.values()


@pytest.mark.parametrize("way", WAYS)
def test_lasting_memory_shortage_ends_sequences_in_turn(way: str) -> None:
    this = short(*range(1, 200), way=way)
    for epoch in (1, 2, 3):
        this.add(sequence(this.limits, epoch, prompt(50, epoch), max_tokens=4))
    collected = run(this, max_steps=60)
    assert {*collected.errors.values()} == {"out of memory"}
    assert len(collected.stops) == 3


def test_engine_breaks_on_rank_local_memory_error() -> None:
    bounds = limits()
    runner = FakeRunner(bounds.num_blocks, FakeModel(), faults={1: MemoryError()})
    this = Engine(runner, bounds, survivable=(EngineFailed,))
    this.add(sequence(bounds, 1, prompt(3)))
    with pytest.raises(EngineBroken, match="MemoryError"):
        this.step()


def test_preemption_frees_the_runner_slot_at_once() -> None:
    released: list[int] = []

    class Noting(FakeRunner):
        def release(self, slots: Collection[int]) -> None:
            released.extend(slots)
            super().release(slots)

        def execute(self, plan: Plan) -> list[RowResult]:
            assert not {admission.slot for admission in plan.admissions} & {*released}
            return super().execute(plan)

    bounds = limits(num_blocks=64, speculation=Speculation())
    this = Engine(Noting(64, FakeModel(), faults={2: MemoryError()}), bounds)
    for epoch in (1, 2):
        this.add(sequence(bounds, epoch, prompt(3, epoch), max_tokens=4))
    collected = Collected()
    collected.take(this.step())
    collected.take(this.step())
    assert released == [1], "who has computed as much as the other, and came later"
    released.clear()
    run(this, collected)
    assert sorted(released) == [0, 1], "the end of both"
