"""Cluster whose workers run vLLM with a model that reads images.

Run by make test-vllm, which names the interpreter of that environment in EVERLIFT_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.llm.completion import gather
from everlift.client.client import AsyncClient
from tests.chaos.support import Cluster, running
from tests.support.images import png, png_header, png_url
from tests.support.router.http_client import ask
from tests.vllm_engine.support import PYTHON, Result
from tests.vllm_engine.test_vllm_cluster import config
from tests.vllm_engine.tiny_idefics import PLACEHOLDER, write_idefics

pytestmark = pytest.mark.skipif(not PYTHON, reason="run by make test-vllm")

_REQUESTS, _KILLS, _LENGTH = 12, 3, 300
PATH = "/v1/chat/completions"


def settings(tmp_path: Path) -> Any:
    model = str(write_idefics(tmp_path / "model"))
    given = config(tmp_path)
    router, worker = replace(given.router, model=model), replace(given.worker, model=model)
    return replace(given, model=model, router=router, worker=worker)


async def generate(client: AsyncClient, number: int) -> Result:
    options: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"seed": number}
    count = 1 + number % 3
    stream = client.generate(
        f"{number}: {PLACEHOLDER * count} what?",
        max_tokens=_LENGTH,
        frequency_penalty=0.1,
        ignore_eos=True,
        images=[png(number + index) for index in range(count)],
        n=2 if number % 4 == 2 else 1,
        **options,
    )
    choices = (await gather(stream)).choices
    return tuple((choice.token_ids, choice.finish_reason) for choice in choices)


async def results(cluster: Cluster) -> list[Result]:
    async with AsyncClient(*cluster.addresses) as client:
        return await asyncio.gather(*(generate(client, number) for number in range(_REQUESTS)))


async def test_killed_workers_change_no_output_of_images(tmp_path: Path) -> None:
    async with running(settings(tmp_path)) as cluster:
        undisturbed = await results(cluster)
        assert len({*undisturbed}) == _REQUESTS
        for kill in range(_KILLS):
            disturbed = asyncio.create_task(results(cluster))
            await asyncio.sleep(0.7)
            assert not disturbed.done()
            await cluster.kill_worker(kill % 2)
            assert await disturbed == undisturbed
            await cluster.restart_worker(kill % 2)


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 24, "temperature": 0}


GOOD = png_url(png(1))
#: URLs of images, each with the status that the request gets.
HOSTILE = {
    "truncated": ([png_url(png(1)[:-30])], 400),
    "damaged": ([png_url(png(1)[:70] + bytes(300))], 400),
    "too many pixels": ([png_url(png_header(50_000, 50_000))], 400),
    "header only": ([png_url(png_header(40, 30))], 400),
    "wrong base64": ([GOOD[:-3]], 400),
    "remote": (["https://example.com/a.png"], 400),
    "too many": ([GOOD] * 9, 400),
    "too many bytes": ([png_url(png(1) + bytes(5 << 20))], 400),
    "one pixel": ([png_url(png(1, 1, 1))], 200),
    "one column": ([png_url(png(1, 1, 3000))], 200),
    "several": ([GOOD] * 8, 200),
}


async def test_hostile_images_leave_the_workers_alive(tmp_path: Path) -> None:
    async with running(settings(tmp_path)) as cluster:
        address, pids = cluster.routers[0].http_address, [it.pids for it in cluster.workers]
        good = (await ask(address, PATH, chat(GOOD))).json["choices"]
        other = (await ask(address, PATH, chat(png_url(png(2))))).json["choices"]
        assert good != other
        for name, (urls, status) in HOSTILE.items():
            answer = await ask(address, PATH, chat(*urls))
            assert answer.status == status, (name, answer.status, answer.body[:500])
            print(name, json.dumps(answer.json.get("error")))
        text = chat(GOOD)
        text["messages"][0]["content"][1]["text"] = PLACEHOLDER * 3
        assert (await ask(address, PATH, text)).status in (200, 400)
        plain = {**text, "messages": [{"role": "user", "content": PLACEHOLDER}]}
        assert (await ask(address, PATH, plain)).status in (200, 400)
        assert (await ask(address, PATH, chat(GOOD))).json["choices"] == good
        assert [it.pids for it in cluster.workers] == pids
