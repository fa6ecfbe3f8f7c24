"""Choices of other routers' policies, in small cases with known results."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.locality_rivals import (
    Candidate,
    ImbalanceThreshold,
    Policy,
    RivalQueue,
    StickyUntilSaturated,
    dynamo,
    lmetric,
    peak_prefill_rate,
    rivals,
)
from benchmarks.scheduling.scheduling_forecast import spec
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.workloads.arrivals import Arrival
from router.config import RouterConfig

LLM_D = StickyUntilSaturated(peak_tokens_per_s=15_928)
SGLANG = ImbalanceThreshold()


def chosen(policy: Policy, *candidates: Candidate, prompt_tokens: int = 3200) -> str:
    """Return the name of the chosen worker, which must not depend on chance."""
    names = {policy(prompt_tokens, candidates, Random(seed)).name for seed in range(8)}
    assert len(names) == 1
    return names.pop()


def test_llm_d_sticks_to_a_worker_with_a_backlog() -> None:
    warm = Candidate("warm", cached_tokens=2880, pending_tokens=10_000)
    assert chosen(LLM_D, Candidate("idle"), warm) == "warm"


def test_llm_d_leaves_a_worker_that_is_18_s_behind() -> None:
    behind = Candidate("warm", cached_tokens=2880, pending_tokens=287_000)
    within = Candidate("warm", cached_tokens=2880, pending_tokens=286_000)
    assert chosen(LLM_D, Candidate("idle"), behind) == "idle"
    assert chosen(LLM_D, Candidate("idle"), within) == "warm"


def test_llm_d_ignores_less_than_80_percent() -> None:
    some = Candidate("some", cached_tokens=2528, pending_tokens=3000)
    most = Candidate("most", cached_tokens=2560, pending_tokens=3000)
    assert chosen(LLM_D, Candidate("idle"), some) == "idle"
    assert chosen(LLM_D, Candidate("idle"), most) == "most"


def test_llm_d_counts_uncached_tokens_of_the_request() -> None:
    some = Candidate("some", cached_tokens=1600, pending_tokens=1000)
    assert chosen(LLM_D, Candidate("idle"), some) == "some"


def test_dynamo_adds_prefill_and_active_blocks() -> None:
    warm = Candidate("warm", cached_tokens=1600, active_blocks=49)
    assert chosen(dynamo, Candidate("idle"), warm) == "warm"
    warm = Candidate("warm", cached_tokens=1600, active_blocks=51)
    assert chosen(dynamo, Candidate("idle"), warm) == "idle"
    pending = Candidate("pending", cached_tokens=1600, pending_tokens=1632)
    assert chosen(dynamo, Candidate("idle"), pending) == "idle"


def test_lmetric_multiplies_tokens_by_batch_size() -> None:
    warm = Candidate("warm", cached_tokens=2400, num_requests=2)
    cold = Candidate("cold", num_requests=0)
    assert chosen(lmetric, cold, warm) == "warm"
    warm = Candidate("warm", cached_tokens=2400, num_requests=4)
    assert chosen(lmetric, cold, warm) == "cold"


def test_lmetric_prefers_the_warm_of_two_idle_workers() -> None:
    assert chosen(lmetric, Candidate("cold"), Candidate("warm", cached_tokens=256)) == "warm"


def test_sglang_follows_the_longest_match() -> None:
    short = Candidate("short", cached_tokens=1024)
    longest = Candidate("long", cached_tokens=2048, num_requests=60)
    assert chosen(SGLANG, short, longest, Candidate("idle")) == "long"


def test_sglang_takes_the_smallest_tree_without_a_match() -> None:
    little = Candidate("little", cached_tokens=960, num_chunks=9)
    small = Candidate("small", num_requests=5, num_chunks=7)
    assert chosen(SGLANG, little, small) == "small"
    enough = Candidate("enough", cached_tokens=961, num_chunks=9)
    assert chosen(SGLANG, enough, small) == "enough"


@pytest.mark.parametrize(
    ("most", "fewest", "is_imbalanced"), [(65, 0, True), (64, 0, False), (200, 134, False)]
)
def test_sglang_balances_beyond_both_thresholds(
    most: int, fewest: int, is_imbalanced: bool
) -> None:
    warm = Candidate("warm", cached_tokens=3000, num_requests=most)
    idle = Candidate("idle", num_requests=fewest)
    assert chosen(SGLANG, warm, idle) == ("idle" if is_imbalanced else "warm")


def test_peak_prefill_rate_is_that_of_one_long_prompt() -> None:
    # Tokens alone would take 23.6 us each (roofline of the h200).
    assert 30_000 < peak_prefill_rate(spec()) < 1 / 23.6e-6
    assert peak_prefill_rate(spec(slowness=2.0)) == pytest.approx(peak_prefill_rate(spec()) / 2)


@pytest.mark.parametrize("name", [*rivals(spec())])
def test_rival_queue_sends_a_session_to_its_worker(name: str) -> None:
    arrivals = [
        Arrival(turn * 10.0 + session, 3000 + 600 * turn, 50, 100, session=session + 1)
        for turn in range(4)
        for session in range(3)
    ]
    queue = RivalQueue(rivals(spec())[name], RouterConfig())
    scenario = Scenario((spec(),) * 3, weights=None)
    records = simulate(arrivals, scenario, dispatcher=queue).records
    assert all(it.is_finished for it in records)
    for session in range(3):
        own = [it for it in records if it.arrival.session == session + 1]
        assert len({it.worker for it in own}) == 1
        assert all(it.cached_tokens > 2500 for it in own[1:])
