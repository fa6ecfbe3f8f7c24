"""Background responses whose worker, router and ledger are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from tests.chaos.support import ROUTER, Cluster, running, until
from tests.chaos.test_ledger import Server
from tests.support.router import retrying
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
    async with retrying.client(cluster.routers[router].address) as client:
        return (await client.status()).http_address


def config(server: Server, tmp_path: Path) -> Config:
    worker = WorkerConfig(
        model=str(DEMO_MODEL), num_blocks=256, num_threads=1, dtype="float32", max_num_seqs=2
    )
    return Config(
        model=str(DEMO_MODEL),
        num_routers=2,
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER | {"model": str(DEMO_MODEL)}),
        worker=worker,
        ledger=LedgerConfig(url=server.url, durability_class="always"),
    )


@pytest.mark.long
async def test_background_responses_survive_kills(server: Server, tmp_path: Path) -> None:
    async with running(config(server, tmp_path)) as cluster:
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


@pytest.mark.long
async def test_conversation_survives_loss_of_router(server: Server, tmp_path: Path) -> None:
    """The router is lost between the submission of a conversation's response and its end."""
    async with running(config(server, tmp_path)) as cluster:
        first, other = [await http_address(cluster, router) for router in range(2)]
        conversation = (await ask(first, "/v1/conversations", {})).json["id"]
        turn = body(_TEXTS[0], background=True, conversation=conversation)
        answer = await ask(first, "/v1/responses", turn)
        assert answer.status == 200, answer.body
        # The other router does not own the response, but rejects a turn while it runs.
        locked = await ask(other, "/v1/responses", turn)
        assert (locked.status, locked.error) == (409, ("conversation_locked", "conversation"))
        assert await item_texts(other, conversation) == []
        await cluster.kill_router(0)
        response = await ended(other, answer.json["id"])
        assert response["status"] == "incomplete"
        expected = await ask(other, "/v1/responses", body(_TEXTS[0], store=False))
        said = [_TEXTS[0], content(expected.json)]
        assert await item_texts(other, conversation) == said
        later = body(_TEXTS[1], conversation=conversation, max_output_tokens=20)
        answer = await ask(other, "/v1/responses", later)
        assert answer.status == 200, answer.body
        assert answer.json["conversation"] == {"id": conversation}
        assert answer.json["usage"]["input_tokens"] > response["usage"]["total_tokens"]
        said += [_TEXTS[1], content(answer.json)]
        assert await item_texts(other, conversation) == said


async def item_texts(address: str, conversation: str) -> list[str]:
    answer = await get(address, f"/v1/conversations/{conversation}/items?order=asc")
    assert answer.status == 200, answer.body
    return [item["content"][0]["text"] for item in answer.json["data"]]


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
