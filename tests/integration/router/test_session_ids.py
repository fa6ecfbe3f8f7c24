"""Session ids of requests, as each protocol passes them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from everlift.hashes import session_key
from everlift.request_id import shard_key
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from tests.support.in_process import LONG_LEASE, ROUTER, Cluster, cluster, until
from tests.support.router.http_client import JSON, ask

HEADER = (("x-session-id", "talk-7"),)
BY_KEY = replace(ROUTER, session_from=("prompt_cache_key",))
BODY = {"prompt": [1, 2], "max_tokens": 1, "user": "ann"}


async def session_of(parts: Cluster, request_id: str) -> str:
    return (await parts.ledger.read(request_id)).request.session_id


async def test_grpc_metadata_names_the_session() -> None:
    async with (
        cluster(workers=1) as parts,
        grpc.aio.insecure_channel(parts.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        both = {"": "talk-7", "talk-8": "talk-8"}
        for number, (named, session) in enumerate(both.items()):
            message = pb.GenerateRequest(
                request_id=str(number), text="a", max_tokens=1, session_id=named
            )
            assert [it async for it in stub.Generate(message, metadata=HEADER)]
            assert await session_of(parts, str(number)) == session


async def test_kserve_metadata_names_the_session() -> None:
    request = kserve_pb.ModelInferRequest(model_name="fake")
    request.parameters["request_id"].string_param = "r"
    request.parameters["max_tokens"].int64_param = 1
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"a")
    async with (
        cluster(workers=1) as parts,
        grpc.aio.insecure_channel(parts.address) as channel,
    ):
        stub = cast(
            "kserve_grpc.GRPCInferenceServiceAsyncStub",
            kserve_grpc.GRPCInferenceServiceStub(channel),
        )
        await stub.ModelInfer(request, metadata=HEADER)
        assert await session_of(parts, "r") == "talk-7"


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({}, {}, ""),
        ({"prompt_cache_key": "talk-8"}, {}, "talk-8"),
        ({"prompt_cache_key": "talk-8" * 99}, dict(HEADER), "talk-7"),
    ],
)
async def test_http_header_precedes_prompt_cache_key(
    body: dict[str, str], headers: dict[str, str], session: str
) -> None:
    async with cluster(workers=1, router_config=BY_KEY) as parts:
        asked: dict[str, Any] = {**BODY, "prompt": [[1], [2]], **body}
        name = {"idempotency-key": "r"}
        address = parts.routers[0].http_address
        answer = await ask(address, "/v1/completions", asked, {**JSON, **name, **headers})
        assert answer.status == 200
        assert [await session_of(parts, f"r:{place}") for place in (0, 1)] == [session, session]


async def test_http_session_from_is_configured() -> None:
    config = replace(ROUTER, session_from=("user",))
    async with cluster(workers=1, router_config=config) as parts:
        address, name = parts.routers[0].http_address, {"idempotency-key": "r"}
        body = {**BODY, "prompt_cache_key": "talk-8"}
        assert (await ask(address, "/v1/completions", body, {**JSON, **name})).status == 200
        assert await session_of(parts, "r") == "ann"
        refused = await ask(address, "/v1/completions", {**BODY, "user": "u" * 129})
        assert (refused.status, refused.error) == (400, ("out_of_range", "user"))


@pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}])
async def test_http_request_id_selects_the_shard_of_its_session(headers: dict[str, str]) -> None:
    async with cluster(workers=1, router_config=BY_KEY) as parts:
        address, keys = parts.routers[0].http_address, set()
        for body in ({"prompt_cache_key": "talk-7"}, {}):
            more = {} if body else dict(HEADER)
            asked: dict[str, Any] = {**BODY, "prompt": [[1], [2]], **body}
            answer = await ask(address, "/v1/completions", asked, {**JSON, **headers, **more})
            name = answer.headers["idempotency-key"]
            assert answer.headers["x-request-id"] == headers.get("x-request-id", name)
            assert answer.json["id"] == f"cmpl-{name}"
            keys |= {shard_key(f"{name}:{place}") for place in (0, 1)}
            assert await session_of(parts, f"{name}:1") == "talk-7"
        assert len(keys) == 1


@pytest.mark.parametrize("queued", [False, True])
async def test_leader_learns_what_a_session_was_served(queued: bool) -> None:
    async with cluster(routers=2, workers=not queued, router_config=LONG_LEASE) as parts:
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        follower, leader = sorted(parts.routers, key=lambda it: it._leader.is_leading)
        await until(lambda: follower._leader_client.is_open)
        body, headers = {"prompt": [1, 2, 3], "max_tokens": 5}, {**JSON, **dict(HEADER)}
        both = [
            asyncio.create_task(ask(router.http_address, "/v1/completions", body, headers))
            for router in parts.routers
        ]
        if queued:
            await until(lambda: leader._leader.queued == 2)
            await parts.add_worker()
        assert [answer.status for answer in await asyncio.gather(*both)] == [200, 200]
        assert leader._leader._leader_state is not None
        service = leader._leader._leader_state.queue("fake")._attained_service
        await until(lambda: service.attained(session_key("", "talk-7")) == 2 * (3 + 2 * 5))


async def test_http_retry_with_the_returned_id_is_the_same_request() -> None:
    async with cluster(workers=1) as parts:
        address, headers = parts.routers[0].http_address, {**JSON, **dict(HEADER)}
        first = await ask(address, "/v1/completions", BODY, headers)
        headers["idempotency-key"] = first.headers["idempotency-key"]
        again = await ask(address, "/v1/completions", BODY, headers)
        assert again.headers["idempotency-key"] == first.headers["idempotency-key"]
        assert again.json["id"] == first.json["id"]
        assert len((await parts.ledger.list_requests("")).entries) == 1
