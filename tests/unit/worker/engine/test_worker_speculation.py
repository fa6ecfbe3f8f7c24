"""Drafts in the scheduler: their number per sequence, acceptance and rejection."""

from __future__ import annotations

from typing import Any

from tests.support.worker.scheduler_bench import TOKEN, Bench
from tests.support.worker.worker_support import limits
from worker.config import Speculation
from worker.engine.outcome import Outcome, SequenceKey, Stop
from worker.engine.plan import Plan, RowResult
from worker.engine.sequence import Sequence
from worker.engine.speculation import MAX_READ


def speculating(**fields: Any) -> Bench:
    return Bench(limits(**fields, speculation=Speculation(num_draft_tokens=4)))


def drafts(plan: Plan) -> list[int]:
    return [row.num_drafts for row in plan.rows]


def decoding(bench: Bench, epoch: int, max_tokens: int = 90, first: int = 200) -> Sequence:
    """Return a decoding sequence with repetitive output, whose next drafts will be right."""
    this = bench.add(epoch, 3, max_tokens=max_tokens, first=first, output=[TOKEN] * 3)
    bench.step()
    return this


def test_accepted_drafts_are_reported_in_one_outcome() -> None:
    bench = speculating()
    this = decoding(bench, 1)
    assert (this.num_computed, this.num_known) == (6, 7)
    plan = bench.plan()
    (row,) = plan.rows
    assert (row.start, row.tokens, row.num_drafts, row.samples) == (6, (TOKEN,) * 5, 4, True)
    assert bench.commit(plan) == [Outcome(SequenceKey(1, 0), 4, (TOKEN,) * 5, num_computed=11)]
    assert (this.num_computed, this.num_known) == (11, 12)
    load = bench.scheduler.load()
    assert (load.counters.draft_tokens, load.counters.accepted_tokens) == (4, 4)
    assert load.output_tokens == 6


def test_rejected_drafts_are_recomputed() -> None:
    bench = speculating()
    this = decoding(bench, 1)
    bench.scheduler.commit(bench.plan(), [RowResult((TOKEN, 9))])
    assert (this.num_computed, this.num_known) == (8, 9), "one draft was right"
    (row,) = bench.plan().rows
    assert (row.start, row.tokens, row.num_drafts) == (8, (9,), 0), "9 never came before"
    counters = bench.scheduler.load().counters
    assert (counters.draft_tokens, counters.accepted_tokens) == (4, 1)


def test_draft_tokens_after_stop_token_are_dropped() -> None:
    bench = speculating()
    this = decoding(bench, 1)
    this.stop_token_ids = frozenset({TOKEN})
    (outcome,) = bench.commit(bench.plan())
    assert (outcome.tokens, outcome.stop) == ((TOKEN,), Stop.EOS)
    assert len(bench.scheduler) == 0


def test_drafts_leave_room_for_next_token() -> None:
    bench = speculating(max_model_len=11)
    bench.add(1, 3, max_tokens=7, first=200, output=[TOKEN] * 3)
    bench.add(2, 3, max_tokens=90, first=400, output=[TOKEN] * 3)
    bench.step()
    plan = bench.plan()
    assert drafts(plan) == [2, 3]
    assert [o.stop for o in bench.commit(plan)] == [Stop.LENGTH, Stop.LENGTH]


def test_drafts_use_leftover_budget() -> None:
    bench = speculating(max_num_batched_tokens=12)
    decoding(bench, 1)
    decoding(bench, 2)
    bench.scheduler.remove(bench.scheduler.of_epoch(2)[0])
    decoding(bench, 3)
    bench.add(4, 7, first=500)
    plan = bench.plan()
    assert [(len(row.tokens), row.num_drafts) for row in plan.rows] == [(4, 3), (1, 0), (7, 0)]


def test_drafter_reading_is_bounded_per_step() -> None:
    bench = speculating(num_blocks=150, max_num_batched_tokens=5000)
    these = [bench.add(epoch, 1500) for epoch in (1, 2, 3)]
    read = []
    for _ in range(4):
        bench.step()
        read.append([this.drafter._index.length if this.drafter else 0 for this in these])
    assert read[:2] == [[0, 0, 0], [1501, MAX_READ - 1501, 0]]
    assert sum(read[2]) == 2 * MAX_READ
    assert min(read[3]) > 1500, "in the end everything"


def test_drafts_use_only_free_blocks() -> None:
    bench = speculating(num_blocks=2, watermark_blocks=0)
    one = bench.add(1, 27, max_tokens=90, first=200, output=[TOKEN] * 3)
    two = bench.add(2, 3, max_tokens=90, first=400, output=[TOKEN] * 3)
    bench.step()
    assert (one.num_known, two.num_known) == (31, 7)
    assert drafts(bench.plan()) == [1, 4]


def test_draft_blocks_are_kept_until_needed() -> None:
    bench = speculating(num_blocks=3, watermark_blocks=0)
    one = bench.add(1, 25, max_tokens=90, first=200, output=[TOKEN] * 3)
    two = bench.add(2, 31, max_tokens=90, first=400)
    bench.step()
    plan = bench.plan()
    assert drafts(plan) == [4, 0]
    bench.scheduler.commit(plan, [RowResult((9,)), RowResult((TOKEN,))])
    bench.scheduler.check_integrity()
    assert (one.num_known, len(one.block_table)) == (30, 2)
    assert (two.num_known, len(two.block_table)) == (33, 1)
    bench.step()
    assert (len(one.block_table), len(two.block_table)) == (1, 2)
    assert bench.scheduler.load().preemptions == 0


def test_block_with_drafts_is_hashed_after_acceptance() -> None:
    bench = speculating()
    this = bench.add(1, 27, max_tokens=90, first=200, output=[TOKEN] * 3)
    bench.step()
    plan = bench.plan()
    (row,) = plan.rows
    assert (row.start, len(row.tokens)) == (30, 5)
    assert not bench.is_on_device(this.block_hash(0)), "the token at 31 is not known yet"
    bench.commit(plan)
    assert bench.is_on_device(this.block_hash(0))
