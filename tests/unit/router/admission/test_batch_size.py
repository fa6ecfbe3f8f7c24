"""Number of sequences that may run at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.step_time import Roofline, StepSize
from router.admission.placement import Placement
from router.admission.request import Waiting
from router.admission.throughput import Work
from router.admission.workers import Capacity, Load, batch_of, largest_batch
from router.config import RouterConfig
from tests.support.router.admission_support import choose

ROOFLINE = Roofline(overhead_s=0.001, weights_s=0.004, token_s=2e-5, kv_token_s=1e-7)
ROW = StepSize(num_rows=1, num_tokens=3, kv_tokens=1000, num_pairs=3000)
WAITING = Waiting("r", "g", 0.0, 10, max_tokens=10)


def test_largest_batch_is_the_limit_if_steps_are_fast() -> None:
    assert largest_batch(ROOFLINE, ROW, 1.0, at_most=64) == 64


def test_largest_batch_is_at_least_one() -> None:
    assert largest_batch(ROOFLINE, ROW, 0.001, at_most=64) == 1


@given(st.floats(0.0, 0.1), st.integers(1, 1000))
def test_largest_batch_is_maximal_within_tpot_target(tpot_s: float, at_most: int) -> None:
    rows = largest_batch(ROOFLINE, ROW, tpot_s, at_most)
    assert 1 <= rows <= at_most
    assert rows == 1 or ROOFLINE.seconds(batch_of(rows, ROW)) <= tpot_s
    assert rows == at_most or ROOFLINE.seconds(batch_of(rows + 1, ROW)) > tpot_s


def placement_after(seconds: int, tpot_target: float, step_s: float = 0.01) -> Placement:
    """Return the placement of a worker with 16 slots, whose steps take ``step_s`` for each of their
    1 to 8 rows.
    """
    placement = Placement(RouterConfig(tpot_target=tpot_target, local_depth=2))
    placement.join("w", Capacity(max_num_seqs=16, num_blocks=1000))
    work = Work()
    for number in range(4 * seconds):
        rows = number % 8 + 1
        work = Work(
            step=work.step + 1,
            computed_tokens=work.computed_tokens + rows,
            busy_s=work.busy_s + rows * step_s,
            num_rows=work.num_rows + rows,
            kv_tokens=work.kv_tokens + 100 * rows,
            num_pairs=work.num_pairs + 100 * rows,
        )
        load = Load(number + 1, num_running=rows, work=work)
        placement.report("w", load, now=number / 4)
        placement.expire(now=number / 4)
    return placement


def test_placement_limits_slots_to_meet_tpot_target() -> None:
    placement = placement_after(30, tpot_target=0.055)
    worker = placement.workers["w"]
    assert worker.slots == 5
    placement.report("w", Load(1000, num_running=4), now=30.0)
    assert choose(placement, WAITING) == "w"
    placement.reserve("w", 1, WAITING, now=30.0)
    assert choose(placement, WAITING) is None, "nobody waits for a slot that is there"


def test_worker_tpot_is_predicted_from_its_running_batch() -> None:
    worker = placement_after(30, tpot_target=0.0).workers["w"]
    assert worker.tpot_s == pytest.approx(0.01 * worker.load.num_running, rel=0.05)
    assert worker.step_time.error is not None and worker.step_time.error < 0.05
    assert placement_after(1, tpot_target=0.0).workers["w"].tpot_s is None


def test_batch_size_is_maximal_without_target_or_step_times() -> None:
    assert placement_after(30, tpot_target=0.0).workers["w"].slots == 16
    assert placement_after(1, tpot_target=0.055).workers["w"].slots == 16


def test_tpot_target_change_applies_at_next_expire() -> None:
    placement = placement_after(30, tpot_target=0.0)
    for target, slots in ((0.055, 5), (0.0, 16)):
        placement.tpot_target = target
        placement.expire(now=30.0)
        assert placement.workers["w"].slots == slots


def test_step_times_are_shared_by_workers_of_one_kind() -> None:
    placement = placement_after(30, tpot_target=0.055)
    placement.join("like it", Capacity(max_num_seqs=16, num_blocks=1000))
    placement.join("another", Capacity(max_num_seqs=16, num_blocks=1000, kind="2x"))
    assert placement.workers["like it"].step_time.is_known
    assert not placement.workers["another"].step_time.is_known
