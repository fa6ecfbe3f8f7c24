"""Predicted waits of requests."""

from __future__ import annotations

import random

import pytest

from everlift.step_fit import FittedStepTime
from everlift.step_time import Roofline, StepSize
from router.admission.throughput import LeastRatio, ThroughputEstimator, Work
from router.admission.wait_estimate import WaitEstimator
from router.admission.workers import Capacity, Load, WorkerView
from tests.support.router.admission_support import waiting

ROOFLINE = Roofline(overhead_s=0.01, weights_s=0.0, token_s=1e-4, kv_token_s=1e-6)
CAPACITY = Capacity(max_num_seqs=8, num_blocks=1000, max_num_batched_tokens=100)


def known(step_time: Roofline = ROOFLINE) -> FittedStepTime:
    fit, dice = FittedStepTime(), random.Random(1)
    for _ in range(300):
        tokens = dice.randrange(1, 100)
        size = StepSize(dice.randrange(1, 9), tokens, dice.randrange(9000), dice.randrange(90000))
        fit.observe(size, step_time.seconds(size))
    fit.refit()
    return fit


def worker(load: Load | None = None, fit: FittedStepTime | None = None) -> WorkerView:
    throughput = ThroughputEstimator()
    throughput.measure(Work(), False, 0.0)
    throughput.measure(Work(1, 4, busy_s=1.0, num_rows=1, kv_tokens=200, num_pairs=800), False, 1.0)
    load = load or Load(1)
    return WorkerView(CAPACITY, load, fit or known(), throughput)


def forecast_of(*workers: WorkerView) -> WaitEstimator:
    forecast = WaitEstimator({f"w{number}": it for number, it in enumerate(workers)})
    forecast.update(0, now=0.0)
    return forecast


def test_wait_is_zero_without_work_and_unknown_without_workers() -> None:
    forecast = forecast_of()
    assert forecast.wait_s(0) == 0.0
    assert forecast.wait_s(100) is None
    assert forecast.prefill_s(waiting("r")) == 0.0


def test_estimate_begins_with_a_full_batch() -> None:
    full = StepSize(8, 32, 1600, 6400)
    rate = 32 / ROOFLINE.seconds(full)
    forecast = forecast_of(worker(), worker())
    assert forecast.wait_s(1000) == pytest.approx(1000 / (2 * rate), rel=0.02)


def test_estimate_follows_full_workers_and_then_the_queue() -> None:
    one, other = worker(), worker()
    one.throughput.full_rate = 50.0
    other.throughput.full_rate = 150.0
    forecast = forecast_of(one, other)
    assert forecast.wait_s(1000) == pytest.approx(5.0)
    for tick in range(20):
        forecast.note_departure(waiting("r", prefill_tokens=100), 0.0)
        forecast.update(9, now=tick / 5)
    assert forecast.wait_s(1000) == pytest.approx(2.0)


def test_prefill_estimate_adds_half_of_the_running_step() -> None:
    idle = forecast_of(worker())
    one_step = ROOFLINE.seconds(StepSize(1, 50, 50, 1250)) + 1.0 / 2
    assert idle.prefill_s(waiting("r", prefill_tokens=50)) == pytest.approx(one_step, rel=0.05)
    decoding = Load(1, num_running=2, committed_tokens=500, pending_prefill_tokens=100)
    busy = forecast_of(worker(decoding))
    # Two prompts have 148 tokens, of which a step computes 98 beside two decoding rows.
    step = ROOFLINE.seconds(StepSize(3, 2 + 74, 400 + 74 + 37, 400 + 74 * 74))
    expected = 2 * step + 1.0 / 2
    assert busy.prefill_s(waiting("r", prefill_tokens=48)) == pytest.approx(expected, rel=0.05)


def test_prefill_estimate_excludes_cached_and_passed_tokens() -> None:
    cached = waiting("r", prefill_tokens=500, cached_tokens=450)
    one_step = ROOFLINE.seconds(StepSize(1, 50, 500, 50 * 475)) + 1.0 / 2
    idle = forecast_of(worker())
    assert idle.prefill_s(cached) == pytest.approx(one_step, rel=0.05)
    passed = forecast_of(worker(Load(1, pending_prefill_tokens=900, long_prefill_tokens=900)))
    assert passed.prefill_s(cached) == pytest.approx(idle.prefill_s(cached), rel=0.05)


def test_least_part_is_a_low_quantile_of_waits() -> None:
    least, dice = LeastRatio(), random.Random(5)
    for _ in range(5000):
        least.note(dice.uniform(0.2, 1.2))
    assert least.value == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize(("predicted_s", "is_learned"), [(0.05, False), (0.1, True)])
def test_least_part_ignores_negligible_waits(predicted_s: float, is_learned: bool) -> None:
    forecast = forecast_of(worker())
    forecast.note_departure(waiting("r", predicted_wait_s=predicted_s), ledger_now=0.0)
    assert (forecast.least_wait_ratio.value < LeastRatio().value) is is_learned


def test_least_tpot_is_from_a_step_without_prompts() -> None:
    """Two sequences decode; the rows of recent steps computed four tokens each."""
    decoding = Load(1, num_running=2, committed_tokens=500)
    forecast = forecast_of(worker(decoding))
    usual = ROOFLINE.seconds(StepSize(2, 2 * 4, 2 * 200, 2 * 800))
    decode = ROOFLINE.seconds(StepSize(2, 2, 500, 500))
    assert forecast.tpot_s == pytest.approx(usual, rel=0.02)
    assert forecast.least_tpot_s == pytest.approx(0.8 * decode, rel=0.02)
    for _ in range(200):
        forecast.least_tpot_ratio.note(0.5)
    assert forecast.least_tpot_s == pytest.approx(0.5 * decode, rel=0.1)


def test_estimate_without_step_times_is_zero() -> None:
    unknown = forecast_of(worker(fit=FittedStepTime()))
    for forecast in (forecast_of(), unknown):
        assert (forecast.tpot_s, forecast.least_tpot_s) == (None, 0.0)
