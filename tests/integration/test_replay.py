"""What a ledger knows of requests that finished, and what they would have met otherwise."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from math import isinf

from rich.console import Console

from cluster.forecast import comparison
from cluster.forecast.history import finished_requests
from cluster.forecast.scenario import Scenario
from cluster.forecast.simulate import simulate
from everlift.client import AsyncClient
from router.config import RouterConfig
from tests.in_process import cluster, receive
from tests.small_clusters import spec

SHARED = [7] * 64


async def test_finished_requests_come_back_as_they_were_but_without_their_prompts() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        await receive(client, [*SHARED, 1, 2], 5, priority=3, ttft_target_s=2.0)
        await receive(client, [*SHARED, 3], 9, timeout_s=60.0)
        records = await finished_requests(parts.ledger, limit=100)
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
    # Nothing but its max_tokens ends it.
    assert first.arrival.foreseen_tokens == 5
    assert newest.arrival == replace(second.arrival, at=0.0)


async def test_a_ledger_that_knows_nothing_has_no_records() -> None:
    async with cluster(workers=1) as parts:
        assert await finished_requests(parts.ledger, limit=10) == []


async def test_what_was_stands_beside_what_would_have_been() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        for count in (3, 4):
            await receive(client, [1, 2, 3], count)
        records = await finished_requests(parts.ledger, limit=100)
    scenario = Scenario((spec(),), router=RouterConfig(order="hrrn"))
    would_be = simulate([record.arrival for record in records], scenario)
    answers = {"was": comparison.past(records), "hrrn": would_be}
    written = StringIO()
    Console(width=120, file=written).print(comparison.table(answers))
    rows = [line.split() for line in written.getvalue().splitlines()]
    assert ["all,", "2"] in rows
    was, hrrn = (next(row for row in rows if row[:1] == [name]) for name in ("was", "hrrn"))
    assert was[1] == "100.0%" and "-" not in was
    assert hrrn[1] == "100.0%" and "-" not in hrrn
    content = comparison.as_json(answers)
    assert content.keys() == {"was", "hrrn"}
