"""Speed of the simulator on one core: a hundred workers with the product's scheduler.

    python benchmarks/forecast_speed.py [--workers 100] [--rate 15.5] [--seconds 10] [--out FILE]

Each worker is an H200 with a model of 8 billion parameters, and gets --rate conversations per
second. A worker with 256 slots can serve 19.4, of which 15.5 is 0.8. ``simulator_speed`` is virtual
seconds per CPU second, without the warm-up in which the batches fill.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from benchmarks import report
from cluster.simulator.forecast import Forecast
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.simulate import simulate
from cluster.simulator.workloads.arrivals import Arrival
from everlift.step_time import Roofline
from worker.config import WorkerConfig

#: 15 GB of weights at 3.66 TB/s, 14 GFLOP a token at 592 TFLOP/s, 128 KiB of KV a token.
H200_8B = Roofline(0.7e-3, 4.1e-3, 23.6e-6, 35.8e-9)
ENGINE = WorkerConfig(
    model="fake",
    num_blocks=25_000,
    max_model_len=32_768,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
)
#: Virtual seconds until the number of running requests is about stationary.
WARM_UP_S = 8.0


def conversations(rate: float, seconds: float, seed: int = 0) -> Iterator[Arrival]:
    """Yield Poisson arrivals at ``rate``, with lengths as in Azure's conversation trace of 2023."""
    dice, at = Random(seed), 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        prompt = min(14_000, max(1, round(dice.lognormvariate(6.63, 0.99))))
        is_short = dice.random() < 0.6
        output = dice.lognormvariate(4.419, 0.45) if is_short else dice.gauss(404, 29)
        yield Arrival(at, prompt, min(1000, max(1, round(output))), 1000)


class Clock:
    """Iterator over arrivals that measures the simulation's CPU time after the warm-up.

    ``cpu_s`` has it once the simulation has asked for an arrival after the last one.
    """

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._began = self.cpu_s = 0.0

    def __iter__(self) -> Iterator[Arrival]:
        for arrival in self._arrivals:
            if not self._began and arrival.at >= WARM_UP_S:
                self._began = time.process_time()
            yield arrival
        self.cpu_s = time.process_time() - self._began


def measure(workers: int, rate: float, seconds: float) -> tuple[float, Forecast]:
    """Simulate ``rate`` requests per second and worker; return the CPU seconds and the result."""
    scenario = Scenario.uniform(workers, WorkerSpec(ENGINE, H200_8B))
    clock = Clock(conversations(rate * workers, WARM_UP_S + seconds))
    forecast = simulate(clock, scenario)
    return clock.cpu_s, forecast


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rate", type=float, default=15.5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("build/bench/forecast_speed.json"))
    args = parser.parse_args()
    cpu_s, forecast = measure(args.workers, args.rate, args.seconds)
    summary, speed = forecast.summary(), args.seconds / cpu_s
    report.write(
        args.out,
        packages=("numpy",),
        settings={name: getattr(args, name) for name in ("workers", "rate", "seconds")},
        raw={
            "cpu_s": cpu_s,
            "requests": summary.requests,
            "steps": forecast.num_steps,
            "jumped": forecast.num_jumped,
            "cpu_ms_per_request": 1e3 * cpu_s / (args.rate * args.workers * args.seconds),
            "ttft_p99_s": summary.ttft_s.p99,
            "tpot_mean_s": summary.tpot_s.mean,
        },
        ratios={f"simulator_speed_{args.workers}_workers": speed},
    )


if __name__ == "__main__":
    main()
