"""Notice to a worker that its machine is about to be reclaimed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local.launch import RankLaunch, encode
from tests.support.router.session_support import Router, announced
from tests.support.worker.worker_support import prompt, start
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens
from worker.serving import reclaim
from worker.serving.rank import Rank
from worker.serving.reclaim import wait_for_notice

ROOT = Path(__file__).parents[3]
#: Slow enough that the notice arrives in the middle of a sequence.
CONFIG = WorkerConfig(
    model="fake", num_blocks=64, cluster_id="here", fake=FakeModel(step_time=0.005)
)


class Cloud:
    """Metadata server that gives its answers in order and then repeats the last one."""

    def __init__(self, *answers: bytes) -> None:
        self.asked = 0
        self.answers = answers

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/spot"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        writer.write(answer)
        await writer.drain()
        writer.close()


def http(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "_POLL_S", 0.01)


async def test_reclaim_notice_requires_status_200(quick: None) -> None:
    answers = [
        http("404 Not Found"),
        http("500 No"),
        http("302 Found\r\nLocation: /somewhere"),
        http("302 Found\r\nLocation: http://["),
        b"no http at all\r\n\r\n",
        b"",
        http("200 OK"),
    ]
    cloud = Cloud(*answers)
    async with cloud.open() as url, asyncio.timeout(60.0):
        await wait_for_notice(url)
    assert cloud.asked == len(answers)


async def test_unreachable_reclaim_address_gives_no_notice(quick: None) -> None:
    async with Cloud(b"").open() as url:
        pass
    asking = asyncio.create_task(wait_for_notice(url))
    await asyncio.to_thread(reclaim._has_notice, url)
    assert not asking.done()
    asking.cancel()


async def until_returned(router: Router, epochs: range) -> None:
    """Wait until all sequences are returned with their tokens; the stream stays open."""
    await router.ended(*epochs)
    assert {*router.stops.values()} == {"RETURNED"}
    for epoch in epochs:
        tokens = router.tokens[epoch]
        assert tokens == expected_tokens(prompt(20 + epoch, epoch), len(tokens))
    await router.start(start(99, prompt(3)))
    await router.ended(99)
    assert router.stops[99] == "RETURNED"
    assert router.state.draining


@asynccontextmanager
async def busy_router(address: str, epochs: range) -> AsyncIterator[Router]:
    router = Router(address)
    try:
        await router.hello(*(start(e, prompt(20 + e, e), max_tokens=1900) for e in epochs))
        await router.until(lambda: router.tokens.get(epochs[-1]))
        yield router
    finally:
        await router.close()


async def test_reclaim_notice_returns_all_sequences(quick: None) -> None:
    cloud = Cloud(http("404 Not Found"))
    async with cloud.open() as url:
        rank = Rank(replace(CONFIG, reclaim_url=url))
        info = await rank.start()
        async with busy_router(info.address, range(1, 6)) as router:
            cloud.answers = (http("200 OK"),)
            await until_returned(router, range(1, 6))
        await rank.stop()
        await rank.wait()


async def test_reclaim_notice_before_start_is_not_lost() -> None:
    rank = Rank(CONFIG)
    rank.reclaim()
    info = await rank.start()
    router = Router(info.address)
    await router.hello(start(1, prompt(3)))
    await router.ended(1)
    assert router.stops == {1: "RETURNED"}
    await router.close()
    await rank.stop()


async def test_reclaim_signal_returns_all_sequences_without_exit() -> None:
    async with announced() as router_address:
        launch = RankLaunch("rank", "error", CONFIG, routers=(router_address,))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cluster.local.process", "rank"),
            env=environment(),
            stdin=PIPE,
            stdout=PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{os.getpid()}\n".encode() + encode(launch) + b"\n")
        report = json.loads(await process.stdout.readline())
        async with busy_router(report["address"], range(1, 6)) as router:
            process.send_signal(signal.SIGUSR1)
            await until_returned(router, range(1, 6))
            assert process.returncode is None
            process.terminate()
        assert await process.wait() == 0


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
