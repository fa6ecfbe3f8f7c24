"""Scheduler with small limits: the rows of each step."""

from __future__ import annotations

from typing import NoReturn

import pytest

from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed
from tests.support.worker.scheduler_bench import TOKEN, Bench, result
from tests.support.worker.worker_support import (
    BY_ARRIVAL,
    limits,
    prompt,
    sequence,
    under_each_policy,
)
from worker.config import Scheduling
from worker.engine.limits import Limits
from worker.engine.load import Counters, Load, Occupant
from worker.engine.outcome import Outcome, SequenceKey, SequenceUpdate, Stop
from worker.engine.plan import NO_ROWS, Plan, RowResult
from worker.engine.sequence import NO_SLOT, Sequence


@under_each_policy
def test_empty_scheduler_plans_nothing(scheduling: Scheduling) -> None:
    bench = Bench(limits(scheduling=scheduling))
    assert bench.plan() == Plan(1, NO_ROWS)
    assert bench.plan() == Plan(2, NO_ROWS)


@under_each_policy
def test_prompt_is_prefilled_in_chunks_then_decoded(scheduling: Scheduling) -> None:
    bench = Bench(limits(max_num_batched_tokens=40, scheduling=scheduling))
    bench.add(1, 100)
    assert [bench.step() for _ in range(5)] == [
        [(0, 0, 40)],
        [(0, 40, 40)],
        [(0, 80, 20)],
        [(0, 100, 1)],
        [(0, 101, 1)],
    ]


def test_load_sums_computed_and_attended_tokens() -> None:
    bench = Bench(limits(max_num_batched_tokens=40))
    bench.add(1, 100)
    bench.steps(4)
    load = bench.scheduler.load()
    assert (load.step, load.counters.slot_steps, load.computed_tokens) == (4, 4, 101)
    assert load.kv_tokens == 40 + 80 + 100 + 101
    assert load.num_pairs == sum(range(1, 102))


def test_decodes_precede_prefills_within_budget() -> None:
    bench = Bench(limits(max_num_batched_tokens=10))
    bench.add(1, 5)
    bench.step()
    bench.add(2, 12)
    bench.add(3, 12)
    assert [bench.step() for _ in range(3)] == [
        [(0, 5, 1), (1, 0, 9)],
        [(0, 6, 1), (1, 9, 3), (2, 0, 6)],
        [(0, 7, 1), (1, 12, 1), (2, 6, 6)],
    ]


@under_each_policy
def test_step_admits_within_budget_and_slots(scheduling: Scheduling) -> None:
    bench = Bench(limits(max_num_seqs=2, max_num_batched_tokens=20, scheduling=scheduling))
    for epoch in (1, 2, 3):
        bench.add(epoch, 3)
    assert bench.step() == [(0, 0, 3), (1, 0, 3)]
    assert bench.scheduler.load().num_waiting == 1


def test_slot_is_stable_and_lowest_free_is_assigned() -> None:
    bench = Bench(limits(max_num_seqs=3))
    first, second = bench.add(1, 3), bench.add(2, 3)
    bench.step()
    bench.scheduler.remove(first)
    bench.add(3, 3)
    bench.step()
    assert (first.slot, second.slot) == (NO_SLOT, 1)
    assert bench.scheduler.occupants() == (Occupant(0, "request-3"), Occupant(1, "request-2"))


def test_occupant_is_prefilling_until_prompt_is_computed() -> None:
    bench = Bench(limits(max_num_batched_tokens=10))
    bench.add(1, 25)
    phases = []
    for _ in range(4):
        bench.step()
        [occupant] = bench.scheduler.occupants()
        phases.append(occupant.prefilling)
    assert phases == [True, True, False, False]


def test_admission_reserves_blocks_for_whole_prompt() -> None:
    bench = Bench(limits(num_blocks=5, max_num_batched_tokens=10, watermark_blocks=1))
    bench.add(1, 70)
    bench.step()
    bench.add(2, 40, first=500)
    assert bench.scheduler.load().blocks_used == 3
    bench.steps(7)
    assert bench.scheduler.load().num_waiting == 1, "two more would leave less than the watermark"


def by_arrival(**fields: int) -> Limits:
    """Return limits with which prompts are prefilled in order of arrival."""
    return limits(**fields, scheduling=BY_ARRIVAL)


def test_waiting_head_is_not_overtaken() -> None:
    bench = Bench(by_arrival(num_blocks=5))
    bench.add(1, 64)
    bench.step()
    bench.add(2, 120)
    bench.add(3, 3)
    bench.step()
    assert [o.request_id for o in bench.scheduler.occupants()] == ["request-1"]


def test_prefix_cache_shares_computed_prefix() -> None:
    bench = Bench(limits(num_blocks=16))
    first = bench.add(1, 64)
    bench.step()
    second = bench.add(2, 70)
    assert bench.step() == [(0, 64, 1), (1, 64, 6)]
    assert second.block_table[:2] == first.block_table[:2]
    assert bench.scheduler.load().blocks_used == 4


def test_fully_cached_prompt_recomputes_last_block() -> None:
    bench = Bench(limits(num_blocks=16))
    bench.scheduler.remove(bench.add(1, 64))
    bench.add(2, 64, max_tokens=1)
    bench.step()
    bench.add(3, 64, max_tokens=1)
    assert bench.step() == [(0, 32, 32)], "the second block holds the token that must be computed"


def test_prefix_cache_separates_salts() -> None:
    bench = Bench(limits(num_blocks=16))
    bench.add(1, 64)
    bench.step()
    bench.scheduler.add(sequence(bench.limits, 2, prompt(64), salt=b"other"))
    assert bench.step() == [(0, 64, 1), (1, 0, 63)]


def test_prefix_block_is_shared_in_step_that_computes_it() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=40))
    first = bench.add(1, 100)
    bench.step()
    second = bench.add(2, 100)
    assert bench.step() == [(0, 40, 40)]
    assert bench.step() == [(0, 80, 20), (1, 96, 4)]
    assert second.block_table[:3] == first.block_table[:3]


@under_each_policy
def test_choices_share_one_prompt_computation(scheduling: Scheduling) -> None:
    bench = Bench(
        limits(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=512, scheduling=scheduling)
    )
    for choice in range(8):
        bench.add(1, 70, choice=choice)
    assert bench.step() == [(0, 0, 70), *((slot, 64, 6) for slot in range(1, 8))]
    assert bench.scheduler.load().blocks_used == 2 + 8
    counters = bench.scheduler.load().counters
    assert (counters.prompt_tokens, counters.prefix_hit_tokens) == (8 * 70, 7 * 64)


def test_failed_step_blocks_are_not_prefix_hits() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=200))
    bench.add(1, 100)
    bench.steps(30)
    bench.add(2, 140)
    bench.scheduler.fail(bench.plan(), EngineFailed())
    bench.scheduler.check_integrity()
    bench.add(3, 140)
    assert bench.step() == [(0, 96, 44)], "block 3 was to be filled by the failed step"


def test_failed_row_blocks_are_not_prefix_hits() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=200))
    bench.add(1, 40, first=300)
    bench.step()
    bench.add(2, 70)
    plan, error = bench.plan(), EngineFailed("no number")
    outcomes = bench.scheduler.commit(plan, [result(plan.rows[0]), RowResult(error=error)])
    failed = Outcome(
        SequenceKey(2, 0), 0, (), Stop.FAILED, error, update=SequenceUpdate(waited_s=0.0)
    )
    assert outcomes[1] == failed
    bench.scheduler.check_integrity()
    bench.add(3, 70)
    assert bench.step() == [(0, 41, 1), (1, 0, 70)]


def fail_last_row(bench: Bench) -> None:
    """Run a step whose last row fails, and whose other rows sample TOKEN."""
    plan = bench.plan()
    *others, _ = plan.rows
    results = [*map(result, others), RowResult(error=EngineFailed("no number"))]
    bench.scheduler.commit(plan, results)
    bench.scheduler.check_integrity()


def test_failed_row_invalidates_earlier_blocks_of_sequence() -> None:
    """The cause of the NaN logits may be in the cache since the first chunk."""
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=70))
    bench.add(1, 130)
    bench.step()
    fail_last_row(bench)
    bench.add(2, 130)
    assert bench.step() == [(0, 0, 70)]


def test_failed_row_invalidates_unshared_cache_hits() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=200))
    neighbour = bench.add(1, 70)
    bench.step()
    bench.add(2, 70)
    fail_last_row(bench)
    bench.add(3, 70)
    assert bench.step() == [(0, 71, 1), (1, 64, 6)], "the neighbour is still well"
    bench.scheduler.remove(neighbour)
    fail_last_row(bench)
    bench.add(4, 70)
    assert bench.step() == [(0, 0, 70)]


def fill(bench: Bench, *lengths: int) -> list[Sequence]:
    """Return prefilled sequences without a common prefix."""
    sequences = [bench.add(i, n, first=100 * i) for i, n in enumerate(lengths, 1)]
    while any(s.num_output == 0 for s in sequences):
        bench.step()
    return sequences


def test_least_computed_sequence_is_preempted_and_hits_prefix() -> None:
    bench = Bench(by_arrival(num_blocks=6, watermark_blocks=0, max_num_batched_tokens=200))
    long, short, middle = fill(bench, 60, 33, 35)
    assert bench.scheduler.load().blocks_used == 6
    bench.steps(5)
    assert [s.slot for s in (long, short, middle)] == [0, NO_SLOT, 2]
    assert bench.scheduler.load().preemptions == 1
    assert short.tokens[33:] == [TOKEN] * 5, "its tokens are kept"

    bench.scheduler.remove(middle)
    assert bench.step() == [(0, 65, 1), (1, 32, 6)]


def test_preempted_sequences_precede_later_arrivals_in_order() -> None:
    bench = Bench(by_arrival(num_blocks=6, watermark_blocks=0, max_num_batched_tokens=300))
    long, first, second = fill(bench, 95, 32, 31)
    bench.add(4, 3)
    while first.slot != NO_SLOT or second.slot != NO_SLOT:
        bench.step()
    assert long.slot == 0
    waiting = bench.scheduler._waiting
    assert waiting.head() is first
    waiting.remove(first)
    assert waiting.head() is second


def test_preempting_step_admits_no_sequence() -> None:
    bench = Bench(limits(num_blocks=4, watermark_blocks=0, max_num_batched_tokens=200))
    long, _ = fill(bench, 60, 40)
    bench.add(3, 3)
    while bench.scheduler.load().preemptions == 0:
        rows = bench.step()
    assert rows == [(long.slot, long.num_computed - 1, 1)]


@under_each_policy
def test_sequence_larger_than_the_pool_fails_with_its_tokens(
    scheduling: Scheduling,
) -> None:
    bench = Bench(limits(num_blocks=2, scheduling=scheduling))
    bench.add(1, 60, max_tokens=1000)
    bench.steps(4)
    (outcome,) = bench.commit(bench.plan())
    assert (outcome.offset, outcome.tokens, outcome.stop) == (4, (TOKEN,), Stop.FAILED)
    assert isinstance(outcome.error, EngineFailed)
    assert str(outcome.error) == "the sequence outgrew the worker's KV cache of 2 blocks"
    assert bench.scheduler.load().blocks_used == 0


@under_each_policy
def test_outcome_has_offset_of_its_token(scheduling: Scheduling) -> None:
    bench = Bench(limits(scheduling=scheduling))
    bench.scheduler.add(sequence(bench.limits, 1, [1], max_tokens=4, output=[2, 3]))
    first = Outcome(
        SequenceKey(1, 0), 2, (TOKEN,), num_computed=3, update=SequenceUpdate(waited_s=0.0)
    )
    assert bench.commit(bench.plan()) == [first]
    assert bench.commit(bench.plan()) == [
        Outcome(SequenceKey(1, 0), 3, (TOKEN,), Stop.LENGTH, num_computed=4)
    ]
    assert len(bench.scheduler) == 0


@under_each_policy
def test_failed_plan_ends_only_its_sequences(scheduling: Scheduling) -> None:
    bench = Bench(limits(max_num_seqs=1, scheduling=scheduling))
    bench.add(1, 3)
    bench.add(2, 3)
    bench.step()
    error = EngineFailed("why")
    assert bench.scheduler.fail(bench.plan(), error) == [
        Outcome(SequenceKey(1, 0), 1, (), Stop.FAILED, error, num_computed=3)
    ]
    bench.scheduler.check_integrity()
    assert [s.key.epoch for s in bench.scheduler] == [2]


@under_each_policy
def test_epoch_lookup_finds_running_and_waiting_choices(scheduling: Scheduling) -> None:
    bench = Bench(limits(max_num_seqs=1, scheduling=scheduling))
    for choice in (0, 1):
        bench.scheduler.add(sequence(bench.limits, 1, prompt(3), choice=choice))
    bench.step()
    assert [s.key.choice for s in bench.scheduler.of_epoch(1)] == [0, 1]
    for this in bench.scheduler.of_epoch(1):
        bench.scheduler.remove(this)
    assert (bench.scheduler.of_epoch(1), len(bench.scheduler)) == ((), 0)


def test_load_counts_committed_and_pending_tokens() -> None:
    bench = Bench(by_arrival(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=30))
    bench.add(1, 10)
    bench.step()
    bench.add(2, 50)
    bench.add(3, 7)
    bench.step()
    assert bench.scheduler.load() == Load(
        num_running=2,
        num_waiting=1,
        blocks_used=3,
        blocks_total=16,
        pending_prefill_tokens=50 - 29 + 7,
        committed_tokens=12 + 50 + 7,
        step=2,
        output_tokens=2,
        preemptions=0,
        counters=Counters(prompt_tokens=60, slot_steps=3, unfilled_tokens=32 - 11 + 64 - 29),
        computed_tokens=10 + 1 + 29,
        released_blocks=0,
        kv_tokens=10 + 11 + 29,
        num_pairs=sum(range(1, 11)) + 11 + sum(range(1, 30)),
    )


@pytest.mark.parametrize(("policy", "expected"), [("continuous", 35), ("slai", 35), ("magnus", 0)])
def test_load_counts_prefill_that_short_prompts_pass(policy: EnginePolicy, expected: int) -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=30, scheduling=Scheduling(policy)))
    bench.add(1, 65)
    assert bench.scheduler.load().long_prefill_tokens == 0, "it is not in the batch yet"
    bench.step()
    bench.add(2, 20, first=500)
    load = bench.scheduler.load()
    assert (load.pending_prefill_tokens, load.long_prefill_tokens) == (35 + 20, expected)
    bench.step()
    assert bench.scheduler.load().long_prefill_tokens == 0, "the rest fits in one step"


def test_load_counts_no_resumed_sequence_that_comes_first() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=30))
    bench.add(1, 65, output=[7])
    bench.step()
    bench.add(2, 20, first=500)
    load = bench.scheduler.load()
    assert (load.pending_prefill_tokens, load.long_prefill_tokens) == (36 + 20, 0)
    assert bench.step() == [(0, 30, 30)]


def test_released_blocks_exclude_shared_blocks() -> None:
    bench = Bench(limits(num_blocks=16, max_num_batched_tokens=200))
    first, second = bench.add(1, 70), bench.add(2, 70)
    bench.step()
    bench.scheduler.remove(first)
    assert bench.scheduler.load().released_blocks == 1
    bench.scheduler.preempt(second)
    assert bench.scheduler.load().released_blocks == 1, "it will come back"
    bench.step()
    bench.scheduler.remove(second)
    assert bench.scheduler.load().released_blocks == 1 + 3


def test_scheduler_step_does_not_touch_waiting_members() -> None:
    bench = Bench(limits(max_num_seqs=1))
    bench.add(1, 3)
    bench.step()
    for epoch in range(2, 200):
        bench.add(epoch, 3)
    bench.scheduler._waiting._members = Untouchable(bench.scheduler._waiting._members)
    for _ in range(5):
        plan = bench.plan()
        bench.scheduler.commit(plan, [result(row) for row in plan.rows])
        bench.scheduler.load()


class Untouchable(dict[int, Sequence]):
    """Dictionary that permits look-ups, but no iteration."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("iterated over")

    __iter__ = values = items = keys = _refuse


@under_each_policy
@pytest.mark.parametrize("damage", ["slot", "computed", "lost"])
def test_scheduler_integrity_check_detects_damage(damage: str, scheduling: Scheduling) -> None:
    bench = Bench(limits(scheduling=scheduling))
    this = bench.add(1, 40)
    bench.step()
    match damage:
        case "slot":
            this.slot = 2
        case "computed":
            this.num_computed = 41
        case "lost":
            del bench.scheduler._epochs[1]
    with pytest.raises(AssertionError):
        bench.scheduler.check_integrity()
