"""Background responses whose worker, router and ledger are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config
from everlift.client.client import AsyncClient
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from tests.chaos.support import ROUTER, Cluster, running, until
from tests.chaos.test_ledger import Server
from tests.support.router.http_client import ask, get, streamed
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

_TEXTS = [f"count from {first} to {first + 200}:" for first in (17, 29, 31, 45, 52, 68)]
_LENGTH = 250


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", LedgerConfig(durability_class="always"))
    yield server
    server.stop()


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"input": text, "temperature": 0, "max_output_tokens": _LENGTH, **more}


async def http_address(cluster: Cluster, router: int) -> str:
    async with AsyncClient(cluster.routers[router].address) as client:
        return (await client.status()).http_address


async def test_background_responses_survive_kills(server: Server, tmp_path: Path) -> None:
    worker = WorkerConfig(
        model=str(DEMO_MODEL), num_blocks=256, num_threads=1, dtype="float32", max_num_seqs=2
    )
    settings = Config(
        model=str(DEMO_MODEL),
        num_routers=2,
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER | {"model": str(DEMO_MODEL)}),
        worker=worker,
        ledger=LedgerConfig(url=server.url, durability_class="always"),
    )
    async with running(settings) as cluster:
        first, other = [await http_address(cluster, router) for router in range(2)]
        ids = []
        for text in _TEXTS:
            answer = await ask(first, "/v1/responses", body(text, background=True))
            assert answer.status == 200, answer.body
            ids.append(answer.json["id"])
        begun = await begin_stream(other, ids[0])
        await cluster.kill_worker(0)
        await cluster.kill_router(0)
        server.kill()
        await asyncio.to_thread(server.start)
        for text, response_id in zip(_TEXTS, ids, strict=True):
            response = await ended(other, response_id)
            assert response["status"] == "incomplete"
            assert response["usage"]["output_tokens"] == _LENGTH
            expected = await ask(other, "/v1/responses", body(text, store=False))
            assert content(response) == content(expected.json)
        number, known = begun
        rest = await read_stream(other, ids[0], number)
        assert known + rest == content(await ended(other, ids[0]))


async def begin_stream(address: str, response_id: str) -> tuple[int, str]:
    """Read the first deltas of a response; return the last sequence number and the text."""
    text, number = "", -1
    async with streamed(
        address, f"/v1/responses/{response_id}?stream=true", method="GET"
    ) as stream:
        async for event in events(stream):
            number = event["sequence_number"]
            text += event.get("delta", "")
            if len(text) > 20:
                break
        stream.hang_up()
    return number, text


async def read_stream(address: str, response_id: str, after: int) -> str:
    path = f"/v1/responses/{response_id}?stream=true&starting_after={after}"
    async with streamed(address, path, method="GET") as stream:
        return "".join([event.get("delta", "") async for event in events(stream)])


async def events(stream: Any) -> Any:
    async for event in stream.events():
        yield event.json


async def ended(address: str, response_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_ended() -> bool:
        answer = await get(address, f"/v1/responses/{response_id}")
        found.update(answer.json)
        return answer.status == 200 and found["status"] not in ("queued", "in_progress")

    await until(is_ended)
    return found


def content(response: dict[str, Any]) -> str:
    [message] = response["output"]
    text: str = message["content"][0]["text"]
    return text
