"""Requests of every kind after SIGKILL of their worker process, with the demo model.

Their outputs are those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEMO_MODEL, Config
from cluster.local.processes import ProcessCluster
from everlift.client.client import AsyncClient
from everlift.client.stream import Stream
from everlift.sampling import TokenLogprobs
from router.config import RouterConfig
from tests.chaos.support import paused
from tests.support.router import retrying
from worker.config import WorkerConfig

COUNT = 160
#: Time until all tokens that a worker sent before it was frozen are in the ledger.
_ON_THE_WAY_S = 0.5
#: Attempts of a case: the workers may be frozen after all requests have ended.
_TRIES = 5
HOT = {"temperature": 1.5, "seed": 4, "max_tokens": COUNT, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "seed": HOT,
    "penalties": HOT | {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "repetition": HOT | {"repetition_penalty": 1.2},
    "logprobs": HOT | {"logprobs": 2, "prompt_logprobs": 1},
    "n": HOT | {"n": 3, "max_tokens": COUNT // 2},
    "grammar": {
        "temperature": 1.5,
        "seed": 4,
        "max_tokens": 3 * COUNT,
        "regex": r"[0-9]{3}(, [0-9]{3}){30}",
    },
    "greedy": {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True},
}


class Said:
    """Output that a client received; each token must arrive once."""

    def __init__(self) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.logprobs: list[TokenLogprobs] = []
        self.rest: object = None
        self.migrations = 0

    async def read(self, stream: Stream) -> None:
        async for chunk in stream:
            assert chunk.offset == len(self.tokens[chunk.choice])
            self.tokens[chunk.choice] += chunk.token_ids
            self.texts[chunk.choice] += chunk.text
            self.logprobs += chunk.logprobs
        self.logprobs += stream.prompt_logprobs
        assert stream.usage is not None
        assert stream.timing is not None
        self.migrations = stream.timing.migrations
        usage = (stream.usage.prompt_tokens, stream.usage.output_tokens)
        self.rest = (stream.finish_reasons, usage)

    def check(self, calm: Said) -> None:
        assert self.tokens == calm.tokens
        assert self.texts == calm.texts
        assert self.rest == calm.rest
        mine, theirs = ([it.logprob for it in said.logprobs] for said in (self, calm))
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    config = Config(
        model=str(DEMO_MODEL),
        num_workers=2,
        state_dir=tmp_path,
        # A worker that is frozen briefly does not count as lost.
        router=RouterConfig(port=0, http_port=0, grace=20.0, worker_silence=5.0),
        worker=WorkerConfig(num_blocks=256, num_threads=1, dtype="float32"),
    )
    async with ProcessCluster(config) as cluster:
        yield cluster


async def everything(client: AsyncClient, name: str, stop: str) -> dict[str, Said]:
    """Send all requests at once; return their outputs by kind."""
    said = {kind: Said() for kind in [*ASKED, "stop string"]}
    await asyncio.gather(*readers(client, name, stop, said))
    return said


def id_of(name: str, kind: str) -> str:
    return f"{name}-{kind.replace(' ', '-')}"


def readers(
    client: AsyncClient, name: str, stop: str, said: dict[str, Said]
) -> list[asyncio.Task[None]]:
    asked = ASKED | ({"stop string": HOT | {"stop": stop}} if stop else {})
    return [
        asyncio.create_task(
            said[kind].read(
                client.generate(
                    "count from 17 to 99:",
                    request_id=id_of(name, kind),
                    **options,
                )
            )
        )
        for kind, options in asked.items()
    ]


@pytest.mark.long
async def test_continuations_after_worker_kill_are_exact(cluster: ProcessCluster) -> None:
    async with retrying.client(cluster.address) as client:
        first = await everything(client, "first", stop="")
        stop = first["seed"].texts[0][-40:-34]
        calm = await everything(client, "calm", stop)
        for tokens in (1, 30, 80):
            for attempt in range(_TRIES):
                name = f"broken-{tokens}-{attempt}"
                if await is_broken_after(tokens, cluster, client, name, stop, calm):
                    break
            else:
                pytest.fail("each time no request had a token and went on when all were frozen")


async def is_broken_after(
    tokens: int,
    cluster: ProcessCluster,
    client: AsyncClient,
    name: str,
    stop: str,
    calm: dict[str, Said],
) -> bool:
    """Kill a worker when a client has ``tokens`` tokens, and check all outputs.

    Return False if no request was running then: on a busy machine the client may receive its tokens
    late.
    """
    said = {kind: Said() for kind in calm}
    reading = readers(client, name, stop, said)
    await until(lambda: len(said["seed"].tokens[0]) >= tokens)
    broken = await kill_in_the_middle(cluster, client, [id_of(name, kind) for kind in said])
    await asyncio.gather(*reading)
    for kind, one in said.items():
        one.check(calm[kind])
    if broken is None:
        return False
    assert any(said[kind].migrations for kind in said if id_of(name, kind) == broken)
    return True


async def kill_in_the_middle(
    cluster: ProcessCluster, client: AsyncClient, request_ids: list[str]
) -> str | None:
    """Kill and restart the worker of the running request with the most tokens; return its id.

    Return None if no request with tokens is running. All workers are frozen before the kill, so
    that no request ends in the meantime.
    """
    with paused(pid for worker in cluster.workers for pid in worker.pids):
        await asyncio.sleep(_ON_THE_WAY_S)
        known = await asyncio.gather(*map(client.get_request, request_ids))
        going_on = [it for it in known if it.worker_id and it.output_tokens]
        if not going_on:
            return None
        longest = max(going_on, key=lambda it: it.output_tokens)
        victim = [worker.worker_id for worker in cluster.workers].index(longest.worker_id)
        await cluster.kill_worker(victim)
    await cluster.restart_worker(victim)
    return longest.request_id


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
