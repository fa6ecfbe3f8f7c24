"""What a worker's breakdowns take of its steps, for bench-explain.

256 sequences decode, one after the other ends, and the next one's prompt comes in, as in
bench-scheduler. CPU time of the breakdowns, in the engine's thread and in the event loop's, over
the time of a step: of an engine on a checkpoint, where it is taken around each of their calls, and
beside the model, where an engine with breakdowns and one without take turns step by step, whose
steps last as long on the breakdowns' clock as those of the checkpoint do.
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
#: Of the output of a checkpoint's sequences; those beside the model have bench-scheduler's.
OUTPUT = 160
STEPS = {"tiny": 400, "small": 120}
BESIDE = (64, 256, 1024)
BESIDE_STEPS = 400
_WARM = 10
_NOTHINGS = 20_000

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Measured(NamedTuple):
    settings: dict[str, Any]
    raw: dict[str, Any]
    ratios: dict[str, float]


class Meter:
    """CPU time of this thread within some functions, which may call each other, less what it takes
    to look at the clock."""

    def __init__(self, own_s: float | None = None) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._own_s = _seconds_of_nothing() if own_s is None else own_s

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


def _seconds_of_nothing() -> float:
    """What a meter says of a call that does nothing."""
    meter = Meter(own_s=0.0)
    nothing = meter.over(lambda: None)
    for _ in range(_NOTHINGS):
        nothing()
    return meter.seconds / _NOTHINGS


class HalfSteps:
    """A clock that is read when a step begins and when it is over."""

    def __init__(self, step_s: float) -> None:
        self._half_s = step_s / 2
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._half_s
        return self._now


def on_checkpoint(name: str) -> dict[str, float]:
    """Means over the steps."""
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


def beside_the_model(running: int, step_s: float) -> dict[str, float]:
    """Medians over the steps of either engine."""
    benches = {"on": Bench(running, WAITING, clock=HalfSteps(step_s))}
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
        beside = raw[f"beside_{running}"] = beside_the_model(running, step_s)
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
    """Of a step of the 125M checkpoint, but for one of the tiny one."""
    step_us = 1e3 * raw["small"]["step_ms"]
    return {
        "overhead": round(raw["small"]["account_us"] / step_us, 5),
        "overhead_by_difference": round(raw[f"beside_{RUNNING}"]["account_us"] / step_us, 5),
        "overhead_tiny": round(raw["tiny"]["account_us"] / (1e3 * raw["tiny"]["step_ms"]), 5),
    }
