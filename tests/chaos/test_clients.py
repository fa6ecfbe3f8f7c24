"""Clients that disconnect, read slowly or send a request twice, and clients of a frozen router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from everlift.client.client import AsyncClient
from everlift.errors import RequestConflict
from everlift.messages import OnDisconnect
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.requests.tokenizer import ByteTokenizer
from tests.chaos.support import Cluster, Load, config, paused, resident, running, until
from tests.support.router import retrying
from tests.support.router.http_client import JSON, streamed
from tests.support.router.session_support import OPTIONS
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

SLOW = FakeModel(step_time=0.01)
#: Tokens of a stream with log probabilities, some 200 bytes each.
SCORED = 2500


@asynccontextmanager
async def plain(
    address: str, options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    async with grpc.aio.insecure_channel(address, options=options) as channel:
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
        pytest.param(OnDisconnect.CANCEL, pb.REQUEST_STATE_CANCELLED, marks=pytest.mark.long),
        (OnDisconnect.GRACE, pb.REQUEST_STATE_CANCELLED),
        pytest.param(OnDisconnect.CONTINUE, pb.REQUEST_STATE_FINISHED, marks=pytest.mark.long),
    ],
)
async def test_vanished_client_request_follows_disconnect_policy(
    tmp_path: Path, way: OnDisconnect, state: pb.RequestState.ValueType
) -> None:
    # Without a client the request runs for 30 s: it cannot end before its router cancels it.
    count = 200 if way is OnDisconnect.CONTINUE else 3000
    settings = config(tmp_path, workers=1, fake=SLOW, router={"grace": 0.5})
    async with running(settings) as cluster, retrying.client(cluster.address) as other:
        async with Load(cluster.addresses, 8, fake=SLOW) as neighbours:
            async with plain(cluster.address) as stub:
                call = stub.Generate(wanted("mine", count, way))
                for _ in range(20):
                    await call.read()
            await until(lambda: is_in(other, "mine", state))
            await neighbours.finish()
        neighbours.check()
        known = await other.get_request("mine")
        assert (known.output_tokens == count) == (way is OnDisconnect.CONTINUE)
        if way is OnDisconnect.CONTINUE:
            stream = other.attach("mine", 20)
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens([1, 2, 3], count, SLOW)[20:]
        await cluster.idle()


async def is_in(client: AsyncClient, request_id: str, state: pb.RequestState.ValueType) -> bool:
    return (await client.get_request(request_id)).state == state


@pytest.mark.long
async def test_slow_readers_use_no_memory_and_delay_no_stream(
    tmp_path: Path,
) -> None:
    """A stream with log probabilities has 64 clients that do not read it.

    The router buffers only what is in flight to them (10 to 30 MiB), not a copy of the stream for
    each (70 MiB). Later they receive the whole stream. A busy router writes larger pieces and keeps
    the memory, so one of three runs must stay below the limit.
    """
    grown = [await grown_by_unread(tmp_path / "0", 64)]
    while grown[-1] >= 36 << 20 and len(grown) < 3:
        grown.append(await grown_by_unread(tmp_path / str(len(grown)), 64))
    assert grown[-1] < 36 << 20, grown


async def grown_by_unread(state_dir: Path, others: int) -> int:
    """Return the bytes of router memory that ``others`` clients add which do not read a stream."""
    async with running(config(state_dir, workers=1, fake=FakeModel())) as cluster:
        warm, read = [await rss_after(cluster, f"r{turn}", 0) for turn in range(2)]
        unread = await rss_after(cluster, "unread", others)
        print(f"router: {warm >> 20}, {read >> 20}, {unread >> 20} MiB")
        return unread - read - max(read - warm, 0)


async def rss_after(cluster: Cluster, request_id: str, others: int) -> int:
    """Return the router's memory in bytes after a stream that ``others`` clients do not read.

    One client reads the stream. Two of the others read it after the measurement.
    """
    async with plain(cluster.address) as quick, plain(cluster.address, OPTIONS) as slow:
        own = quick.Generate(scored(request_id))
        await own.read()
        attach = pb.AttachRequest(request_id=request_id)
        calls = [slow.Attach(attach) for _ in range(others)]
        await asyncio.gather(*(call.read() for call in calls))
        assert await counted(own) == SCORED
        rss = resident(cluster.routers[0].pids[0])
        if calls:
            async with Load(cluster.addresses, 8, fake=FakeModel()) as neighbours:
                await neighbours.finish()
            neighbours.check()
        assert [await counted(call) for call in calls[:2]] == [SCORED] * len(calls[:2])
        for call in calls:
            call.cancel()
    return rss


def scored(request_id: str) -> pb.GenerateRequest:
    request = wanted(request_id, SCORED, OnDisconnect.CONTINUE)
    request.sampling.logprobs = 20
    return request


async def counted(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> int:
    count = 0
    while (piece := await call.read()) is not grpc.aio.EOF:
        count += len(piece.token_ids)
    return count


@pytest.mark.long
async def test_duplicate_request_at_two_routers_runs_once(tmp_path: Path) -> None:
    async with running(config(tmp_path, routers=2, fake=SLOW)) as cluster:
        answers = await asyncio.gather(
            *(tokens_of(cluster.addresses[n % 2], "same") for n in range(6))
        )
        assert answers == [expected_tokens([1, 2, 3], 100, SLOW)] * 6
        async with retrying.client(cluster.addresses) as client:
            assert (await client.get_request("same")).attempts == 1
            with pytest.raises(RequestConflict):
                await client.generate([9], request_id="same").text()
        await cluster.idle()


@pytest.mark.long
async def test_sse_streams_follow_requests_off_frozen_router(tmp_path: Path) -> None:
    """The connected router resumes after another one has taken over its requests."""
    async with running(config(tmp_path, routers=2, fake=SLOW)) as cluster:
        address = cluster.routers[0].http_address
        streams = [asyncio.create_task(events_of(address, f"r{n}", 400)) for n in range(8)]
        async with retrying.client(cluster.addresses) as client:
            await until(lambda: has_begun(client, "r7"))
        since = time.time()
        with paused(cluster.routers[0].pids):
            await until(lambda: num_adopted(cluster, since) == len(streams))
        for text in await asyncio.gather(*streams):
            assert text == ByteTokenizer().decode(expected_tokens([1, 2, 3], 400, SLOW))
        await cluster.idle()


def num_adopted(cluster: Cluster, since: float) -> int:
    return sum(event["event"] == "request taken over" for event in cluster.events(since=since))


async def has_begun(client: AsyncClient, request_id: str) -> bool:
    return (await client.get_request(request_id)).output_tokens > 0


async def events_of(address: str, request_id: str, count: int) -> str:
    """Return the text of a stream, which must end without a new connection."""
    body = {"prompt": [1, 2, 3], "max_tokens": count, "temperature": 0, "stream": True}
    headers = {**JSON, "idempotency-key": request_id}
    async with streamed(address, "/v1/completions", body, headers) as stream:
        *events, done = [event async for event in stream.events()]
    assert done.data == "[DONE]", done.data
    return "".join(event.text for event in events)


async def tokens_of(address: str, request_id: str) -> list[int]:
    async with plain(address) as stub:
        call = stub.Generate(wanted(request_id, 100))
        return [token async for piece in call for token in piece.token_ids]
