"""Choice of the request that a full KV cache preempts, and its migration, in virtual time.

Simulated workers that run the product's scheduler (cluster/simulator) have few KV blocks, and chats
arrive at random. The benchmark replaces the scheduler's choice by others. All of them preempt
requests of a lower priority class first; within a class they take:

    least computed   the request with the fewest computed tokens (the product's choice)
    newest           the request that came last
    most blocks      the request with the most KV blocks, which has the most to recompute
    oldest           the request that came first

Preempted requests may migrate to other workers, as by default. The product's choice is also
simulated without migration (router.max_moves 0). All policies get the same requests. Loads are
shares of the saturation rate, at which these workers finish requests under the product's choice
when the queue is never empty.
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
VictimKey = Callable[[Sequence], tuple[int, ...]]

LEAST_COMPUTED, NO_MOVES = "least computed", "least computed, no moves"
#: Sort keys of running sequences; the first one in this order is preempted.
VICTIM_KEYS: Mapping[str, VictimKey] = {
    LEAST_COMPUTED: scheduler._preemption_key,
    "newest": lambda it: (it.priority, -it.order),
    "most blocks": lambda it: (it.priority, -len(it.block_table), -it.order),
    "oldest": lambda it: (it.priority, it.order),
}
MOVING = RouterConfig(max_queued=10**9)


@dataclass(frozen=True, slots=True)
class Policy:
    """Sort key of the sequences to preempt, and settings of the router, which limit migrations."""

    victim_key: VictimKey
    router: RouterConfig = MOVING


POLICIES: Mapping[str, Policy] = {
    **{name: Policy(key) for name, key in VICTIM_KEYS.items()},
    NO_MOVES: Policy(VICTIM_KEYS[LEAST_COMPUTED], replace(MOVING, max_moves=0)),
}
LOADS = (0.9, 1.1)
#: The target of 10 ms per token is twice the TPOT of a request that runs alone.
SLO = Slo(ttft_s=1.0, tpot_s=0.01)


@dataclass(frozen=True)
class Scale:
    """Size of the simulation: each load runs with ``seeds`` seeds.

    Requests that arrive during ``warm_up_s`` are not counted, those of the next ``duration_s`` are.
    ``kv_tokens`` is the KV cache of a worker: 8,000 tokens hold about 17 chats; the longest chat
    has 6,144 tokens.
    """

    seeds: int = 1
    warm_up_s: float = 20.0
    duration_s: float = 40.0
    #: interval after the warm-up in which the saturation rate is measured
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
    """Return the figures by load, then by policy."""
    found: dict[str, dict[str, Figures]] = {}
    for load in loads:
        of_load = found[f"{load:g}"] = {}
        for name, policy in POLICIES.items():
            records = simulated_records(policy, load * saturation(scale), scale)
            of_load[name] = figures(records, load)
            print(load, name, of_load[name], flush=True)
    return found


def simulated_records(policy: Policy, rate: float, scale: Scale) -> list[Record]:
    """Return the records of the requests that arrived after the warm-up, over all seeds.

    ``rate`` is in requests per second.
    """
    with mock.patch.object(scheduler, "_preemption_key", policy.victim_key):
        return [
            record
            for seed in range(scale.seeds)
            for record in _simulate(policy.router, rate, scale, scale.duration_s, seed)
            if record.arrival.at >= scale.warm_up_s
        ]


def _simulate(
    router: RouterConfig, rate: float, scale: Scale, duration_s: float, seed: int
) -> tuple[Record, ...]:
    until = scale.warm_up_s + duration_s
    arrivals = takewhile(lambda it: it.at < until, CHATS.at_rate(rate).arrivals(seed))
    return simulate(arrivals, scale.scenario(router)).records


@cache
def saturation(scale: Scale) -> float:
    """Return the requests per second that all workers finish when the queue is never empty."""
    sample = CHATS.arrivals(seed=0)
    [worker, *_] = scale.scenario(MOVING).workers
    estimate = saturation_rate([next(sample) for _ in range(2000)], worker)
    rate = 1.5 * scale.workers * estimate
    records = _simulate(MOVING, rate, scale, scale.saturation_s, seed=0)
    until = scale.warm_up_s + scale.saturation_s
    return sum(scale.warm_up_s <= it.finished < until for it in records) / scale.saturation_s


def figures(records: list[Record], load: float) -> Figures:
    """Return the figures of the records at ``load``, a share of the saturation rate.

    ``goodput`` is the rate of requests that met the SLO, as a share of the saturation rate.
    """
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
    """Return the tokens that the request's first run computes: all but cached ones and the last."""
    return record.arrival.prompt_tokens - record.cached_tokens + record.output_tokens - 1


#: Figures by which policies are compared.
COMPARED = ("recomputed_share", "ttft_p99_s", "tpot_p99_ms", "latency_p99_s", "goodput")


def ratios(found: Mapping[str, Mapping[str, Figures]]) -> Figures:
    """Return the figures of each other policy divided by those of the product's, by load."""
    compared: Figures = {}
    for load, policies in found.items():
        for name in POLICIES:
            if name != LEAST_COMPUTED:
                words = name.replace(", ", "_").replace(" ", "_")
                compared |= _compared(
                    f"victims_{words}_vs_product_{load}", policies[name], policies[LEAST_COMPUTED]
                )
    return compared


def _compared(name: str, one: Figures, other: Figures) -> Figures:
    return {
        f"{name}_{figure}": round(one[figure] / other[figure], 3)
        for figure in COMPARED
        if other[figure]
    }
