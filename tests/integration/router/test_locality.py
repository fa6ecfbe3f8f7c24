"""Dispatch by cached prefix: routers, fake workers and a ledger over real gRPC, in one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.v1 import inference_pb2 as pb
from router.requests import tokenizer
from tests.support.in_process import ROUTER, WORKER, cluster, until
from worker.config import FakeModel

PROMPT = (*range(1, 1 + 3 * CHUNK_SIZE), 7, 8, 9)
#: Worker with one slot and slow prefill: a token takes a quarter of a step's fixed time.
SLOW = replace(
    WORKER,
    max_num_seqs=1,
    num_blocks=400,
    max_num_batched_tokens=512,
    fake=FakeModel(step_time=0.002, token_time=5e-4, max_model_len=8192),
)


async def run(
    client: AsyncClient, request_id: str, prompt=PROMPT, **options
) -> pb.ExplainedAttempt:  # type: ignore[no-untyped-def]
    stream = client.generate(prompt, request_id=request_id, **{"max_tokens": 4, **options})
    await stream.text()
    return (await client.explain(request_id)).attempts[-1]


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_turn_goes_to_the_worker_that_has_its_prefix(num_routers: int) -> None:
    async with cluster(num_routers, 3) as parts, AsyncClient(parts.address) as client:
        first = await run(client, "first")
        assert (first.expected_cached_tokens, first.cached_tokens) == (0, 0)
        for number in range(4):
            longer = (*PROMPT, *range(10, 40 + number))
            later = await run(client, f"later-{number}", longer)
            assert later.worker_id == first.worker_id
            assert later.expected_cached_tokens == 3 * CHUNK_SIZE
            assert later.cached_tokens >= 3 * CHUNK_SIZE


async def test_prefix_of_another_salt_is_not_expected() -> None:
    async with cluster(1, 2) as parts, AsyncClient(parts.address) as client:
        await run(client, "first")
        other = await run(client, "other", cache_salt="b")
        assert (other.expected_cached_tokens, other.cached_tokens) == (0, 0)
        same = await run(client, "same")
        assert same.expected_cached_tokens == 3 * CHUNK_SIZE


async def test_prefix_without_salt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chunk_hashes", lambda tokens, salt: chunk_hashes(tokens))
    with pytest.raises(AssertionError):
        await test_prefix_of_another_salt_is_not_expected()


async def test_prompt_logprobs_expect_no_prefix() -> None:
    async with cluster(1, 2) as parts, AsyncClient(parts.address) as client:
        await run(client, "first")
        scored = await run(client, "scored", prompt_logprobs=1)
        assert (scored.expected_cached_tokens, scored.cached_tokens) == (0, 0)


async def test_locality_off_expects_no_prefix() -> None:
    config = replace(ROUTER, locality=False)
    async with cluster(1, 2, config) as parts, AsyncClient(parts.address) as client:
        await run(client, "first")
        assert (await run(client, "second")).expected_cached_tokens == 0


async def test_new_leader_knows_cached_prefixes() -> None:
    async with cluster(2, 3) as parts:
        async with AsyncClient(parts.address) as client:
            first = await run(client, "first")
        leader = next(router for router in parts.routers if router.leader.is_leading)
        await parts.kill_router(leader)
        await until(lambda: parts.routers[0].leader.is_leading)
        async with AsyncClient(parts.address) as client:
            for number in range(3):
                later = await run(client, f"later-{number}")
                assert later.worker_id == first.worker_id
                assert later.expected_cached_tokens == 3 * CHUNK_SIZE


async def test_request_waits_for_busy_worker_with_its_prefix() -> None:
    config = replace(ROUTER, local_depth=0)
    async with cluster(1, 2, config, SLOW) as parts, AsyncClient(parts.address) as client:
        long = tuple(1 + n % 1000 for n in range(16 * CHUNK_SIZE))
        warm = (await run(client, "first", long)).worker_id
        # Other requests provide measurements of both workers' speeds and departure rates.
        for number in range(12):
            await asyncio.gather(
                *(
                    run(client, f"{number}-{n}", (5, number + 1, n + 1), max_tokens=40)
                    for n in (0, 1)
                )
            )
        views = parts.routers[0].leader.views
        assert all(view.departures.per_s for view in views.values())
        busy = asyncio.create_task(run(client, "busy", long[: 8 * CHUNK_SIZE], max_tokens=100))
        await until(lambda: views[warm].load.num_running > 0)
        waited = await run(client, "waited", long)
        assert (await busy).worker_id == waited.worker_id == warm
        assert waited.cached_tokens > 15 * CHUNK_SIZE
        assert waited.prefix_wait.tokens > 15 * CHUNK_SIZE
        assert 0.0 < waited.prefix_wait.seconds <= waited.prefix_wait.saved_s + 0.1
        assert waited.prefix_wait.compute_s > 0.0
        spans = (await client.explain("waited")).spans
        kinds = {span.kind for span in spans}
        assert pb.SPAN_KIND_PREFIX_WAIT in kinds
