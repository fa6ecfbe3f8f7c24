"""Sizes and encodings of messages on client connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from everlift import wire
from everlift.errors import MessageTooLarge, MetadataTooLarge, PromptTooLong, Unimplemented
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from tests.support.in_process import ROUTER, cluster

MIB = 1 << 20
GZIP = grpc.Compression.Gzip


@asynccontextmanager
async def stub(
    address: str, compression: grpc.Compression = grpc.Compression.NoCompression
) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    async with grpc.aio.insecure_channel(address, compression=compression) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, GZIP])
async def test_grpc_message_size_limit_is_configurable(compression: grpc.Compression) -> None:
    config = replace(ROUTER, max_message_bytes=MIB)
    async with (
        cluster(workers=0, router_config=config) as parts,
        stub(parts.address, compression) as router,
    ):
        for size, error in ((MIB - 100, PromptTooLong), (MIB + 1, MessageTooLarge)):
            call = router.Generate(pb.GenerateRequest(text="x" * size))
            with pytest.raises(error):
                await wire.read(call)


async def test_grpc_metadata_beyond_limit_is_rejected() -> None:
    async with cluster(workers=0) as parts, stub(parts.address) as router:
        for _ in range(10):
            await router.ListModels(
                pb.ListModelsRequest(), metadata=(("x-request-id", "x" * 15_000),)
            )
            call = router.ListModels(
                pb.ListModelsRequest(), metadata=(("x-request-id", "x" * 17_000),)
            )
            with pytest.raises(MetadataTooLarge):
                await wire.answer(call, call)


async def test_grpc_unknown_method_is_unimplemented_with_name() -> None:
    async with cluster(workers=0) as parts, grpc.aio.insecure_channel(parts.address) as channel:
        call = channel.unary_unary("/everlift.v1.Inference/Guess")(b"")
        with pytest.raises(Unimplemented, match="Guess"):
            await wire.answer(call, call)


@pytest.mark.parametrize("compression", [GZIP, grpc.Compression.Deflate])
async def test_grpc_compressed_request_is_decompressed(compression: grpc.Compression) -> None:
    async with cluster(workers=0) as parts, stub(parts.address, compression) as router:
        text = "again and " * 1000
        answer = await router.Tokenize(pb.TokenizeRequest(text=text))
    assert bytes(answer.token_ids).decode() == text


@pytest.mark.parametrize("compression", [GZIP, grpc.Compression.Deflate])
async def test_grpc_response_uses_compression_of_request(compression: grpc.Compression) -> None:
    request = pb.TokenizeRequest(text="again and " * 1000)
    answers, sizes = [], []
    async with cluster(workers=0) as parts, counting(parts.address) as (address, counts):
        for asked in (grpc.Compression.NoCompression, compression):
            async with stub(address, asked) as router:
                before = counts[0]
                answers.append(await router.Tokenize(request))
                sizes.append(counts[0] - before)
    assert answers[0] == answers[1]
    assert sizes[1] < 1000 < 10_000 < sizes[0]


async def test_grpc_stream_messages_are_compressed() -> None:
    request = pb.GenerateRequest(
        text="a" * 400, max_tokens=3, sampling=pb.Sampling(prompt_logprobs=20, logprobs=20)
    )
    sizes = []
    async with cluster(workers=1) as parts, counting(parts.address) as (address, counts):
        for asked in (grpc.Compression.NoCompression, GZIP):
            async with stub(address, asked) as router:
                before = counts[0]
                pieces = [piece async for piece in router.Generate(request)]
                sizes.append(counts[0] - before)
                assert any(piece.prompt_logprobs for piece in pieces)
    assert sizes[1] < 0.8 * sizes[0]


@asynccontextmanager
async def counting(target: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield the address of a proxy to ``target``, and a list with the number of bytes returned."""
    counts, host, port = [0], *target.split(":")

    async def carry(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                counts[0] += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, back, counted=False), carry(there, writer, counted=True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        name, number = server.sockets[0].getsockname()
        yield f"{name}:{number}", counts
