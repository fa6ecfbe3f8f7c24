"""Runs of bench-locality: one workload, policy and rate on simulated workers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from benchmarks.locality_reuse import InfiniteCache, PooledCache
from benchmarks.locality_rivals import RivalQueue, rivals
from benchmarks.locality_wait import Decision, WatchedQueue, summary
from benchmarks.locality_workloads import WORKLOADS
from benchmarks.scheduling.scheduling_forecast import spec
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Quantiles, Record
from everlift.hashes import BLOCK_SIZE
from router.config import RouterConfig
from worker.config import Scheduling

#: The h200 preset; its model's context is raised to that of the longest session.
WORKER = spec(max_model_len=212_992)
#: Rivals' engines prefill in the order of arrival, as those of vLLM and SGLang do by default.
RIVAL_WORKER = replace(
    WORKER, config=replace(WORKER.config, scheduling=Scheduling(ageing_tokens=1 << 20))
)
OFF, EVERLIFT = "off", "everlift"
RIVALS = (*rivals(WORKER),)
POLICIES = (OFF, *RIVALS, EVERLIFT)
#: A rate is sustained if the p99 TTFT is at most this.
SUSTAINED_P99_S = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """Simulations at a rate per worker, one for each seed.

    Requests that arrive in the first ``warm_up_s`` do not count.
    """

    workload: str
    policy: str
    workers: int
    rate: float
    warm_up_s: float
    duration_s: float
    seeds: tuple[int, ...] = (1,)

    def figures(self) -> dict[str, Any]:
        """Return figures of the requests of all seeds together, each of which is a simulation."""
        began = time.process_time()
        parts = [self._simulate(seed) for seed in self.seeds]
        figures = self._figures([it for part in parts for it in part.counted])
        if self.policy == EVERLIFT:
            figures["waits"] = summary([it for part in parts for it in part.decisions])
        figures["cpu_s"] = time.process_time() - began
        return figures

    def _simulate(self, seed: int) -> _Part:
        until_s = self.warm_up_s + self.duration_s
        requests = WORKLOADS[self.workload](self.rate * self.workers, seed, until_s)
        config = RouterConfig(max_queued=10**9, locality=self.policy != OFF)
        queue: Any = None
        worker = WORKER
        if self.policy in RIVALS:
            queue = RivalQueue(rivals(WORKER)[self.policy], config, seed)
            worker = RIVAL_WORKER
        elif self.policy == EVERLIFT:
            queue = WatchedQueue(config)
        scenario = Scenario((worker,) * self.workers, config, weights=None)
        records = simulate(
            requests.arrivals, scenario, dispatcher=queue, follow_up=requests.follow_up
        ).records
        infinite = InfiniteCache()
        pooled = PooledCache(self.workers * WORKER.limits.num_blocks * BLOCK_SIZE)
        counted = [_Counted(it, infinite.add(it.arrival), pooled.add(it.arrival)) for it in records]
        return _Part(
            [it for it in counted if it.record.arrival.at >= self.warm_up_s],
            queue.decisions(self.warm_up_s) if isinstance(queue, WatchedQueue) else [],
        )

    def _figures(self, counted: Sequence[_Counted]) -> dict[str, Any]:
        own = [it.record for it in counted]
        ttft = Quantiles.of(it.ttft_s for it in own)
        prompt = sum(it.arrival.prompt_tokens for it in own)
        cached = sum(it.cached_tokens for it in own)
        by_infinite = sum(it.by_infinite for it in counted)
        by_pooled = sum(it.by_pooled for it in counted)
        by_worker = Counter(it.worker for it in own)
        return {
            "rate": self.rate * self.workers,
            "requests": len(own),
            "unfinished": sum(not it.is_finished for it in own),
            "requests_per_s": len(own) / self.duration_s / len(self.seeds),
            "ttft_p50_s": ttft.p50,
            "ttft_p90_s": ttft.p90,
            "ttft_p99_s": ttft.p99,
            "ttft_mean_s": ttft.mean,
            "tpot_mean_ms": 1e3 * Quantiles.of(it.tpot_s for it in own).mean,
            "prompt_tokens_mean": prompt / len(own),
            "hit_share": cached / prompt,
            "reusable_share": by_infinite / prompt,
            "reused_of_reusable": cached / by_infinite if by_infinite else 1.0,
            "pooled_of_reusable": by_pooled / by_infinite if by_infinite else 1.0,
            "busiest_worker": max(by_worker.values()) * self.workers / len(own),
        }


class _Counted(NamedTuple):
    """Request, and how many of its tokens infinite caches and a pooled cache would have."""

    record: Record
    by_infinite: int
    by_pooled: int


class _Part(NamedTuple):
    counted: list[_Counted]
    decisions: list[Decision]


def is_sustained(run: Run) -> bool:
    p99_s = run.figures()["ttft_p99_s"]
    print(
        f"{run.workload} {run.policy}: {run.rate:.4g}/s per worker: p99 TTFT {p99_s:.3g} s",
        flush=True,
    )
    return bool(p99_s <= SUSTAINED_P99_S)


#: Precision of a saturation, as a factor, and the share of ``duration_s`` of runs of its search.
_STEP = 1.1
_SEARCH_SHARE = 0.6


def saturation(run: Run) -> float:
    """Return the largest sustained rate per worker, from about ``run.rate``; 0 if there is none."""
    run = replace(run, seeds=run.seeds[:1], duration_s=_SEARCH_SHARE * run.duration_s)
    low, high = 0.0, run.rate
    while is_sustained(replace(run, rate=high)):
        low, high = high, high * 1.5
    while not low:
        if high < run.rate / 40:
            return 0.0
        if is_sustained(replace(run, rate=high / 1.5)):
            low = high / 1.5
        else:
            high /= 1.5
    while high / low > _STEP:
        middle = (low * high) ** 0.5
        if is_sustained(replace(run, rate=middle)):
            low = middle
        else:
            high = middle
    return low


Found = TypeVar("Found")


#: Number of runs at a time.
NUM_PROCESSES = len(os.sched_getaffinity(0))


def run_in_parallel(call: Callable[[Run], Found], runs: Iterable[Run]) -> list[Found]:
    """Return the results of a call for each run; as many as there are cores run at a time."""
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("fork")) as players:
        return [*players.map(call, runs)]


def figures(run: Run) -> dict[str, Any]:
    found = run.figures()
    print(
        f"{run.workload} {run.policy} {run.workers} workers, {found['rate']:.4g}/s:"
        f" TTFT p50 {found['ttft_p50_s']:.3g} p99 {found['ttft_p99_s']:.3g} s,"
        f" reused {found['reused_of_reusable']:.3f}, {found['cpu_s']:.0f} s of CPU",
        flush=True,
    )
    return found
