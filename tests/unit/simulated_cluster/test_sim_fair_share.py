"""Fair share of tenants in a cluster on a virtual clock, which one of them floods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from router.config import RouterConfig
from tests.simulated_cluster.cluster import ROUTER, WORKER, SimCluster
from tests.support.example_counts import long
from tests.support.router.keyring import Keyring
from worker.config import FakeModel

#: Worker that generates 80 tokens a second.
SLOW = replace(WORKER, max_num_seqs=4, fake=FakeModel(step_time=0.05))
PROMPT, TOKENS = 8, 40


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    async def made() -> dict[str, str]:
        keyring = Keyring(tmp_path / "keys.yaml")
        await keyring.limit("heavy", weight=3)
        return {name: await keyring.key(name) for name in ("flood", "little", "heavy")}

    return asyncio.run(made())


@pytest.fixture
def config(keys: dict[str, str], tmp_path: Path) -> RouterConfig:
    return replace(ROUTER, access="file", access_file=str(tmp_path / "keys.yaml"))


Submit = Callable[..., None]


def clients(cluster: SimCluster, keys: dict[str, str]) -> Submit:
    def submit(tenant: str, count: int, router: int = 0) -> None:
        for _ in range(count):
            name = f"{tenant}-{len(cluster.transcripts)}"
            options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            cluster.submit(
                name,
                [1 + len(name)] * PROMPT,
                options,  # type: ignore[arg-type]
                router=router,
                api_key=keys[tenant],
            )

    return submit


def tokens_of(cluster: SimCluster, tenant: str) -> int:
    answers = cluster.transcripts.items()
    return sum(it.num_tokens for name, it in answers if name.startswith(tenant))


def waits(cluster: SimCluster, tenant: str) -> list[float]:
    """Return the seconds in the queue of the tenant's completed requests."""
    answers = cluster.transcripts.items()
    return [it.queued_s for name, it in answers if name.startswith(tenant) and it.is_complete]


@pytest.mark.parametrize(("fair_share", "waits_s"), [(True, 2.6), long(False, 25.0)])
def test_fair_share_protects_a_light_tenant_from_a_flood(
    config: RouterConfig, keys: dict[str, str], fair_share: bool, waits_s: float
) -> None:
    with SimCluster(replace(config, fair_share=fair_share), SLOW) as cluster:
        submit = clients(cluster, keys)
        cluster.start_router(0)
        cluster.start_worker(0)
        cluster.run_for(2.0)
        submit("flood", 80)
        cluster.run_for(2.0)
        for _ in range(5):
            submit("little", 1)
            cluster.run_for(2.5)
        cluster.settle(200.0)
        if fair_share:
            assert max(waits(cluster, "little")) < waits_s
        else:
            assert min(waits(cluster, "little")) > waits_s


def test_fair_share_weights_survive_a_change_of_leader(
    config: RouterConfig, keys: dict[str, str]
) -> None:
    """The leader is killed during the load."""
    with SimCluster(config, SLOW) as cluster:
        submit = clients(cluster, keys)
        for index in range(3):
            cluster.start_router(index)
        cluster.start_worker(0)
        cluster.start_worker(1)
        cluster.run_until(lambda: bool(cluster.leaders()))
        (leader,) = cluster.leaders()
        others = [index for index in range(3) if index != leader]
        for _ in range(100):
            for tenant in ("flood", "heavy"):
                submit(tenant, 1, others[len(cluster.transcripts) // 2 % 2])
        cluster.run_for(12.0)
        cluster.kill_router(leader)
        cluster.run_for(12.0)
        shares = tokens_of(cluster, "heavy") / tokens_of(cluster, "flood")
        (leader,) = cluster.leaders()
        leader_state = cluster.routers[leader].router._leader._leader_state  # type: ignore[union-attr]
        assert leader_state.has_restored_counters
        assert 2.3 < shares < 3.7
