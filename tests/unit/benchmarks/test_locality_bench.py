"""Bounds and ratios of bench-locality."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import locality, locality_picture
from benchmarks.agent_sessions import AgentSessions, ClosedLoop
from benchmarks.locality_leader import measure
from benchmarks.locality_reuse import InfiniteCache, PooledCache
from benchmarks.locality_runs import EVERLIFT, OFF, POLICIES, RIVALS, Run
from benchmarks.locality_wait import Decision, WatchedQueue, summary
from benchmarks.scheduling.scheduling_forecast import spec
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival
from router.admission.request import Waiting
from router.config import RouterConfig


def turn(tokens: int, output: int = 100, session: int = 1) -> Arrival:
    return Arrival(0.0, tokens, output, output, session=session)


def part(tokens: int, *prefix: int, tenant: str = "a") -> Arrival:
    return Arrival(0.0, tokens, 1, 1, prefix=prefix, tenant=tenant)


def test_infinite_cache_reuses_prompt_and_output_of_a_session() -> None:
    cache = InfiniteCache()
    assert cache.add(turn(1000)) == 0
    # 1,099 of the 1,100 tokens have keys and values, in blocks of 32.
    assert cache.add(turn(2000)) == 1088
    assert cache.add(turn(2000, session=2)) == 0


def test_infinite_cache_reuses_shared_parts_of_a_tenant() -> None:
    cache = InfiniteCache()
    assert cache.add(part(2000, 1, 2, 3)) == 0
    assert cache.add(part(2000, 1, 2, 4)) == 1024
    assert cache.add(part(2000, 4, 2, 3)) == 0
    assert cache.add(part(2000, 1, 2, 3, tenant="b")) == 0
    # The last token is always computed.
    assert cache.add(part(1024, 1, 2)) == 992


def test_pooled_cache_evicts_the_least_recently_used() -> None:
    cache = PooledCache(4 * 512)
    assert cache.add(part(1025, 1, 2)) == 0
    assert cache.add(part(1025, 3, 4)) == 0
    assert cache.add(part(1025, 1, 2)) == 1024
    assert cache.add(part(1025, 5, 6)) == 0
    assert cache.add(part(1025, 3, 4)) == 0
    assert cache.add(part(1025, 5, 6)) == 1024


def test_closed_loop_begins_with_sessions_in_progress() -> None:
    loop = ClosedLoop(AgentSessions().at_rate(0.1), seed=1, until_s=100.0)
    times = [it.at for it in loop.arrivals]
    assert times == sorted(times) and times[0] >= 0
    at_once = [it for it in loop.arrivals if it.at < 20]
    assert len(at_once) > 20
    assert max(it.prompt_tokens for it in at_once) > 50_000


def test_closed_loop_sends_a_turn_after_the_previous_end() -> None:
    loop = ClosedLoop(AgentSessions().at_rate(0.1), seed=1, until_s=100.0)
    first = loop.arrivals[0]
    following = loop.follow_up(Record(0, first, finished=first.at + 40.0))
    assert following is not None and following.session == first.session
    assert following.at > first.at + 40.0
    assert following.prompt_tokens > first.prompt_tokens + first.output_tokens
    assert loop.follow_up(Record(1, following, finished=100.0)) is None


def test_decision_is_compared_with_the_better_of_both_ways() -> None:
    waiting = Waiting("r", "gateway", 0.0, 1000, 10)
    assert Decision(waiting, 0.0, compute_s=3.0).clairvoyant_s == 3.0
    assert Decision(waiting, 0.0, compute_s=3.0, best_s=1.0).clairvoyant_s == 1.0
    assert Decision(waiting, 0.0, compute_s=3.0, best_s=4.0).clairvoyant_s == 3.0


@pytest.mark.long
def test_watched_queue_dispatches_as_the_product_does() -> None:
    sessions = AgentSessions(min_turns=4, max_turns=8, max_prompt_tokens=30_000).at_rate(1.0)
    arrivals = [*sessions.arrivals(1, 30.0)]
    config = RouterConfig(max_queued=10**9)
    scenario = Scenario((spec(),) * 2, config, weights=None)
    queue = WatchedQueue(config)
    watched = simulate(arrivals, scenario, dispatcher=queue).records
    assert watched == simulate(arrivals, scenario).records
    figures = summary(queue.decisions(0.0))
    assert 0 < figures["waited"] <= figures["decisions"]
    assert figures["cost_s"] >= figures["clairvoyant_s"] > 0


@pytest.mark.parametrize("policy", [OFF, "llm-d", EVERLIFT])
def test_run_reuses_no_more_than_infinite_caches(policy: str) -> None:
    figures = Run("tenants", policy, 2, 4.0, 2.0, 8.0).figures()
    assert figures["unfinished"] == 0
    assert 0 < figures["reused_of_reusable"] <= 1
    assert figures["pooled_of_reusable"] == 1.0


def figures(p99_s: float, reused: float = 0.9) -> dict[str, object]:
    waits = {"decisions": 4, "cost_s": 6.0, "clairvoyant_s": 5.0}
    return {"ttft_p99_s": p99_s, "reused_of_reusable": reused, "waits": waits}


def test_locality_ratios_compare_with_the_best_rival() -> None:
    found = {OFF: figures(0.1), EVERLIFT: figures(3.0, 0.97)}
    found |= {rival: figures(4.0 + index) for index, rival in enumerate(RIVALS)}
    assert locality.load_ratios("agents", {"0.9": found}) == {
        "reused_of_reusable_agents_0.9": 0.97,
        "p99_ttft_vs_best_rival_agents_0.9": 0.75,
        "wait_vs_clairvoyant_agents": 1.2,
    }


def test_leader_measures_what_chunks_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.locality_leader._ROUNDS", 3)
    monkeypatch.setattr("benchmarks.locality_leader._CYCLES", 2)
    monkeypatch.setattr("benchmarks.locality_leader._REQUESTS", 20)
    found = measure(20)
    assert 0 < found["path"]["without_us"] < found["path"]["with_us"]
    assert 0 < found["index"]["turn_us"] < found["index"]["cold_us"]


def test_locality_picture_shows_all_policies(tmp_path: Path) -> None:
    found = dict.fromkeys(POLICIES, figures(1.0))
    saturations = dict.fromkeys(POLICIES, 0.02)
    raw = {"agents": {"loads": {"0.9": found}, "saturation_per_worker": saturations}}
    locality_picture.draw(raw, tmp_path / "all.png")
    locality_picture.draw({}, tmp_path / "none.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "none.png").exists()
