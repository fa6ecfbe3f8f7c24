"""A forecast held against a live cluster that gets the same requests at the same moments.

The cluster is that of scheduling_live.py. It gets a minute of other requests of the same kind, from
which the router learns how long its worker's steps take; what it has learned is the forecast's kind
of worker (``everlift measure --running``). What a request takes beside its worker's steps is
measured too: one after the other, each with one token, on an idle cluster.

Then it is saturated, and gets LOADS of what it did; everybody is waited for. The forecasts get the
prompts' lengths, the outputs' lengths and the moments. One has what the router had learned before
the requests came ("foretold"), one what it has learned by their end ("forecast"): machines become
faster and slower by a tenth within minutes, and near saturation that is a much larger part of the
time to the first token, as it would be of any two runs. The second one's error is the simulator's.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.online.online_load import Answer, Client, percentile
from benchmarks.online.online_servers import everlift, serving
from benchmarks.scheduling.scheduling_live import SLOTS, saturation
from benchmarks.scheduling.scheduling_mix import MAX_TOKENS, Request, mix
from cluster import endpoint
from cluster.simulator.hardware import kind_file, learned
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.simulate import simulate
from cluster.simulator.workloads.arrivals import Arrival
from everlift import AsyncClient, settings
from everlift.v1 import admin_pb2
from router.config import RouterConfig
from worker.config import WorkerConfig

Figures = dict[str, float]

LOADS = (0.7, 0.9)
_WARM_UP = 40
_LEARNED_FROM_S = 60.0
_SATURATING = 320
_ALONE = 30
_SEED = 5000
#: A worker tells of itself at least so often.
_FRAME_S = 0.5
_BUSY = re.compile(r"^everlift_worker_busy_seconds_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the cluster did with some requests, whose prompts have so many tokens."""

    requests: Sequence[Request]
    prompt_tokens: Sequence[int]
    answers: Sequence[Answer]

    @property
    def arrivals(self) -> list[Arrival]:
        pairs = zip(self.requests, self.prompt_tokens, strict=True)
        return [Arrival(it.due, tokens, it.tokens, MAX_TOKENS) for it, tokens in pairs]


async def measure(model: Path, logs: Path, duration_s: float) -> dict[str, Any]:
    """Live and forecast figures of one cluster."""
    with TemporaryDirectory(prefix="everlift-faithful-") as state:
        server = everlift(
            "faithful",
            with_ray=False,
            more={"worker.max_num_seqs": SLOTS, "state_dir": state},
        )
        async with serving(server, model, logs) as client:
            async with AsyncClient(await _addresses(Path(state))) as direct:
                return await _measure(Bench(client, direct), duration_s)


async def _addresses(state: Path) -> list[str]:
    """It answers before it says where it is."""
    while not (found := endpoint.find(state)):
        await asyncio.sleep(0.1)
    return found


@dataclass(frozen=True, slots=True)
class Bench:
    client: Client
    direct: AsyncClient

    async def send(self, requests: Sequence[Request]) -> Seen:
        prompts = [len((await self.direct.tokenize(it.prompt)).token_ids) for it in requests]
        return Seen(requests, prompts, await self.client.send([it.ask() for it in requests]))

    async def beside_s(self) -> float:
        """What a request takes that is on its own, less the worker's steps."""
        busy_s = await self._busy_s()
        seconds = 0.0
        for each in mix(_ALONE, 0.0, _SEED):
            (answer,) = await self.client.send([replace(each, tokens=1, due=0.0).ask()])
            seconds += answer.e2e_s
        await asyncio.sleep(_FRAME_S)
        return (seconds - (await self._busy_s() - busy_s)) / _ALONE

    async def _busy_s(self) -> float:
        """That the worker has spent in steps."""
        address = (await self.direct.status()).metrics_address
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/metrics") as response:
                (found,) = _BUSY.findall(await response.text())
        return float(found)

    async def kind(self) -> admin_pb2.WorkerKind:
        return learned.only((await self.direct.capacity()).kinds, None)


async def _measure(bench: Bench, duration_s: float) -> dict[str, Any]:
    await bench.send(mix(_WARM_UP, 0.0, _SEED + 1))
    rough = saturation((await bench.send(mix(_SATURATING // 2, 0.0, _SEED + 2))).answers)
    per_s = rough / statistics.fmean(it.tokens for it in mix(10_000, 0.0, _SEED))
    await bench.send(mix(round(0.8 * per_s * _LEARNED_FROM_S), 0.8 * per_s, _SEED + 3))
    beside_s = await bench.beside_s()
    kind = await bench.kind()
    saturated = await bench.send(mix(_SATURATING, 0.0, _SEED + 4))
    kinds = [kind, await bench.kind()]
    found = {"saturated": _compared(saturated, kinds, beside_s)}
    rate = saturation(saturated.answers)
    for number, load in enumerate(LOADS):
        seen = await bench.send(_at_load(load * rate, duration_s, _SEED + 5 + number))
        kinds.append(await bench.kind())
        found[f"{load:g}"] = _compared(seen, kinds[-2:], beside_s)
        print(load, found[f"{load:g}"], file=sys.stderr, flush=True)
    return {
        "kinds": [learned.content(kind) for kind in kinds],
        "beside_s": beside_s,
        "found": found,
    }


def _at_load(tokens_per_s: float, duration_s: float, seed: int) -> list[Request]:
    """Of so many output tokens a second, these very ones."""
    mean = statistics.fmean(it.tokens for it in mix(10_000, 0.0, _SEED))
    requests = mix(round(duration_s * tokens_per_s / mean), 1.0, seed)
    scale = sum(it.tokens for it in requests) / tokens_per_s / requests[-1].due
    return [replace(it, due=scale * it.due) for it in requests]


def _scenario(kind: admin_pb2.WorkerKind, beside_s: float) -> Scenario:
    made = kind_file.parse_kind("live", learned.content(kind))
    config = settings.load(WorkerConfig, {"model": "fake", **made.worker})
    worker = WorkerSpec(config, made.step_time)
    # There and back.
    return Scenario((worker,), RouterConfig(), link_s=beside_s / 2, weights=None)


def _compared(
    seen: Seen, kinds: Sequence[admin_pb2.WorkerKind], beside_s: float
) -> dict[str, Figures]:
    """``kinds`` are what had been learned before and what has been learned since."""
    found = {"live": figures(seen.answers)}
    for name, kind in zip(("foretold", "forecast"), kinds, strict=True):
        records = simulate(seen.arrivals, _scenario(kind, beside_s)).records
        found[name] = figures(
            [Answer(it.arrival.at, it.first_token, it.finished, it.output_tokens) for it in records]
        )
    return found


def figures(answers: Sequence[Answer]) -> Figures:
    found = {"tokens_per_s": saturation(answers)}
    for name, values in (
        ("ttft", [it.ttft_s for it in answers]),
        ("latency", [it.e2e_s for it in answers]),
    ):
        found |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in (50, 90)}
    return found


def errors(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, Figures]]:
    """By load and forecast: of the medians over the rounds."""
    found: dict[str, dict[str, Figures]] = {}
    for load in rounds[0]["found"]:
        medians = {
            name: {
                figure: statistics.median(each["found"][load][name][figure] for each in rounds)
                for figure in seen
            }
            for name, seen in rounds[0]["found"][load].items()
        }
        live = medians.pop("live")
        found[load] = {
            name: {figure: seen[figure] / live[figure] - 1 for figure in live}
            for name, seen in medians.items()
        }
    return found


def ratios(errors: Mapping[str, Mapping[str, Figures]]) -> Figures:
    """The simulator's largest errors over the loads; that of the rate is of the saturated
    cluster."""
    at_loads = [errors[f"{load:g}"]["forecast"] for load in LOADS]
    each = {
        f"simulator_{name}_error": max(abs(error[f"{name}_s"]) for error in at_loads)
        for name in ("ttft_p50", "ttft_p90", "latency_p50", "latency_p90")
    }
    rate = errors["saturated"]["forecast"]["tokens_per_s"]
    return each | {"simulator_saturation_error": abs(rate)}
