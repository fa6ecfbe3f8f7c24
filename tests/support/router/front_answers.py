"""Answers of each front to a request whose fields have the same names on all of them."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast

import grpc

from everlift import error_details, wire
from everlift.errors import BY_SLUG
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from tests.support.in_process import Cluster
from tests.support.router.http_client import JSON, ask


class Answer(NamedTuple):
    """Answer of a front; ``slug`` is empty on success, ``status`` is gRPC's or HTTP's."""

    slug: str = ""
    message: str = ""
    status: str | int = ""


Fields = Mapping[str, Any]
Front = Callable[[Cluster, Fields, Mapping[str, str]], Awaitable[Answer]]


async def answer(call: Any) -> Answer:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        details = dict(error.trailing_metadata() or ())[wire.DETAILS]
        decoded = error_details.decode(cast("bytes", details))
        assert decoded is not None
        return Answer(decoded.slug, error.details() or "", error.code().name)
    return Answer()


async def native(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = cast(
            "inference_pb2_grpc.InferenceAsyncStub", inference_pb2_grpc.InferenceStub(channel)
        )
        return await answer(stub.Generate(_native(given), metadata=tuple(headers.items())))


async def many(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    message = pb.GenerateManyRequest(requests=[_native(given)])
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = cast(
            "inference_pb2_grpc.InferenceAsyncStub", inference_pb2_grpc.InferenceStub(channel)
        )
        async for response in stub.GenerateMany(message, metadata=tuple(headers.items())):
            for piece in response.pieces:
                if piece.HasField("failure"):
                    slug, message = piece.failure.slug, piece.failure.message
                    return Answer(slug, message, BY_SLUG[slug].grpc_status)
    return Answer()


def _native(given: Fields) -> pb.GenerateRequest:
    named = _named(given)
    sampling = pb.Sampling()
    if schema := named.pop("json_schema", None):
        sampling.grammar.json_schema = schema
    if choice := named.pop("choice", None):
        sampling.grammar.choice.texts.extend(choice)
    if tokens := named.pop("tokens", None):
        named["tokens"] = pb.TokenIds(ids=tokens)
    for name in named.keys() & pb.Sampling.DESCRIPTOR.fields_by_name.keys():
        sampling.MergeFrom(pb.Sampling(**{name: named.pop(name)}))
    return pb.GenerateRequest(sampling=sampling, **named)


def _named(given: Fields) -> dict[str, Any]:
    """Return the fields that are set, with a default ``max_tokens``; None means unset."""
    named = {"max_tokens": 1, **given}
    return {name: value for name, value in named.items() if value is not None}


async def kserve(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    named = _named(given)
    request = kserve_pb.ModelInferRequest(model_name="fake")
    if tokens := named.pop("tokens", None):
        request.inputs.add(name="input_ids", datatype="UINT32", shape=[len(tokens)])
        request.raw_input_contents.append(struct.pack(f"<{len(tokens)}I", *tokens))
    else:
        text = named.pop("text").encode()
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    request.parameters["sampling_parameters"].string_param = json.dumps(named)
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = cast(
            "kserve_grpc.GRPCInferenceServiceAsyncStub",
            kserve_grpc.GRPCInferenceServiceStub(channel),
        )
        call = stub.ModelInfer(request, metadata=tuple(headers.items()))
        return await answer(_once(call))


async def _once(call: Any) -> AsyncIterator[Any]:
    yield await call


async def http(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    body = _named(given)
    body["prompt"] = body.pop("tokens", None) or body.pop("text")
    if "json_schema" in body:
        body["structured_outputs"] = {"json": body.pop("json_schema")}
    if "choice" in body:
        body["structured_outputs"] = {"choice": body.pop("choice")}
    address = parts.routers[0].http_address
    response = await ask(address, "/v1/completions", body, {**JSON, **headers})
    if response.status == 200:
        return Answer()
    return Answer(response.error[0], response.json["error"]["message"], response.status)


async def chat(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    """Return the answer of a model with a chat template."""
    body = _named(given)
    body["messages"] = [{"role": "user", "content": body.pop("text")}]
    if "logprobs" in body:
        body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
    address = parts.routers[0].http_address
    response = await ask(address, "/v1/chat/completions", body, {**JSON, **headers})
    if response.status == 200:
        return Answer()
    return Answer(response.error[0], response.json["error"]["message"], response.status)


FRONTS: dict[str, Front] = {"native": native, "KServe": kserve, "HTTP": http}
