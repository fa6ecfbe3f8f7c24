"""Clients that vanish, read slowly, ask twice, or come with far too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from everlift.client import AsyncClient
from everlift.errors import RequestConflict
from everlift.messages import OnDisconnect
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from tests.chaos.support import Cluster, Load, config, resident, running, until
from worker.config import FakeModel
from worker.fake_runner import expected_tokens

SLOW = FakeModel(step_time=0.01)


@asynccontextmanager
async def plain(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[misc]


def wanted(request_id: str, count: int, way: OnDisconnect | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokens=pb.TokenIds(ids=[1, 2, 3]),
        max_tokens=count,
        sampling=pb.Sampling(temperature=0.0),
        on_disconnect=None if way is None else way.value,
    )


@pytest.mark.parametrize(
    ("way", "state"),
    [
        (OnDisconnect.CANCEL, pb.REQUEST_STATE_CANCELLED),
        (OnDisconnect.GRACE, pb.REQUEST_STATE_CANCELLED),
        (OnDisconnect.CONTINUE, pb.REQUEST_STATE_FINISHED),
    ],
)
async def test_a_client_that_vanishes_leaves_its_request_as_it_wished(
    tmp_path: Path, way: OnDisconnect, state: pb.RequestState.ValueType
) -> None:
    settings = config(tmp_path, workers=1, fake=SLOW, router={"grace": 0.5})
    async with running(settings) as cluster, AsyncClient(cluster.address) as other:
        async with Load(cluster.addresses, 8, fake=SLOW) as neighbours:
            async with plain(cluster.address) as stub:
                call = stub.Generate(wanted("mine", 200, way))
                for _ in range(20):
                    await call.read()
            await until(lambda: is_in(other, "mine", state))
            await neighbours.finish()
        neighbours.check()
        known = await other.get_request("mine")
        assert (known.output_tokens == 200) == (way is OnDisconnect.CONTINUE)
        if way is OnDisconnect.CONTINUE:
            stream = other.attach("mine", 20)
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens([1, 2, 3], 200, SLOW)[20:]
        await cluster.idle()


async def is_in(client: AsyncClient, request_id: str, state: pb.RequestState.ValueType) -> bool:
    return (await client.get_request(request_id)).state == state


async def test_clients_that_do_not_read_cost_no_memory_and_nobody_else_anything(
    tmp_path: Path,
) -> None:
    """Eight do not read 1,500 tokens each, with log probabilities: the router keeps no more for
    them than for eight who read, and a moment later they have everything."""
    fake = FakeModel()
    settings = config(tmp_path, workers=1, fake=fake, num_blocks=8192)
    async with running(settings) as cluster:
        warm, reading, not_reading = [await rss_after(cluster, n) for n in (0, 1, 2)]
        assert not_reading - reading < max(reading - warm, 0) + (8 << 20)


async def rss_after(cluster: Cluster, turn: int) -> int:
    """Bytes that the router has after eight streams; those of turn 2 are read in the end."""
    async with plain(cluster.address) as stub:
        calls = [stub.Generate(scored(f"r{turn}.{n}")) for n in range(8)]
        if turn < 2:
            await asyncio.gather(*(counted(call) for call in calls))
        else:
            async with AsyncClient(cluster.address) as client:
                ids = [f"r{turn}.{n}" for n in range(8)]
                await until(lambda: all_in(client, ids, pb.REQUEST_STATE_FINISHED))
        rss = resident(cluster.routers[0].pids[0])
        if turn == 2:
            async with Load(cluster.addresses, 8, fake=FakeModel()) as neighbours:
                await neighbours.finish()
            neighbours.check()
            assert await asyncio.gather(*(counted(call) for call in calls)) == [1500] * 8
    return rss


async def all_in(client: AsyncClient, ids: list[str], state: pb.RequestState.ValueType) -> bool:
    return all([await is_in(client, request_id, state) for request_id in ids])


def scored(request_id: str) -> pb.GenerateRequest:
    request = wanted(request_id, 1500, OnDisconnect.CONTINUE)
    request.sampling.logprobs = 5
    return request


async def counted(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> int:
    return sum([len(piece.token_ids) async for piece in call])


async def test_the_same_request_at_two_routers_at_once_runs_once(tmp_path: Path) -> None:
    async with running(config(tmp_path, routers=2, fake=SLOW)) as cluster:
        answers = await asyncio.gather(
            *(tokens_of(cluster.addresses[n % 2], "same") for n in range(6))
        )
        assert answers == [expected_tokens([1, 2, 3], 100, SLOW)] * 6
        async with AsyncClient(cluster.addresses) as client:
            assert (await client.get_request("same")).attempts == 1
            with pytest.raises(RequestConflict):
                await client.generate([9], request_id="same").text()
        await cluster.idle()


async def tokens_of(address: str, request_id: str) -> list[int]:
    async with plain(address) as stub:
        call = stub.Generate(wanted(request_id, 100))
        return [token async for piece in call for token in piece.token_ids]
