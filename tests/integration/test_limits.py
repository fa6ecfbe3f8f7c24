"""What a client may send of each thing, on each front: so much of it passes, and more gets an error
of its own that says what is too much."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import grpc
import pytest

from everlift import error_details, wire
from everlift.errors import BY_SLUG
from everlift.messages import (
    MAX_N,
    MAX_REQUESTS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from everlift.sampling import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.gateway.http import connection, server
from router.gateway.http.fields import MAX_PROMPTS
from router.gateway.kserve.v2 import open_inference_pb2 as kserve_pb
from router.gateway.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from router.rpc.limits import Limits
from tests.http_client import JSON, ask, get
from tests.in_process import ROUTER, WORKER, Cluster, cluster
from worker.config import FakeModel

CONTEXT = 256
CHARACTERS = 128 * CONTEXT
MESSAGE = 8 << 10
METADATA = Limits().max_metadata_bytes


class Answer(NamedTuple):
    """``slug`` is empty where it is no error; ``status`` is gRPC's or HTTP's."""

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
        told = error_details.decode(cast("bytes", details))
        assert told is not None
        return Answer(told.slug, error.details() or "", error.code().name)
    return Answer()


async def native(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    named = {"logit_bias": {}, **given}
    sampling = pb.Sampling(logit_bias=named.pop("logit_bias"))
    if schema := named.pop("json_schema", None):
        sampling.grammar.json_schema = schema
    if choice := named.pop("choice", None):
        sampling.grammar.choice.texts.extend(choice)
    if tokens := named.pop("tokens", None):
        named["tokens"] = pb.TokenIds(ids=tokens)
    message = pb.GenerateRequest(max_tokens=1, sampling=sampling, **named)
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub = cast(
            "inference_pb2_grpc.InferenceAsyncStub", inference_pb2_grpc.InferenceStub(channel)
        )
        return await answer(stub.Generate(message, metadata=tuple(headers.items())))


async def kserve(parts: Cluster, given: Fields, headers: Mapping[str, str]) -> Answer:
    named = {"max_tokens": 1, **given}
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
    body = {"max_tokens": 1, **given}
    body["prompt"] = body.pop("tokens", None) or body.pop("text")
    if "json_schema" in body:
        body["structured_outputs"] = {"json": body.pop("json_schema")}
    if "choice" in body:
        body["structured_outputs"] = {"choice": body.pop("choice")}
    address = parts.routers[0].http_address
    told = await ask(address, "/v1/completions", body, {**JSON, **headers})
    if told.status == 200:
        return Answer()
    return Answer(told.error[0], told.json["error"]["message"], told.status)


FRONTS: dict[str, Front] = {"native": native, "KServe": kserve, "HTTP": http}


class Limit(NamedTuple):
    """``says`` is in the error's message. Not every front ``has`` what it is of."""

    slug: str
    below: Fields
    above: Fields
    says: str
    has: str = "native KServe HTTP"


ASKED = {"text": "a"}
LIMITS = {
    "tokens": Limit(
        "prompt_too_long",
        {"tokens": [1] * (CONTEXT - 1)},
        {"tokens": [1] * CONTEXT},
        "worker.max_model_len",
    ),
    "tokens of a text": Limit(
        "prompt_too_long", {"text": "a" * (CONTEXT - 1)}, {"text": "a" * CHARACTERS}, f"{CONTEXT}"
    ),
    "n": Limit("too_many_choices", {**ASKED, "n": MAX_N}, {**ASKED, "n": MAX_N + 1}, f"{MAX_N}"),
    "stops": Limit(
        "too_many_stops",
        {**ASKED, "stop": ["x"] * MAX_STOP_STRINGS},
        {**ASKED, "stop": ["x"] * (MAX_STOP_STRINGS + 1)},
        f"at most {MAX_STOP_STRINGS}",
    ),
    "bytes of a stop": Limit(
        "too_many_stops",
        {**ASKED, "stop": ["x" * MAX_STOP_BYTES]},
        {**ASKED, "stop": ["x" * (MAX_STOP_BYTES + 1)]},
        f"{MAX_STOP_BYTES} bytes",
    ),
    "stop tokens": Limit(
        "too_many_stops",
        {**ASKED, "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
        {**ASKED, "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS + 1))},
        f"at most {MAX_STOP_TOKEN_IDS}",
    ),
    "biases": Limit(
        "logit_bias_too_large",
        {**ASKED, "logit_bias": {token: 1.0 for token in range(MAX_LOGIT_BIAS)}},
        {**ASKED, "logit_bias": {token: 1.0 for token in range(MAX_LOGIT_BIAS + 1)}},
        f"at most {MAX_LOGIT_BIAS}",
        has="native HTTP",
    ),
    "bytes of a schema": Limit(
        "grammar_too_large",
        {**ASKED, "json_schema": "x" * MAX_GRAMMAR_BYTES},
        {**ASKED, "json_schema": "x" * (MAX_GRAMMAR_BYTES + 1)},
        f"{MAX_GRAMMAR_BYTES} bytes",
    ),
    "texts to choose from": Limit(
        "grammar_too_large",
        {**ASKED, "choice": ["x"] * MAX_CHOICES},
        {**ASKED, "choice": ["x"] * (MAX_CHOICES + 1)},
        f"at most {MAX_CHOICES}",
        has="native HTTP",
    ),
}
CASES = [(limit, front) for limit, it in LIMITS.items() for front in it.has.split()]
#: The fake worker's word for a grammar, which came so far.
NO_GRAMMAR = "the fake model follows no grammar"


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    small = replace(WORKER, fake=FakeModel(max_model_len=CONTEXT))
    async with cluster(workers=1, worker_config=small) as parts:
        yield parts


@pytest.mark.parametrize(("name", "front"), CASES)
async def test_so_much_passes_and_more_has_its_own_error(
    parts: Cluster, name: str, front: str
) -> None:
    limit = LIMITS[name]
    passed = await FRONTS[front](parts, limit.below, {})
    assert passed.slug == "" or passed.message == NO_GRAMMAR
    refused = await FRONTS[front](parts, limit.above, {})
    assert refused.slug == limit.slug and limit.says in refused.message
    error = BY_SLUG[limit.slug]
    assert refused.status in (error.grpc_status, error.http_status)


@pytest.mark.parametrize("front", FRONTS)
async def test_a_text_that_cannot_fit_is_not_read(parts: Cluster, front: str) -> None:
    refused = await FRONTS[front](parts, {"text": "a" * (CHARACTERS + 1)}, {})
    assert refused.slug == "prompt_text_too_long" and "worker.max_model_len" in refused.message


@pytest.mark.parametrize(
    ("front", "setting"),
    [
        ("native", "router.max_message_bytes"),
        ("KServe", "router.max_message_bytes"),
        ("HTTP", "router.max_body_bytes"),
    ],
)
async def test_the_size_of_a_message(front: str, setting: str) -> None:
    config = replace(ROUTER, max_message_bytes=MESSAGE, max_body_bytes=MESSAGE)
    async with cluster(workers=1, router_config=config) as parts:
        stops = ["x" * 1000] * (MESSAGE // 1000 - 1)
        assert await FRONTS[front](parts, {**ASKED, "stop": stops}, {}) == Answer()
        refused = await FRONTS[front](parts, {**ASKED, "stop": [*stops, *stops]}, {})
        assert refused.slug == "message_too_large" and setting in refused.message


@pytest.mark.parametrize(
    ("front", "most"),
    [("native", METADATA), ("KServe", METADATA), ("HTTP", connection._MAX_HEAD_BYTES)],
)
async def test_the_size_of_metadata(parts: Cluster, front: str, most: int) -> None:
    assert await FRONTS[front](parts, ASKED, {"x-note": "x" * (most - 500)}) == Answer()
    refused = await FRONTS[front](parts, ASKED, {"x-note": "x" * most})
    assert refused.slug == "metadata_too_large" and str(most) in refused.message


async def test_the_number_of_requests_of_a_call(parts: Cluster) -> None:
    for count, slug in ((MAX_REQUESTS, ""), (MAX_REQUESTS + 1, "too_many_requests")):
        each = pb.GenerateRequest(text="a", max_tokens=1)
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.GenerateMany(pb.GenerateManyRequest(requests=[each] * count))
            assert (await answer(call)).slug == slug
    for count, slug in ((MAX_PROMPTS, ""), (MAX_PROMPTS + 1, "too_many_requests")):
        assert (await http(parts, {"tokens": [[1]] * count}, {})).slug == slug


async def test_connections_over_http_beyond_the_most_are_told_so(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 2)
    address = parts.routers[0].http_address
    open_ones = [await asyncio.open_connection(*address.split(":")) for _ in range(2)]
    for _, writer in open_ones:
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    for reader, _ in open_ones:
        assert b"200" in await reader.readline()
    refused = await get(address, "/health")
    assert (refused.status, refused.error[0]) == (503, "too_many_connections")
    for _, writer in open_ones:
        writer.close()


async def test_a_connection_over_http_without_requests_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 0.05)
    async with cluster(workers=0) as parts:
        address = parts.routers[0].http_address
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
