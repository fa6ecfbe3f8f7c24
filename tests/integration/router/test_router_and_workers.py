"""Routers, fake workers and a ledger over real gRPC: lost requests resume with exact tokens."""

from __future__ import annotations

import asyncio
import time
from asyncio import Task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import grpc
import pytest

from everlift import wire
from everlift.client.client import AsyncClient
from everlift.errors import ContextLengthExceeded, NoWorker, PromptTooLong, RouterStopping
from everlift.messages import OnDisconnect
from everlift.options import submission_message
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.worker_sessions import WorkerLink
from tests.support.in_process import (
    LONG_LEASE,
    ROUTER,
    WORKER,
    Cluster,
    Held,
    Received,
    cluster,
    receive,
    right_tokens,
    until,
)
from worker.config import FakeModel


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 120))] for _ in range(count)]


def check(received: list[Received], asked: list[list[int]], count: int) -> None:
    for one, prompt in zip(received, asked, strict=True):
        assert one.tokens == right_tokens(prompt, count)
        assert one.is_contiguous


async def test_concurrent_requests_return_exact_tokens() -> None:
    asked = prompts(60)
    async with cluster() as parts, AsyncClient(parts.address) as client:
        received = await asyncio.gather(*(receive(client, p, 40) for p in asked))
        check(received, asked, 40)
        status = await client.status()
    assert (status.completed, status.queued, status.failed, status.migrated) == (60, 0, 0, 0)
    assert status.output_tokens == 60 * 40
    assert all(worker.output_tokens for worker in status.workers)


@asynccontextmanager
async def running_on(num_blocks: int, count: int) -> AsyncIterator[tuple[Cluster, Task[Received]]]:
    """Yield a cluster whose only worker runs the prompt 1, 2, 3 for ``count`` tokens, and the task.

    The worker's KV cache has ``num_blocks`` blocks, which hold less than the model's context.
    """
    config = replace(WORKER, fake=FakeModel(step_time=0.01, max_model_len=8192))
    async with (
        cluster(workers=0, worker_config=config) as parts,
        AsyncClient(parts.address) as client,
    ):
        await parts.add_worker(num_blocks=num_blocks)
        # A worker that is not held could finish while the test starts another one.
        [held] = parts.hold()
        running = asyncio.create_task(receive(client, [1, 2, 3], count))
        await until(lambda: held.num_requests)
        held.let(10)
        link = parts.routers[0]._sessions.links[0]
        await until(lambda: link.state.output_tokens > 5)
        yield parts, running


async def kill_held_worker(parts: Cluster, held: Held) -> None:
    """Kill the first worker before it takes another step."""
    link = parts.routers[0]._sessions._links[parts.workers[0].worker_id]
    killing = asyncio.create_task(parts.kill_worker(parts.workers[0]))
    await until(lambda: not link.is_up)
    held.release()
    await killing


async def test_workers_of_a_model_may_have_other_kv_cache_sizes() -> None:
    """A worker on a GPU measures its KV cache size at each start."""
    async with running_on(num_blocks=100, count=60) as (parts, running):
        await kill_held_worker(parts, parts.held[0])
        await parts.add_worker(num_blocks=101)
        await parts.add_worker(num_blocks=102)
        assert (await running).tokens == right_tokens([1, 2, 3], 60)


async def test_running_request_is_not_cut_by_a_smaller_worker() -> None:
    async with running_on(num_blocks=100, count=400) as (parts, running):
        await parts.add_worker(num_blocks=4)
        await kill_held_worker(parts, parts.held[0])
        with pytest.raises(ContextLengthExceeded, match="context length is 128 tokens"):
            await running


@pytest.mark.parametrize("tokens_before", [0, 1, 7, 60, 119])
async def test_killed_worker_streams_migrate(tokens_before: int) -> None:
    asked = prompts(24, seed=tokens_before)
    async with cluster() as parts, AsyncClient(parts.address) as client:
        held, other = parts.hold()
        work = [asyncio.create_task(receive(client, p, 120)) for p in asked]
        await until(lambda: held.num_requests + other.num_requests == 24)
        at_victim = held.num_requests
        other.release()
        link = await take_steps(parts, held, tokens_before)
        killing = asyncio.create_task(parts.kill_worker(parts.workers[0]))
        await until(lambda: not link.is_up)
        held.release()
        received = await asyncio.gather(*work)
        await killing
        status = await client.status()
        entries = [await parts.ledger.get(one.request_id) for one in received]
    check(received, asked, 120)
    assert status.failed == 0
    # Half of the requests, or fewer after a change of leader, which knows less about the load.
    assert sum(entry.attempts - 1 for entry in entries) == at_victim > 4
    assert sum(one.migrations for one in received) == status.migrated
    # Requests without a token have not migrated; the first step has only those that had arrived.
    least, most = [(0, 0), (1, at_victim), (at_victim, at_victim)][min(tokens_before, 2)]
    assert least <= status.migrated <= most


async def take_steps(parts: Cluster, held: Held, steps: int) -> WorkerLink:
    """Let the first worker run ``steps`` steps; return a router's link to it."""
    link = parts.routers[0]._sessions._links[parts.workers[0].worker_id]
    held.let(steps)
    await until(lambda: link.state.step >= steps)
    return link


async def test_drained_worker_returns_all_requests() -> None:
    asked = prompts(24)
    async with cluster() as parts, AsyncClient(parts.address) as client:
        leaving = parts.workers[0]
        held, other = parts.hold()
        work = [asyncio.create_task(receive(client, p, 150)) for p in asked]
        await until(lambda: held.num_requests + other.num_requests == 24)
        at_leaving = held.num_requests
        other.release()
        await take_steps(parts, held, 10)
        draining = asyncio.create_task(parts.drain_worker(leaving))
        await until(lambda: leaving._sessions is not None and leaving._sessions.is_draining)
        held.release()
        await draining
        received = await asyncio.gather(*work)
        entries = [await parts.ledger.get(one.request_id) for one in received]
    check(received, asked, 150)
    assert sum(one.migrations for one in received) == at_leaving > 4
    assert sum(entry.losses for entry in entries) == 0


async def test_requests_wait_for_first_worker() -> None:
    asked = prompts(5)
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        work = [asyncio.create_task(receive(client, p, 10)) for p in asked]
        await until(lambda: parts.routers[0]._leader.queued == 5)
        await parts.add_worker()
        check(await asyncio.gather(*work), asked, 10)


async def test_requests_without_worker_fail_after_worker_wait() -> None:
    config = replace(ROUTER, worker_wait=0.3)
    async with (
        cluster(workers=0, router_config=config) as parts,
        AsyncClient(parts.address) as client,
    ):
        asked = time.monotonic()
        with pytest.raises(NoWorker):
            await receive(client, [1, 2, 3], 10)
        # The client would retry an unreachable router for 30 s.
        assert time.monotonic() - asked < 10
        await parts.add_worker()
        check([await receive(client, [1, 2, 3], 10)], [[1, 2, 3]], 10)


async def test_context_limit_persists_after_last_worker_is_lost() -> None:
    small = replace(WORKER, max_model_len=64)
    too_long = list(range(100))
    async with cluster(workers=0, worker_config=small) as parts:
        worker = await parts.add_worker()
        await parts.kill_worker(worker)
        # This router was never connected to that worker.
        await parts.add_router()
        for router in parts.routers:
            async with AsyncClient(router.address) as client:
                with pytest.raises(PromptTooLong, match="context length is 64 tokens"):
                    await receive(client, too_long, 10)


async def test_preemption_in_small_cache_keeps_tokens_exact() -> None:
    asked = prompts(30)
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        await parts.add_worker(num_blocks=16, max_num_seqs=8)
        received = await asyncio.gather(*(receive(client, p, 100) for p in asked))
        check(received, asked, 100)
        status = await client.status()
    assert status.workers[0].preemptions > 0
    assert status.workers[0].blocks_used == 0


@pytest.mark.parametrize("ending", ["cancel", "disconnect", "deadline"])
async def test_ended_request_frees_blocks_within_two_steps(ending: str) -> None:
    """The worker takes no step while the abort is on its way to it."""
    async with (
        cluster(workers=1) as parts,
        AsyncClient(parts.address) as client,
        grpc.aio.insecure_channel(parts.address) as channel,
    ):
        [held] = parts.hold()
        link = parts.routers[0]._sessions.links[0]
        neighbour = asyncio.create_task(receive(client, [7, 8, 9], 30))
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2] * 60), request_id="ends")
        if ending == "deadline":
            # Long enough for both requests to run, even on a busy machine.
            request.timeout_ms = 5000
        call = stub.Generate(request)
        await until(lambda: held.num_requests == 2)
        held.let(3)
        await until(lambda: (link.state.num_running, link.state.step) == (2, 3))
        if ending == "disconnect":
            call.cancel()
        elif ending == "cancel":
            await client.cancel("ends")
        await until(lambda: held.num_requests == 1)
        held.let(2)
        await until(lambda: link.state.step == 5)
        assert (link.state.num_running, link.state.blocks_used) == (1, 1)
        held.release()
        assert (await neighbour).tokens == right_tokens([7, 8, 9], 30)


async def test_dead_router_requests_are_taken_over() -> None:
    asked = prompts(12)
    async with cluster(routers=2, workers=2) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            work = [asyncio.create_task(receive(client, p, 200)) for p in asked]
            await until(lambda: first._requests.counters.output_tokens > 300)
            await parts.kill_router(first)
            check(await asyncio.gather(*work), asked, 200)


async def test_stopping_router_redirects_clients_to_another() -> None:
    asked = prompts(12)
    async with cluster(routers=2, workers=2) as parts:
        first, second = parts.routers
        held = parts.hold()
        async with AsyncClient([first.address, second.address]) as client:
            work = [asyncio.create_task(receive(client, p, 200)) for p in asked]
            await until(lambda: sum(worker.num_requests for worker in held) == 12)
            for worker in held:
                worker.let(30)
            await until(lambda: first._requests.counters.output_tokens > 150)
            parts.routers.remove(first)
            await first.stop()
            for worker in held:
                worker.release()
            check(await asyncio.gather(*work), asked, 200)
        entries = [await parts.ledger.get((await task).request_id) for task in work]
        assert {entry.gateway for entry in entries} <= {first.router_id, second.router_id}
        assert second.router_id in {entry.gateway for entry in entries}


async def test_stopping_leader_finishes_streams_and_hands_over() -> None:
    """The other router leads before this one has stopped, and before its lease would expire."""
    config = replace(ROUTER, drain=20.0, lease=20.0)
    async with cluster(routers=2, workers=1, router_config=config) as parts:
        await until(lambda: all(router._heartbeat.leader_id for router in parts.routers))
        leaving, other = sorted(parts.routers, key=lambda r: r._leader.is_leading, reverse=True)
        parts.routers.remove(leaving)
        [held] = parts.hold()
        async with AsyncClient([leaving.address, other.address]) as client:
            old = asyncio.create_task(receive(client, [5, 6], 40))
            await until(lambda: held.num_requests)
            stops = [asyncio.create_task(leaving.stop()) for _ in range(2)]
            await until(lambda: not leaving._requests.accepts_requests)
            with pytest.raises(RouterStopping):
                await submitted(leaving.address)
            new = asyncio.create_task(receive(client, [7, 8], 40))
            await until(lambda: held.num_requests == 2)
            await until(lambda: other._leader.is_leading, seconds=10.0)
            assert len(leaving._requests) == len(other._requests) == 1
            assert not any(stop.done() for stop in stops)
            held.release()
            check([await old, await new], [[5, 6], [7, 8]], 40)
            await asyncio.gather(*stops)


async def submitted(address: str) -> None:
    """Send a request without retries, and read its first message."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        await wire.read(stub.Generate(submission_message([1], {})))


async def test_restarted_router_recovers_queued_requests() -> None:
    asked = prompts(6)
    async with cluster(routers=1, workers=0) as parts:
        old = parts.routers[0]
        async with AsyncClient(old.address) as client:
            streams = [
                client.generate(p, max_tokens=9, temperature=0, on_disconnect=OnDisconnect.CONTINUE)
                for p in asked
            ]
            ids = [stream.request_id for stream in streams]
            work = [asyncio.create_task(anext(stream)) for stream in streams]
            await until(lambda: old._leader.queued == 6)
            await parts.kill_router(old)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        await parts.add_router()
        await parts.add_worker()
        async with AsyncClient(parts.address) as client:
            for prompt, request_id in zip(asked, ids, strict=True):
                tokens = [t async for c in client.attach(request_id) for t in c.token_ids]
                assert tokens == right_tokens(prompt, 9)


async def test_routers_share_one_queue() -> None:
    async with cluster(routers=2, workers=0, router_config=LONG_LEASE) as parts:
        await until(lambda: all(router._heartbeat.leader_id for router in parts.routers))
        leading = [router for router in parts.routers if router._leader.is_leading]
        assert len(leading) == 1
        clients = [AsyncClient(router.address) for router in parts.routers]
        work = []
        for number in range(8):
            client = clients[number % 2]
            work.append(asyncio.create_task(receive(client, [number + 1], 5)))
            await until(lambda n=number: leading[0]._leader.queued == n + 1)
        await parts.add_worker()
        for number, one in enumerate(await asyncio.gather(*work)):
            assert one.tokens == right_tokens([number + 1], 5, WORKER)
        for client in clients:
            await client.close()
