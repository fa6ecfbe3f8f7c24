"""Requests with images: in every API, in later turns, and through losses of workers and routers."""

from __future__ import annotations

import asyncio
import json
import shutil
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.llm.completion import gather
from everlift.client.client import AsyncClient
from everlift.errors import InvalidRequest, OutOfRange
from everlift.images import Image
from tests.support.images import png, png_header, png_url
from tests.support.in_process import ROUTER, Cluster, cluster, receive, until
from tests.support.router.http_client import ask, get
from tests.support.worker import fake_vllm_core
from tests.support.worker.fake_vllm_core import PLACEHOLDER_ID, SlowCore, process_images
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.engine.limits import Limits
from worker.engine.plan import Runner
from worker.runner.fake_runner import expected_tokens
from worker.serving.engine_thread import EngineThread
from worker.vllm_engine.engine import VllmEngine

PROMPT = [5, PLACEHOLDER_ID, 7, 8]
IMAGES = [png(seed) for seed in range(3)]
URL = png_url(IMAGES[1])
SIZE = 120


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers compute with the vLLM engine over a fake core that takes images."""

    def build(thread: EngineThread, runner: Runner) -> VllmEngine:
        limits = replace(Limits.of(thread._config, runner), max_images=4)
        core = SlowCore(limits, image_processor=process_images)
        return VllmEngine(core, limits, thread._timed)

    monkeypatch.setattr(EngineThread, "_build_engine", build)


def expected(image: bytes, count: int = SIZE, choice: int = 0) -> list[int]:
    processed = process_images(PROMPT, [Image.checked(image, "image")], b"")
    return expected_tokens(processed.prompt_ids, count, choice=choice)


async def test_images_survive_the_loss_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The requests must not end before the loss, although this process may be paused.
    monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.03)
    async with cluster() as parts, AsyncClient(parts.address) as client:
        requests = [
            asyncio.create_task(receive(client, PROMPT, SIZE, images=[image]))
            for image in IMAGES * 2
        ]
        await until(lambda: parts.routers[0]._requests.counters.output_tokens > 100)
        await parts.kill_worker(parts.workers[0])
        monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.002)
        results = await asyncio.gather(*requests)
    for image, received in zip(IMAGES * 2, results, strict=True):
        assert received.is_contiguous and received.tokens == expected(image)
    assert sum(received.migrations for received in results) > 0
    assert len({tuple(received.tokens) for received in results}) == len(IMAGES)


async def test_choices_with_an_image_survive_the_loss_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.03)
    async with cluster() as parts, AsyncClient(parts.address) as client:
        stream = client.generate(PROMPT, max_tokens=SIZE, n=3, images=IMAGES[:1], seed=4)
        request = asyncio.create_task(gather(stream))
        await until(lambda: parts.routers[0]._requests.counters.output_tokens > 60)
        busy = [rank for rank in parts.workers if rank._sessions and not rank._sessions.is_idle]
        await parts.kill_worker(busy[0])
        monkeypatch.setattr(fake_vllm_core, "STEP_S", 0.002)
        disturbed = (await request).choices
        again = client.generate(PROMPT, max_tokens=SIZE, n=3, images=IMAGES[:1], seed=4)
        assert [it.token_ids for it in (await gather(again)).choices] == [
            it.token_ids for it in disturbed
        ]


async def test_images_survive_the_loss_of_the_router() -> None:
    async with cluster(routers=2) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            requests = [
                asyncio.create_task(receive(client, PROMPT, SIZE, images=[image]))
                for image in IMAGES
            ]
            await until(lambda: first._requests.counters.output_tokens > 30)
            await parts.kill_router(first)
            for image, received in zip(IMAGES, await asyncio.gather(*requests), strict=True):
                assert received.is_contiguous and received.tokens == expected(image)


async def test_broken_image_ends_only_its_request() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        good = asyncio.create_task(receive(client, PROMPT, SIZE, images=IMAGES[:1]))
        with pytest.raises(InvalidRequest, match="no placeholder"):
            await receive(client, [5, 6], SIZE, images=IMAGES[:1])
        with pytest.raises(InvalidRequest, match="no supported format"):
            await receive(client, PROMPT, SIZE, images=[b"broken"])
        with pytest.raises(OutOfRange, match="pixels"):
            await receive(client, PROMPT, SIZE, images=[png_header(50_000, 50_000)])
        with pytest.raises(OutOfRange, match="has 5 images; at most 4"):
            await receive(client, PROMPT, SIZE, images=IMAGES[:1] * 5)
        assert (await good).tokens == expected(IMAGES[0])


TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %} {% endfor %}"
)


@pytest.fixture
async def chats(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Cluster whose chat template writes the placeholder of the fake core for each image."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    [first] = tokenizer["added_tokens"]
    tokenizer["added_tokens"] += [{**first, "id": PLACEHOLDER_ID, "content": "<image>"}]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    router = replace(ROUTER, model=str(directory))
    async with cluster(workers=1, router_config=router) as parts:
        yield parts


def body(path: str, image: bytes, text: str = "what?") -> dict[str, Any]:
    """Return a body with an image and a text, in the form of an API."""
    if path == "/v1/responses":
        part: dict[str, Any] = {"type": "input_image", "image_url": png_url(image)}
        content = [part, {"type": "input_text", "text": text}]
        return {"input": [{"role": "user", "content": content}], "max_output_tokens": 8}
    if path == "/v1/messages":
        data = b64encode(image).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        part = {"type": "image", "source": source}
    else:
        part = {"type": "image_url", "image_url": {"url": png_url(image)}}
    content = [part, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "model": "fake"}


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


async def said(parts: Cluster, path: str, fields: dict[str, Any]) -> Any:
    """Return the message in the answer to a request, without its id."""
    fields = {"temperature": 0, **fields, "model": parts.routers[0]._models.first.name}
    answer = await ask(parts.routers[0].http_address, path, fields)
    assert answer.status == 200, answer.body
    found = answer.json
    match path:
        case "/v1/responses":
            return found["output"][0]["content"]
        case "/v1/messages":
            return found["content"]
    return found["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", PATHS)
async def test_http_apis_accept_images(chats: Cluster, path: str) -> None:
    images = (*IMAGES, IMAGES[0])
    answers = [json.dumps(await said(chats, path, body(path, image))) for image in images]
    assert answers[0] == answers[3]
    assert len({*answers}) == len(IMAGES)


@pytest.mark.parametrize(
    ("path", "change", "code", "param"),
    [
        (PATHS[0], (URL, "https://a.b/c.png"), "unsupported_content", "image_url.url"),
        (PATHS[0], (URL, URL[:-1]), "invalid_request", "image_url.url"),
        (PATHS[1], (URL, "https://a.b/c.png"), "unsupported_content", "image_url"),
        (PATHS[2], ('"base64"', '"url"'), "unsupported_content", "source.type"),
        (PATHS[2], ("image/png", "image/gif"), "invalid_request", "source.data"),
    ],
)
async def test_refusal_names_the_image(
    chats: Cluster, path: str, change: tuple[str, str], code: str, param: str
) -> None:
    fields = json.loads(json.dumps(body(path, IMAGES[1])).replace(*change))
    answer = await ask(chats.routers[0].http_address, path, fields)
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, code)
    at = "input" if path == PATHS[1] else "messages"
    assert f"{at}[0].content[0].{param}" in (error.get("param") or error["message"])


async def test_images_above_the_limit_are_refused(chats: Cluster) -> None:
    fields = body(PATHS[0], IMAGES[0])
    fields["messages"][0]["content"] *= 5
    fields["model"] = chats.routers[0]._models.first.name
    answer = await ask(chats.routers[0].http_address, PATHS[0], fields)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "out_of_range", "messages")


@pytest.mark.parametrize("in_conversation", [False, True])
async def test_later_turn_of_a_response_has_its_image(
    chats: Cluster, in_conversation: bool
) -> None:
    path, name = "/v1/responses", chats.routers[0]._models.first.name
    address = chats.routers[0].http_address
    first = {**body(path, IMAGES[1]), "model": name, "temperature": 0}
    if in_conversation:
        first["conversation"] = (await ask(address, "/v1/conversations", {})).json["id"]
    stored = (await ask(address, path, first)).json
    message = {"role": "user", "content": "and?"}
    later: dict[str, Any] = {"input": [message], "max_output_tokens": 8}
    if in_conversation:
        later["conversation"] = first["conversation"]
    else:
        later["previous_response_id"] = stored["id"]
    whole = {"input": [*first["input"], *stored["output"], message], "max_output_tokens": 8}
    assert await said(chats, path, later) == await said(chats, path, whole)
    other = {**whole, "input": [*body(path, IMAGES[2])["input"], *stored["output"], message]}
    assert await said(chats, path, other) != await said(chats, path, whole)
    items = (await get(address, f"{path}/{stored['id']}/input_items")).json["data"]
    assert items[0]["content"][0]["image_url"] == URL
