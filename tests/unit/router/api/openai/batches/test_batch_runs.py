"""Batches of routers on one ledger: crashes, errors of the ledger, cancellation, and expiry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from everlift.errors import (
    DataLoss,
    EverliftError,
    ForgottenRequest,
    InvalidRequest,
    LedgerFull,
    LedgerUnavailable,
    Moved,
    NoWorker,
    QueueTimeout,
    RateLimited,
    RequestConflict,
)
from everlift.heap import pause_gc
from router.api.openai.batches import run, runners
from router.api.openai.batches.stored import BATCH_PREFIX
from router.api.openai.object_ids import new_id
from router.auth.caller import ANYONE
from router.auth.limits import Limits
from tests.support.in_process import until
from tests.support.router.batch_routers import KEPT_S, FakeRouter, Model, Objects, input_lines

IDS = [f"l{number}" for number in range(7)]
LINES = input_lines(IDS)
OK = dict.fromkeys(IDS, "ok")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_SCAN_S", 0.01)
    monkeypatch.setattr(run, "_SAVE_S", 0.005)
    monkeypatch.setattr(run, "_AGAIN_S", 0.001)


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
async def router(objects: Objects) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(objects)
    router.start()
    yield router
    await router.stop()


async def test_batch_completes_with_one_result_per_line(router: FakeRouter) -> None:
    record = await router.ended(await router.create(LINES))
    assert (record.status, record.total, record.counts.completed) == ("completed", 7, 7)
    assert await router.results(record) == OK
    assert (record.counts.input_tokens, record.counts.output_tokens) == (14, 21)
    assert [*record.times] == ["in_progress", "finalizing", "completed"]
    assert set(router.model.answered.values()) == {1}
    await until(lambda: not router.objects.names("unfinished_batches"))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_batch_survives_a_crash_at_each_write(
    objects: Objects, moment: str, is_cancelled: bool
) -> None:
    crashed_at = 0
    while True:
        crashed_at += 1
        first, other = FakeRouter(objects, "a", Model(), 2), FakeRouter(objects, "b")
        batch_id = await other.create(LINES)
        if is_cancelled:
            await other.cancel(batch_id)

        def crash(number: int, at: str, router: FakeRouter = first, last: int = crashed_at) -> None:
            if (number, at) == (last, moment):
                router.kill()
                raise LedgerUnavailable("the router was killed")

        first.link.on_write = crash
        first.start()
        await until(lambda: first.link.is_down or not objects.names("unfinished_batches"))  # noqa: B023
        other.start()
        record = await other.ended(batch_id)
        await first.stop()
        await other.stop()
        if not is_cancelled:
            assert (record.status, await other.results(record)) == ("completed", OK)
        else:
            assert record.status == "cancelled"
            assert [*await other.results(record)] == IDS
        if first.link.num_writes < crashed_at:
            assert crashed_at > 5
            return


@pytest.mark.parametrize(
    ("moment", "error"),
    [("before", LedgerUnavailable), ("after", LedgerUnavailable), ("before", LedgerFull)],
)
async def test_batch_survives_a_failure_of_each_write(
    objects: Objects, moment: str, error: type[EverliftError]
) -> None:
    last_failed = 0
    while True:
        last_failed += 1
        router = FakeRouter(objects)
        batch_id = await router.create(LINES)
        router.link.num_writes = 0

        def fail(number: int, at: str, last: int = last_failed) -> None:
            # Two writes fail in succession.
            if at == moment and number in (last, last + 1):
                raise error("failed")

        router.link.on_write = fail
        router.start()
        record = await router.ended(batch_id)
        await router.stop()
        assert (record.status, await router.results(record)) == ("completed", OK)
        if router.link.num_writes < last_failed:
            assert last_failed > 5
            return


async def test_routers_that_both_run_a_batch_agree(objects: Objects) -> None:
    # Each router believes that the other one is dead.
    routers = [FakeRouter(objects, name, size=1) for name in "ab"]
    batch_id = await routers[0].create(input_lines(f"l{number}" for number in range(40)))
    for router in routers:
        router.start()
        objects.living.clear()
    record = await routers[1].ended(batch_id)
    assert record.status == "completed" and record.counts.completed == 40
    assert len(await routers[0].results(record)) == 40
    for router in routers:
        await router.stop()


async def test_interrupted_batch_is_taken_again_by_its_router(objects: Objects) -> None:
    first, other = FakeRouter(objects, "a"), FakeRouter(objects, "b")
    first.model.held = {*IDS}
    first.start()
    batch_id = await first.create(LINES)
    await until(lambda: first.model.waiting)
    other.start()
    await until(lambda: other.runners._others)
    # The first router has no lease for a moment, so the other one takes the batch over. The run is
    # interrupted there after the first router is alive again.
    other.model.held = {*IDS}
    objects.living.remove("a")
    await until(lambda: other.model.waiting)
    objects.living.add("a")
    await until(lambda: first.runners._others)
    error = LedgerFull("full for a moment")

    def fail(number: int, at: str) -> None:
        if at == "before":
            other.link.on_write = lambda number, at: None
            raise error

    other.link.on_write = fail
    other.model.released.set()
    record = await other.ended(batch_id)
    assert (record.status, await other.results(record)) == ("completed", OK)
    await first.stop()
    await other.stop()


async def test_stopped_router_hands_its_batch_over(objects: Objects) -> None:
    first, other = FakeRouter(objects, "a"), FakeRouter(objects, "b")
    first.model.held = {"l3", "l4", "l5", "l6"}
    first.start()
    batch_id = await first.create(LINES)
    await first.when(batch_id, lambda it: it.counts.completed == 3)
    other.start()
    await until(lambda: other.runners._others)
    assert not other.runners._runs
    await first.stop()
    record = await other.ended(batch_id)
    assert (record.status, await other.results(record)) == ("completed", OK)
    assert sorted(other.model.answered) == ["l3", "l4", "l5", "l6"]
    await other.stop()


async def test_batch_is_cancelled_while_it_is_validated(objects: Objects) -> None:
    router = FakeRouter(objects)
    batch_id = await router.create(LINES)
    await router.cancel(batch_id)
    router.start()
    record = await router.ended(batch_id)
    assert (record.status, record.total) == ("cancelled", 7)
    assert await router.results(record) == dict.fromkeys(IDS, "batch_cancelled")
    assert not router.model.answered
    await router.stop()


@pytest.mark.parametrize("is_taken_over", [False, True])
async def test_cancelled_batch_keeps_its_results(objects: Objects, is_taken_over: bool) -> None:
    router = FakeRouter(objects)
    router.model.held = {"l2", "l3"}
    router.start()
    batch_id = await router.create(LINES)
    await router.when(batch_id, lambda it: it.counts.completed == 5)
    if is_taken_over:
        await router.stop()
        router = FakeRouter(objects, "b")
    await router.cancel(batch_id)
    if is_taken_over:
        router.start()
    record = await router.ended(batch_id)
    assert record.status == "cancelled"
    assert await router.results(record) == OK | dict.fromkeys(("l2", "l3"), "batch_cancelled")
    assert router.model.cancelled == [3, 4]
    await router.stop()


async def test_batch_cancelled_at_its_end_is_cancelled(router: FakeRouter) -> None:
    router.model.held = {"l6"}
    batch_id = await router.create(LINES)
    await until(lambda: router.model.waiting)
    router.link.on_write = lambda number, at: router.model.released.set()
    await router.cancel(batch_id)
    record = await router.ended(batch_id)
    assert record.status == "cancelled" and "cancelling" in record.times
    await router.cancel(batch_id)
    assert (await router.ended(batch_id)).status == "cancelled"


async def test_expired_batch_keeps_its_results(router: FakeRouter) -> None:
    router.model.held = {"l6"}
    batch_id = await router.create(LINES, "10m")
    await router.when(batch_id, lambda it: it.counts.completed == 6)
    router.objects.now += 601
    record = await router.ended(batch_id)
    assert record.status == "expired" and record.times["expired"] >= record.expires_at
    assert await router.results(record) == OK | {"l6": "batch_expired"}
    assert router.model.cancelled == [7]


async def test_complete_batch_does_not_expire_in_a_takeover(objects: Objects) -> None:
    first, other = FakeRouter(objects, "a"), FakeRouter(objects, "b")
    batch_id = await first.create(LINES, "10m")
    first.start()

    def kill_at_end(number: int, at: str) -> None:
        if at == "before":
            record = objects._objects.get(f"batches/{batch_id}")
            if record is not None and b'"finalizing"' in record.data:
                first.kill()
                raise LedgerUnavailable("the router was killed")

    first.link.on_write = kill_at_end
    await until(lambda: first.link.is_down)
    objects.now += 601
    other.start()
    record = await other.ended(batch_id)
    assert (record.status, await other.results(record)) == ("completed", OK)
    await first.stop()
    await other.stop()


async def test_batch_result_during_a_save_is_stored_before_the_end(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = FakeRouter(objects, "a"), FakeRouter(objects, "b")
    batch_id = await first.create(LINES, "10m")
    first.model.held = {IDS[-1]}
    write = first.link.put_object

    async def put_object(name: str, *arguments: Any) -> int:
        if len(first.model.answered) == len(IDS) - 1:
            first.model.released.set()
            await asyncio.sleep(0.05)
        record = objects._objects.get(f"batches/{batch_id}")
        if record is not None and b'"finalizing"' in record.data:
            first.kill()
        return await write(name, *arguments)

    monkeypatch.setattr(first.link, "put_object", put_object)
    first.start()
    await until(lambda: first.link.is_down)
    objects.now += 601
    other.start()
    record = await other.ended(batch_id)
    assert (record.status, await other.results(record)) == ("completed", OK)
    await first.stop()
    await other.stop()


async def test_batch_fails_if_its_input_is_deleted(router: FakeRouter) -> None:
    long = [f"{number}-{'x' * 480}" for number in range(2000)]  # more than one chunk
    router.model.held = set(long[2:6])
    batch_id = await router.create(input_lines(long))
    await router.when(batch_id, lambda it: it.counts.completed == 2)
    record = (await router.batches.get(ANYONE, batch_id)).record
    await router.files.delete(ANYONE, record.input_file_id)
    router.model.released.set()
    record = await router.ended(batch_id)
    assert record.status == "failed" and record.counts.completed < 2000
    [error] = record.errors
    assert (error["code"], error["param"]) == ("unknown_object", "input_file_id")
    assert set((await router.results(record)).values()) == {"ok"}


async def test_deleted_input_cancels_requests_in_progress(router: FakeRouter) -> None:
    long = [f"{number}-{'x' * 480}" for number in range(2000)]
    batch_id = await router.create(input_lines(long))
    router.model.held = set(long[:1])
    await until(lambda: router.model.waiting)
    record = (await router.batches.get(ANYONE, batch_id)).record
    await router.files.delete(ANYONE, record.input_file_id)
    assert (await router.ended(batch_id)).status == "failed"
    assert 1 in router.model.cancelled


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"{", "malformed_body"),
        (LINES + input_lines(["l1"]), "duplicate_custom_id"),
        (b"x" * (1 << 21), "out_of_range"),
    ],
)
async def test_invalid_input_fails_the_batch(router: FakeRouter, content: bytes, code: str) -> None:
    record = await router.ended(await router.create(content))
    assert record.status == "failed" and record.errors[0]["code"] == code
    assert not router.model.answered


@pytest.mark.parametrize(
    "error", [NoWorker, RequestConflict, QueueTimeout, ForgottenRequest, DataLoss]
)
async def test_line_is_submitted_again_if_its_request_ended(
    router: FakeRouter, error: type[EverliftError]
) -> None:
    router.model.errors["l1"] = [error("ended"), error("ended again")]
    record = await router.ended(await router.create(LINES))
    assert await router.results(record) == OK
    assert router.model.forgotten == [2, 2]


@pytest.mark.parametrize("error", [RateLimited, LedgerUnavailable, Moved, LedgerFull])
async def test_line_waits_while_the_cluster_has_no_room(
    router: FakeRouter, error: type[EverliftError]
) -> None:
    router.model.errors["l1"] = [error("later")]
    record = await router.ended(await router.create(LINES))
    assert await router.results(record) == OK
    assert not router.model.forgotten


async def test_refused_line_is_in_the_error_file(router: FakeRouter) -> None:
    router.model.errors["l1"] = [InvalidRequest("no")]
    record = await router.ended(await router.create(LINES))
    assert (record.counts.completed, record.counts.failed) == (6, 1)
    assert await router.results(record) == OK | {"l1": "invalid_request"}


async def test_limits_are_read_for_each_line(router: FakeRouter) -> None:
    router.model.held = {"l0", "l1", "l2", "l3"}
    batch_id = await router.create(LINES)
    await until(lambda: len(router.model.waiting) == 4)
    router.limits = Limits(max_tokens=5)
    router.model.released.set()
    await router.ended(batch_id)
    assert [it.max_tokens for it in router.model.limits] == [None] * 4 + [5] * 3


async def test_results_outlive_a_batch_longer_than_their_expiry(router: FakeRouter) -> None:
    router.model.held = {"l6"}
    batch_id = await router.create(LINES, "24h", output_expires_s=3600)
    await router.when(batch_id, lambda it: it.counts.completed == 6)
    router.objects.now += KEPT_S - 10  # the input expires later
    await router.when(batch_id, lambda it: it.counts.completed == 6)
    router.objects.now += 3600
    router.model.released.set()
    record = await router.ended(batch_id)
    assert await router.results(record) == OK
    file = await router.files.get(ANYONE, record.output_file_id)
    assert file.expires_at == file.created_at + 3600
    assert abs(file.created_at - router.objects.now) < 2
    router.objects.now += 3602
    assert await router.files.list_all(ANYONE) == []


async def test_unreadable_batch_does_not_stop_others(router: FakeRouter) -> None:
    name = "batches/" + (unreadable := new_id(BATCH_PREFIX, router.batches.ledger_time()))
    await router.objects.put_object(name, b'{"new": 1, "counts": {}}', 0)
    await router.objects.put_object(f"unfinished_batches/{unreadable}:", b"", 0)
    record = await router.ended(await router.create(LINES))
    assert record.status == "completed"
    assert router.runners._unreadable == {unreadable}


async def test_batch_runs_although_its_record_came_late(router: FakeRouter) -> None:
    put = router.batches._put

    async def put_late(*args: object) -> int:
        # A pause, in which the entry of a batch without a record is removed.
        router.objects.now += 60
        await until(lambda: not router.objects.names("unfinished_batches"))
        router.batches._put = put  # type: ignore[method-assign]
        return await put(*args)  # type: ignore[arg-type]

    router.batches._put = put_late  # type: ignore[method-assign]
    record = await router.ended(await router.create(LINES))
    assert record.status == "completed"


async def test_clock_jumps_do_not_lose_lines(router: FakeRouter) -> None:
    router.model.held = {"l5", "l6"}
    batch_id = await router.create(LINES)
    await router.when(batch_id, lambda it: it.counts.completed == 5)
    for jump in (-7200, 1800, 5400):
        router.objects.now += jump
        await asyncio.sleep(0.02)
    router.model.released.set()
    record = await router.ended(batch_id)
    assert (record.status, await router.results(record)) == ("completed", OK)


@pytest.mark.long
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_large_batch_does_not_block_the_event_loop(
    objects: Objects, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SAVE_S", 0.2)
    router = FakeRouter(objects, size=512)
    router.files.max_bytes = 64 << 20
    batch_id = await router.create(input_lines(f"line-{number:06}" for number in range(50_000)))
    if is_cancelled:
        await router.cancel(batch_id)
    router.start()
    longest, status = 0.0, ""
    # Routers freeze their heap, so that a collection takes less time than in this process.
    with pause_gc():
        while status not in ("completed", "cancelled"):
            # Time of other threads and processes does not count.
            begun = time.thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - begun)
            status = (await router.batches.get(ANYONE, batch_id)).record.status
    record = await router.ended(batch_id)
    assert record.counts.completed + record.counts.failed == 50_000
    assert len(await router.results(record)) == 50_000
    assert longest < 0.15
    await router.stop()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level("DEBUG")
    yield caplog


async def test_logs_do_not_contain_prompts(
    router: FakeRouter, logged: pytest.LogCaptureFixture
) -> None:
    router.model.text = "a secret answer"
    router.model.errors["a-secret-id"] = [InvalidRequest("a secret prompt")]
    await router.ended(await router.create(input_lines(["a-secret-id", "b"])))
    assert "batch ended" in logged.text and "secret" not in logged.text
