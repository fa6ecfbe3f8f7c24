"""Comparison of batching policies on the engine: static, Magnus, continuous; chunks; SLAI.

    python benchmarks/batching.py [--quick] [--virtual] [--rounds 1] [--model tiny] [--threads N]
                                  [--sizes N ...] [--out FILE]

Sweep: static batching, batching by predicted lengths (Magnus) and continuous batching. The queue is
never empty. Each request has a prompt of 32 tokens and an output length from a mix. A run ends when
the number of output tokens of two static batches has been generated, or of LONGEST_MIX requests if
these are more. So all policies generate equally many tokens, and no run has a tail with free slots.
Magnus gets the true output lengths.

    mixed    64, 256 or 1,024 tokens, equally often
    uniform  16 to 512
    equal    256 each
    skewed   16, but one in 32 has 1,024

Chunks: prefill in chunks ("on"), or with a token budget into which the longest prompt fits as a
whole ("off"). One prompt in ten is long. Arrivals are Poisson at 0.7 of the saturation rate, at
which the engine serves the same requests if all are queued from the beginning.

SLAI: the policy "slai" against "continuous", and that against continuous batching in the order of
arrival. Prompts have a long tail, and arrivals are Poisson at several shares of the saturation
rate. A token is missed if it comes later than TBT_TARGET after the previous one. The capacity of a
policy is the largest load up to which the median TTFT is at most TTFT_LIMIT and at most one token
in a hundred is missed.

All runs take turns in one process. ``continuous_vs_static`` is the ratio of tokens per second with
the mix "mixed", at the batch size with the largest ratio. Names with a mix and a size are ratios of
that case. ``..._slots`` is the ratio of the shares of slots that compute something. Token rates
would have this ratio if a step took equally long for one row and for all; on a CPU this holds only
for few rows. --quick only tests the benchmark. With --virtual, the product's scheduler runs in
virtual time with the step times of batching_virtual.py, so figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks import checkpoints, report
from benchmarks.batching_engines import Bench, Live, Virtual
from benchmarks.batching_picture import draw
from benchmarks.batching_player import Request, RunResult, quantile
from worker.config import Scheduling, WorkerConfig
from worker.engine.plan import Runner

SIZES = (4, 8, 16, 32, 64, 128)
STATIC, CONTINUOUS = Scheduling("static"), Scheduling("continuous")
POLICIES = {"static": STATIC, "magnus": Scheduling("magnus"), "continuous": CONTINUOUS}
PROMPT = 32
#: Number of outputs in the longest mix.
LONGEST_MIX = 32
TBT_TARGET = 0.1
TTFT_LIMIT = 0.5
SLAI = Scheduling("slai", tbt_target=TBT_TARGET)
#: With so much ageing no prompt passes an earlier one.
BY_ARRIVAL = Scheduling("continuous", ageing_tokens=1 << 20)
LOADS = (0.7, 0.9, 1.0, 1.1, 1.3)
MISSED = 0.01
CHUNK_LOAD = 0.7
WHOLE_PROMPT_BUDGET = 2048

#: Output lengths of each mix. They are repeated, in a new random order each time.
MIXES = {
    "mixed": (64, 256, 1024),
    "uniform": tuple(range(16, 513, 16)),
    "equal": (256,),
    "skewed": (*[16] * 31, 1024),
}


@dataclass(frozen=True)
class Scale:
    """Size of the benchmark.

    The output lengths of the sweep are divided by ``output``. ``chunk`` is the token budget of
    chunked prefill. The comparison with SLAI has ``slots`` slots and a token budget of ``budget``.
    """

    sizes: tuple[int, ...] = SIZES
    output: int = 1
    requests: int = 400
    loads: tuple[float, ...] = LOADS
    chunk: int = 64
    slots: int = 64
    budget: int = 128


FULL = Scale()
QUICK = Scale((4, 32), 8, 60, (0.7, 1.1))
VIRTUAL = Scale(
    requests=2000,
    loads=(0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3),
    chunk=512,
    slots=256,
    budget=512,
)


# static against continuous


def sweep(bench: Bench, scale: Scale, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians over the rounds, by mix, then by batch size."""
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in MIXES}
    for size in scale.sizes:
        config = bench.config(size)
        runner = bench.runner(config)
        for name, mix in MIXES.items():
            runs = [compare(bench, runner, config, mix, scale, seed) for seed in range(rounds)]
            found[name][str(size)] = medians(runs)
            print(name, size, found[name][str(size)], flush=True)
    return found


def compare(
    bench: Bench,
    runner: Runner,
    config: WorkerConfig,
    mix: Sequence[int],
    scale: Scale,
    seed: int,
) -> dict[str, float]:
    """Return the figures of all policies in one round; every other round has the reverse order."""
    rng, size = Random(seed), config.max_num_seqs
    num_measured = max(2 * size, LONGEST_MIX)
    outputs = [
        max(1, output // scale.output) for output in shuffled_outputs(mix, 6 * num_measured, rng)
    ]
    requests = [Request(PROMPT, output) for output in outputs]
    figures: dict[str, float] = {}
    for name in sorted(POLICIES, reverse=bool(seed % 2)):
        under = replace(config, scheduling=POLICIES[name])
        played = bench.play(runner, under, requests, enough=sum(outputs[:num_measured]))
        figures |= {
            f"{name}_tokens_per_s": played.tokens_per_s,
            f"{name}_useful_share": played.useful_share,
        }
    for unit in ("tokens_per_s", "useful_share"):
        for name in ("continuous", "magnus"):
            figures[f"{name}_vs_static_{unit}"] = (
                figures[f"{name}_{unit}"] / figures[f"static_{unit}"]
            )
    return figures


def shuffled_outputs(mix: Sequence[int], count: int, rng: Random) -> list[int]:
    """Return ``count`` output lengths: the mix again and again, each time in random order."""
    outputs: list[int] = []
    while len(outputs) < count:
        outputs += rng.sample(mix, len(mix))
    return outputs[:count]


# prompts in chunks, or whole


def chunks(bench: Bench, scale: Scale, rounds: int) -> dict[str, dict[str, float]]:
    rng = Random(1)
    shapes = [
        (1500 if rng.random() < 0.1 else rng.randint(16, 128), rng.randint(32, 96))
        for _ in range(scale.requests)
    ]
    configs = {"on": bench.config(32, scale.chunk), "off": bench.config(32, WHOLE_PROMPT_BUDGET)}
    runners = {name: bench.runner(config) for name, config in configs.items()}
    rate = CHUNK_LOAD * saturation(bench, runners["off"], configs["off"], shapes)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in configs}
    for round_ in range(rounds):
        requests = at_random(shapes, rate, round_)
        for name, config in configs.items():
            runs[name].append(latencies(bench.play(runners[name], config, requests)))
    return {name: medians(several) for name, several in runs.items()}


# SLAI against the default


def deadlines(bench: Bench, scale: Scale, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the latencies by load, then by policy: in order of arrival, the default, and SLAI."""
    rng = Random(2)
    shapes = [
        (min(1500, max(16, round(rng.lognormvariate(5.5, 1.0)))), rng.randint(16, 96))
        for _ in range(scale.requests)
    ]
    config = bench.config(scale.slots, scale.budget)
    runner = bench.runner(config)
    rate = saturation(bench, runner, config, shapes)
    policies = {"arrival": BY_ARRIVAL, "continuous": CONTINUOUS, "slai": SLAI}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load in scale.loads:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
        for round_ in range(rounds):
            requests = at_random(shapes, load * rate, round_)
            for name, scheduling in policies.items():
                under = replace(config, scheduling=scheduling)
                runs[name].append(latencies(bench.play(runner, under, requests)))
        found[str(load)] = {name: medians(several) for name, several in runs.items()}
        print("load", load, found[str(load)], flush=True)
    return found


def capacity(found: dict[str, dict[str, dict[str, float]]], policy: str) -> float:
    """Return the largest load up to which ``policy`` meets the limits; 0 if there is none."""
    capacity = 0.0
    for load, policies in found.items():
        served = policies[policy]
        if served["ttft_p50_s"] > TTFT_LIMIT or served["missed_share"] > MISSED:
            return capacity
        capacity = float(load)
    return capacity


# shared functions


def saturation(
    bench: Bench, runner: Runner, config: WorkerConfig, shapes: Sequence[tuple[int, int]]
) -> float:
    """Return the requests per second if all requests are queued from the beginning."""
    requests = [Request(*shape) for shape in shapes]
    return len(shapes) / bench.play(runner, config, requests).seconds


def at_random(shapes: Sequence[tuple[int, int]], rate: float, seed: int) -> list[Request]:
    """Return requests of these (prompt, output) lengths with Poisson arrivals."""
    rng, at = Random(seed), 0.0
    requests = []
    for prompt, output in shapes:
        requests.append(Request(prompt, output, at))
        at += rng.expovariate(rate)
    return requests


def latencies(played: RunResult) -> dict[str, float]:
    ttfts, gaps = played.ttfts(), played.gaps()
    return {
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_p99_s": quantile(ttfts, 0.99),
        "tbt_p50_s": quantile(gaps, 0.5),
        "tbt_p99_s": quantile(gaps, 0.99),
        "tbt_p999_s": quantile(gaps, 0.999),
        "missed_share": sum(gap > TBT_TARGET for gap in gaps) / len(gaps),
        "tokens_per_s": played.tokens_per_s,
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(run[name] for run in runs), 5) for name in runs[0]}


def ratios(raw: dict[str, Any]) -> dict[str, float]:
    deadlines = raw["slai"]
    mixed = raw["sweep"]["mixed"].values()
    largest = max(mixed, key=lambda figures: figures["continuous_vs_static_tokens_per_s"])
    compared = {
        "continuous_vs_static": largest["continuous_vs_static_tokens_per_s"],
        "continuous_vs_static_slots": largest["continuous_vs_static_useful_share"],
        "chunks_tbt_p999_off_over_on": raw["chunks"]["off"]["tbt_p999_s"]
        / raw["chunks"]["on"]["tbt_p999_s"],
    }
    for name, sizes in raw["sweep"].items():
        for size, figures in sizes.items():
            for policy in ("continuous", "magnus"):
                ratio = f"{policy}_vs_static"
                compared[f"{ratio}_{name}_{size}"] = figures[f"{ratio}_tokens_per_s"]
                compared[f"{ratio}_slots_{name}_{size}"] = figures[f"{ratio}_useful_share"]
    for load, policies in deadlines.items():
        ttft_s = {name: figures["ttft_p50_s"] for name, figures in policies.items()}
        compared[f"slai_ttft_p50_vs_default_{load}"] = ttft_s["slai"] / ttft_s["continuous"]
        compared[f"default_ttft_p50_vs_arrival_{load}"] = ttft_s["continuous"] / ttft_s["arrival"]
    if default_capacity := capacity(deadlines, "continuous"):
        compared["slai_capacity_vs_default"] = capacity(deadlines, "slai") / default_capacity
    return {name: round(ratio, 3) for name, ratio in compared.items()}


# whole benchmark


def measure(bench: Bench, scale: Scale, rounds: int) -> dict[str, Any]:
    return {
        "sweep": sweep(bench, scale, rounds),
        "chunks": chunks(bench, scale, rounds),
        "slai": deadlines(bench, scale, rounds),
    }


def settings(scale: Scale, rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "scale": asdict(scale),
        "tbt_target_s": TBT_TARGET,
        "ttft_limit_s": TTFT_LIMIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", choices=checkpoints.CHECKPOINTS, default="tiny")
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of the sweep")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("build/bench/batching.json"))
    options = parser.parse_args()
    scale, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    bench: Bench
    if options.virtual:
        bench, scale = Virtual(), QUICK if options.quick else VIRTUAL
    else:
        bench = Live(checkpoints.ensure(options.model), options.threads)
    scale = replace(scale, sizes=tuple(options.sizes or scale.sizes))
    raw = measure(bench, scale, rounds)
    report.write(
        options.out,
        packages=["torch", "numpy"],
        settings=settings(scale, rounds)
        | {
            "model": "virtual" if options.virtual else options.model,
            "threads": options.threads,
        },
        raw=raw,
        ratios=ratios(raw),
    )
    draw(raw, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
