"""Speed of workers, from their reports, with made-up clocks."""

from __future__ import annotations

import pytest

from everlift.hashes import BLOCK_SIZE
from everlift.v1 import session_pb2 as pb
from router.admission.throughput import ThroughputEstimator, Work, slow_workers, spared_tokens
from router.admission.workers import Load
from tests.support.worker.worker_support import engine, limits, prompt, run, sequence
from worker.config import FakeModel, Speculation


class Worker:
    """Worker that reports its work every ``interval_s`` seconds."""

    def __init__(self) -> None:
        self.throughput = ThroughputEstimator()
        self.now = 0.0
        self.work = Work()
        self.throughput.measure(self.work, False, self.now)

    def run(
        self,
        seconds: float,
        step_s: float,
        tokens: int,
        *,
        released_per_s: float = 0.0,
        interval_s: float = 0.25,
        is_full: bool = False,
    ) -> Worker:
        """Run steps of ``tokens`` tokens that take ``step_s`` each, for ``seconds``."""
        busy = 0.0
        for _ in range(round(seconds / interval_s)):
            busy += interval_s
            steps, before = int(busy / step_s), self.work
            busy -= steps * step_s
            self.now += interval_s
            self.work = Work(
                before.step + steps,
                before.computed_tokens + steps * tokens,
                before.output_tokens + steps,
                before.released_blocks + round(released_per_s * interval_s),
                before.busy_s + steps * step_s,
            )
            self.throughput.measure(self.work, is_full, self.now)
        return self


def are_slow(*workers: Worker, now: float) -> set[str]:
    paces = {f"w{number}": worker.throughput for number, worker in enumerate(workers)}
    return set(slow_workers(paces, 5.0, now))


def test_estimator_is_unknown_without_any_work() -> None:
    throughput = ThroughputEstimator()
    assert (throughput.step_s, throughput.prefill_rate, throughput.free_rate) == (0.0, None, None)
    assert throughput.max_step_s(1) == float("inf")


def test_step_time_is_that_of_the_last_second() -> None:
    worker = Worker().run(5.0, step_s=0.01, tokens=8)
    assert worker.throughput.step_s == pytest.approx(0.01)
    worker.run(3.0, step_s=0.1, tokens=8)
    assert worker.throughput.step_s == pytest.approx(0.1, rel=0.1)


def test_prefill_rate_is_that_of_the_best_steps() -> None:
    worker = Worker().run(3.0, step_s=0.05, tokens=500).run(3.0, step_s=0.01, tokens=4)
    assert worker.throughput.prefill_rate == pytest.approx(10_000)


def test_step_time_is_bounded_by_larger_and_smaller_steps() -> None:
    throughput = (
        Worker().run(3.0, step_s=0.05, tokens=500).run(3.0, step_s=0.01, tokens=4).throughput
    )
    assert throughput.max_step_s(2) == pytest.approx(0.01)
    assert throughput.max_step_s(8) == pytest.approx(0.02)
    assert throughput.max_step_s(100) == pytest.approx(0.05)
    assert throughput.max_step_s(1000) == pytest.approx(0.1)


def test_free_rate_is_released_blocks_minus_growth() -> None:
    worker = Worker()
    assert worker.run(0.5, step_s=0.01, tokens=1, released_per_s=20).throughput.free_rate is None
    worker.run(60.0, step_s=0.01, tokens=1, released_per_s=20)
    assert worker.throughput.free_rate == pytest.approx(20 - 100 / BLOCK_SIZE, rel=0.01)
    worker.run(60.0, step_s=0.01, tokens=1)
    assert worker.throughput.free_rate == pytest.approx(-100 / BLOCK_SIZE, rel=0.01)


def test_worker_ten_times_slower_is_marked_slow() -> None:
    workers = [Worker().run(5.0, s, tokens=8) for s in (0.03, 0.3, 0.03)]
    assert are_slow(*workers, now=5.0) == {"w1"}
    assert are_slow(*workers[:2], now=5.0) == {"w1"}
    assert not are_slow(workers[1], now=5.0)


def test_worker_twice_slower_is_not_marked_slow() -> None:
    assert not are_slow(*(Worker().run(5.0, s, tokens=8) for s in (0.03, 0.06)), now=5.0)


def test_prefilling_worker_is_not_slow_beside_a_decoding_one() -> None:
    prefills = Worker().run(5.0, step_s=0.25, tokens=512)
    decodes = Worker().run(5.0, step_s=0.025, tokens=8)
    assert not are_slow(prefills, decodes, now=5.0)


def test_busy_slow_worker_is_slow_beside_a_nearly_idle_one() -> None:
    busy = Worker().run(5.0, step_s=0.3, tokens=8)
    nearly_idle = Worker().run(5.0, step_s=0.03, tokens=8).run(2.0, step_s=0.03, tokens=1)
    assert are_slow(busy, nearly_idle, now=5.0) == {"w0"}


def test_short_step_noise_marks_no_worker_slow() -> None:
    assert not are_slow(*(Worker().run(5.0, s, tokens=8) for s in (0.001, 0.019)), now=5.0)


def test_slow_mark_expires_without_new_steps() -> None:
    workers = [Worker().run(5.0, s, tokens=8) for s in (0.03, 0.3)]
    assert are_slow(*workers, now=14.0) == {"w1"}
    assert not are_slow(*workers, now=16.0)


def test_recovered_worker_is_no_longer_slow() -> None:
    workers = [Worker().run(5.0, s, tokens=8) for s in (0.03, 0.3)]
    workers[1].run(5.0, step_s=0.03, tokens=8)
    assert not are_slow(*workers, now=10.0)


def test_full_rate_is_measured_only_while_full() -> None:
    worker = Worker().run(5.0, step_s=0.05, tokens=10)
    assert worker.throughput.full_rate is None
    worker.run(60.0, step_s=0.05, tokens=100, is_full=True)
    assert worker.throughput.full_rate == pytest.approx(2000, rel=0.05)
    worker.run(60.0, step_s=0.05, tokens=10)
    assert worker.throughput.full_rate == pytest.approx(2000, rel=0.05)
    worker.run(60.0, step_s=0.05, tokens=50, is_full=True)
    assert worker.throughput.full_rate == pytest.approx(1000, rel=0.05)


def test_full_rate_includes_cached_prompt_tokens() -> None:
    """Arrivals and the queue count whole prompts. A rate without cached tokens would ask for
    several times as many workers.
    """
    throughput = ThroughputEstimator()
    for second in range(60):
        state = pb.WorkerState(step=second, computed_tokens=20 * second, busy_s=second)
        state.counters.prefix_hit_tokens = 200 * second
        state.counters.draft_tokens, state.counters.accepted_tokens = 9 * second, 3 * second
        state.counters.recomputed_tokens = 4 * second
        throughput.measure(Load.from_proto(state).work, True, float(second))
    assert throughput.full_rate == pytest.approx(20 + 200 - 6 - 4)


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_computed_plus_spared_tokens_equal_requested_work(
    num_drafts: int,
) -> None:
    """The last token of each output is not counted: no step computes on from it."""
    model = FakeModel(surprise_one_in=20)
    bounds = limits(num_blocks=64, speculation=Speculation(num_drafts))
    this = engine(bounds, model)
    for epoch in range(1, 7):
        this.add(sequence(bounds, epoch, [*prompt(96), epoch], max_tokens=90))
        run(this)
    load = this.load()
    assert load.counters.prefix_hit_tokens == 5 * 96
    assert load.computed_tokens + spared_tokens(load.counters) == 6 * (97 + 90 - 1)


def test_full_rate_ignores_momentary_fullness() -> None:
    worker = Worker()
    for _ in range(20):
        worker.run(0.1, step_s=0.05, tokens=10, interval_s=0.1, is_full=True)
        worker.run(0.1, step_s=0.05, tokens=10, interval_s=0.1)
    assert worker.throughput.full_rate is None
