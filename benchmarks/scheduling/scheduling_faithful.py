"""Accuracy of the simulator: a live cluster and simulations of it with the same requests.

The live cluster is that of scheduling_live.py. First it serves a minute of similar requests, from
which the router learns the step times of its worker. The simulated worker has these step times
(``everlift measure --running``). The overhead of a request outside its worker's steps is the mean
over requests with one output token, sent one after the other to the idle cluster.

Then the cluster is saturated, and after that it gets LOADS of the saturation rate. A run ends when
all requests have ended. Simulations get the due times and the lengths of prompts and outputs.
"foretold" has the step times that the router had learned before the requests came, and "forecast"
those that it had learned by their end. The speed of a machine varies by a tenth within minutes,
which near saturation changes the time to first token by much more. Therefore only the error of
"forecast" counts as the simulator's error.
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
#: Longest time between two reports of a worker, in seconds.
_FRAME_S = 0.5
_BUSY = re.compile(r"^everlift_worker_busy_seconds_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Requests sent to the live cluster, the token counts of their prompts, and their answers."""

    requests: Sequence[Request]
    prompt_tokens: Sequence[int]
    answers: Sequence[Answer]

    @property
    def arrivals(self) -> list[Arrival]:
        """The same requests as input of the simulator."""
        pairs = zip(self.requests, self.prompt_tokens, strict=True)
        return [Arrival(it.due, tokens, it.tokens, MAX_TOKENS) for it, tokens in pairs]


async def measure(model: Path, logs: Path, duration_s: float) -> dict[str, Any]:
    """Measure a new live cluster, and simulate it.

    Return the learned kinds of worker, the overhead per request in seconds, and figures by load.
    """
    with TemporaryDirectory(prefix="everlift-faithful-") as state:
        server = everlift(
            "faithful",
            with_ray=False,
            more={"worker.max_num_seqs": SLOTS, "state_dir": state},
        )
        async with serving(server, model, logs) as client:
            async with AsyncClient(await _wait_for_addresses(Path(state))) as direct:
                return await _measure(Bench(client, direct), duration_s)


async def _wait_for_addresses(state: Path) -> list[str]:
    """Return the routers' gRPC addresses, as soon as the cluster has published them in ``state``.

    The HTTP endpoint may answer earlier than that.
    """
    while not (found := endpoint.find(state)):
        await asyncio.sleep(0.1)
    return found


@dataclass(frozen=True, slots=True)
class Bench:
    client: Client
    direct: AsyncClient

    async def send(self, requests: Sequence[Request]) -> LiveRun:
        prompts = [len((await self.direct.tokenize(it.prompt)).token_ids) for it in requests]
        answers = await self.client.send([it.to_timed_request() for it in requests])
        return LiveRun(requests, prompts, answers)

    async def overhead_s(self) -> float:
        """Return the mean latency of a lone request of one token, less the worker's step time."""
        busy_s = await self._busy_s()
        seconds = 0.0
        for each in mix(_ALONE, 0.0, _SEED):
            request = replace(each, tokens=1, due=0.0)
            (answer,) = await self.client.send([request.to_timed_request()])
            seconds += answer.e2e_s
        await asyncio.sleep(_FRAME_S)
        return (seconds - (await self._busy_s() - busy_s)) / _ALONE

    async def _busy_s(self) -> float:
        """Return the seconds that the worker has spent in steps, from the router's metrics."""
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
    overhead_s = await bench.overhead_s()
    kind = await bench.kind()
    saturated = await bench.send(mix(_SATURATING, 0.0, _SEED + 4))
    kinds = [kind, await bench.kind()]
    found = {"saturated": _compare(saturated, kinds, overhead_s)}
    rate = saturation(saturated.answers)
    for number, load in enumerate(LOADS):
        live_run = await bench.send(_at_load(load * rate, duration_s, _SEED + 5 + number))
        kinds.append(await bench.kind())
        found[f"{load:g}"] = _compare(live_run, kinds[-2:], overhead_s)
        print(load, found[f"{load:g}"], file=sys.stderr, flush=True)
    return {
        "kinds": [learned.content(kind) for kind in kinds],
        "beside_s": overhead_s,
        "found": found,
    }


def _at_load(tokens_per_s: float, duration_s: float, seed: int) -> list[Request]:
    """Return requests of about ``duration_s`` whose outputs are ``tokens_per_s``.

    Due times are scaled so that the outputs up to the last due time have exactly that rate.
    """
    mean = statistics.fmean(it.tokens for it in mix(10_000, 0.0, _SEED))
    requests = mix(round(duration_s * tokens_per_s / mean), 1.0, seed)
    scale = sum(it.tokens for it in requests) / tokens_per_s / requests[-1].due
    return [replace(it, due=scale * it.due) for it in requests]


def _scenario(kind: admin_pb2.WorkerKind, overhead_s: float) -> Scenario:
    made = kind_file.parse_kind("live", learned.content(kind))
    config = settings.load(WorkerConfig, {"model": "fake", **made.worker})
    worker = WorkerSpec(config, made.step_time)
    # The overhead is that of both directions.
    return Scenario((worker,), RouterConfig(), link_s=overhead_s / 2, weights=None)


def _compare(
    live_run: LiveRun, kinds: Sequence[admin_pb2.WorkerKind], overhead_s: float
) -> dict[str, Figures]:
    """Return the figures of the live run, and of a simulation with each of two worker kinds.

    ``kinds`` are those that the router had learned before the run, and by its end.
    """
    found = {"live": figures(live_run.answers)}
    for name, kind in zip(("foretold", "forecast"), kinds, strict=True):
        records = simulate(live_run.arrivals, _scenario(kind, overhead_s)).records
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
    """Return the relative errors of the simulations' figures, by load and simulation.

    Both figures of an error, live and simulated, are medians over the rounds.
    """
    found: dict[str, dict[str, Figures]] = {}
    for load in rounds[0]["found"]:
        medians = {
            name: {
                figure: statistics.median(each["found"][load][name][figure] for each in rounds)
                for figure in names
            }
            for name, names in rounds[0]["found"][load].items()
        }
        live = medians.pop("live")
        found[load] = {
            name: {figure: simulated[figure] / live[figure] - 1 for figure in live}
            for name, simulated in medians.items()
        }
    return found


def ratios(errors: Mapping[str, Mapping[str, Figures]]) -> Figures:
    """Return the largest absolute error of each latency over LOADS, and that of the token rate.

    The rate's error is that of the saturated cluster. All are errors of "forecast".
    """
    at_loads = [errors[f"{load:g}"]["forecast"] for load in LOADS]
    each = {
        f"simulator_{name}_error": max(abs(error[f"{name}_s"]) for error in at_loads)
        for name in ("ttft_p50", "ttft_p90", "latency_p50", "latency_p90")
    }
    rate = errors["saturated"]["forecast"]["tokens_per_s"]
    return each | {"simulator_saturation_error": abs(rate)}
