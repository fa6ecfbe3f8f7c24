"""GenerateMany on a whole cluster: each of its requests behaves like a single one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest

from everlift import error_details, wire
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, InvalidRequest, OutOfRange, TooManyRequests
from everlift.messages import MAX_REQUESTS
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.api.grpc import handlers
from tests.support.in_process import ROUTER, cluster, receive, right_tokens, until


@dataclass
class Read:
    """Output of each request, by its index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    failures: dict[int, pb.Failure] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def take(self, message: pb.GenerateManyResponse) -> None:
        for it in message.pieces:
            if it.HasField("failure"):
                assert it.index not in self.finished
                self.failures[it.index] = it.failure
                continue
            tokens = self.tokens.setdefault(it.index, [])
            self.names[it.index] = it.piece.request_id
            assert it.piece.offset == len(tokens)
            tokens.extend(it.piece.token_ids)
            if it.piece.HasField("usage"):
                self.finished.add(it.index)


def asked(
    tokens: Sequence[int], count: int, request_id: str = "", **fields: object
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=tokens),
        max_tokens=count,
        sampling=pb.Sampling(temperature=0.0),
        request_id=request_id,
        **fields,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def stub(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def read(
    address: str,
    requests: Sequence[pb.GenerateRequest],
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Read:
    """Read a call to its end. Raises EverliftError."""
    result = Read()
    async with stub(address) as router:
        call = router.GenerateMany(
            pb.GenerateManyRequest(requests=requests),
            metadata=tuple((headers or {}).items()),
            timeout=timeout_s,
        )
        while (message := await wire.read(call)) is not None:
            result.take(message)
    return result


async def test_generate_many_answers_each_request_independently() -> None:
    async with cluster(workers=2) as parts:
        prompts = [[number, 7] for number in range(60)]
        result = await read(parts.address, [asked(it, 1 + it[0] % 20) for it in prompts])
    for index, prompt in enumerate(prompts):
        assert result.tokens[index] == right_tokens(prompt, 1 + prompt[0] % 20)
    assert result.finished == set(range(60))
    assert len(set(result.names.values())) == 60


async def test_generate_many_rejects_only_invalid_requests() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        result = await read(
            parts.address,
            [
                asked([1], 5, "good"),
                asked([], 5),
                asked([1], 5, "a b"),
                asked([1], 5, model="gpt-9"),
                asked([5000], 5, "unknown-token"),
            ],
        )
        assert result.tokens == {0: right_tokens([1], 5)}
        assert {index: it.slug for index, it in result.failures.items()} == {
            1: "empty_prompt",
            2: "invalid_request",
            3: "unknown_model",
            4: "out_of_range",
        }
        assert (await client.get_request("good")).state == pb.REQUEST_STATE_FINISHED


async def test_generate_many_logs_x_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "router"):
        async with cluster(workers=1) as parts:
            requests = [asked([1], 3, "a"), asked([2], 3, "b")]
            result = await read(parts.address, requests, {"x-request-id": "mesh/1"})
            plain = await read(parts.address, [asked([1], 3, "c")])
    assert (result.finished, plain.finished) == ({0, 1}, {0})
    logged = [
        (fields["request_id"], record.getMessage(), fields.get("x_request_id"))
        for record in caplog.records
        if record.getMessage() in ("accepted", "finished")
        for fields in [record.__dict__["everlift_fields"]]
    ]
    assert sorted(logged, key=str) == [
        (name, event, given)
        for name, given in (("a", "mesh/1"), ("b", "mesh/1"), ("c", None))
        for event in ("accepted", "finished")
    ]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ([], OutOfRange),
        ([""] * (MAX_REQUESTS + 1), TooManyRequests),
        (["a", "b", "a"], InvalidRequest),
    ],
    ids=["none", "too many", "a name twice"],
)
async def test_generate_many_rejects_invalid_request_list(
    names: list[str], error: type[EverliftError]
) -> None:
    async with cluster(workers=1) as parts:
        with pytest.raises(error) as caught:
            await read(parts.address, [asked([1], 5, name) for name in names])
        assert caught.value.field == "requests"
        assert not len(parts.routers[0]._requests)


async def test_generate_many_serves_maximum_number_of_requests() -> None:
    async with cluster(workers=2) as parts:
        prompts = [[number % 1000] for number in range(MAX_REQUESTS)]
        result = await read(parts.address, [asked(prompt, 2) for prompt in prompts])
    assert result.tokens == dict(enumerate(right_tokens(prompt, 2) for prompt in prompts))


async def test_generate_many_idempotency_key_repeats_requests() -> None:
    requests = [asked([number], 6) for number in range(4)]
    named = {"idempotency-key": "batch"}
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        first = await read(parts.address, requests, named)
        again = await read(parts.address, requests, named)
        assert first == again
        assert set(first.names.values()) == {"batch:0", "batch:1", "batch:2", "batch:3"}
        assert (await client.status()).completed == 4
        other = await read(parts.address, [asked([9], 6), *requests[1:]], named)
        assert {index: it.slug for index, it in other.failures.items()} == {0: "request_conflict"}


async def test_generate_many_relays_requests_of_other_router() -> None:
    async with cluster(routers=2, workers=1) as parts:
        [held] = parts.hold()
        here, there = (router.address for router in parts.routers)
        reading = asyncio.create_task(read(there, [asked([1, 2], 30, "theirs")]))
        await until(lambda: held.num_requests)
        both = asyncio.create_task(read(here, [asked([1, 2], 30, "theirs"), asked([3], 4, "ours")]))
        await until(lambda: held.num_requests == 2)
        held.release()
        assert (await both).tokens == {0: right_tokens([1, 2], 30), 1: right_tokens([3], 4)}
        assert (await reading).tokens == {0: right_tokens([1, 2], 30)}


async def test_generate_many_disconnect_follows_each_on_disconnect() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        async with stub(parts.address) as router:
            call = router.GenerateMany(
                pb.GenerateManyRequest(
                    requests=[
                        asked([1], 50, "ends"),
                        asked([2], 50, "stays", on_disconnect=pb.ON_DISCONNECT_CONTINUE),
                    ]
                )
            )
            await until(lambda: held.num_requests == 2)
            call.cancel()
        async with asyncio.timeout(10):
            while (await client.get_request("ends")).state != pb.REQUEST_STATE_CANCELLED:
                await asyncio.sleep(0.01)
        held.release()
        kept = client.attach("stays")
        assert [t async for it in kept for t in it.token_ids] == right_tokens([2], 50)


async def test_generate_many_full_queue_rejects_each_with_retry_after() -> None:
    config = replace(ROUTER, max_queued=2)
    async with (
        cluster(workers=0, router_config=config) as parts,
        AsyncClient(parts.address) as client,
    ):
        waiting = [asyncio.create_task(receive(client, [number], 3)) for number in (1, 2)]
        await until(lambda: parts.routers[0]._leader_client.queued == 2)
        result = await read(parts.address, [asked([number], 3) for number in range(3)])
        assert [it.slug for it in result.failures.values()] == ["queue_full"] * 3
        retry_after_s = [it.retry_after_s or 0.0 for it in result.failures.values()]
        assert all(0.5 <= it <= 2.5 for it in retry_after_s) and len(set(retry_after_s)) == 3
        await parts.add_worker()
        await asyncio.gather(*waiting)


async def test_generate_many_call_deadline_applies_to_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may deliver the answer late, here by at most half of the deadline.
    monkeypatch.setattr(handlers, "_ANSWER_MARGIN_S", 4.0)
    async with cluster(workers=1) as parts:
        parts.hold()
        requests = [asked([1], 50, "a"), asked([2], 50, "b")]
        result = await read(parts.address, requests, timeout_s=8.0)
    assert {it.slug for it in result.failures.values()} == {"deadline_exceeded"}
    assert len(result.failures) == 2


async def test_generate_many_full_batch_does_not_block_other_request() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        many = asyncio.create_task(
            read(parts.address, [asked([number % 900], 3) for number in range(MAX_REQUESTS)])
        )
        assert (await receive(client, [5, 6], 20)).tokens == right_tokens([5, 6], 20)
        assert len((await many).finished) == MAX_REQUESTS


@pytest.mark.parametrize(
    ("data", "slug"),
    [
        pytest.param(b"\xff\xff", "invalid_request", id="no message"),
        pytest.param(b"\x0a\x00" * 1_000_000, "out_of_range", id="a million requests"),
        pytest.param(b"\x78\x00" * 1_000_000, "out_of_range", id="a million unknown fields"),
    ],
)
async def test_generate_many_rejects_malformed_message(data: bytes, slug: str) -> None:
    async with cluster(workers=0) as parts, grpc.aio.insecure_channel(parts.address) as channel:
        call = channel.unary_stream("/everlift.v1.Inference/GenerateMany")(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    details = error_details.decode(dict(caught.value.trailing_metadata() or ())[wire.DETAILS])
    assert details is not None and details.slug == slug
