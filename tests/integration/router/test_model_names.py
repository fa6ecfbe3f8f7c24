"""Names of the served model (router.served_model_names), in every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from everlift.client.client import AsyncClient
from everlift.errors import UnknownModel
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from router.config import RouterConfig
from tests.support.in_process import ROUTER, Cluster
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import ask, get
from tests.support.scripted import BODIES, SAY, scripted_cluster


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Cluster]:
    config = replace(ROUTER, served_model_names=("big", "org/small"))
    async with scripted_cluster(tmp_path / "m", HERMES, router_config=config) as parts:
        yield parts


async def test_http_answers_have_the_requested_name(parts: Cluster) -> None:
    address, own = parts.routers[0].http_address, parts.routers[0]._models.first.name
    for path, body in BODIES.items():
        for name in ("big", "org/small", own):
            answer = await ask(address, path, {**body, "model": name})
            assert (answer.status, answer.json["model"]) == (200, name)
            if path == "/v1/responses":
                stored = await get(address, f"{path}/{answer.json['id']}")
                assert stored.json["model"] == name
        answer = await ask(address, path, {**body, "model": "bigger"})
        assert answer.status == 404 and "'big' or 'org/small'" in answer.json["error"]["message"]
    answer = await ask(address, "/v1/completions", BODIES["/v1/completions"])
    assert answer.json["model"] == own
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert (await ask(address, path, {**body, "model": "big"})).status == 200


async def test_responses_of_a_model_no_longer_served_can_be_deleted(parts: Cluster) -> None:
    address, models = parts.routers[0].http_address, parts.routers[0]._models
    answer = await ask(address, "/v1/responses", {**BODIES["/v1/responses"], "model": "big"})
    path = f"/v1/responses/{answer.json['id']}"
    items = (await get(address, f"{path}/input_items")).json
    models._by_name = {"another": models.first}
    # The output is stored as tokens, which only the model's own tokenizer can decode.
    answer = await get(address, path)
    assert (answer.status, answer.error[0]) == (404, "unknown_model")
    assert (await get(address, f"{path}/input_items")).json == items
    assert (await ask(address, path, method="DELETE")).json["deleted"]
    assert (await get(address, path)).error[0] == "forgotten_request"


async def test_model_lists_have_every_name(parts: Cluster) -> None:
    address, own = parts.routers[0].http_address, parts.routers[0]._models.first.name
    listed = (await get(address, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == [own, "big", "org/small"]
    assert (await get(address, "/v1/models/org/small")).json == listed[2]
    async with AsyncClient(parts.address) as client:
        assert [model.name for model in (await client.models()).models] == [own, "big", "org/small"]


async def test_grpc_and_kserve_accept_every_name(parts: Cluster) -> None:
    own = parts.routers[0]._models.first.name
    async with AsyncClient(parts.address) as client:
        assert await client.generate(f"{SAY}four<|im_end|>", model="big").text() == "four"
        with pytest.raises(UnknownModel):
            await client.generate("a", model="bigger").text()
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub: Any = kserve_grpc.GRPCInferenceServiceStub(channel)
        request = kserve_pb.ModelInferRequest(model_name="big")
        prompt = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        prompt.contents.bytes_contents.append(f"{SAY}four<|im_end|>".encode())
        assert (await stub.ModelInfer(request)).model_name == "big"
        index = await stub.RepositoryIndex(kserve_pb.RepositoryIndexRequest())
        assert [model.name for model in index.models] == [own, "big", "org/small"]
        ready = kserve_pb.ModelReadyRequest(name="org/small")
        assert (await stub.ModelReady(ready)).ready


def test_served_names_must_not_be_empty() -> None:
    with pytest.raises(ValidationError, match="served_model_names"):
        RouterConfig(served_model_names=("",))
