"""Whom a full KV cache preempts, and where that request goes on, in virtual time.

Exact workers (cluster/simulator) have few KV blocks, and chats come at random. In place of the
product's choice others are put here, and nowhere else; a class goes before all of them:

    least computed   the product's: the cheapest to repeat
    newest           who came last
    most blocks      who frees most, and has most to repeat
    oldest           who came first

With each of them preempted requests move to other workers as they do by default; with the
product's choice all is also played without moves (router.max_moves 0). All get the same requests.
Loads are parts of the rate at which these workers, with the product's choice, finish requests when
they always have enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from statistics import fmean
from unittest import mock

from benchmarks.scheduling.scheduling_forecast import CHATS, spec
from cluster.simulator.plan import saturation_rate
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Quantiles, Record, Slo
from everlift.hashes import BLOCK_SIZE
from router.config import RouterConfig
from worker.engine import scheduler
from worker.engine.sequence import Sequence

Figures = dict[str, float]
Choice = Callable[[Sequence], tuple[int, ...]]

LEAST_COMPUTED, NO_MOVES = "least computed", "least computed, no moves"
#: Who sorts first gives way.
CHOICES: Mapping[str, Choice] = {
    LEAST_COMPUTED: scheduler._preemption_key,
    "newest": lambda it: (it.priority, -it.order),
    "most blocks": lambda it: (it.priority, -len(it.block_table), -it.order),
    "oldest": lambda it: (it.priority, it.order),
}
MOVING = RouterConfig(max_queued=10**9)


@dataclass(frozen=True, slots=True)
class Way:
    """Whom to preempt, and where that one may go on."""

    choice: Choice
    router: RouterConfig = MOVING


WAYS: Mapping[str, Way] = {
    **{name: Way(choice) for name, choice in CHOICES.items()},
    NO_MOVES: Way(CHOICES[LEAST_COMPUTED], replace(MOVING, max_moves=0)),
}
LOADS = (0.9, 1.1)
#: A token every 10 ms is twice what one takes that nobody disturbs.
SLO = Slo(ttft_s=1.0, tpot_s=0.01)


@dataclass(frozen=True)
class Scale:
    """Each load is played with so many seeds, so long each after the warm-up: until queues and
    batches are as they stay. ``kv_tokens`` are each worker's: some 17 chats have room in 8,000, and
    the longest one has 6,144."""

    seeds: int = 1
    warm_up_s: float = 20.0
    duration_s: float = 40.0
    #: in which is counted what the workers can do
    saturation_s: float = 60.0
    workers: int = 4
    kv_tokens: int = 8000

    def scenario(self, router: RouterConfig) -> Scenario:
        blocks = self.kv_tokens // BLOCK_SIZE
        worker = spec(num_blocks=blocks, max_model_len=blocks * BLOCK_SIZE)
        return Scenario.uniform(self.workers, worker, router=router, weights=None)


FULL = Scale()
SMALLEST = Scale(1, 2.0, 2.0, 2.0, 2, 6400)


def measure(scale: Scale = FULL, loads: Iterable[float] = LOADS) -> dict[str, dict[str, Figures]]:
    """By load, then by way."""
    found: dict[str, dict[str, Figures]] = {}
    for load in loads:
        of_load = found[f"{load:g}"] = {}
        for name, way in WAYS.items():
            of_load[name] = figures(play(way, load * saturation(scale), scale), load)
            print(load, name, of_load[name], flush=True)
    return found


def play(way: Way, rate: float, scale: Scale) -> list[Record]:
    """What became of those that came after the warm-up, with all seeds."""
    with mock.patch.object(scheduler, "_preemption_key", way.choice):
        return [
            record
            for seed in range(scale.seeds)
            for record in _played(way.router, rate, scale, scale.duration_s, seed)
            if record.arrival.at >= scale.warm_up_s
        ]


def _played(
    router: RouterConfig, rate: float, scale: Scale, duration_s: float, seed: int
) -> tuple[Record, ...]:
    until = scale.warm_up_s + duration_s
    arrivals = takewhile(lambda it: it.at < until, CHATS.at_rate(rate).arrivals(seed))
    return simulate(arrivals, scale.scenario(router)).records


@cache
def saturation(scale: Scale) -> float:
    """Requests a second that all workers together finish when they always have enough."""
    sample = CHATS.arrivals(seed=0)
    [worker, *_] = scale.scenario(MOVING).workers
    estimate = saturation_rate([next(sample) for _ in range(2000)], worker)
    rate = 1.5 * scale.workers * estimate
    records = _played(MOVING, rate, scale, scale.saturation_s, seed=0)
    until = scale.warm_up_s + scale.saturation_s
    return sum(scale.warm_up_s <= it.finished < until for it in records) / scale.saturation_s


def figures(records: list[Record], load: float) -> Figures:
    """``goodput`` is of requests that kept the SLO, by what the workers can do."""
    recomputed = sum(record.recomputed_tokens for record in records)
    computed = sum(map(_computed_once, records)) + recomputed
    return {
        "requests": len(records),
        "preemptions": sum(record.preemptions for record in records),
        "migrations": sum(record.migrations for record in records),
        "recomputed_share": recomputed / computed,
        "ttft_p99_s": Quantiles.of(record.ttft_s for record in records).p99,
        "tpot_p99_ms": 1e3 * Quantiles.of(record.tpot_s for record in records).p99,
        "latency_p99_s": Quantiles.of(record.latency_s for record in records).p99,
        "goodput": load * fmean(map(SLO.is_good, records)),
    }


def _computed_once(record: Record) -> int:
    """Of its last token nothing is computed."""
    return record.arrival.prompt_tokens - record.cached_tokens + record.output_tokens - 1


#: What ways are compared by.
COMPARED = ("recomputed_share", "ttft_p99_s", "tpot_p99_ms", "latency_p99_s", "goodput")


def ratios(found: Mapping[str, Mapping[str, Figures]]) -> Figures:
    """Of each other way to the product's."""
    compared: Figures = {}
    for load, ways in found.items():
        for name in WAYS:
            if name != LEAST_COMPUTED:
                words = name.replace(", ", "_").replace(" ", "_")
                compared |= _compared(
                    f"victims_{words}_vs_product_{load}", ways[name], ways[LEAST_COMPUTED]
                )
    return compared


def _compared(name: str, one: Figures, other: Figures) -> Figures:
    return {
        f"{name}_{figure}": round(one[figure] / other[figure], 3)
        for figure in COMPARED
        if other[figure]
    }
