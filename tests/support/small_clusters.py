"""Small clusters to forecast, shared by tests."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.workloads.arrivals import Arrival
from everlift.step_time import Roofline
from worker.config import WorkerConfig

#: 10 ms a step, plus 100 us for each prompt token beyond a hundred.
STEP_TIME = Roofline(overhead_s=0.0, weights_s=0.01, token_s=1e-4, kv_token_s=1e-7)
ENGINE = WorkerConfig(
    model="fake", num_blocks=200, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=128
)


def spec(slowness: float = 1.0, **changes: Any) -> WorkerSpec:
    return WorkerSpec(replace(ENGINE, **changes), STEP_TIME, slowness)


def scenario(*workers: WorkerSpec, **changes: Any) -> Scenario:
    return Scenario(workers or (spec(),), **changes)


def arrivals(number: int, rate: float, seed: int = 0, **changes: Any) -> list[Arrival]:
    dice, at, found = Random(seed), 0.0, []
    for _ in range(number):
        at += dice.expovariate(rate)
        prompt, output = dice.randint(1, 300), dice.randint(1, 100)
        found.append(replace(Arrival(at, prompt, output, 200), **changes))
    return found
