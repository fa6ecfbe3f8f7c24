"""Engine policies that operators set, in clusters under load over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import InvalidRequest
from tests.support.in_process import (
    ROUTER,
    WORKER,
    Cluster,
    Received,
    cluster,
    receive,
    right_tokens,
    until,
    worker_status,
)
from worker.config import Scheduling
from worker.engine.policies.continuous import Continuous
from worker.engine.policies.magnus import Magnus
from worker.engine.policies.policy import Policy
from worker.engine.policies.slai import Slai
from worker.engine.policies.static import Static
from worker.serving.rank import Rank

POLICIES: dict[str, type[Policy]] = {
    "continuous": Continuous,
    "slai": Slai,
    "static": Static,
    "magnus": Magnus,
}
#: Fewer slots and KV blocks than concurrent requests need.
SMALL = replace(WORKER, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=64)
PROMPTS = [[1 + number % 7] * (5 + 13 * (number % 5)) for number in range(30)]


def policy_of(rank: Rank) -> type[Policy]:
    assert rank._thread is not None
    return type(rank._thread.ready.result()._scheduler._policy)


def running(parts: Cluster) -> int:
    """Return the number of requests on workers."""
    return sum(len(rank._sessions._attempts) for rank in parts.workers if rank._sessions)


async def until_all_go_by(parts: Cluster, name: str) -> None:
    await until(lambda: {policy_of(rank) for rank in parts.workers} == {POLICIES[name]})


def count(number: int) -> int:
    return 20 + number % 4 * 30


@pytest.mark.long
async def test_engine_policy_change_under_load_keeps_all_tokens() -> None:
    async with (
        cluster(2, 2, replace(ROUTER, max_moves=0), SMALL) as parts,
        AsyncClient(parts.address) as client,
        AsyncClient(parts.routers[1].address) as operator,
    ):

        async def load() -> list[Received]:
            reading = [receive(client, it, count(i)) for i, it in enumerate(PROMPTS)]
            return await asyncio.gather(*reading)

        loaded = []
        for name in ("static", "slai", "magnus", "continuous", "static"):
            loading = asyncio.create_task(load())
            await until(lambda: running(parts) > 4)
            answer = await operator.set_policy(engine_policy=name)
            assert (answer.engine_policy, [*answer.overridden]) == (name, ["engine_policy"])
            await until_all_go_by(parts, name)
            loaded.append(running(parts) > 0)
            for number, received in enumerate(await loading):
                right = right_tokens(PROMPTS[number], count(number), SMALL)
                assert (received.tokens, received.is_contiguous) == (right, True)
                assert received.migrations == 0
        assert any(loaded), "each time all were done before the policy changed"


async def test_engine_policy_reaches_new_workers_and_resets_to_own() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        await client.set_policy(engine_policy="slai")
        late = await parts.add_worker(scheduling=Scheduling("static"))
        await until_all_go_by(parts, "slai")
        await until(lambda: parts.routers[0]._sessions.links[-1].state.engine_policy == "slai")
        assert (await worker_status(client, late.worker_id)).engine_policy == "slai"
        await parts.add_router()
        await parts.kill_router(parts.routers[0])
        async with AsyncClient(parts.address) as other:
            answer = await other.set_policy(reset=["engine_policy"])
            assert (answer.engine_policy, [*answer.overridden]) == ("default", [])
        await until(lambda: [policy_of(rank) for rank in parts.workers] == [Continuous, Static])


async def test_engine_policy_unknown_name_changes_nothing() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        with pytest.raises(InvalidRequest, match="did you mean static"):
            await client.set_policy(engine_policy="statics", max_queued=3)
        answer = await client.set_policy()
        assert (answer.engine_policy, [*answer.overridden]) == ("default", [])
        assert policy_of(parts.workers[0]) is Continuous
