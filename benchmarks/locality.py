"""Prefix-cache-aware dispatch against policies of other routers, in virtual time, and its cost.

    python benchmarks/locality.py [--sections NAME ...] [--trace FILE] [--out FILE]

Workers are the h200 preset (Llama-3.1-8B, 845,632 tokens of KV cache; the context is raised to that
of the longest session). Queue, placement, index, engine scheduler and block pools are the product's
own. ``off`` is the product without locality, and the rivals are in locality_rivals.py.

The load 1 is the saturation of Everlift: the largest rate, within 10 %, at which the p99 of the
time to first token is at most 10 s. With 64 workers it is the same rate per worker. Ratios are
named after the workload and the load, and end in ``_64`` with 64 workers:

    reused_of_reusable_*        cached prompt tokens, divided by those that infinite caches would
                                have
    p99_ttft_vs_best_rival_*    Everlift's p99 TTFT, divided by the smallest one of the rivals
    saturation_vs_off_*         Everlift's saturation, divided by that of ``off``;
                                saturation_vs_best_rival_*: by the largest one of the rivals
    no_sharing_vs_off           p99 TTFT divided by that of ``off``, with prompts that share nothing
    wait_vs_clairvoyant_*       cost of all decisions to wait or not, divided by that of a
                                clairvoyant policy (locality_wait.py): the largest over the loads
    leader_us_added_*           CPU time of the index for a cold prompt of 12,000 tokens, with this
                                number of queued requests; leader_us_added_turn_* for a session's
                                turn; leader_us_path_* for all that the leader does
                                (locality_leader.py)
    ledger_bytes_per_turn       bytes of a turn at 200,000 tokens beyond its new tokens
                                (ledger_turns.py)
    session_reuse               share of a prompt and answer with which the session's next prompt
                                begins (session_reuse.py)
    live_*                      sessions on a cluster of real workers (locality_live.py)

Claims rest on the ratios of ``agents`` with 8 workers, and on no_sharing_vs_off at the load 0.9.
Each section adds its own ratios; with --sections, the file keeps those of the other sections.
--trace runs only a recorded workload in Mooncake's format.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import ledger_turns, locality_live, report, session_reuse
from benchmarks.locality_leader import leader
from benchmarks.locality_picture import draw
from benchmarks.locality_runs import (
    EVERLIFT,
    OFF,
    POLICIES,
    RIVALS,
    Run,
    figures,
    run_in_parallel,
    saturation,
)
from benchmarks.locality_workloads import WORKLOADS, recorded_trace

#: Raw figures and ratios of a section, given the raw figures of those before it.
Section: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, float]]]

LOADS = (0.7, 0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs of a workload: their virtual seconds, and policies whose saturation is found.

    ``rate`` is where the search for it begins, in requests or sessions per second and worker.
    """

    rate: float
    warm_up_s: float
    duration_s: float
    loads: tuple[float, ...] = (0.9,)
    policies: tuple[str, ...] = POLICIES
    saturated: tuple[str, ...] = (OFF, EVERLIFT)
    seeds: tuple[int, ...] = (1, 2)

    def run(self, workload: str, policy: str, workers: int, rate: float) -> Run:
        return Run(workload, policy, workers, rate, self.warm_up_s, self.duration_s, self.seeds)


PLANS = {
    # At the load 0.7, the p99 TTFT of a single seed differs by up to a third from another's.
    "agents": Plan(0.022, 90.0, 180.0, LOADS, saturated=POLICIES, seeds=(1, 2, 3, 4, 5, 6)),
    "conversation": Plan(1.5, 200.0, 100.0),
    "toolagent": Plan(3.0, 60.0, 60.0),
    "tenants": Plan(8.0, 60.0, 240.0),
    "no-sharing": Plan(5.0, 60.0, 240.0, policies=(OFF, EVERLIFT)),
}
_LARGE = Plan(0.0, 60.0, 60.0, LOADS, seeds=(1,))
_WORKERS, _MANY_WORKERS = 8, 64
#: Start of the search for a policy's saturation, as a share of the plan's rate.
_GUESSES = {OFF: 0.25, "dynamo": 0.4, "sglang": 0.5}


def simulated(workload: str, raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure a workload with eight workers: saturations, then all policies at Plan.loads.

    Loads are shares of Everlift's saturation.
    """
    plan = PLANS[workload]
    searches = [
        plan.run(workload, it, _WORKERS, plan.rate * _GUESSES.get(it, 1.0)) for it in plan.saturated
    ]
    saturations = dict(zip(plan.saturated, run_in_parallel(saturation, searches), strict=True))
    print(f"{workload}: saturation per worker {saturations}", flush=True)
    loads = at_loads(plan, workload, _WORKERS, saturations[EVERLIFT])
    ratios = load_ratios(workload, loads)
    if saturations[OFF]:
        ratios[f"saturation_vs_off_{workload}"] = saturations[EVERLIFT] / saturations[OFF]
    if rivals := [saturations[it] for it in RIVALS if saturations.get(it)]:
        ratios[f"saturation_vs_best_rival_{workload}"] = saturations[EVERLIFT] / max(rivals)
    return {"saturation_per_worker": saturations, "loads": loads}, ratios


def many_workers(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure the agents with 64 workers, at shares of the rate per worker that saturates eight."""
    rate = raw["agents"]["saturation_per_worker"][EVERLIFT]
    loads = at_loads(_LARGE, "agents", _MANY_WORKERS, rate)
    ratios = load_ratios("agents", loads)
    return {"loads": loads}, {f"{name}_{_MANY_WORKERS}": it for name, it in ratios.items()}


def at_loads(plan: Plan, workload: str, workers: int, rate: float) -> dict[str, dict[str, Any]]:
    """Return the figures by load, then by policy."""
    runs = [
        plan.run(workload, policy, workers, load * rate)
        for load in plan.loads
        for policy in plan.policies
    ]
    found = iter(run_in_parallel(figures, runs))
    return {f"{load:g}": {it: next(found) for it in plan.policies} for load in plan.loads}


def load_ratios(workload: str, loads: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for load, found in loads.items():
        own = found[EVERLIFT]
        if workload == "no-sharing":
            ratios["no_sharing_vs_off"] = own["ttft_p99_s"] / found[OFF]["ttft_p99_s"]
            continue
        best = min(found[it]["ttft_p99_s"] for it in RIVALS)
        ratios[f"reused_of_reusable_{workload}_{load}"] = own["reused_of_reusable"]
        ratios[f"p99_ttft_vs_best_rival_{workload}_{load}"] = own["ttft_p99_s"] / best
    waits = [found[EVERLIFT]["waits"] for found in loads.values()]
    if sum(it["decisions"] for it in waits):
        ratios[f"wait_vs_clairvoyant_{workload}"] = max(
            it["cost_s"] / it["clairvoyant_s"] for it in waits if it["decisions"]
        )
    return ratios


def ledger(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    found = asyncio.run(ledger_turns.measure(context=200_000, turns=20))
    return found, {"ledger_bytes_per_turn": found["bytes_per_turn"]}


def sessions(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    found = asyncio.run(session_reuse.measure())
    return found, {"session_reuse": found["session_reuse"]}


def live_cluster(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    return locality_live.live(sessions=40, turns=10, logs=Path("build/bench/locality_live"))


SECTIONS: dict[str, Section] = {
    **{workload: partial(simulated, workload) for workload in PLANS},
    "agents with 64 workers": many_workers,
    "leader": leader,
    "ledger": ledger,
    "sessions": sessions,
    "live": live_cluster,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--trace", type=Path, help="file in Mooncake's format")
    parser.add_argument("--out", type=Path, default=Path("build/bench/locality.json"))
    args = parser.parse_args()
    raw, ratios = {}, {}
    if args.sections and args.out.exists():
        before = json.loads(args.out.read_text())
        raw, ratios = before["raw"], before["ratios"]
    sections = {it: SECTIONS[it] for it in args.sections or SECTIONS}
    if args.trace:
        name = args.trace.stem
        WORKLOADS[name] = recorded_trace(args.trace)
        PLANS[name] = PLANS["conversation"]
        sections = {name: partial(simulated, name)}
    for name, section in sections.items():
        began = time.monotonic()
        raw[name], found = section(raw)
        ratios.update(found)
        print(f"{name}: {time.monotonic() - began:.0f} s, {found}", flush=True)
        report.write(
            args.out,
            packages=("numpy",),
            settings={"plans": {it: repr(plan) for it, plan in PLANS.items()}},
            raw=raw,
            ratios=ratios,
        )
    draw(raw, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
