"""Replay of finished requests from a ledger, with the recorded and with other settings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from io import StringIO
from math import isfinite, isinf
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import Config
from cluster.simulator import comparison
from cluster.simulator.command import ledger_requests
from cluster.simulator.history import finished_requests
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Record
from everlift.client.client import AsyncClient
from router.config import RouterConfig
from router.ledger.base import Ledger
from tests.support.commands import run
from tests.support.in_process import KeptLedger, cluster, receive, until
from tests.support.router.restored_logging import restored_logging
from tests.support.small_clusters import STEP_TIME, spec

SHARED = [7] * 64
#: Number of requests, of 30 output tokens each, that arrive at the same time.
SERVED = 8


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    with restored_logging():
        yield


class PausedClock:
    """Monotonic clock of a ledger, paused until ``resume``."""

    def __init__(self) -> None:
        self._stands_at: float | None = time.monotonic()

    def resume(self) -> None:
        self._stands_at = None

    def __call__(self) -> float:
        return time.monotonic() if self._stands_at is None else self._stands_at


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Ledger, found by commands, of a cluster that has served requests.

    A paused clock gives all requests the same arrival time, even on a busy machine.
    """
    clock = PausedClock()
    ledger = KeptLedger(clock)
    async with (
        cluster(workers=1, ledger=ledger) as parts,
        AsyncClient(parts.address) as client,
    ):

        @asynccontextmanager
        async def connected_ledger(config: Config) -> AsyncIterator[Ledger]:
            yield parts.ledger

        monkeypatch.setattr(ledger_requests, "connected_ledger", connected_ledger)
        [held] = parts.hold()
        serving = [asyncio.create_task(receive(client, SHARED, 30)) for _ in range(SERVED)]
        await until(lambda: len(ledger._records) == SERVED)
        clock.resume()
        held.release()
        await asyncio.gather(*serving)
        await explained_requests(ledger, SERVED)
        yield


@pytest.fixture
def kind(tmp_path: Path) -> str:
    """File of a worker with two slots and steps of 10 ms."""
    file = tmp_path / "small.json"
    worker = {
        "num_blocks": 200,
        "max_model_len": 1024,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 128,
    }
    file.write_text(json.dumps({"step_time": asdict(STEP_TIME), "worker": worker}))
    return str(file)


async def explained_requests(ledger: Ledger, number: int) -> list[Record]:
    """Return the finished requests, once the ledger has the times of all.

    They are written after the client has received the whole output.
    """
    async with asyncio.timeout(30.0):
        while True:
            records = await finished_requests(ledger, limit=100)
            if [isfinite(record.first_token) for record in records] == [True] * number:
                return records
            await asyncio.sleep(0.01)


async def test_replay_reads_finished_requests_without_prompts() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        await receive(client, [*SHARED, 1, 2], 5, priority=3, ttft_target_s=2.0)
        await receive(client, [*SHARED, 3], 9, timeout_s=60.0)
        records = await explained_requests(parts.ledger, 2)
        (newest,) = await finished_requests(parts.ledger, limit=1)
    first, second = records
    assert (first.index, second.index) == (0, 1)
    assert (first.arrival.at, first.arrival.prompt_tokens) == (0.0, 66)
    assert (first.arrival.output_tokens, first.arrival.max_tokens) == (5, 5)
    assert (first.arrival.priority, first.arrival.ttft_target_s) == (3, 2.0)
    assert isinf(first.arrival.deadline_s) and 0 < second.arrival.deadline_s <= 60.1
    assert len(first.arrival.prefix) == 2
    assert first.arrival.prefix == second.arrival.prefix
    assert 0 <= first.queued_s <= first.latency_s
    assert second.arrival.at > 0 and second.attempts == 1
    assert 0 < first.ttft_s < first.latency_s
    # Only max_tokens ends this request.
    assert first.arrival.predicted_tokens == 5
    assert newest.arrival == replace(second.arrival, at=0.0)


async def test_empty_ledger_has_no_replay_records() -> None:
    async with cluster(workers=1) as parts:
        assert await finished_requests(parts.ledger, limit=10) == []


async def test_comparison_shows_past_and_simulated_results() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        for count in (3, 4):
            await receive(client, [1, 2, 3], count)
        records = await explained_requests(parts.ledger, 2)
    scenario = Scenario((spec(),), router=RouterConfig(order="hrrn"))
    would_be = simulate([record.arrival for record in records], scenario)
    answers = {"was": comparison.recorded_forecast(records), "hrrn": would_be}
    written = StringIO()
    Console(width=120, file=written).print(comparison.table(answers))
    rows = [line.split() for line in written.getvalue().splitlines()]
    assert ["all,", "2"] in rows
    was, hrrn = (next(row for row in rows if row[:1] == [name]) for name in ("was", "hrrn"))
    assert was[1] == "100.0%" and "-" not in was
    assert hrrn[1] == "100.0%" and "-" not in hrrn
    content = comparison.as_json(answers)
    assert content.keys() == {"was", "hrrn"}


async def test_replay_survives_lost_and_added_workers(
    tmp_path: Path, served: None, kind: str
) -> None:
    """The slowed workers need 3 s for each request."""
    to_json = tmp_path / "answer.json"
    slow = ("--slow", "0=10", "--slow", "1=10")
    where = ("--from-ledger", "--workers", f"{kind}=2", *slow, "--json", str(to_json))
    await run("simulate", *where)
    undisturbed = json.loads(to_json.read_text())
    await run("simulate", *where, "--lose", "0@1", "--add", "1@3", "--start-time", "1")
    disturbed = json.loads(to_json.read_text())
    for answer in (undisturbed, disturbed):
        assert answer["all"]["requests"] == answer["all"]["finished"] == SERVED
    assert disturbed["all"]["latency_s"]["p99"] > undisturbed["all"]["latency_s"]["p99"] + 1.0
    assert {sample["workers"] for sample in disturbed["samples"]} == {1, 2}
    await run("simulate", *where, "--limit", "3")
    assert json.loads(to_json.read_text())["all"]["requests"] == 3


async def test_plan_sizes_the_cluster_from_served_requests(
    tmp_path: Path, served: None, kind: str
) -> None:
    """Each request takes 0.3 s, and a worker runs two at a time."""
    to_json = tmp_path / "plan.json"
    how = ("--from-ledger", "--kind", kind, "--json", str(to_json))
    assert "4 workers are enough" in await run("plan", "--slo", "latency_p99=500ms", *how)
    tried = json.loads(to_json.read_text())["kinds"]["small"]["trials"]
    assert {trial["workers"]: trial["is_enough"] for trial in tried}[3] is False


async def test_replay_compares_policies_with_the_past(
    tmp_path: Path, served: None, kind: str
) -> None:
    to_json = tmp_path / "answers.json"
    how = ("--from-ledger", "--workers", f"{kind}=1", "--json", str(to_json))
    await run("replay", "--policy", "fifo,shortest", *how)
    answers = json.loads(to_json.read_text())
    assert list(answers) == ["was", "fifo", "shortest"]
    assert {answer["all"]["finished"] for answer in answers.values()} == {SERVED}
