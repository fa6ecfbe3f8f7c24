"""Clients of real processes receive each token exactly once despite SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc
import pytest

from cluster.config import Config
from cluster.local.processes import ProcessCluster
from everlift.client.client import AsyncClient
from everlift.messages import OnDisconnect
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.config import RouterConfig
from router.ledger.embedded.embedded import running_url
from tests.support.ledger.ledgers import written
from tests.support.router import retrying
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens

FAKE = FakeModel(step_time=0.008)
COUNT = 150


def config(state_dir: Path, fake: FakeModel = FAKE) -> Config:
    return Config(
        model="fake",
        num_workers=2,
        state_dir=state_dir,
        router=RouterConfig(port=0, http_port=0, grace=20.0),
        worker=WorkerConfig(model="fake", num_blocks=512, fake=fake),
    )


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    async with ProcessCluster(config(tmp_path)) as cluster:
        yield cluster


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 100))] for _ in range(count)]


class Wire:
    """Stream as it arrives over gRPC: repeated tokens are not dropped."""

    def __init__(self, prompt: list[int], request_id: str, count: int = COUNT) -> None:
        self.prompt = prompt
        self.count = count
        self.request = pb.GenerateRequest(
            request_id=request_id,
            tokens=pb.TokenIds(ids=prompt),
            max_tokens=count,
            sampling=pb.Sampling(temperature=0.0),
        )
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        self.attempts = 0

    async def read(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        async for piece in stub.Generate(self.request):
            self.tokens.extend(piece.token_ids)
            self.offsets.extend(range(piece.offset, piece.offset + len(piece.token_ids)))
            self.attempts = piece.timing.attempts

    def check(self) -> None:
        assert self.offsets == list(range(self.count))
        assert self.tokens == expected_tokens(self.prompt, self.count, FAKE)


@pytest.mark.parametrize(
    "tokens_before", [40, *(pytest.param(it, marks=pytest.mark.long) for it in (1, 5, 100, 120))]
)
async def test_killed_worker_loses_and_repeats_no_token(
    cluster: ProcessCluster, tokens_before: int
) -> None:
    # The streams run for 5 s, which is longer than stalls of this process before the kill.
    streams = [Wire(p, f"r{n}", 600) for n, p in enumerate(prompts(24, tokens_before))]
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        work = [asyncio.create_task(stream.read(stub)) for stream in streams]
        await until_one_has(streams, tokens_before)
        await cluster.kill_worker(0)
        await asyncio.gather(*work)
        status = await stub.GetStatus(pb.GetStatusRequest())
    for stream in streams:
        stream.check()
    assert status.failed == 0
    assert max(stream.attempts for stream in streams) > 1


async def until_one_has(streams: list[Wire], tokens: int) -> None:
    async with asyncio.timeout(30):
        while not any(len(stream.tokens) >= tokens for stream in streams):
            await asyncio.sleep(0.002)


@pytest.mark.long
async def test_workers_killed_in_turn_lose_no_token(cluster: ProcessCluster) -> None:
    asked = prompts(12)
    async with retrying.client(cluster.address) as client:
        work = [asyncio.create_task(received(client, p)) for p in asked]
        for index in (0, 1):
            await asyncio.sleep(0.2)
            await cluster.restart_worker(index)
        for prompt, tokens in zip(asked, await asyncio.gather(*work), strict=True):
            assert tokens == expected_tokens(prompt, COUNT, FAKE)


async def received(client: AsyncClient, prompt: list[int]) -> list[int]:
    stream = client.generate(prompt, max_tokens=COUNT, temperature=0)
    return [token async for chunk in stream for token in chunk.token_ids]


@pytest.mark.long
async def test_restarted_router_resumes_running_and_queued_requests(tmp_path: Path) -> None:
    """Some requests run and others are queued when the router is killed."""
    small = WorkerConfig(model="fake", num_blocks=512, max_num_seqs=4, fake=FAKE)
    async with ProcessCluster(
        Config(
            model="fake",
            num_workers=2,
            state_dir=tmp_path,
            router=RouterConfig(port=0, http_port=0, grace=20.0),
            worker=small,
        )
    ) as cluster:
        asked = prompts(24)
        async with retrying.client(cluster.address) as client:
            work = [asyncio.create_task(received(client, p)) for p in asked]
            await until_status(client, lambda status: status.queued >= 4 and status.running >= 4)
            await cluster.kill_router(0)
            await cluster.restart_router(0)
            for prompt, tokens in zip(asked, await asyncio.gather(*work), strict=True):
                assert tokens == expected_tokens(prompt, COUNT, FAKE)


@pytest.mark.long
async def test_client_reattaches_by_id_and_offset(cluster: ProcessCluster) -> None:
    [prompt] = prompts(1)
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        stream = Wire(prompt, "mine")
        work = asyncio.create_task(stream.read(stub))
        await until_one_has([stream], 20)
        await cluster.kill_router(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await work
    await cluster.restart_router(0)
    async with retrying.client(cluster.address) as client:
        rest = client.attach("mine", len(stream.tokens))
        tokens = [token async for chunk in rest for token in chunk.token_ids]
    assert stream.tokens + tokens == expected_tokens(prompt, COUNT, FAKE)


@pytest.mark.long
async def test_killed_ledger_server_is_restarted_and_reasserted(cluster: ProcessCluster) -> None:
    """Routers re-send the restarted ledger the state of its lost last second; streams continue."""
    streams = [Wire(p, f"r{n}") for n, p in enumerate(prompts(12))]
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        work = [asyncio.create_task(stream.read(stub)) for stream in streams]
        await until_one_has(streams, 40)
        os.kill(cluster._ledger.pid, signal.SIGKILL)
        await asyncio.gather(*work)
        for stream in streams:
            stream.check()
            known = await stub.GetRequest(
                pb.GetRequestRequest(request_id=stream.request.request_id)
            )
            assert known.output_tokens == COUNT
            assert known.state == pb.REQUEST_STATE_FINISHED


async def test_killed_cluster_resumes_requests_after_restart(tmp_path: Path) -> None:
    """The embedded ledger on disk has the finished requests, and unfinished ones resume."""
    asked = prompts(6)
    # The requests run for 9 s, so that they outlast the steps and stalls of the test.
    slow = config(tmp_path, FakeModel(step_time=0.06))
    async with ProcessCluster(slow) as cluster:
        async with retrying.client(cluster.address) as client:
            finished = client.generate(asked[0], max_tokens=5, temperature=0, request_id="done")
            before = [token async for chunk in finished for token in chunk.token_ids]
            for number, prompt in enumerate(asked):
                stream = client.generate(
                    prompt,
                    max_tokens=COUNT,
                    temperature=0,
                    request_id=f"r{number}",
                    on_disconnect=OnDisconnect.CONTINUE,
                )
                await anext(stream)
            url = running_url(tmp_path)
            assert url is not None
            await written(url)
            await until_status(client, lambda status: status.running == len(asked))
            await kill_all(cluster)
    async with (
        ProcessCluster(slow) as cluster,
        retrying.client(cluster.address) as client,
    ):
        stream = client.attach("done")
        assert [token async for chunk in stream for token in chunk.token_ids] == before
        for number, prompt in enumerate(asked):
            stream = client.attach(f"r{number}")
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens(prompt, COUNT, FAKE)


async def kill_all(cluster: ProcessCluster) -> None:
    await asyncio.gather(cluster.kill_router(0), *(cluster.kill_worker(i) for i in (0, 1)))
    os.kill(cluster._ledger.pid, signal.SIGKILL)


async def until_status(client: AsyncClient, holds) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(30):
        while not holds(await client.status()):
            await asyncio.sleep(0.01)
