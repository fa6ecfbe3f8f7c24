"""Measured step times, fitted as a roofline."""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import pytest

from cluster.simulator.hardware.fit import Step, fitted
from cluster.simulator.measurement import Measurement
from everlift.step_time import Roofline, StepSize
from worker.config import FakeModel, WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.runner.fake_runner import FakeRunner

HARDWARE = Roofline(0.0007, 0.004, 2.4e-5, 3.6e-8, 9e-10, 1.8e-6)
SIZES = [StepSize(1, n, n, n * (n + 1) / 2) for n in (1, 16, 64, 256, 512, 1024, 2048)] + [
    StepSize(rows, rows, rows * context, rows * context)
    for rows in (1, 8, 64, 256)
    for context in (32, 256, 4096)
]
CONFIG = WorkerConfig(model="fake", num_blocks=400, max_num_seqs=32, max_num_batched_tokens=128)


def measured(hardware: Roofline, noise: float = 0.0) -> list[Step]:
    rng = Random(1)
    return [Step(size, hardware.seconds(size) * (1 + rng.gauss(0, noise))) for size in SIZES]


def test_fit_recovers_a_roofline() -> None:
    fit = fitted(measured(HARDWARE))
    assert fit.largest_error < 0.001
    assert astuple(fit.roofline) == pytest.approx(astuple(HARDWARE), rel=0.02)


def test_fit_averages_noise() -> None:
    fit = fitted(measured(HARDWARE, noise=0.05))
    errors = [fit.roofline.seconds(size) / HARDWARE.seconds(size) - 1 for size in SIZES]
    assert max(map(abs, errors)) < 0.08
    assert fit.mean_error < 0.08


def test_fit_has_no_negative_part() -> None:
    fit = fitted([Step(size, 0.01 / (1 + size.num_rows)) for size in SIZES])
    assert min(astuple(fit.roofline)) >= 0.0


def test_measurement_steps_have_their_reported_sizes() -> None:
    """The fake runner takes 5 ms a step and 0.1 ms a token, in virtual time."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    runner = FakeRunner(400, FakeModel(step_time=0.005, token_time=1e-4), sleep=sleep)
    engine = Engine(runner, Limits.of(CONFIG, runner))
    measurement = Measurement(engine, clock=lambda: now[0])
    steps = list(measurement.steps())
    assert len(steps) == len(measurement)
    for step in steps:
        assert step.seconds == pytest.approx(0.005 + 1e-4 * step.size.num_tokens)
    sizes = [step.size for step in steps]
    assert {(size.num_rows, size.num_tokens) for size in sizes} >= {(1, 128), (1, 1), (32, 32)}
    assert max(size.kv_tokens for size in sizes) > 1000
    assert not engine.has_work
    engine.check_integrity()
    assert fitted(steps).largest_error < 0.01
