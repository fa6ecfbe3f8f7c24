"""Parts of the benchmark of the router (router_cost.py)."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from dataclasses import dataclass

from benchmarks import cores
from benchmarks.clients import Window, connected, watch
from benchmarks.cores import cpu_seconds, waited_seconds
from benchmarks.durability import RouterProcess, router_process
from benchmarks.floor import Floor
from benchmarks.noop_worker import TokenPacing, noop_worker
from benchmarks.ray_serve import MODES, Mode, RayServe
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.ledger.config import LedgerConfig

CONFIG = RouterConfig(model="fake", port=0, http_host="", worker_silence=5.0)
CONNECTIONS = 8
#: message rates, of which the first is used that the router and its clients keep up with
PACES_PER_S = (8000, 5000, 3000, 2000)
#: smallest number of messages per step of a stream at which the router counts as keeping up
CALM_SHARE = 0.98
PROMPT_TOKENS, OUTPUT_TOKENS, STEP_S = 100, 16, 0.02
#: share of a core that requests take in the part latency
LOAD = 0.7
#: first rate and number of probes in the search for that rate. Several are needed, because the CPU
#: time of a request falls with the rate
GENTLE_PER_S, PROBES = 100.0, 3
HELD, HELD_TOKENS, HELD_STEP_S = 2000, 8, 0.25
#: seconds of load before the measurement
WARM_UP_S = 0.5

Figures = dict[str, float]


@dataclass(frozen=True)
class Bench:
    """Processes, cores and sizes of all rounds; ``url`` is the address of the ledger's server."""

    url: str
    ledger_pid: int
    #: core of the measured process, and core of all others
    core: int
    other_core: int
    #: duration of a measurement
    seconds: float
    #: two numbers of concurrent streams or requests
    many: int
    few: int
    router: RouterProcess
    floor: Floor


def _request(output_tokens: int, prompt_tokens: int = 1) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=range(1, prompt_tokens + 1))
    return pb.GenerateRequest(tokens=prompt, max_tokens=output_tokens)


# streams


async def run_streams(
    router: RouterProcess, num: int, output_tokens: int, pace_s: float, tokens: int
) -> Window:
    """Run ``num`` concurrent streams with ``tokens`` tokens per step.

    Steps are ``pace_s`` apart; 0: as fast as the router accepts them.
    """
    request = _request(output_tokens)
    async with (
        noop_worker(router.internal_address, TokenPacing(pace_s, num, tokens)),
        connected(router.address, CONNECTIONS) as clients,
    ):
        return await watch(router.pid, num, lambda traffic: clients.read(request, traffic))


async def calm_streams(bench: Bench, num: int, tokens: int = 1) -> Figures:
    """Measure streams at the fastest pace at which nearly every step is a message of its own.

    If there is none, measure them at the slowest pace.
    """
    for per_s in PACES_PER_S:
        steps = math.ceil(bench.seconds * per_s / num)
        window = await run_streams(bench.router, num, 1 + tokens * steps, num / per_s, tokens)
        figures = window.figures() | {"pace_s": num / per_s}
        if figures["tokens_per_message"] <= tokens / CALM_SHARE:
            break
    return figures


async def hasty_streams(bench: Bench, num: int, tokens: int, per_s: float) -> Figures:
    """Measure streams with steps as fast as the router accepts them.

    They last about ``bench.seconds`` if the router carries ``per_s`` tokens per second.
    """
    output_tokens = max(16, round(per_s * bench.seconds / num))
    return (await run_streams(bench.router, num, output_tokens, 0.0, tokens)).figures()


async def streams(bench: Bench) -> dict[str, Figures]:
    many = bench.many
    one, four = await calm_streams(bench, many), await calm_streams(bench, many, 4)
    return {
        "streams": one,
        "few_streams": await calm_streams(bench, bench.few),
        "streams_of_4": four,
        "hasty_streams": await hasty_streams(bench, many, 1, one["tokens_per_cpu_s"]),
        "hasty_streams_of_4": await hasty_streams(bench, many, 4, four["tokens_per_cpu_s"]),
    }


# requests


async def closed_loop(
    bench: Bench, address: str, pid: int, num: int, request: pb.GenerateRequest
) -> Figures:
    """Measure ``num`` clients, each of which sends one request after another."""
    async with connected(address, CONNECTIONS) as clients, asyncio.TaskGroup() as group:
        until = time.perf_counter() + WARM_UP_S + bench.seconds
        for _ in range(num):
            group.create_task(clients.closed_loop(request, until))
        await asyncio.sleep(WARM_UP_S)
        before, begin = clients.answered, time.perf_counter()
        cpu, ledger_cpu = cpu_seconds(pid), cpu_seconds(bench.ledger_pid)
        waited = waited_seconds(pid)
        await asyncio.sleep(bench.seconds)
        answered, wall_s = clients.answered - before, time.perf_counter() - begin
        cpu_s = cpu_seconds(pid) - cpu
        ledger_cpu_s = cpu_seconds(bench.ledger_pid) - ledger_cpu
        waited_s = waited_seconds(pid) - waited
    return {
        "requests_per_cpu_s": answered / cpu_s,
        "requests_per_wall_s": answered / wall_s,
        "core_share": cpu_s / wall_s,
        "core_denied": waited_s / wall_s,
        "ledger_core_share": ledger_cpu_s / wall_s,
    }


async def requests(bench: Bench) -> dict[str, Figures]:
    request, found = _request(1), {}
    router, floor = bench.router, bench.floor
    for name, num in (("requests", bench.many), ("few_requests", bench.few)):
        async with noop_worker(router.internal_address, TokenPacing(0.0, 1, 1)):
            found[name] = await closed_loop(bench, router.address, router.pid, num, request)
        found[f"{name}_floor"] = await closed_loop(bench, floor.ledger, floor.pid, num, request)
    return found


# latency


async def latency(bench: Bench) -> dict[str, Figures]:
    request = _request(OUTPUT_TOKENS, PROMPT_TOKENS)
    router, floor = bench.router, bench.floor
    async with noop_worker(router.internal_address, TokenPacing(STEP_S, 1, 1)):
        through = await at_load(bench, router.address, router.pid, request)
    rate = through["requests_per_s"]
    filed = await at_load(bench, floor.ledger, floor.pid, _request(1, PROMPT_TOKENS))
    return {
        "latency": through,
        "latency_floor": await arrivals(bench, floor.transport, floor.pid, request, rate),
        "filed_latency": filed,
    }


async def at_load(bench: Bench, address: str, pid: int, request: pb.GenerateRequest) -> Figures:
    """Find the rate of arrivals at which the process takes LOAD of a core, and measure it."""
    rate = GENTLE_PER_S
    for _ in range(PROBES):
        probe = await arrivals(bench, address, pid, request, rate)
        rate = LOAD * probe["requests_per_cpu_s"]
    return await arrivals(bench, address, pid, request, rate)


async def arrivals(
    bench: Bench, address: str, pid: int, request: pb.GenerateRequest, rate: float
) -> Figures:
    """Measure Poisson arrivals at ``rate`` per second; equal rates have the same arrival times."""
    async with connected(address, CONNECTIONS) as clients:
        await asyncio.gather(*(clients.read(request) for _ in range(CONNECTIONS)))
        begin, cpu, waited = time.perf_counter(), cpu_seconds(pid), waited_seconds(pid)
        waits = await clients.open_loop(request, rate, bench.seconds, random.Random(1))
        wall_s, cpu_s = time.perf_counter() - begin, cpu_seconds(pid) - cpu
        waited_s = waited_seconds(pid) - waited
    percentiles = statistics.quantiles(waits, n=100, method="inclusive")
    return {
        "ttft_p50_ms": percentiles[49] * 1e3,
        "ttft_p99_ms": percentiles[98] * 1e3,
        "requests": len(waits),
        "requests_per_s": rate,
        "requests_per_cpu_s": len(waits) / cpu_s,
        "core_share": cpu_s / wall_s,
        "core_denied": waited_s / wall_s,
    }


# memory


async def held(bench: Bench) -> dict[str, Figures]:
    """Measure the memory per stream on a new router, so that earlier loads do not count."""
    ledger = LedgerConfig(url=bench.url, key_prefix=f"held-{time.time_ns()}")
    with router_process(CONFIG, ledger) as router:
        cores.pin(router.pid, bench.core)
        await run_streams(router, bench.few, HELD_TOKENS, HELD_STEP_S, 1)
        before = cores.resident_bytes(router.pid)
        window = await run_streams(router, HELD, HELD_TOKENS, HELD_STEP_S, 1)
    per_stream = (window.resident_bytes - before) / HELD
    return {"held": window.figures() | {"kib_per_stream": per_stream / 1024}}


# Ray Serve


async def serve(bench: Bench, ray: RayServe) -> dict[str, Figures]:
    num = bench.many
    calm = await calm_streams(bench, num)
    found = {"router": calm, "router_of_4": await calm_streams(bench, num, 4)}
    for mode in MODES:
        found[mode] = await through_serve(bench, ray, mode, calm["pace_s"])
    found["hasty_router"] = await hasty_streams(bench, num, 1, calm["tokens_per_cpu_s"])
    for mode in MODES:
        found[f"hasty_{mode}"] = await through_serve(bench, ray, mode, 0.0)
    return found


async def through_serve(bench: Bench, ray: RayServe, mode: Mode, pace_s: float) -> Figures:
    """Measure streams through Ray Serve for about ``bench.seconds``."""
    num = bench.many
    cores.pin(ray.pid(mode), bench.core)
    try:
        first = await ray.watch(mode, num, 8, pace_s)
        per_s = first.tokens / first.wall_s
        output_tokens = max(8, round(per_s * bench.seconds / num))
        return (await ray.watch(mode, num, output_tokens, pace_s)).figures()
    finally:
        cores.pin(ray.pid(mode), bench.other_core)
