"""Time limits of steps, after which a step counts as hung."""

from __future__ import annotations

import pytest

from worker.parallel.watchdog import StepTimes, WakingTime, Watchdog

TIMEOUT_S = 5.0


def known(*steps: tuple[int, float]) -> StepTimes:
    """Return step times of eight steps of one token in 0 s, and of ``steps`` (tokens, seconds)."""
    times = StepTimes(TIMEOUT_S)
    for num_tokens, seconds in [*[(1, 0.0)] * 8, *steps]:
        times.record(num_tokens, seconds)
    return times


def test_step_limit_is_timeout_for_fast_engine() -> None:
    assert known((1, 0.02), (512, 0.3)).limit_s(1) == TIMEOUT_S


def test_step_limit_is_ten_times_slowest_step() -> None:
    assert known((1, 0.7), (1, 0.6)).limit_s(1) == pytest.approx(7.0)


def test_step_limit_forgets_slowest_step_after_64() -> None:
    times = known((1, 2.0), *[(1, 0.1)] * 63)
    assert times.limit_s(1) == pytest.approx(20.0)
    times.record(1, 0.1)
    assert times.limit_s(1) == TIMEOUT_S


def test_step_limit_is_proportional_to_chunk_size() -> None:
    assert known((100, 1.0)).limit_s(800) == pytest.approx(10 * 8.0)


def test_step_limit_remembers_large_chunk_time() -> None:
    times = known((800, 4.0), *[(1, 0.02)] * 64)
    assert times.limit_s(800) == pytest.approx(40.0)
    assert times.limit_s(8) == TIMEOUT_S


def test_step_limit_uses_latest_step_of_equal_size() -> None:
    times = known((800, 40.0), (800, 4.0), *[(1, 0.02)] * 64)
    assert times.limit_s(800) == pytest.approx(40.0)


def test_step_limit_is_raised_for_first_and_large_steps() -> None:
    times = StepTimes(TIMEOUT_S)
    for _ in range(8):
        assert times.limit_s(0) == pytest.approx(50.0)
        assert times.limit_s(500) == pytest.approx(50.0 + 50.0)
        times.record(1, 0.01)
    assert times.limit_s(1) == TIMEOUT_S


def watchdog() -> Watchdog:
    this = Watchdog(TIMEOUT_S)
    for step in range(8):
        this.begin_step(step, 1, now=100.0)
        this.end_step(now=100.0)
    return this


def test_watchdog_step_is_overdue_after_limit() -> None:
    this = watchdog()
    this.begin_step(9, 3, now=200.0)
    assert [this.overdue(now) for now in (1.0, 3.0, 6.0)] == [None] * 3
    assert this.overdue(6.1) == "step 9, of 3 tokens, takes longer than 5.0 s"


def test_watchdog_limits_each_step_separately() -> None:
    this = watchdog()
    for step in range(9, 30):
        this.begin_step(step, 1, now=0.0)
        assert this.overdue(float(step)) is None
        this.end_step(now=1.0)
        assert this.overdue(step + 0.5) is None
    assert this.overdue(1000.0) is None, "an idle engine is not late"


def test_watchdog_limit_grows_after_slow_step() -> None:
    this = watchdog()
    this.begin_step(9, 1, now=0.0)
    this.end_step(now=2.0)
    this.begin_step(10, 1, now=2.0)
    assert [this.overdue(now) for now in (0.0, 20.0)] == [None, None]
    assert this.overdue(20.1) == "step 10, of 1 tokens, takes longer than 20.0 s"


def test_waking_time_excludes_suspension() -> None:
    time = WakingTime(most_s=0.5)
    assert [time.update(now) for now in (70.0, 70.25, 70.75)] == [0.0, 0.25, 0.75]
    assert time.update(370.75) == 1.25, "who was stopped for five minutes saw half a second pass"


def test_watchdog_excludes_suspension_of_process() -> None:
    this, time = watchdog(), WakingTime(most_s=0.5)
    this.begin_step(9, 1, now=0.0)
    assert this.overdue(time.update(0.0)) is None
    assert this.overdue(time.update(3600.0)) is None
