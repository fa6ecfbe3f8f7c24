"""Reflection of a router's services, as grpcurl and Postman use it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.in_process import cluster, right_tokens

VERSIONS = ["v1", "v1alpha"]
SERVICES = [
    "everlift.v1.Admin",
    "everlift.v1.Chaos",
    "everlift.v1.Inference",
    "grpc.health.v1.Health",
    "inference.GRPCInferenceService",
]


class Conversation:
    """Open call of the reflection protocol."""

    def __init__(self, channel: grpc.aio.Channel, version: str) -> None:
        self._call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )()

    async def ask(self, **request: str) -> Any:
        await self._call.write(pb.ServerReflectionRequest(**request))
        return await self._call.read()

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF


@asynccontextmanager
async def conversation(address: str, version: str) -> AsyncIterator[Conversation]:
    async with grpc.aio.insecure_channel(address) as channel:
        talk = Conversation(channel, version)
        yield talk
        await talk.end()


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_returns_services_with_dependencies(version: str) -> None:
    async with cluster(workers=0) as parts, conversation(parts.address, version) as talk:
        answer = await talk.ask(list_services="")
        assert [it.name for it in answer.list_services_response.service] == SERVICES
        for name in SERVICES:
            answer = await talk.ask(file_containing_symbol=name)
            files = map(
                FileDescriptorProto.FromString,
                answer.file_descriptor_response.file_descriptor_proto,
            )
            pool = DescriptorPool()
            for file in reversed([*files]):
                pool.Add(file)  # type: ignore[no-untyped-call]
            assert pool.FindServiceByName(name).methods


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_unknown_symbol_leaves_stream_open(
    version: str,
) -> None:
    async with cluster(workers=0) as parts, conversation(parts.address, version) as talk:
        for question in (
            {"file_containing_symbol": "everlift.v9.Inference"},
            {"file_by_filename": "../../etc/passwd"},
            {"all_extension_numbers_of_type": "x" * 100_000},
            {"file_containing_symbol": ""},
        ):
            answer = await talk.ask(**question)
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        answer = await talk.ask(file_by_filename="everlift/v1/inference.proto")
        assert answer.file_descriptor_response.file_descriptor_proto


async def test_reflection_malformed_request_ends_only_its_call() -> None:
    async with cluster(workers=0) as parts, grpc.aio.insecure_channel(parts.address) as channel:
        for data in (b"\xff\xff", *(os.urandom(64) for _ in range(50))):
            method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            call = channel.stream_stream(method)()
            await call.write(data)
            await call.done_writing()
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with conversation(parts.address, "v1") as talk:
            assert (await talk.ask(list_services="")).list_services_response.service


async def test_reflection_suffices_for_generic_client_to_generate() -> None:
    """The client learns service, method and messages from the router, as grpcurl does."""
    request = {"tokens": {"ids": [1, 2]}, "maxTokens": 5, "sampling": {"temperature": 0}}
    async with cluster(workers=1) as parts:
        pieces = await asyncio.to_thread(call, parts.address, "Generate", request)
        [refusal] = await asyncio.to_thread(call, parts.address, "Generate", {"text": ""})
    tokens = [token for piece in pieces for token in piece.get("tokenIds", ())]
    assert tokens == right_tokens([1, 2], 5)
    assert pieces[-1]["finishReason"] == "FINISH_REASON_LENGTH"
    assert refusal == {"error": "INVALID_ARGUMENT"}


def call(address: str, name: str, request: dict[str, object]) -> list[dict[str, Any]]:
    """Return a method's responses as JSON, or its error."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        [service] = [it for it in database.get_services() if it.endswith(".Inference")]
        method = pool.FindServiceByName(service).methods_by_name[name]
        asked = ParseDict(request, GetMessageClass(method.input_type)())
        stream: Callable[..., Any] = channel.unary_stream(
            f"/{service}/{name}",
            request_serializer=type(asked).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        try:
            return [MessageToDict(answer) for answer in stream(asked)]
        except grpc.RpcError as error:
            return [{"error": error.code().name}]  # type: ignore[attr-defined]
