"""The client of the end-to-end benchmark, and that benchmark with a small load."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.online.online_load import Client, Incomplete, TimedRequest

ROOT = Path(__file__).parents[3]

Write = Callable[[bytes], Coroutine[Any, Any, None]]
Script = Callable[[dict[str, Any], Write], Coroutine[Any, Any, None]]


def event(text: str | None = None, tokens: int | None = None) -> bytes:
    chunk = {
        "choices": [] if text is None else [{"index": 0, "text": text}],
        "usage": None if tokens is None else {"completion_tokens": tokens},
    }
    return b"id: 1\ndata: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(script: Script) -> AsyncIterator[Client]:
    async def completions(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await script(await request.json(), response.write)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = runner.addresses[0]
        async with Client(f"http://{address[0]}:{address[1]}") as client:
            yield client
    finally:
        await runner.cleanup()


async def test_latency_counts_from_the_due_time() -> None:
    asked: list[dict[str, Any]] = []
    all_came = asyncio.Event()

    async def held_until_all_came(body: dict[str, Any], write: Write) -> None:
        asked.append(body)
        if len(asked) == 3:
            all_came.set()
        await all_came.wait()
        await write(event("a") + event("b") + event(tokens=2) + DONE)

    requests = [TimedRequest((number,), 2, due) for number, due in enumerate((0.0, 0.05, 0.1))]
    async with answering(held_until_all_came) as client:
        answers = await client.send(requests)
    assert [answer.due for answer in answers] == [0.0, 0.05, 0.1]
    assert answers[0].ttft_s >= 0.1 and answers[1].ttft_s >= 0.05
    assert [body["prompt"] for body in asked] == [[0], [1], [2]]
    assert all(body["ignore_eos"] and body["max_tokens"] == 2 for body in asked)


async def test_client_reads_events_split_at_any_byte() -> None:
    whole = event("a") + event("b") + event(tokens=2) + DONE

    async def byte_by_byte(body: dict[str, Any], write: Write) -> None:
        for place in range(len(whole)):
            await write(whole[place : place + 1])
            await asyncio.sleep(0)

    async with answering(byte_by_byte) as client:
        (answer,) = await client.send([TimedRequest((1,), 2, 0.0)])
    assert answer.tokens == 2
    assert answer.first_token < answer.last_token


@pytest.mark.parametrize(
    "said",
    [
        event("a") + event(tokens=1) + DONE,
        event("a") + event("b") + DONE,
        event("a") + event("b") + event(tokens=2),
        event("a") + b'data: {"error": {"message": "lost"}}\n\n' + DONE,
    ],
    ids=["too few", "nobody says how many", "broken off", "an error"],
)
async def test_incomplete_answer_raises_an_error(said: bytes) -> None:
    async def say(body: dict[str, Any], write: Write) -> None:
        await write(said)

    async with answering(say) as client:
        with pytest.raises(Incomplete):
            await client.send([TimedRequest((1,), 2, 0.0)])


@pytest.mark.long
def test_online_benchmark_measures_everlift(tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    request = {"id": 0, "prompt": [1, 2, 3], "max_tokens": 4}
    workload.write_text(json.dumps({"requests": [request]}))
    out = tmp_path / "online.json"
    subprocess.run(
        [
            *(
                sys.executable,
                "benchmarks/online/online_bench.py",
                "--systems",
                "offline",
                "everlift",
            ),
            *("--rounds", "1", "--requests", "4", "--model", "cluster/demo_model"),
            *("--workload", workload, "--saturation", "50", "--out", out, "--logs", tmp_path),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    report = json.loads(out.read_text())
    medians = report["raw"]["medians"]
    assert set(medians) == {"offline", "everlift"}
    assert set(medians["everlift"]) == {"saturation", "60", "90"}
    parts = ("router", "ledger", "engine", "worker's event loop", "client")
    assert all(medians["everlift"]["saturation"][f"cpu_ms {part}"] > 0 for part in parts)
    assert medians["offline"]["saturation"]["cpu_ms"] > 0
    assert set(report["ratios"]) == {"added_core_ms_per_token"}
