"""Cost of a worker's time breakdowns, as a share of its steps, for bench-explain.

256 sequences decode; when one ends, the prompt of the next one is computed, as in bench-scheduler.
The cost is the CPU time of the breakdowns in the engine and the event loop. It is measured in two
ways: around each call of the breakdowns, with an engine on a checkpoint; and without a model, as
the difference between an engine with breakdowns and one without, which take turns step by step. On
the clock of those breakdowns, a step lasts as long as a step of the checkpoint.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from benchmarks import checkpoints
from benchmarks.scheduler import PROMPT, Bench
from worker.config import WorkerConfig
from worker.engine.step_times import Stopwatch
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner

RUNNING, WAITING = 256, 100
MODELS = ("tiny", "small")
#: Output tokens of a sequence of a checkpoint; without a model they are those of bench-scheduler.
OUTPUT = 160
STEPS = {"tiny": 400, "small": 120}
BESIDE = (64, 256, 1024)
BESIDE_STEPS = 400
_WARM = 10
_CALLS = 20_000

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Measured(NamedTuple):
    settings: dict[str, Any]
    raw: dict[str, Any]
    ratios: dict[str, float]


class Meter:
    """Meter of this thread's CPU time within some functions, without its own overhead.

    The functions may call each other; nested calls are counted once.
    """

    def __init__(self, own_s: float | None = None) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._own_s = _call_overhead_s() if own_s is None else own_s

    def over(self, function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        def timed(*args: _Args.args, **named: _Args.kwargs) -> _Result:
            began = time.thread_time()
            self._depth += 1
            try:
                return function(*args, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began - self._own_s

        return timed


def _call_overhead_s() -> float:
    """Return the seconds that a meter counts for a call that does nothing."""
    meter = Meter(own_s=0.0)
    nothing = meter.over(lambda: None)
    for _ in range(_CALLS):
        nothing()
    return meter.seconds / _CALLS


class HalfStepClock:
    """Clock that advances by half of ``step_s`` at each call, since each step reads it twice."""

    def __init__(self, step_s: float) -> None:
        self._half_s = step_s / 2
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._half_s
        return self._now


def on_checkpoint(name: str) -> dict[str, float]:
    """Return the mean time of a step of the checkpoint, and of its breakdowns."""
    bench = Bench(RUNNING, WAITING, OUTPUT, build_runner=lambda *args: _runner(name, *args))
    meter, breakdowns, outbox = Meter(), bench.breakdowns, bench.session.outbox
    assert breakdowns is not None
    for method in ("begin_step", "drop_slots", "end_step", "report"):
        setattr(breakdowns, method, meter.over(getattr(breakdowns, method)))
    for _ in range(_WARM):
        bench.step()
    meter.seconds, began = 0.0, time.perf_counter()
    outbox.add_breakdown = meter.over(outbox.add_breakdown)  # type: ignore[method-assign]
    for _ in range(STEPS[name]):
        bench.step()
    step_s = (time.perf_counter() - began) / STEPS[name]
    account_s = meter.seconds / STEPS[name]
    return {"step_ms": round(1e3 * step_s, 3), "account_us": round(1e6 * account_s, 1)}


def _runner(name: str, num_blocks: int, stopwatch: Stopwatch) -> TorchRunner:
    config = WorkerConfig(
        model=str(checkpoints.ensure(name)),
        device="cpu",
        num_threads=os.cpu_count() or 1,
        num_blocks=num_blocks,
        max_num_seqs=RUNNING,
    )
    return build_runner(config, Group.single(), stopwatch)


def without_model(running: int, step_s: float) -> dict[str, float]:
    """Return the median times of a step with and without breakdowns, and their difference."""
    benches = {"on": Bench(running, WAITING, clock=HalfStepClock(step_s))}
    benches["off"] = Bench(running, WAITING, clock=None)
    times: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(BESIDE_STEPS):
        for name, bench in benches.items():
            began = time.thread_time()
            bench.step()
            times[name].append(time.thread_time() - began)
    medians = {name: statistics.median(these[_WARM:]) for name, these in times.items()}
    medians["account"] = medians["on"] - medians["off"]
    return {f"{name}_us": round(1e6 * seconds, 1) for name, seconds in medians.items()}


def measure() -> Measured:
    raw: dict[str, Any] = {}
    for name in MODELS:
        raw[name] = on_checkpoint(name)
        print(name, raw[name], flush=True)
    torch.set_num_threads(1)
    step_s = raw["small"]["step_ms"] / 1e3
    for running in BESIDE:
        beside = raw[f"beside_{running}"] = without_model(running, step_s)
        print(running, beside, flush=True)
    settings = {
        "running": RUNNING,
        "waiting": WAITING,
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "threads": os.cpu_count(),
        "steps": STEPS,
    }
    return Measured(settings, raw, _ratios(raw))


def _ratios(raw: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the cost as a share of a step of the 125M checkpoint, and of the tiny one."""
    step_us = 1e3 * raw["small"]["step_ms"]
    return {
        "overhead": round(raw["small"]["account_us"] / step_us, 5),
        "overhead_by_difference": round(raw[f"beside_{RUNNING}"]["account_us"] / step_us, 5),
        "overhead_tiny": round(raw["tiny"]["account_us"] / (1e3 * raw["tiny"]["step_ms"]), 5),
    }
