"""Time of the parts of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count

import pytest

from tests.support.worker.worker_support import limits, prompt, sequence
from worker.config import FakeModel
from worker.engine.engine import Engine
from worker.engine.in_flight import InFlightStep
from worker.engine.plan import LaunchedStep, Plan, RowResult
from worker.engine.step_times import NO_TIME, Part, StepTimes, Stopwatch
from worker.runner.fake_runner import FakeRunner

BOUNDS = limits()


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def read(self) -> float:
        return self.now


class Runner(FakeRunner):
    """Runner whose model takes 2 s per step, and whose sampling takes 1 s."""

    def __init__(self, clock: Clock, stopwatch: Stopwatch) -> None:
        super().__init__(BOUNDS.num_blocks, FakeModel())
        self._clock, self._stopwatch = clock, stopwatch

    def execute(self, plan: Plan) -> list[RowResult]:
        self._clock.now += 2.0
        self._stopwatch.lap(Part.MODEL)
        results = super().execute(plan)
        self._clock.now += 1.0
        self._stopwatch.lap(Part.SAMPLE)
        return results


class TimedStep:
    """Launched step: the start of sampling takes 1 s, the wait for the results 4 s."""

    def __init__(self, step: LaunchedStep, clock: Clock) -> None:
        self._step, self._clock = step, clock

    def sample(self) -> None:
        self._clock.now += 1.0
        self._step.sample()

    def results(self) -> list[RowResult]:
        self._clock.now += 4.0
        return self._step.results()


class LaunchingRunner(FakeRunner):
    """Runner whose launches take 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(BOUNDS.num_blocks, FakeModel(runs_ahead=True))
        self._clock = clock

    def _launch(self, plan: Plan) -> LaunchedStep:
        self._clock.now += 2.0
        return TimedStep(super()._launch(plan), self._clock)


def test_stopwatch_attributes_time_to_each_part() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock.read)
    engine = Engine(Runner(clock, stopwatch), BOUNDS, stopwatch=stopwatch)
    engine.add(sequence(BOUNDS, 1, prompt(3), max_tokens=2))
    engine.step()
    assert engine.step_times() == StepTimes(0.0, 2.0, 1.0, 0.0)
    clock.now += 100.0
    engine.step()
    assert engine.step_times() == StepTimes(0.0, 4.0, 2.0, 0.0)


def test_stopwatch_times_whole_step_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, launch = Clock(), InFlightStep.launch

    def slow_launch(step: InFlightStep) -> None:
        clock.now += 8.0
        launch(step)

    monkeypatch.setattr(InFlightStep, "launch", slow_launch)
    runner = LaunchingRunner(clock)
    engine = Engine(runner, BOUNDS, stopwatch=Stopwatch(clock.read), launch=runner.launch)
    engine.add(sequence(BOUNDS, 1, prompt(3), max_tokens=2))
    engine.step()
    assert engine.step_times() == StepTimes(0.0, 2.0, 1.0, 8.0)
    clock.now += 100.0
    engine.step()
    assert engine.step_times() == StepTimes(0.0, 4.0, 6.0, 16.0)


def test_stopwatch_parts_cover_whole_step() -> None:
    """The clock advances by 1 s at each reading."""
    ticks: Iterator[int] = count()
    stopwatch = Stopwatch(lambda: float(next(ticks)))
    engine = Engine(FakeRunner(BOUNDS.num_blocks, FakeModel()), BOUNDS, stopwatch=stopwatch)
    engine.add(sequence(BOUNDS, 1, prompt(3), max_tokens=4))
    for _ in range(4):
        engine.step()
    assert engine.step_times() == StepTimes(4.0, 4.0, 0.0, 4.0)


def test_engine_without_stopwatch_records_no_time() -> None:
    engine = Engine(FakeRunner(BOUNDS.num_blocks, FakeModel()), BOUNDS)
    engine.add(sequence(BOUNDS, 1, prompt(3), max_tokens=1))
    engine.step()
    assert engine.step_times() == NO_TIME


def test_step_times_message_has_every_part() -> None:
    times = StepTimes(1.0, 2.0, 3.0, 4.0).to_proto()
    fields: Collection[str] = [field.name for field in times.DESCRIPTOR.fields]
    assert [getattr(times, name) for name in fields] == [1.0, 2.0, 3.0, 4.0]
    assert len(fields) == len(Part)
