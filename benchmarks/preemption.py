"""Migration of preempted requests: two workers short of KV blocks, in virtual time.

    python benchmarks/preemption.py [--seconds 30] [--seeds 6] [--load NAME ...] [--out FILE]

Routers and workers are the product's, on a simulated cluster (tests/simulated_cluster) with the
step times of a GPU; the figures do not depend on the machine. Each load runs twice with the same
requests. In "moving", preempted requests may migrate to the other worker (router.max_moves has its
default). In "local", they wait and recompute at their worker (max_moves 0).

    joining   long requests fill one worker; then another worker joins, and short requests come
    uneven    one worker has half the blocks of the other
    mixed     equal workers, lengths with a long tail: either worker is short of blocks at times
    overfull  as joining, with so many long requests that both workers are short of blocks

The normalised latency of a request is the time from its submission to its last token, divided by
its output tokens. ``ratios`` are figures of "moving" divided by those of "local", as medians over
the loads. Below 1 is better.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import report
from router.config import RouterConfig
from tests.simulated_cluster.cluster import SimCluster
from worker.config import FakeModel, WorkerConfig

#: 15 ms per step, and 25,000 prompt tokens per second.
MODEL = FakeModel(vocab_size=256, max_model_len=2048, step_time=0.015, token_time=4e-5)
NUM_BLOCKS = 96
WORKER = WorkerConfig(
    model="fake", num_blocks=NUM_BLOCKS, max_num_seqs=64, max_num_batched_tokens=512, fake=MODEL
)
MOVING = RouterConfig(model="fake")
WAITING = replace(MOVING, max_moves=0)
_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, KV blocks of each worker, and the second in which the last worker joins."""

    arrivals: tuple[Arrival, ...]
    blocks: tuple[int, ...] = (NUM_BLOCKS, NUM_BLOCKS)
    joins: float = 0.0


def joining(rng: Random, seconds: float, num_long: int = 10) -> Load:
    long = [Arrival(rng.uniform(0, 2), rng.randint(40, 120), 600) for _ in range(num_long)]
    short = [*_poisson(rng, 4.0, (5.0, seconds), lambda: rng.randint(20, 80))]
    return Load((*sorted(long, key=lambda it: it.at), *short), joins=4.0)


def overfull(rng: Random, seconds: float) -> Load:
    return joining(rng, seconds, num_long=16)


def uneven(rng: Random, seconds: float) -> Load:
    arrivals = _poisson(rng, 4.0, (0.0, seconds), lambda: _long_tail(rng))
    return Load(tuple(arrivals), (NUM_BLOCKS // 2, NUM_BLOCKS))


def mixed(rng: Random, seconds: float) -> Load:
    return Load(tuple(_poisson(rng, 6.0, (0.0, seconds), lambda: _long_tail(rng))))


LOADS: dict[str, Callable[[Random, float], Load]] = {
    "joining": joining,
    "uneven": uneven,
    "mixed": mixed,
    "overfull": overfull,
}


def _long_tail(rng: Random) -> int:
    return min(900, max(16, round(rng.lognormvariate(4.8, 0.9))))


def _poisson(
    rng: Random, rate: float, between: tuple[float, float], length: Callable[[], int]
) -> Iterator[Arrival]:
    at, end = between
    while (at := at + rng.expovariate(rate)) < end:
        yield Arrival(at, rng.randint(20, 120), length())


@dataclass(frozen=True, slots=True)
class Measured:
    latencies: tuple[float, ...]
    recomputed_tokens: int
    preemptions: int
    migrations: int
    output_tokens: int

    def summary(self) -> dict[str, float]:
        return {
            "requests": len(self.latencies),
            "p50_normalised_latency_s": quantile(self.latencies, 0.5),
            "p99_normalised_latency_s": quantile(self.latencies, 0.99),
            "mean_normalised_latency_s": statistics.fmean(self.latencies),
            "output_tokens": self.output_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
            "migrations": self.migrations,
        }


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def simulate(load: Load, config: RouterConfig) -> Measured:
    with SimCluster(config, WORKER) as cluster:
        cluster.start_router(0)
        for index, blocks in enumerate(load.blocks[:-1]):
            cluster.start_worker(index, num_blocks=blocks)
        _submit_all(cluster, load)
        cluster.settle(_LIMIT_S)
        transcripts = [*cluster.transcripts.values()]
    assert all(it.is_complete for it in transcripts), [it.error for it in transcripts if it.error]
    return Measured(
        latencies=tuple(it.total_s / it.num_tokens for it in transcripts),
        recomputed_tokens=sum(it.recomputed_tokens for it in transcripts),
        preemptions=sum(it.preemptions for it in transcripts),
        migrations=sum(it.migrations for it in transcripts),
        output_tokens=sum(it.num_tokens for it in transcripts),
    )


def _submit_all(cluster: SimCluster, load: Load) -> None:
    last = len(load.blocks) - 1
    cluster.run_for(1.0)
    begin, has_joined = cluster.clock.elapsed, False
    for number, arrival in enumerate(load.arrivals):
        if not has_joined and arrival.at >= load.joins:
            cluster.run_for(max(0.0, begin + load.joins - cluster.clock.elapsed))
            cluster.start_worker(last, num_blocks=load.blocks[last])
            has_joined = True
        cluster.run_for(max(0.0, begin + arrival.at - cluster.clock.elapsed))
        prompt = [(number * 31 + i * 7) % 255 + 1 for i in range(arrival.prompt)]
        options = {"max_tokens": arrival.output, "temperature": 0.0}
        cluster.submit(f"r{number}", prompt, options)  # type: ignore[arg-type]


def compare(name: str, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Run a load with and without migration, over all seeds; return the figures and ratios."""
    runs: dict[str, list[Measured]] = {"moving": [], "local": []}
    for seed in seeds:
        load = LOADS[name](Random(seed), seconds)
        for way, config in (("moving", MOVING), ("local", WAITING)):
            runs[way].append(simulate(load, config))
            print(name, seed, way, json.dumps(rounded(runs[way][-1].summary())), flush=True)
    sums = {way: pooled(measured).summary() for way, measured in runs.items()}
    return {way: rounded(it) for way, it in sums.items()} | {"ratios": ratios(sums)}


def pooled(runs: Sequence[Measured]) -> Measured:
    """Return the figures of all runs as those of one run."""
    return Measured(
        latencies=tuple(latency for run in runs for latency in run.latencies),
        recomputed_tokens=sum(run.recomputed_tokens for run in runs),
        preemptions=sum(run.preemptions for run in runs),
        migrations=sum(run.migrations for run in runs),
        output_tokens=sum(run.output_tokens for run in runs),
    )


def ratios(sums: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the figures with migration divided by those without."""
    moving, local = sums["moving"], sums["local"]
    return {
        "p99_normalised_latency_vs_local": round(
            moving["p99_normalised_latency_s"] / local["p99_normalised_latency_s"], 3
        ),
        "recomputed_tokens_vs_local": round(
            moving["recomputed_tokens"] / max(1, local["recomputed_tokens"]), 3
        ),
    }


def medians(ratios: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(it[name] for it in ratios), 3) for name in ratios[0]}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--load", choices=LOADS, nargs="+", default=list(LOADS))
    parser.add_argument("--out", type=Path, default=Path("build/bench/preemption.json"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = range(arguments.seeds)
    loads = {name: compare(name, seeds, arguments.seconds) for name in arguments.load}
    report.write(
        arguments.out,
        packages=["everlift"],
        settings={
            "workers": len(Load(()).blocks),
            "blocks": NUM_BLOCKS,
            "seconds": arguments.seconds,
            "seeds": arguments.seeds,
        },
        raw=loads,
        ratios=medians([load["ratios"] for load in loads.values()]),
    )


if __name__ == "__main__":
    main()
