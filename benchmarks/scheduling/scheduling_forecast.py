"""What decides who boards next, and where, at sizes and loads that no machine here has.

Everything is in virtual time, so these figures are the same on every machine, but for the speed of
forecasting itself. Workers are H200s with a model of 8 billion parameters (cluster/simulator).
Loads are parts of the rate at which such workers finish requests when they always have enough,
which is found by giving them 1.5 times what an estimate says.

    binding     the global queue, and workers that are bound early: p99 TTFT of conversations
    orders      who leaves first, under loads up to 1.3: chats, 64 slots
    patience    how long a request gives way to shorter ones
    overload    goodput, with and without bounds: conversations
    speed       virtual seconds by seconds of CPU, a hundred exact workers (forecast_speed.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import starmap, takewhile
from math import inf
from multiprocessing import get_context
from typing import Any, TypeVar

from benchmarks import forecast_speed
from benchmarks.early_binding import EarlyBinding
from cluster.simulator.forecast import Forecast
from cluster.simulator.hardware.kind import GPUS, on_gpus
from cluster.simulator.hardware.model_size import MODELS
from cluster.simulator.plan import saturation_rate
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Slo, Summary
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.known import WORKLOADS
from cluster.simulator.workloads.workload import Workload
from everlift import settings
from everlift.hashes import BLOCK_SIZE
from router.config import Order, RouterConfig
from worker.config import WorkerConfig

Figures = dict[str, float]

#: What the figures of that part are called.
BINDING = "binding_p99_ttft_ms"

_KIND = on_gpus(GPUS["h200"], MODELS["llama-3.1-8b"])
#: A few times the slots: prompts are computed beside others' tokens, as policies see them.
_STEP_TOKENS = 2048
#: Until queues and batches are as they stay.
_WARM_UP_S = 20.0
_SEED = 1
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
#: What an output's predicted length is off by: Kendall's tau of these is that of the names (a
#: normal error of a logarithm whose own deviation is 0.9).
TAUS: Mapping[str, float] = {"tau 0.3": 1.77, "tau 0.6": 0.65, "oracle": 0.0}


def plain(name: str) -> Workload:
    """Of one tenant and class, without targets, at a steady rate."""
    return replace(
        WORKLOADS[name].without_drift(),
        tenants={"": 1.0},
        classes={0: 1.0},
        ttft_target_s=inf,
        deadline_s=inf,
    )


CONVERSATIONS, CHATS = plain("azure-conversation"), plain("chat")


def spec(slowness: float = 1.0, **changes: Any) -> WorkerSpec:
    worker = {**_KIND.worker, "max_num_batched_tokens": _STEP_TOKENS, **changes}
    config = settings.load(WorkerConfig, {"model": "fake", **worker})
    return WorkerSpec(config, _KIND.step_time, slowness)


@dataclass(frozen=True, slots=True)
class Run:
    """``load`` of what ``workers`` can do; what comes in the warm-up does not count. Everybody is
    waited for."""

    workload: Workload
    workers: tuple[WorkerSpec, ...]
    load: float
    duration_s: float
    router: RouterConfig = RouterConfig(max_queued=10**9)  # noqa: RUF009 it is frozen
    early: EarlyBinding | None = None
    foresight_sigma: float | None = None
    #: of what the workload brings, by the number of a request
    change: Callable[[int, Arrival], Arrival] | None = None
    weights: Mapping[str, float] | None = None

    @property
    def rate(self) -> float:
        """Requests that come in a second."""
        return self.load * sum(_rate(self.workload, it) for it in self.workers)

    def forecast(self) -> Forecast:
        arrivals = self.workload.at_rate(self.rate).arrivals(_SEED)
        if self.change is not None:
            arrivals = starmap(self.change, enumerate(arrivals))
        until = _WARM_UP_S + self.duration_s
        scenario = Scenario(
            self.workers,
            self.router,
            foresight_sigma=self.foresight_sigma,
            weights=self.weights,
        )
        dispatcher = self.early.queue(self.router) if self.early else None
        arriving = takewhile(lambda it: it.at < until, arrivals)
        return simulate(arriving, scenario, dispatcher=dispatcher)

    def summary(
        self, forecast: Forecast | None = None, of: Callable[[int], bool] = lambda index: True
    ) -> Summary:
        """``of`` those of these numbers."""
        return (forecast or self.forecast()).summary(
            SLO, lambda record: record.arrival.at >= _WARM_UP_S and of(record.index)
        )


Figured = TypeVar("Figured")


def each(figured: Callable[[Run], Figured], runs: Mapping[str, Run]) -> dict[str, Figured]:
    """By name, of runs that are played beside each other: as many as there are cores."""
    # What workers can do is found once: the players are copies of this process.
    print(*(f"{name}: {run.rate:.4g}/s" for name, run in runs.items()), sep=", ", flush=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as players:
        return dict(zip(runs, players.map(figured, runs.values()), strict=True))


_rates: dict[tuple[str, WorkerSpec], float] = {}


def _rate(workload: Workload, worker: WorkerSpec) -> float:
    """Requests a second that it finishes when it always has enough."""
    key = workload.name, worker
    if key not in _rates:
        sample = workload.arrivals(_SEED)
        estimate = saturation_rate([next(sample) for _ in range(2000)], worker)
        rate, until = 1.5 * estimate, 4 * _WARM_UP_S
        arrivals = workload.at_rate(rate).arrivals(_SEED)
        scenario = Scenario((worker,), RouterConfig(max_queued=10**9), weights=None)
        forecast = simulate(takewhile(lambda it: it.at < until, arrivals), scenario)
        ended = sum(_WARM_UP_S <= it.finished < until for it in forecast.records)
        _rates[key] = ended / (until - _WARM_UP_S)
    return _rates[key]


# binding

BINDINGS: Mapping[str, EarlyBinding | None] = {
    "global": None,
    "jsq": EarlyBinding("jsq"),
    "p2c": EarlyBinding("p2c"),
    "round robin": EarlyBinding("round_robin"),
    "jsq, 1 s old": EarlyBinding("jsq", 1.0),
    "p2c, 1 s old": EarlyBinding("p2c", 1.0),
}


def binding(runs: Mapping[str, Run]) -> dict[str, Figures]:
    """p99 TTFT in ms, by run and binding."""
    found: dict[str, Figures] = {}
    for name, run in runs.items():
        bound = {how: replace(run, early=early) for how, early in BINDINGS.items()}
        found[name] = each(_p99_ttft_ms, bound)
        print(name, found[name], flush=True)
    return found


def _p99_ttft_ms(run: Run) -> float:
    return 1e3 * run.summary().ttft_s.p99


def binding_runs() -> dict[str, Run]:
    uniform, slow = (spec(),), (spec(slowness=2.0),)
    run = Run(CONVERSATIONS, 8 * uniform, 0.9, 60.0)
    return {
        "8 workers, load 0.9": run,
        "8 workers, load 0.7": replace(run, load=0.7),
        "8 workers, one at half speed, load 0.9": replace(run, workers=7 * uniform + slow),
        "8 workers, 60,000 tokens of KV, reasoning, load 0.85": _short_of_blocks(),
        "64 workers, load 0.9": replace(run, workers=64 * uniform, duration_s=30.0),
        "1,000 workers, load 0.9": replace(run, workers=1000 * uniform, duration_s=5.0),
    }


def _short_of_blocks() -> Run:
    worker = spec(num_blocks=60_000 // BLOCK_SIZE)
    return Run(plain("reasoning"), 8 * (worker,), 0.85, 300.0)


# orders

PREDICTED: tuple[Order, ...] = ("shortest", "ranked", "hrrn")
LOADS = (0.7, 0.9, 1.1, 1.3)
#: One of so many requests.
_MARKED = 10
#: Until a first token is wanted, of these and of the others.
_NEAR_S, _FAR_S = 1.0, 10.0


def orders() -> dict[str, dict[str, Figures]]:
    """By load, then by order and how well lengths are foreseen. A tenth of the requests is in a
    higher class, is due sooner, or is a tenant's of its own, where the order looks at that."""
    found: dict[str, dict[str, Figures]] = {}
    for load in LOADS:
        runs = {
            "fifo": _chats(load),
            "classes": replace(_chats(load), change=_in_classes),
            "turns": replace(_chats(load), change=_of_tenants, weights={}),
            "deadline": replace(_chats(load, "deadline"), change=_due),
        }
        for order in PREDICTED:
            for how, sigma in TAUS.items():
                runs[f"{order} {how}"] = replace(_chats(load, order), foresight_sigma=sigma)
        found[f"{load:g}"] = each(_latencies, runs)
    return found


def _chats(load: float, order: Order = "fifo") -> Run:
    router = RouterConfig(order=order, max_queued=10**9)
    return Run(CHATS, 4 * (spec(max_num_seqs=64),), load, 120.0, router)


def _is_marked(index: int) -> bool:
    return index % _MARKED == 0


def _in_classes(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, priority=int(_is_marked(index)))


def _of_tenants(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, tenant="few" if _is_marked(index) else "many")


def _due(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, ttft_target_s=_NEAR_S if _is_marked(index) else _FAR_S)


PATIENCES = (0.5, 1.0, 1.5, 2.0, 4.0)


def patience() -> dict[str, dict[str, Figures]]:
    """What shortest first does at 1.15 of saturation, by how many foreseen waits a request gives
    way, and fifo."""
    found: dict[str, dict[str, Figures]] = {}
    for workload, slots in ((CHATS, 64), (CONVERSATIONS, 256)):
        run = Run(workload, 2 * (spec(max_num_seqs=slots),), 1.15, 120.0)
        run = replace(run, foresight_sigma=TAUS["tau 0.6"])
        shortest = replace(run.router, order="shortest")
        patient = {f"{it:g}": replace(shortest, ageing_factor=it) for it in PATIENCES}
        runs = {name: replace(run, router=router) for name, router in patient.items()}
        found[workload.name] = each(_latencies, {"fifo": run, **runs})
    return found


def _latencies(run: Run) -> Figures:
    forecast = run.forecast()
    summary, tenth = run.summary(forecast), run.summary(forecast, _is_marked)
    return {
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p99_s": summary.ttft_s.p99,
        "normalised_latency_mean_ms": 1e3 * summary.normalised_latency_s.mean,
        "good_share": summary.good_share,
        "bypassed_p99": summary.bypassed.p99,
        "tenth_ttft_mean_s": tenth.ttft_s.mean,
        "tenth_ttft_p99_s": tenth.ttft_s.p99,
    }


# overload


def overload() -> dict[str, Figures]:
    """Requests a second that kept the SLO, by what the workers can do."""
    targeted = replace(CONVERSATIONS, ttft_target_s=SLO.ttft_s)
    bounded = RouterConfig(max_queued=10**9, refuse_late=True, tpot_target=SLO.tpot_s)
    routers = {"unbounded": RouterConfig(max_queued=10**9), "bounded": bounded}
    workers = 8 * (spec(),)
    capacity = sum(_rate(targeted, it) for it in workers)
    found: dict[str, Figures] = {}
    for name, router in routers.items():
        runs = {
            f"{load:g}": Run(targeted, workers, load, 60.0, router)
            for load in (0.8, 1.0, 1.1, 1.3, 1.6)
        }
        good = each(_good_share, runs)
        found[name] = {load: good[load] * run.load for load, run in runs.items()}
    return found | {"capacity": {"requests_per_s": capacity}}


def _good_share(run: Run) -> float:
    return run.summary().good_share


# speed


def speed(workers: int = 100, seconds: float = 5.0) -> float:
    """Virtual seconds by seconds of CPU, at 0.8 of saturation."""
    cpu_s, _ = forecast_speed.measure(workers, rate=15.5, seconds=seconds)
    return seconds / cpu_s


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in {
        BINDING: lambda: binding(binding_runs()),
        "orders": orders,
        "patience": patience,
        "goodput": overload,
        "speed_100_workers": speed,
    }.items():
        began = time.perf_counter()
        found[name] = part()
        print(name, round(time.perf_counter() - began), "s", found[name], flush=True)
    return found


def ratios(found: Mapping[str, Any]) -> Figures:
    at_90 = found[BINDING]["8 workers, load 0.9"]
    bounded = found["goodput"]["bounded"]
    return {
        "global_p99_ttft_vs_p2c": at_90["global"] / at_90["p2c"],
        "global_p99_ttft_vs_jsq": at_90["global"] / at_90["jsq"],
        "goodput_1_3_vs_1_0": bounded["1.3"] / bounded["1"],
        "simulator_speed_100_workers": found["speed_100_workers"],
    }
