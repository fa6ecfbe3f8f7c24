"""LoRA adapters that clients name as the model: in every API, and through losses of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from everlift.client.client import AsyncClient
from everlift.errors import UnknownModel
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from tests.support.in_process import ROUTER, Cluster, Received, cluster, receive, until
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import ask, get
from tests.support.scripted import BODIES, SAY, scripted_cluster
from tests.support.worker import fake_vllm_core
from tests.support.worker.fake_vllm_core import SlowCore
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.plan import Admission, Runner
from worker.engine.sequence import Sequence
from worker.runner.fake_runner import expected_tokens
from worker.runner.runner import TorchRunner
from worker.serving.engine_thread import EngineThread
from worker.vllm_engine.engine import VllmEngine

ADAPTED = replace(ROUTER, adapters=("sql=org/sql@v1", "poems=/adapters/poems-2"))
DIGESTS = {"sql": "digest of sql", "poems": "digest of poems"}
PROMPT = [5, 6, 7, 8]
#: A request of 200 tokens outlasts a pause of this process by seconds.
_SLOW_STEP_S = 0.03


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Digests of the adapters that workers serve, if they start after this fixture.

    The workers compute with the model itself.
    """
    served, of, admit = dict(DIGESTS), Limits.of, TorchRunner._admit

    def limited(config: WorkerConfig, runner: Runner) -> Limits:
        return replace(of(config, runner), adapters=dict(served))

    def admitted(runner: TorchRunner, admission: Admission) -> None:
        admit(runner, replace(admission, adapter=""))

    monkeypatch.setattr(Limits, "of", limited)
    monkeypatch.setattr(TorchRunner, "_admit", admitted)
    return served


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Adapters of the sequences that engines received."""
    names: list[str] = []
    add = Engine.add

    def recorded(engine: Engine, sequence: Sequence) -> None:
        names.append(sequence.adapter)
        add(engine, sequence)

    monkeypatch.setattr(Engine, "add", recorded)
    return names


@pytest.fixture
async def parts(tmp_path: Path, adapters: dict[str, str]) -> AsyncIterator[Cluster]:
    async with scripted_cluster(tmp_path / "m", HERMES, router_config=ADAPTED) as parts:
        yield parts


async def test_http_apis_accept_adapters(parts: Cluster, computed: list[str]) -> None:
    address = parts.routers[0].http_address
    for path, body in BODIES.items():
        for name in ("sql", "poems"):
            answer = await ask(address, path, {**body, "model": name})
            assert (answer.status, answer.json["model"]) == (200, name)
            assert computed.pop() == name and not computed
            if path == "/v1/responses":
                stored = await get(address, f"{path}/{answer.json['id']}")
                assert stored.json["model"] == name
        answer = await ask(address, path, {**body, "model": "spl"})
        assert answer.status == 404
        assert "'spl' is not served" in answer.json["error"]["message"]
    await ask(address, "/v1/completions", BODIES["/v1/completions"])
    assert computed == [""]
    assert (await ask(address, "/tokenize", {"prompt": "a", "model": "sql"})).status == 200


async def test_model_list_has_parents_and_roots(parts: Cluster) -> None:
    address, own = parts.routers[0].http_address, parts.routers[0]._models.first.name
    expected = [(own, own, None), ("sql", "org/sql", own), ("poems", "poems-2", own)]
    listed = (await get(address, "/v1/models")).json["data"]
    assert [(it["id"], it["root"], it["parent"]) for it in listed] == expected
    assert (await get(address, "/v1/models/sql")).json == listed[1]
    async with AsyncClient(parts.address) as client:
        models = (await client.models()).models
    assert [(it.name, it.root, it.parent or None) for it in models] == expected


async def test_grpc_and_kserve_accept_adapters(parts: Cluster, computed: list[str]) -> None:
    async with AsyncClient(parts.address) as client:
        stream = client.generate(f"{SAY}four<|im_end|>", model="sql")
        assert await stream.text() == "four"
        assert (await client.get_request(stream.request_id)).model == "sql"
        with pytest.raises(UnknownModel, match="'spl' is not served"):
            await client.generate("a", model="spl").text()
    async with grpc.aio.insecure_channel(parts.address) as channel:
        stub: Any = kserve_grpc.GRPCInferenceServiceStub(channel)
        request = kserve_pb.ModelInferRequest(model_name="poems")
        prompt = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        prompt.contents.bytes_contents.append(f"{SAY}four<|im_end|>".encode())
        assert (await stub.ModelInfer(request)).model_name == "poems"
        assert (await stub.ModelReady(kserve_pb.ModelReadyRequest(name="sql"))).ready
    assert computed == ["sql", "poems"]


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch, adapters: dict[str, str]) -> dict[str, str]:
    """Let workers compute with the vLLM engine over a fake core."""

    def build(thread: EngineThread, runner: Runner) -> VllmEngine:
        limits = Limits.of(thread._config, runner)
        return VllmEngine(SlowCore(limits), limits, thread._timed)

    monkeypatch.setattr(EngineThread, "_build_engine", build)
    return adapters


def expected(adapter: str, count: int) -> list[int]:
    return expected_tokens([*adapter.encode(), *PROMPT], count)


async def test_adapter_survives_the_loss_of_workers(
    with_vllm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_vllm_core, "STEP_S", _SLOW_STEP_S)
    names = ("sql", "", "poems", "sql")
    async with cluster(router_config=ADAPTED) as parts, AsyncClient(parts.address) as client:
        requests = [asyncio.create_task(receive(client, PROMPT, 200, model=name)) for name in names]
        await until(lambda: parts.routers[0]._requests.counters.output_tokens > 100)
        await parts.kill_worker(parts.workers[0])
        monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.002)
        results: list[Received] = await asyncio.gather(*requests)
    for name, received in zip(names, results, strict=True):
        assert received.is_contiguous and received.tokens == expected(name, 200)
    assert sum(received.migrations for received in results) > 0


async def test_adapter_survives_the_loss_of_the_router(with_vllm: dict[str, str]) -> None:
    async with cluster(routers=2, router_config=ADAPTED) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            requests = [
                asyncio.create_task(receive(client, PROMPT, 200, model="sql")) for _ in range(8)
            ]
            await until(lambda: first._requests.counters.output_tokens > 50)
            await parts.kill_router(first)
            for received in await asyncio.gather(*requests):
                assert received.is_contiguous and received.tokens == expected("sql", 200)
            attached = client.attach(received.request_id)
            assert [it async for chunk in attached for it in chunk.token_ids] == received.tokens


async def test_started_request_fails_under_another_version(
    with_vllm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_vllm_core, "STEP_S", _SLOW_STEP_S)
    async with cluster(workers=1, router_config=ADAPTED) as parts:
        async with AsyncClient(parts.address) as client:
            requests = [
                asyncio.create_task(receive(client, PROMPT, 300, model=name))
                for name in ("sql", "poems")
            ]
            await until(lambda: parts.routers[0]._requests.counters.output_tokens > 40)
            await parts.kill_worker(parts.workers[0])
            monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.002)
            sessions = parts.routers[0]._sessions
            await until(lambda: not any(link.is_up for link in sessions.links))
            with_vllm["sql"] = "another digest"
            await parts.add_worker()
            with pytest.raises(UnknownModel, match="the adapter 'sql' has changed since"):
                await requests[0]
            assert (await requests[1]).tokens == expected("poems", 300)
            again = await receive(client, PROMPT, 20, model="sql")
            assert again.tokens == expected("sql", 20)


async def test_worker_without_the_adapter_gets_no_request(with_vllm: dict[str, str]) -> None:
    async with cluster(workers=1, router_config=ADAPTED) as parts:
        del with_vllm["sql"]
        await parts.add_worker(max_num_seqs=300)
        async with AsyncClient(parts.address) as client:
            received = await asyncio.gather(
                *(receive(client, PROMPT, 20, model="sql") for _ in range(8))
            )
    assert [each.tokens for each in received] == [expected("sql", 20)] * 8
