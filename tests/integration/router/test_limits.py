"""Limits of everything that a client may send, on each front.

The limit itself is accepted. A larger value gets an error of its own, which names the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import pytest

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
from router.api.http import connection, server
from router.api.http2 import Limits
from router.api.openai.fields import MAX_PROMPTS
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster
from tests.support.router.front_answers import FRONTS, Answer, answer, http
from tests.support.router.http_client import get
from worker.config import FakeModel

CONTEXT = 256
CHARACTERS = 128 * CONTEXT
MESSAGE = 8 << 10
METADATA = Limits().max_metadata_bytes


Fields = Mapping[str, Any]


class Limit(NamedTuple):
    """Limit of a field of the fronts in ``has``; the error's message contains ``says``."""

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
        str(MAX_STOP_STRINGS),
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
        str(MAX_STOP_TOKEN_IDS),
    ),
    "biases": Limit(
        "logit_bias_too_large",
        {**ASKED, "logit_bias": {token: 1.0 for token in range(MAX_LOGIT_BIAS)}},
        {**ASKED, "logit_bias": {token: 1.0 for token in range(MAX_LOGIT_BIAS + 1)}},
        str(MAX_LOGIT_BIAS),
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
        str(MAX_CHOICES),
        has="native HTTP",
    ),
}
CASES = [(limit, front) for limit, it in LIMITS.items() for front in it.has.split()]
#: Error of the fake worker for a grammar, which shows that the router accepted it.
NO_GRAMMAR = "the fake model supports no grammar"


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    small = replace(WORKER, fake=FakeModel(max_model_len=CONTEXT))
    async with cluster(workers=1, worker_config=small) as parts:
        yield parts


@pytest.mark.parametrize(("name", "front"), CASES)
async def test_limit_accepts_maximum_and_rejects_excess(
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
async def test_prompt_text_beyond_context_is_rejected_untokenized(
    parts: Cluster, front: str
) -> None:
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
async def test_message_size_limit_is_enforced_and_names_setting(front: str, setting: str) -> None:
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
async def test_metadata_size_limit_is_enforced(parts: Cluster, front: str, most: int) -> None:
    assert await FRONTS[front](parts, ASKED, {"x-note": "x" * (most - 500)}) == Answer()
    refused = await FRONTS[front](parts, ASKED, {"x-note": "x" * most})
    assert refused.slug == "metadata_too_large" and str(most) in refused.message


async def test_requests_per_call_limit_is_enforced(parts: Cluster) -> None:
    for count, slug in ((MAX_REQUESTS, ""), (MAX_REQUESTS + 1, "too_many_requests")):
        each = pb.GenerateRequest(text="a", max_tokens=1)
        async with grpc.aio.insecure_channel(parts.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.GenerateMany(pb.GenerateManyRequest(requests=[each] * count))
            assert (await answer(call)).slug == slug
    for count, slug in ((MAX_PROMPTS, ""), (MAX_PROMPTS + 1, "too_many_requests")):
        assert (await http(parts, {"tokens": [[1]] * count}, {})).slug == slug


async def test_http_connections_beyond_limit_get_503(
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


async def test_idle_http_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 0.05)
    async with cluster(workers=0) as parts:
        address = parts.routers[0].http_address
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
