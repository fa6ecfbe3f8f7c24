"""Odd but valid requests are served as sent; excessive ones are rejected before they cost anything.

A concurrent stream continues meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from everlift.client.client import AsyncClient
from everlift.errors import InvalidRequest, PromptTooLong
from everlift.v1 import inference_pb2 as pb
from tests.support.in_process import WORKER, Cluster, cluster, receive, right_tokens

NEIGHBOUR = [5, 6, 7]
CONTEXT = 4096
GENERATE = "/everlift.v1.Inference/Generate"


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=1) as parts:
        yield parts


@pytest.fixture
async def client(parts: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(parts.address) as client:
        yield client


TEXTS = {
    "spaces": "  \t\n ",
    "one letter": "a",
    "nul": "a\0b",
    "byte order mark": "\ufeffa",
    "right to left, joined, without width": "\u202eab\u200d\u200b\u2066c",
    "emoji of several characters": "👩🏽\u200d🚀",
    "combining marks": "e" + "\u0301" * 500,
}


@pytest.mark.parametrize("case", TEXTS)
async def test_prompt_text_accepts_any_characters(client: AsyncClient, case: str) -> None:
    stream = client.generate(TEXTS[case], max_tokens=3, temperature=0.0)
    tokens = [token async for chunk in stream for token in chunk.token_ids]
    assert tokens == right_tokens(list(TEXTS[case].encode()), 3)


async def test_prompt_must_leave_room_for_one_token(client: AsyncClient) -> None:
    longest = [7] * (CONTEXT - 1)
    assert (await receive(client, longest, 1)).tokens == right_tokens(longest, 1)
    with pytest.raises(PromptTooLong):
        await receive(client, [*longest, 7], 1)


async def test_prompt_larger_than_kv_cache_is_rejected() -> None:
    async with (
        cluster(workers=1, worker_config=replace(WORKER, num_blocks=4)) as parts,
        AsyncClient(parts.address) as client,
    ):
        with pytest.raises(PromptTooLong):
            await receive(client, [7] * 128, 1)
        assert (await receive(client, [7] * 127, 1)).tokens == right_tokens([7] * 127, 1)


ODD_BUT_LEGAL = {
    "temperature below zero by its sign alone": dict(temperature=-0.0),
    "absurd temperature": dict(temperature=1e308),
    "top_k above the vocabulary": dict(temperature=0.0, top_k=2**31 - 1),
    "largest seed": dict(temperature=1.0, seed=2**63 - 1),
    "max_tokens above the context": dict(
        temperature=0.0, max_tokens=1 << 30, clamp_max_tokens=True
    ),
}


@pytest.mark.parametrize("case", ODD_BUT_LEGAL)
async def test_unusual_options_are_served_or_rejected_with_cause(
    client: AsyncClient, case: str
) -> None:
    options = {"max_tokens": 3} | ODD_BUT_LEGAL[case]
    prompt = [1] * (CONTEXT - 10)
    try:
        tokens = [t async for c in client.generate(prompt, **options) for t in c.token_ids]  # type: ignore[arg-type]
    except InvalidRequest as error:
        assert len(str(error)) > 10
    else:
        assert len(tokens) == min(options["max_tokens"], 10)


@pytest.mark.parametrize("priority", [-11, 11, 2**31 - 1])
async def test_priority_out_of_range_is_rejected(client: AsyncClient, priority: int) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        await client.generate("a", priority=priority).text()


def varint(value: int) -> bytes:
    """Return a number of up to 64 bits in protobuf's encoding."""
    septets = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(septet | 0x80 for septet in septets[:-1]), septets[-1]])


@pytest.mark.parametrize("token", [2**31, 2**32 - 1, 2**63, 2**64 - 1])
async def test_token_outside_vocabulary_is_rejected(
    parts: Cluster, client: AsyncClient, token: int
) -> None:
    """-1 is 2^64 - 1 on the wire. Field 3 holds the tokens, packed in its field 1."""
    ids = varint(token)
    tokens = b"\x0a" + varint(len(ids)) + ids
    data = pb.GenerateRequest(max_tokens=2).SerializeToString()
    data += b"\x1a" + varint(len(tokens)) + tokens
    parsed = pb.GenerateRequest.FromString(data)
    code, _ = await answer_to(parts, data)
    wanted = grpc.StatusCode.INVALID_ARGUMENT if max(parsed.tokens.ids) >= 1024 else None
    assert code == wanted


async def test_unknown_message_fields_are_ignored(parts: Cluster) -> None:
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), max_tokens=2)
    unknown = varint(2000 << 3 | 2) + b"\x03abc"
    assert await answer_to(parts, request.SerializeToString() + unknown) == (None, "")


async def answer_to(parts: Cluster, data: bytes, **call: object) -> tuple[object, str]:
    """Return status (None if served) and details of a Generate call with these bytes."""
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(parts.address, options=unlimited) as channel:
        stream = channel.unary_stream(GENERATE)(data, **call)  # type: ignore[arg-type]
        try:
            async for _ in stream:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return None, ""


REFUSED, BROKEN = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
#: Oversized calls; metadata of an absurd size is not read, and its connection is closed.
TOO_MUCH: dict[str, tuple[int, dict[str, object], grpc.StatusCode]] = {
    "a message of 100 MB": (100 << 20, {}, REFUSED),
    "a message that grows to 256 MB": (256 << 20, {"compression": grpc.Compression.Gzip}, REFUSED),
    "metadata of 20 KB": (0, {"metadata": (("k", "v" * 20_000),)}, REFUSED),
    "a thousand headers": (0, {"metadata": tuple((f"k{n}", "v") for n in range(1000))}, REFUSED),
    "metadata of 1 MB": (0, {"metadata": (("k", "v" * (1 << 20)),)}, BROKEN),
    "ten thousand headers": (0, {"metadata": tuple((f"k{n}", "v") for n in range(10_000))}, BROKEN),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_oversized_call_does_not_disturb_other_stream(
    parts: Cluster, client: AsyncClient, case: str
) -> None:
    size, call, status = TOO_MUCH[case]
    neighbour = asyncio.create_task(receive(client, NEIGHBOUR, 100))
    code, _ = await answer_to(parts, bytes(size), **call)
    assert code is status
    assert (await neighbour).tokens == right_tokens(NEIGHBOUR, 100)


@pytest.mark.parametrize("method", ["Generate", "Attach", "Cancel", "GetRequest", "GetStatus"])
async def test_call_without_message_is_invalid_argument(parts: Cluster, method: str) -> None:
    async with grpc.aio.insecure_channel(parts.address) as channel:
        call = channel.stream_stream(f"/everlift.v1.Inference/{method}")(timeout=10)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
