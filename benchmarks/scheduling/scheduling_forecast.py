"""Admission policies in virtual time, at sizes and loads that need a large cluster.

All figures are the same on every machine, except the speed of the simulation. Workers are H200s
with a model of 8 billion parameters (cluster/simulator). Loads are shares of the saturation rate,
at which such workers finish requests when the queue is never empty. It is measured with 1.5 times
the rate of an estimate.

    binding     global queue against early binding of requests to workers: p99 TTFT of conversations
    orders      orders of the queue under loads up to 1.3: chats, 64 slots per worker
    ageing      ageing factor of shortest first: how long a request yields to shorter ones
    overload    goodput with and without rejection of late requests: conversations
    speed       virtual seconds per CPU second with 100 workers (forecast_speed.py)
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

#: Key of the figures of ``binding`` in the report.
BINDING = "binding_p99_ttft_ms"

_KIND = on_gpus(GPUS["h200"], MODELS["llama-3.1-8b"])
#: Tokens per step: a few times the slots, so that prompts are computed beside decoding requests.
_STEP_TOKENS = 2048
#: Time until queues and batches are stationary.
_WARM_UP_S = 20.0
_SEED = 1
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
#: Standard deviation of the error of a predicted output length, in its logarithm. With outputs
#: whose logarithm has a standard deviation of 0.9, Kendall's tau of predictions is as named.
TAUS: Mapping[str, float] = {"tau 0.3": 1.77, "tau 0.6": 0.65, "oracle": 0.0}


def plain(name: str) -> Workload:
    """Return the known workload ``name`` with a steady rate, one tenant, one class, no targets."""
    return replace(
        WORKLOADS[name].without_drift(),
        tenants={"": 1.0},
        classes={0: 1.0},
        ttft_target_s=inf,
        deadline_s=inf,
    )


CONVERSATIONS, CHATS = plain("azure-conversation"), plain("chat")


def spec(slowness: float = 1.0, **changes: Any) -> WorkerSpec:
    """Return a simulated H200; ``changes`` are settings of the worker."""
    worker = {**_KIND.worker, "max_num_batched_tokens": _STEP_TOKENS, **changes}
    config = settings.load(WorkerConfig, {"model": "fake", **worker})
    return WorkerSpec(config, _KIND.step_time, slowness)


@dataclass(frozen=True, slots=True)
class Run:
    """Simulation of a workload at ``load`` times the saturation rate of ``workers``.

    Requests that arrive in the warm-up are not counted. The run ends when all requests have ended.
    """

    workload: Workload
    workers: tuple[WorkerSpec, ...]
    load: float
    duration_s: float
    router: RouterConfig = RouterConfig(max_queued=10**9)  # noqa: RUF009 it is frozen
    early: EarlyBinding | None = None
    foresight_sigma: float | None = None
    #: maps the number of a request and its arrival to a changed arrival
    change: Callable[[int, Arrival], Arrival] | None = None
    weights: Mapping[str, float] | None = None

    @property
    def rate(self) -> float:
        """Arrival rate, in requests per second."""
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
        """Return the summary of the requests whose number satisfies ``of``, after the warm-up."""
        return (forecast or self.forecast()).summary(
            SLO, lambda record: record.arrival.at >= _WARM_UP_S and of(record.index)
        )


Result = TypeVar("Result")


def run_in_parallel(
    figures_of: Callable[[Run], Result], runs: Mapping[str, Run]
) -> dict[str, Result]:
    """Return ``figures_of`` each run by name, computed in as many processes as there are cores."""
    # Reading the rates fills their cache before the fork, so that each is measured only once.
    print(*(f"{name}: {run.rate:.4g}/s" for name, run in runs.items()), sep=", ", flush=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as players:
        return dict(zip(runs, players.map(figures_of, runs.values()), strict=True))


_rates: dict[tuple[str, WorkerSpec], float] = {}


def _rate(workload: Workload, worker: WorkerSpec) -> float:
    """Return the requests per second that the worker finishes when the queue is never empty."""
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
    """Return the p99 TTFT in ms, by run and binding."""
    found: dict[str, Figures] = {}
    for name, run in runs.items():
        bound = {how: replace(run, early=early) for how, early in BINDINGS.items()}
        found[name] = run_in_parallel(_p99_ttft_ms, bound)
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
        "8 workers, 60,000 tokens of KV, reasoning, load 0.85": _few_blocks(),
        "64 workers, load 0.9": replace(run, workers=64 * uniform, duration_s=30.0),
        "1,000 workers, load 0.9": replace(run, workers=1000 * uniform, duration_s=5.0),
    }


def _few_blocks() -> Run:
    worker = spec(num_blocks=60_000 // BLOCK_SIZE)
    return Run(plain("reasoning"), 8 * (worker,), 0.85, 300.0)


# orders

PREDICTED: tuple[Order, ...] = ("shortest", "ranked", "hrrn")
LOADS = (0.7, 0.9, 1.1, 1.3)
#: Every tenth request is marked.
_MARKED = 10
#: TTFT targets of marked and other requests.
_SHORT_TARGET_S, _LONG_TARGET_S = 1.0, 10.0


def orders() -> dict[str, dict[str, Figures]]:
    """Return latencies by load, then by order and quality of the predicted lengths.

    A tenth of the requests is marked. They have a higher class in "classes", a shorter target in
    "deadline", and a tenant of their own in "turns" (fair share).
    """
    found: dict[str, dict[str, Figures]] = {}
    for load in LOADS:
        runs = {
            "fifo": _chats(load),
            "classes": replace(_chats(load), change=_with_class),
            "turns": replace(_chats(load), change=_with_tenant, weights={}),
            "deadline": replace(_chats(load, "deadline"), change=_with_deadline),
        }
        for order in PREDICTED:
            for how, sigma in TAUS.items():
                runs[f"{order} {how}"] = replace(_chats(load, order), foresight_sigma=sigma)
        found[f"{load:g}"] = run_in_parallel(_latencies, runs)
    return found


def _chats(load: float, order: Order = "fifo") -> Run:
    router = RouterConfig(order=order, max_queued=10**9)
    return Run(CHATS, 4 * (spec(max_num_seqs=64),), load, 120.0, router)


def _is_marked(index: int) -> bool:
    return index % _MARKED == 0


def _with_class(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, priority=int(_is_marked(index)))


def _with_tenant(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, tenant="few" if _is_marked(index) else "many")


def _with_deadline(index: int, arrival: Arrival) -> Arrival:
    return replace(arrival, ttft_target_s=_SHORT_TARGET_S if _is_marked(index) else _LONG_TARGET_S)


AGEING_FACTORS = (0.5, 1.0, 1.5, 2.0, 4.0)


def ageing() -> dict[str, dict[str, Figures]]:
    """Return latencies of fifo, and of shortest first by ageing factor, at 1.15 of saturation.

    The ageing factor limits how long a request yields to shorter ones, in multiples of its
    estimated wait.
    """
    found: dict[str, dict[str, Figures]] = {}
    for workload, slots in ((CHATS, 64), (CONVERSATIONS, 256)):
        run = Run(workload, 2 * (spec(max_num_seqs=slots),), 1.15, 120.0)
        run = replace(run, foresight_sigma=TAUS["tau 0.6"])
        shortest = replace(run.router, order="shortest")
        routers = {f"{it:g}": replace(shortest, ageing_factor=it) for it in AGEING_FACTORS}
        runs = {name: replace(run, router=router) for name, router in routers.items()}
        found[workload.name] = run_in_parallel(_latencies, {"fifo": run, **runs})
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
    """Return the goodput by router and load, and the saturation rate ("capacity").

    Goodput is the rate of requests that met the SLO, as a share of the saturation rate.
    """
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
        good = run_in_parallel(_good_share, runs)
        found[name] = {load: good[load] * run.load for load, run in runs.items()}
    return found | {"capacity": {"requests_per_s": capacity}}


def _good_share(run: Run) -> float:
    return run.summary().good_share


# speed


def speed(workers: int = 100, seconds: float = 5.0) -> float:
    """Return the virtual seconds per CPU second, at 0.8 of saturation."""
    cpu_s, _ = forecast_speed.measure(workers, rate=15.5, seconds=seconds)
    return seconds / cpu_s


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in {
        BINDING: lambda: binding(binding_runs()),
        "orders": orders,
        "ageing": ageing,
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
