"""Preemption with swapping to host memory: saved blocks, and their reload."""

from __future__ import annotations

from typing import Any

from everlift.errors import EngineFailed
from tests.support.worker.scheduler_bench import Bench
from tests.support.worker.worker_support import limits
from worker.engine.plan import BlockCopy, RowResult
from worker.engine.sequence import NO_SLOT, Sequence


def swapping(**fields: Any) -> Bench:
    return Bench(limits(**{"num_host_blocks": 8, "watermark_blocks": 0, **fields}))


def preempted(bench: Bench) -> tuple[Sequence, Sequence]:
    """Return a sequence that outgrew a pool of 6 blocks, and a preempted one with 2 full blocks."""
    long = bench.add(1, 90, max_tokens=200, first=100)
    short = bench.add(2, 70, max_tokens=200, first=500)
    bench.step()
    while short.slot != NO_SLOT:
        bench.step()
    return long, short


def test_swap_saves_preempted_blocks_and_loads_them_again() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200)
    long, short = preempted(bench)
    while bench.is_on_device(short.block_hash(0)):
        plan = bench.plan()
        bench.commit(plan)
    ((block, place),) = plan.saves
    assert block in long.block_table, "the plan that overwrites it"
    assert bench.scheduler.load().counters.blocks_swapped_out == 2

    bench.scheduler.remove(long)
    plan = bench.plan()
    assert {copy.host_block for copy in plan.loads} >= {place}
    assert [copy.block for copy in plan.loads] == list(short.block_table[:2])
    assert (plan.rows[0].start, plan.rows[0].block_table) == (64, short.block_table)
    bench.commit(plan)
    counters = bench.scheduler.load().counters
    assert counters.blocks_swapped_in == 2
    assert counters.recomputed_tokens == short.num_computed_before - 64 > 0


def test_swap_without_places_recomputes_overwritten_blocks() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200, num_host_blocks=0)
    long, short = preempted(bench)
    while bench.is_on_device(short.block_hash(0)):
        plan = bench.plan()
        bench.commit(plan)
        assert plan.saves == ()
    bench.scheduler.remove(long)
    plan = bench.plan()
    assert (plan.loads, plan.rows[0].start) == ((), 0)
    bench.commit(plan)
    assert bench.scheduler.load().counters.recomputed_tokens == short.num_computed_before


def test_swap_saves_no_blocks_of_finished_sequences() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200)
    bench.add(1, 90, max_tokens=1)
    bench.step()
    bench.add(2, 180, first=500)
    assert bench.plan().saves == ()


def test_swap_copies_of_failed_step_are_discarded() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200)
    preempted(bench)
    while not (plan := bench.plan()).saves:
        bench.commit(plan)
    bench.scheduler.fail(plan, EngineFailed())
    bench.scheduler.check_integrity()
    plan = bench.plan()
    assert plan.loads == ()
    assert plan.rows[0].start == 32, "of its two blocks the first was not overwritten"


def test_swap_load_of_failed_step_is_repeated() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200)
    long, short = preempted(bench)
    while bench.is_on_device(short.block_hash(0)):
        bench.step()
    bench.scheduler.remove(long)
    plan = bench.plan()
    places = [copy.host_block for copy in plan.loads]
    bench.scheduler.fail(plan, EngineFailed())
    bench.scheduler.check_integrity()
    bench.add(3, 70, first=500)
    plan = bench.plan()
    assert plan.loads == tuple(
        BlockCopy(block, place)
        for block, place in zip(bench.scheduler.of_epoch(3)[0].block_table, places, strict=False)
    )


def test_swap_copy_of_failed_row_is_not_reloaded() -> None:
    bench = swapping(num_blocks=6, max_num_batched_tokens=200)
    long, short = preempted(bench)
    while bench.is_on_device(short.block_hash(0)):
        bench.step()
    bench.scheduler.remove(long)
    plan = bench.plan()
    assert plan.loads
    bench.scheduler.commit(plan, [RowResult(error=EngineFailed("no number"))])
    bench.scheduler.check_integrity()
    bench.add(3, 70, first=500)
    plan = bench.plan()
    assert (plan.loads, plan.rows[0].start) == ((), 0)
