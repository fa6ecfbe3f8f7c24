"""Runs of batches by several routers over one ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from everlift.errors import (
    EngineFailed,
    LedgerUnavailable,
    NoWorker,
    QueueFull,
    RequestConflict,
)
from router.api.openai.batches import run, runners
from router.api.openai.batches.record import BatchRecord
from router.api.openai.files.record import CHUNK_BYTES
from router.auth.caller import Caller
from tests.support.router.batch_support import Bench, line

LINES = [line(f"id-{number}", prompt="x") for number in range(40)]
IDS = {each["custom_id"] for each in LINES}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SAVE_S", 0.02)
    monkeypatch.setattr(run, "_AGAIN_S", 0.01)
    monkeypatch.setattr(runners, "_SCAN_S", 0.02)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


def counts(record: BatchRecord) -> tuple[int, int, int]:
    return record.total, record.counts.completed, record.counts.failed


async def test_batch_answers_each_line_once(bench: Bench) -> None:
    bench.script.gate.set()
    bench.start("a")
    batch = await bench.create(LINES)
    record = await bench.ended(batch)
    assert (record.status, counts(record)) == ("completed", (40, 40, 0))
    assert (record.counts.input_tokens, record.counts.output_tokens) == (80, 120)
    found = await bench.results(record)
    assert {name: it["response"]["body"]["text"] for name, it in found.items()} == {
        name: name for name in IDS
    }
    assert max(bench.script.calls.values()) == 1
    assert bench.script.most_running == bench.window
    assert await bench.batches.unfinished() == {}


async def test_batch_of_lost_router_is_taken_over(bench: Bench) -> None:
    runner = bench.start("a")
    batch = await bench.create(LINES)
    bench.script.allow(12)
    await bench.until(batch, lambda it: it.counts.completed)
    before = await bench.results(await bench.get(batch))
    assert before
    bench.start("b")
    await asyncio.sleep(0.1)
    assert (await bench.get(batch)).runner == "a"
    # The router is frozen: it still believes that it runs the batch.
    del bench.ledger.living["a"]
    await bench.until(batch, lambda it: it.runner == "b")
    bench.script.gate.set()
    record = await bench.ended(batch)
    assert counts(record) == (40, 40, 0)
    found = await bench.results(record)
    assert found.keys() == IDS and before.items() <= found.items()
    async with asyncio.timeout(5):
        while runner._runs:
            await asyncio.sleep(0.01)


async def test_stopped_router_leaves_its_batch_to_others(bench: Bench) -> None:
    bench.start("a")
    batch = await bench.create(LINES)
    await bench.until(batch, lambda it: it.status == "in_progress")
    await bench.stop("a")
    del bench.ledger.living["a"]
    assert bench.script.cancelled == [] and bench.script.num_running == 0
    bench.script.gate.set()
    bench.start("b")
    assert counts(await bench.ended(batch)) == (40, 40, 0)


@pytest.mark.parametrize(
    "part", ["batches/", "batch_results/", "files/", "unfinished_batches/", ""]
)
async def test_batch_survives_failures_of_the_ledger(bench: Bench, part: str) -> None:
    bench.script.gate.set()
    bench.start("a")
    batch = await bench.create(LINES)
    random = Random(7)

    def failing(name: str) -> Any:
        return LedgerUnavailable("away") if part in name and random.random() < 0.3 else None

    bench.ledger.failing = failing
    record = await bench.ended(batch)
    assert counts(record) == (40, 40, 0)
    assert (await bench.results(record)).keys() == IDS


async def test_cancelled_batch_has_partial_results(bench: Bench) -> None:
    bench.start("a")
    batch = await bench.create(LINES)
    bench.script.allow(12)
    await bench.until(batch, lambda it: it.counts.completed)
    await bench.batches.change(_ANYONE, batch.batch_id, lambda it: it.cancelling(bench.time()))
    record = await bench.ended(batch)
    assert record.status == "cancelled"
    found = await bench.results(record)
    assert found.keys() == IDS and counts(record)[1:] == (
        sum(it["error"] is None for it in found.values()),
        sum(it["error"] is not None for it in found.values()),
    )
    assert {it["error"]["code"] for it in found.values() if it["error"]} == {"batch_cancelled"}
    assert bench.script.cancelled


async def test_batch_cancelled_before_its_check_has_no_results(bench: Bench) -> None:
    batch = await bench.create(LINES)
    await bench.batches.change(_ANYONE, batch.batch_id, lambda it: it.cancelling(bench.time()))
    bench.start("a")
    record = await bench.ended(batch)
    assert (record.status, counts(record)) == ("cancelled", (0, 0, 0))
    assert bench.script.calls.total() == 0


async def test_cancelled_batch_of_lost_router_is_ended_by_another(bench: Bench) -> None:
    bench.start("a")
    batch = await bench.create(LINES)
    await bench.until(batch, lambda it: it.status == "in_progress")
    await bench.stop("a")
    del bench.ledger.living["a"]
    await bench.batches.change(_ANYONE, batch.batch_id, lambda it: it.cancelling(bench.time()))
    bench.start("b")
    record = await bench.ended(batch)
    assert (record.status, counts(record)) == ("cancelled", (40, 0, 40))
    # The requests that the lost router had begun are cancelled.
    assert {*range(1, bench.window + 1)} <= {*bench.script.cancelled}


async def test_batch_expires_after_its_window(bench: Bench) -> None:
    bench.start("a")
    batch = await bench.create(LINES, window="1m")
    await bench.until(batch, lambda it: it.status == "in_progress")
    bench.ahead_s = 61.0
    record = await bench.ended(batch)
    assert (record.status, counts(record)) == ("expired", (40, 0, 40))
    found = await bench.results(record)
    assert {it["error"]["code"] for it in found.values()} == {"batch_expired"}


async def test_line_is_retried_while_there_is_no_room(bench: Bench) -> None:
    script = bench.script
    script.gate.set()
    script.failures = {
        "id-1": [QueueFull("full", retry_after_s=0.01)] * 3,
        "id-2": [NoWorker("none")],
        "id-3": [RequestConflict("other prompt")],
        "id-4": [LedgerUnavailable("away")],
        "id-5": [EngineFailed("broken")],
        "id-6": [RuntimeError("a bug")],
    }
    bench.start("a")
    record = await bench.ended(await bench.create(LINES))
    assert counts(record) == (40, 38, 2)
    assert [script.calls[f"id-{number}"] for number in range(1, 7)] == [4, 2, 2, 2, 1, 1]
    assert sorted(script.forgotten) == [3, 4]
    found = await bench.results(record)
    codes = [found[f"id-{n}"]["response"]["body"]["error"]["code"] for n in (5, 6)]
    assert codes == ["engine_failed", "internal"]


async def test_deleted_input_fails_the_batch(bench: Bench) -> None:
    batch = await bench.create(LINES)
    await bench.files.delete(_ANYONE, batch.record.input_file_id)
    bench.start("a")
    record = await bench.ended(batch)
    assert (record.status, record.errors[0]["code"]) == ("failed", "unknown_object")


async def test_large_results_fill_several_chunks(bench: Bench) -> None:
    bench.script.padding = CHUNK_BYTES // 3
    bench.script.gate.set()
    bench.start("a")
    batch = await bench.create(LINES)
    record = await bench.ended(batch)
    assert (await bench.results(record)).keys() == IDS
    chunks = await bench.ledger.list_objects("batch_results", "")
    assert len(chunks) > 10


async def test_batch_belongs_to_its_tenant(bench: Bench) -> None:
    ann, bob = Caller("ann"), Caller("bob")
    bench.script.gate.set()
    bench.start("a")
    batch = await bench.create(LINES, ann)
    record = await bench.ended(batch, ann)
    assert (await bench.results(record, ann)).keys() == IDS
    assert await bench.results(record, bob) == {}
    assert (await bench.batches.list_page(bob, "", 10)) == ([], False)
    assert [it for it, _ in await bench.files.list_all(bob)] == []


async def test_batches_share_the_window_of_a_router(bench: Bench) -> None:
    bench.start("a")
    batches = [await bench.create(LINES) for _ in range(3)]
    for batch in batches:
        await bench.until(batch, lambda it: it.status == "in_progress")
    await asyncio.sleep(0.05)
    assert bench.script.num_running == bench.window
    bench.window = 20
    await asyncio.sleep(0.7)
    assert bench.script.num_running == 20
    bench.script.gate.set()
    for batch in batches:
        assert counts(await bench.ended(batch)) == (40, 40, 0)


async def test_entry_without_batch_is_dropped(bench: Bench) -> None:
    batch_id = bench.batches.new_id()
    await bench.ledger.put_object(f"unfinished_batches/{batch_id}", b"", 0)
    bench.start("a")
    await asyncio.sleep(0.1)
    assert [*await bench.batches.unfinished()] == [batch_id]
    bench.ahead_s = 11.0
    async with asyncio.timeout(5):
        while await bench.batches.unfinished():
            await asyncio.sleep(0.01)


_ANYONE = Caller()
