"""Consistency check of the slot table and the sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.worker.scheduler_bench import Bench
from tests.support.worker.worker_support import limits
from worker.engine.outcome import Stop
from worker.engine.plan import RowResult
from worker.engine.sequence import Sequence
from worker.engine.slot_table import SlotTable


def bench() -> Bench:
    return Bench(limits(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64))


def test_plan_orders_decodes_by_arrival() -> None:
    this = bench()
    first, second = this.add(1, 5), this.add(2, 6)
    this.step()
    this.scheduler.remove(first)
    third = this.add(3, 7)
    this.step()
    assert (third.slot, second.slot) == (0, 1)
    assert [row.slot for row in this.plan().rows] == [1, 0]


def test_stop_token_and_last_token_end_sequences() -> None:
    this = bench()
    this.add(1, 5, stop_token_ids=[9])
    this.add(2, 5, max_tokens=2)
    this.add(3, 5)
    this.step()
    plan = this.plan()
    outcomes = this.scheduler.commit(plan, [RowResult((9,))] * 3)
    this.scheduler.check_integrity()
    stops = {outcome.key.epoch: outcome.stop for outcome in outcomes}
    assert stops == {1: Stop.EOS, 2: Stop.LENGTH, 3: None}
    assert [row.tokens for row in this.plan().rows] == [(9,)]


def test_plan_rows_have_block_tables_of_their_sequences() -> None:
    this = bench()
    sequences = [this.add(1, 31), this.add(2, 30)]
    for _ in range(4):
        for row, sequence in zip(this.plan().rows, sequences, strict=True):
            assert row.block_table == sequence.block_table
        this.commit(this.scheduler.schedule())


Damage = Callable[[SlotTable, Sequence], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda slot_table, this: slot_table.clear(this.slot),
        lambda slot_table, this: slot_table.truncate(this.slot, 1),
        lambda slot_table, this: slot_table.extend(this.slot, (3,)),
        lambda slot_table, this: this.tokens.append(1),
        lambda slot_table, this: setattr(this, "block_table", this.block_table[::-1]),
    ],
)
def test_slot_table_integrity_check_detects_damage(damage: Damage) -> None:
    this = bench()
    sequence = this.add(1, 40)
    this.step()
    slot_table = this.scheduler._batch.slot_table
    slot_table.check_integrity([sequence])
    damage(slot_table, sequence)
    with pytest.raises(AssertionError):
        slot_table.check_integrity([sequence])
