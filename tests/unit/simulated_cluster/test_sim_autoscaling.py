"""A cluster on a virtual clock whose number of workers follows the load."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.autoscale.config import AutoscaleConfig
from tests.simulated_cluster.cluster import ROUTER, WORKER, SimCluster
from tests.simulated_cluster.replicas import SimReplicas
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

START_S = 5.0
#: Worker that generates 80 tokens a second.
SLOW = replace(WORKER, max_num_seqs=4, fake=FakeModel(step_time=0.05))
SCALING = AutoscaleConfig(
    min_workers=0, max_workers=4, ttft_target=2.0, down_delay=20.0, idle_delay=30.0
)


def submit(cluster: SimCluster, name: str, tokens: int) -> list[int]:
    """Submit a request, and return the expected tokens."""
    prompt = [random.Random(name).randrange(256) for _ in range(8)]
    cluster.submit(name, prompt, {"max_tokens": tokens, "temperature": 0.0})
    return expected_tokens(prompt, tokens)


def test_sim_replicas_scale_from_zero_and_back_twice() -> None:
    with SimCluster(ROUTER, SLOW) as cluster:
        cluster.start_router(0)
        replicas = SimReplicas(cluster, SCALING, START_S)
        for turn in range(2):
            cluster.run_for(5.0)
            assert (replicas.target, len(cluster.workers)) == (0, 0)
            name = f"r{turn}"
            right = submit(cluster, name, 40)
            cluster.settle(60.0)
            answer = cluster.transcripts[name]
            assert answer.received() == [right]
            # The wait includes the scaling decision, the start, and the worker's announcement.
            assert START_S <= answer.queued_s <= START_S + 2.0
            cluster.run_until(lambda: not cluster.workers, 60.0)
        assert replicas.reversals == 3


@pytest.mark.long
def test_sim_replicas_follow_a_load_peak_without_token_loss() -> None:
    rng = random.Random(3)
    right: dict[str, list[int]] = {}
    with SimCluster(ROUTER, SLOW) as cluster:
        cluster.start_router(0)
        replicas = SimReplicas(cluster, SCALING, START_S)
        most: list[int] = []
        for workers in (0.5, 2.2, 0.5):
            end, seen = cluster.clock.now + 60.0, 0
            while cluster.clock.now < end:
                cluster.run_for(rng.expovariate(workers * 80 / 30))
                name = f"r{len(right)}"
                right[name] = submit(cluster, name, rng.randint(10, 50))
                seen = max(seen, len(cluster.workers))
            most.append(seen)
        left = replicas.target
        cluster.settle(60.0)
        answers = {name: cluster.transcripts[name].received() for name in right}
    assert answers == {name: [tokens] for name, tokens in right.items()}
    assert most[1] > most[0] and most[1] > left
    assert replicas.reversals <= 3
