"""Sessions of agents, simulated with and without dispatch by cached prefix."""

from __future__ import annotations

import pytest

from benchmarks.agent_sessions import AgentSessions
from benchmarks.scheduling.scheduling_forecast import spec
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.workloads.arrivals import Arrival
from everlift.hashes import BLOCK_SIZE
from router.config import RouterConfig

SESSIONS = AgentSessions(max_prompt_tokens=20_000, min_turns=5, max_turns=15).at_rate(1.0)


def reused(arrivals: list[Arrival], *, locality: bool) -> int:
    """Return the number of prompt tokens that are prefix-cache hits on four workers."""
    config = RouterConfig(max_queued=1_000_000, locality=locality)
    records = simulate(iter(arrivals), Scenario((spec(),) * 4, config, weights=None)).records
    assert all(it.refused == "" for it in records)
    return sum(it.cached_tokens for it in records)


@pytest.mark.long
def test_agent_sessions_reuse_their_tokens_with_locality() -> None:
    arrivals = [*SESSIONS.arrivals(1, 90.0)]
    previous: dict[int, int] = {}
    reusable = 0
    for arrival in arrivals:
        reusable += previous.get(arrival.session, 0) // BLOCK_SIZE * BLOCK_SIZE
        previous[arrival.session] = arrival.prompt_tokens + arrival.output_tokens

    assert len(arrivals) > 200
    assert reused(arrivals, locality=True) >= 0.95 * reusable
    assert reused(arrivals, locality=False) < 0.9 * reusable
