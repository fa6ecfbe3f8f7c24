"""``everlift chaos`` and ``everlift drain`` against a cluster of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster import endpoint
from cluster.cli import app
from cluster.config import Config, load
from cluster.local.processes import ProcessCluster
from everlift.v1 import inference_pb2 as pb
from router.ledger.embedded.embedded import running_url
from router.ledger.redis.connections import Command
from router.ledger.redis.redis_ledger import connect
from tests.support.router import retrying
from tests.support.router.restored_logging import restored_logging
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

TOKENS = 150
FAKE = FakeModel(step_time=0.004)
PROMPT = [1, 2, 3]
SETTINGS = [
    "model=fake",
    "num_workers=2",
    "num_routers=2",
    "router.port=0",
    "router.http_port=0",
    "router.drain=0.2",
    "worker.fake.step_time=0.004",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("EVERLIFT_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("EVERLIFT_ADDRESS", raising=False)
    with restored_logging():
        yield


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(None, {}, [*SETTINGS, "chaos=true", f"state_dir={tmp_path}"])


@pytest.fixture
async def cluster(config: Config) -> AsyncIterator[ProcessCluster]:
    async with published(config) as cluster:
        yield cluster


@asynccontextmanager
async def published(config: Config) -> AsyncIterator[ProcessCluster]:
    """Run a cluster which commands find like one of ``everlift up``."""
    async with ProcessCluster(config, revive=True) as cluster:
        with endpoint.published(config.state_dir, cluster.addresses):
            yield cluster


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def struck(*arguments: str) -> str:
    """Return the output of an ``everlift chaos`` command."""
    result = await run("chaos", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def killed(said: str) -> str:
    """Return the id of the killed worker from the output of a command."""
    [worker] = re.findall(r"^killed (?:rank 1 of )?worker (\w+)", said)
    return str(worker)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(0.02)


async def alive(cluster: ProcessCluster) -> set[str]:
    async with retrying.client(cluster.addresses) as client:
        return {worker.worker_id for worker in (await client.status()).workers if worker.alive}


async def during(cluster: ProcessCluster, *commands: tuple[str, ...]) -> list[str]:
    """Return the outputs of ``everlift chaos`` commands that are run during a stream.

    The commands run after 10 tokens. The stream must have the expected tokens.
    """
    whom, tokens = [], []
    async with retrying.client(cluster.addresses) as client:
        stream = client.generate(PROMPT, max_tokens=TOKENS, temperature=0.0)
        async for chunk in stream:
            tokens += chunk.token_ids
            if len(tokens) >= 10 and not whom:
                whom = [await struck(*command) for command in commands]
    assert tokens == expected_tokens(PROMPT, TOKENS, FAKE)
    return whom


@pytest.mark.long
async def test_chaos_killed_worker_is_replaced(cluster: ProcessCluster) -> None:
    [said] = await during(cluster, ("kill", "any-worker"))
    victim = killed(said)

    async def is_replaced() -> bool:
        workers = await alive(cluster)
        return len(workers) == 2 and victim not in workers

    await until(is_replaced)


@pytest.mark.long
async def test_chaos_killed_rank_ends_its_worker(config: Config) -> None:
    config = replace(config, worker=replace(config.worker, tensor_parallel=2))
    async with ProcessCluster(config) as cluster:
        with endpoint.published(config.state_dir, cluster.addresses):
            [said] = await during(cluster, ("kill", "any-worker", "--rank", "1"))
        victim = killed(said)
        [gone] = [each for each in cluster.workers if each.worker_id == victim]
        async with asyncio.timeout(30):
            while any(child.is_running for child in gone._children):
                await asyncio.sleep(0.02)


async def test_chaos_faults_hit_their_targets_without_harming_streams(config: Config) -> None:
    # A process without a core for a second keeps its leadership and its worker.
    router = replace(config.router, lease=20.0, worker_silence=20.0)
    async with published(replace(config, router=router)) as cluster:
        await check_faults(cluster)


async def check_faults(cluster: ProcessCluster) -> None:
    async with retrying.client(cluster.addresses) as client:
        leader = (await client.status()).leader
    first, second = sorted(await alive(cluster))
    assert await during(
        cluster,
        ("slow", first[:6], "--factor", "3", "--seconds", "0.2"),
        ("partition", second, "--seconds", "0.2", "--peer", leader[:6]),
        ("partition", "leader", "--seconds", "0.2", "--peer", "ledger"),
        ("slow", "ledger", "--delay", "0.01", "--seconds", "0.2"),
        ("pause", first, "--seconds", "0.2"),
        ("kill", "ledger"),
    ) == [
        f"steps of worker {first} take 3 times as long for 0.2 s",
        f"cut worker {second} off from {leader[:6]} for 0.2 s",
        f"cut router {leader} off from ledger for 0.2 s",
        "calls of the ledger take 0.01 s longer for 0.2 s",
        f"paused worker {first} for 0.2 s",
        "killed the ledger",
    ]

    async def is_ledger_back() -> bool:
        async with retrying.client(cluster.addresses) as client:
            return not (await client.status()).ledger.away

    await until(is_ledger_back)
    result = await run("chaos", "check", "--recheck-after", "1")
    assert result.exit_code == 0, result.output


@pytest.mark.long
async def test_paused_leader_is_replaced_by_the_other_router(cluster: ProcessCluster) -> None:
    [said] = await during(cluster, ("pause", "leader", "--seconds", "3"))
    leader = said.removeprefix("paused router ").removesuffix(" for 3 s")

    async def is_led_by_another() -> bool:
        for address in cluster.addresses:
            async with retrying.client(address) as client, asyncio.timeout(5):
                if (await client.status()).leader not in ("", leader):
                    return True
        return False

    await until(is_led_by_another)


@pytest.mark.long
async def test_drained_worker_is_empty_and_receives_no_requests(cluster: ProcessCluster) -> None:
    worker = min(await alive(cluster))
    result = await run("drain", worker[:6], "--wait")
    assert result.stdout.splitlines()[-1] == f"{worker} has no requests left"
    async with retrying.client(cluster.address) as client:
        stream = client.generate(PROMPT, max_tokens=TOKENS, temperature=0.0)
        assert [token async for chunk in stream for token in chunk.token_ids] == expected_tokens(
            PROMPT, TOKENS, FAKE
        )
        by_id = {each.worker_id: each for each in (await client.status()).workers}
    assert by_id[worker].draining
    assert by_id[worker].output_tokens == 0


@pytest.mark.long
async def test_chaos_run_reports_the_number_of_faults(cluster: ProcessCluster) -> None:
    result = await run("chaos", "run", "--minutes", "0.005", "--every", "0.1", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "seed 1" in result.stdout
    assert re.search(
        r"\d faults injected; requests of the answering router meanwhile", result.stdout
    )


@pytest.mark.long
async def test_drained_worker_is_replaced_once_empty(cluster: ProcessCluster) -> None:
    """`chaos run` replaces the worker; it injects no fault in 0 minutes."""
    before = await alive(cluster)
    drained = min(before)
    assert (await run("drain", drained, "--wait")).exit_code == 0
    result = await run("chaos", "run", "--minutes", "0", "--seed", "1")
    assert result.exit_code == 0, result.output

    async def is_replaced() -> bool:
        workers = await alive(cluster)
        return len(workers) == 2 and workers & before == before - {drained}

    await until(is_replaced)


async def test_chaos_command_is_rejected_without_chaos(config: Config) -> None:
    plain = load(None, {}, [*SETTINGS, "num_routers=1", f"state_dir={config.state_dir}"])
    async with ProcessCluster(plain) as cluster:
        with endpoint.published(plain.state_dir, cluster.addresses):
            result = await run("chaos", "kill", "any-worker")
    assert result.exit_code == 1
    assert "start with everlift up --chaos" in " ".join(result.stderr.split())


@pytest.mark.long
async def test_chaos_check_finds_a_corrupted_ledger(cluster: ProcessCluster) -> None:
    async with retrying.client(cluster.address) as client:
        for name in ("whole", "broken"):
            await client.generate(PROMPT, max_tokens=3, temperature=0.0, request_id=name).text()
        assert (await client.get_request("whole")).state == pb.REQUEST_STATE_FINISHED
    url = running_url(cluster.config.state_dir)
    assert url is not None
    ledger = await connect(url)
    key = ledger._shards.key("r:broken")
    await ledger._shards.run_commands("test", Command(key, ("DEL", key)))
    await ledger.close()
    table = await run("chaos", "check", "--recheck-after", "0")
    assert table.exit_code == 1
    assert "t:broken:0 has no request" in table.stdout
    result = await run("chaos", "check", "--recheck-after", "0", "--json", "--ledger", url)
    found = json.loads(result.stdout)
    assert found["requests"]["finished"] == 1
    assert found["counts"] == dict.fromkeys(
        ("lost", "repeated", "reordered", "orphaned", "immortal", "mislisted"), 0
    ) | {"orphaned": 2}
    assert {each["why"] for each in found["findings"]} == {
        "t:broken:0 has no request",
        "e:broken has no request",
    }


async def test_chaos_check_reports_a_missing_ledger(tmp_path: Path) -> None:
    result = await run("chaos", "check")
    assert (result.exit_code, os.listdir(tmp_path)) == (1, [])
    assert "has no ledger" in " ".join(result.stderr.split())
