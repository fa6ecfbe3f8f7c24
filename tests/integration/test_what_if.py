"""What a request would have taken under another policy, asked of a cluster and its ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import Config
from cluster.errors import ForecastFailed
from cluster.explain import replayed as replaying
from cluster.forecast import history
from cluster.forecast import surroundings as around
from cluster.forecast.history import surroundings
from everlift.client import AsyncClient
from everlift.errors import UnknownRequest
from router.ledger.base import Ledger
from tests.in_process import ROUTER, WORKER, Cluster, cluster, receive
from tests.restored_logging import restored_logging
from worker.config import FakeModel

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    with restored_logging():
        yield


async def ask(parts: Cluster, *names: str) -> None:
    """All at once."""
    async with AsyncClient(parts.address) as client:
        await asyncio.gather(*(receive(client, PROMPT, 30, request_id=name) for name in names))


async def test_around_a_request_is_who_was_there_with_it() -> None:
    async with cluster(workers=1) as parts:
        await ask(parts, "before")
        await ask(parts, "r", "beside")
        there = await surroundings(parts.ledger, "r")
        names = {past.request_id for past in there.requests}
        assert {"r", "beside"} <= names
        own = there.requests[there.own]
        assert own.request_id == "r"
        assert 0 < own.worker_s < own.total_s and own.other_s > 0
        assert own.queued_s + own.way_s + own.worker_s + own.other_s == pytest.approx(own.total_s)
        assert min(arrival.at for arrival in there.arrivals) == 0.0
        assert len(there.arrivals) == len(there.choices) == len(names)


async def test_the_last_moment_without_anybody_is_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(around, "_ENOUGH", 2)
    async with cluster(workers=1) as parts:
        for names in (("a",), ("b",), ("c", "d"), ("r",)):
            await ask(parts, *names)
        there = await surroundings(parts.ledger, "r")
        assert {past.request_id for past in there.requests} == {"c", "d", "r"}
        monkeypatch.setattr(history, "_MOST", 0)
        with pytest.raises(ForecastFailed, match="more than 0 requests"):
            await surroundings(parts.ledger, "r")


async def test_only_what_finished_has_something_to_compare_with() -> None:
    async with cluster(workers=1) as parts:
        with pytest.raises(UnknownRequest):
            await surroundings(parts.ledger, "r")
        [held] = parts.hold()
        going = asyncio.create_task(ask(parts, "r"))
        while not held.num_requests:
            await asyncio.sleep(0.01)
        with pytest.raises(ForecastFailed, match="r is running: only what finished"):
            await surroundings(parts.ledger, "r")
        held.release()
        await going


async def test_it_is_asked_for_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(WORKER, max_num_seqs=2, fake=FakeModel(step_time=0.003))
    async with cluster(1, 1, replace(ROUTER, max_queued=100), slow) as parts:

        @asynccontextmanager
        async def connected_ledger(config: Config) -> AsyncIterator[Ledger]:
            yield parts.ledger

        monkeypatch.setattr(replaying, "connected_ledger", connected_ledger)
        monkeypatch.setenv("COLUMNS", "200")
        async with AsyncClient(parts.address) as client:
            while not any(kind.HasField("step_time") for kind in (await client.capacity()).kinds):
                await ask(parts, *(f"r{number}" for number in range(12)))
                for number in range(11):
                    await client.forget(f"r{number}")
        arguments = ["explain", "r11", "--address", parts.address, "--what-if", "shortest,fifo"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        told = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    assert "with policy shortest: " in shown.stdout and "at the median" in shown.stdout
    answer = json.loads(told.stdout)
    assert [*answer["what_if"]["estimated_s"]] == ["fifo", "shortest"]
    assert answer["what_if"]["estimated_s"]["fifo"] > 0 and answer["what_if"]["error"] >= 0
