"""Synthetic workloads have the statistics of the traces that they are named after."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, takewhile
from operator import attrgetter
from random import Random
from statistics import fmean, pvariance, quantiles

import pytest

from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.known import WORKLOADS
from cluster.simulator.workloads.workload import merged

REQUESTS = 20_000
#: Mean, p50, p75, p90, p99 of prompt and output tokens in the published traces.
PUBLISHED = {
    "azure-conversation": ((1155, 1020, 1189, 2734, 4142), (211, 129, 395, 424, 601)),
    "azure-code": ((2048, 1469, 2744, 5188, 7436), (28, 13, 24, 55, 251)),
    "mooncake": ((12_035, 6909, 15_367, 27_367, 85_400), (343, 350, 472, 597, 1119)),
}
#: Tails that are known to be too light: the mixture of two kinds of output misses this p99.
TOO_LIGHT = {("azure-conversation", 601)}


def some(name: str, requests: int = REQUESTS, seed: int = 1) -> list[Arrival]:
    return list(islice(WORKLOADS[name].arrivals(seed), requests))


def some_times(name: str) -> list[float]:
    return list(islice(WORKLOADS[name].traffic.times(Random(1)), 6 * REQUESTS))


def cv(times: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(times)]
    return pvariance(gaps) ** 0.5 / fmean(gaps)


def dispersion(times: Sequence[float], window_s: float) -> float:
    """Return the variance over the mean of the number of requests in a window."""
    counts = Counter(int(at / window_s) for at in times)
    numbers = [counts[i] for i in range(int(times[-1] / window_s))]
    return pvariance(numbers) / fmean(numbers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_workload_lengths_match_published_quantiles(name: str) -> None:
    arrivals = some(name)
    drawn = (
        [each.prompt_tokens for each in arrivals],
        [each.output_tokens for each in arrivals],
    )
    for lengths, published in zip(drawn, PUBLISHED[name], strict=True):
        cuts = quantiles(lengths, n=100)
        found = (fmean(lengths), *(cuts[percent - 1] for percent in (50, 75, 90, 99)))
        for ours, theirs in zip(found, published, strict=True):
            if (name, theirs) not in TOO_LIGHT:
                assert ours == pytest.approx(theirs, rel=0.07)


@pytest.mark.parametrize(
    "name, mean_prompt, mean_output", [("chat", 161, 338), ("reasoning", 250, 2850)]
)
def test_workload_mean_lengths_match_published_means(
    name: str, mean_prompt: float, mean_output: float
) -> None:
    arrivals = some(name)
    assert fmean(each.prompt_tokens for each in arrivals) == pytest.approx(mean_prompt, rel=0.06)
    assert fmean(each.output_tokens for each in arrivals) == pytest.approx(mean_output, rel=0.06)


@pytest.mark.parametrize(
    "name, gaps_cv, in_a_minute",
    [("azure-conversation", 1.09, 16), ("azure-code", 13.2, 164), ("mooncake", 3.0, 16)],
)
def test_workload_burstiness_matches_the_trace(
    name: str, gaps_cv: float, in_a_minute: float
) -> None:
    times = some_times(name)
    assert cv(times) == pytest.approx(gaps_cv, rel=0.1)
    assert dispersion(times, 60) == pytest.approx(in_a_minute, rel=0.2)


def test_conversation_workload_has_low_dispersion_per_second() -> None:
    assert dispersion(some_times("azure-conversation"), 1) == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_has_the_requested_rate(name: str) -> None:
    steady = replace(WORKLOADS[name].traffic, drift=0.0, cv=1.0)
    workload = replace(WORKLOADS[name], traffic=steady).at_rate(50.0)
    arrivals = list(islice(workload.arrivals(1), REQUESTS))
    assert len(arrivals) / arrivals[-1].at == pytest.approx(50.0, rel=0.03)


def test_mooncake_workload_repeats_its_share_of_blocks() -> None:
    seen: set[int] = set()
    repeated = total = 0
    for each in some("mooncake"):
        assert len(each.prefix) == each.prompt_tokens // 512
        repeated += sum(name in seen for name in each.prefix)
        total += len(each.prefix)
        seen.update(each.prefix)
    assert repeated / total == pytest.approx(0.366, abs=0.02)


def test_mooncake_repeated_block_keeps_its_prefix_and_tenant() -> None:
    before: dict[int, tuple[str, tuple[int, ...]]] = {}
    for each in some("mooncake", 2000):
        for place, name in enumerate(each.prefix):
            key = (each.tenant, each.prefix[:place])
            assert before.setdefault(name, key) == key


def test_workload_is_reproducible_by_seed() -> None:
    assert some("chat", 100) == some("chat", 100)
    assert some("chat", 100) != some("chat", 100, seed=2)


def test_workload_at_another_rate_keeps_its_requests() -> None:
    fast = islice(WORKLOADS["chat"].at_rate(100.0).arrivals(1), 100)
    still = [replace(each, at=0.0) for each in fast]
    assert still == [replace(each, at=0.0) for each in some("chat", 100)]


def test_workload_classes_and_tenants_keep_their_shares() -> None:
    arrivals = some("chat")
    classes = Counter(each.priority for each in arrivals)
    assert classes[1] / REQUESTS == pytest.approx(0.1, abs=0.01)
    assert classes[0] / REQUESTS == pytest.approx(0.8, abs=0.01)
    tenants = Counter(each.tenant for each in arrivals)
    assert len(tenants) == 8
    assert tenants["t1"] / tenants["t2"] == pytest.approx(2.0, rel=0.1)


def test_merged_workloads_arrive_in_time_order() -> None:
    two = [WORKLOADS["chat"].at_rate(3.0), WORKLOADS["azure-conversation"].at_rate(1.0)]
    arrivals = list(takewhile(lambda each: each.at < 2000, merged(two, seed=1)))
    assert arrivals == sorted(arrivals, key=attrgetter("at"))
    shares = Counter(each.application for each in arrivals)
    assert shares["chat"] / shares["conversation"] == pytest.approx(3.0, rel=0.3)


def test_workload_arrivals_use_bounded_memory() -> None:
    arrivals = WORKLOADS["mooncake"].arrivals(1)
    for _ in islice(arrivals, 3000):
        pass
    tracemalloc.start()
    try:
        for _ in islice(arrivals, 3000):
            pass
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()
