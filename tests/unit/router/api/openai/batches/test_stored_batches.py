"""Batches in a ledger: repeated calls, tenants, and the list of unfinished ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.errors import LedgerUnavailable, RequestConflict, UnknownObject
from router.api.openai.batches.record import BatchRecord
from router.api.openai.batches.stored import BATCH_PREFIX
from router.api.openai.object_ids import new_id
from router.auth.caller import ANYONE, Caller
from tests.support.router.batch_routers import KEPT_S, FakeRouter, Objects

ACME, OTHER = Caller("acme"), Caller("other")


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter(Objects())


def record_of(router: FakeRouter, window: str = "1h") -> BatchRecord:
    now = round(router.objects.now)
    return BatchRecord("/v1/completions", "file-i", window, now, "file-o", "file-e")


async def test_repeated_call_returns_the_same_batch(router: FakeRouter) -> None:
    record, batch_id = record_of(router), new_id(BATCH_PREFIX, router.batches.ledger_time())
    first = await router.batches.create(ANYONE, batch_id, record)
    again = await router.batches.create(ANYONE, batch_id, replace(record, created_at=5))
    assert again == first
    with pytest.raises(RequestConflict):
        await router.batches.create(ANYONE, batch_id, replace(record, endpoint="/v1/responses"))


async def test_batches_of_tenants_are_separate(router: FakeRouter) -> None:
    ids = {}
    for caller in (ACME, OTHER, ANYONE):
        ids[caller.tenant] = new_id(BATCH_PREFIX, router.batches.ledger_time())
        await router.batches.create(caller, ids[caller.tenant], record_of(router))
    assert await router.batches.unfinished() == {ids[name]: name for name in ids}
    for caller in (ACME, OTHER, ANYONE):
        batches, _ = await router.batches.list_page(caller, "", 10)
        assert [it.batch_id for it in batches] == [ids[caller.tenant]]
    for batch_id in (ids["other"], "batch_", "", "batch_../x", f"{ids['acme']}:acme"):
        with pytest.raises(UnknownObject):
            await router.batches.get(ACME, batch_id)
        with pytest.raises(UnknownObject):
            await router.batches.change(ACME, batch_id, lambda it: it.cancelling(1))


async def test_ended_batch_is_no_longer_unfinished(router: FakeRouter) -> None:
    batch = await router.batches.create(
        ACME, new_id(BATCH_PREFIX, router.batches.ledger_time()), record_of(router)
    )
    await router.batches.put(ACME, batch, batch.record.ended(None, 1))
    assert await router.batches.unfinished() == {}


async def test_entry_without_a_record_is_dropped_later(router: FakeRouter) -> None:
    batch_id = new_id(BATCH_PREFIX, router.batches.ledger_time())

    def fail(number: int, at: str) -> None:
        if (number, at) == (2, "before"):
            raise LedgerUnavailable("down")

    router.link.on_write = fail
    with pytest.raises(LedgerUnavailable):
        await router.batches.create(ACME, batch_id, record_of(router))
    await router.batches.drop_unfinished(batch_id, "acme")
    assert await router.batches.unfinished() == {batch_id: "acme"}
    router.objects.now += 11
    await router.batches.drop_unfinished(batch_id, "acme")
    assert await router.batches.unfinished() == {}


async def test_batch_is_kept_after_its_window(router: FakeRouter) -> None:
    batch = await router.batches.create(
        ANYONE, new_id(BATCH_PREFIX, router.batches.ledger_time()), record_of(router, "2h")
    )
    router.objects.now += 7200 + KEPT_S - 2
    assert await router.batches.get(ANYONE, batch.batch_id)
    router.objects.now += 4
    with pytest.raises(UnknownObject):
        await router.batches.get(ANYONE, batch.batch_id)
    assert await router.batches.unfinished() == {}


async def test_list_page_continues_after_a_batch(router: FakeRouter) -> None:
    ids = []
    for _ in range(5):
        router.objects.now += 1
        ids.append(new_id(BATCH_PREFIX, router.batches.ledger_time()))
        await router.batches.create(ANYONE, ids[-1], record_of(router))
    newest = ids[::-1]
    batches, has_more = await router.batches.list_page(ANYONE, "", 3)
    assert [it.batch_id for it in batches] == newest[:3] and has_more
    batches, has_more = await router.batches.list_page(ANYONE, newest[2], 3)
    assert [it.batch_id for it in batches] == newest[3:] and not has_more
    with pytest.raises(UnknownObject):
        await router.batches.list_page(ANYONE, "batch_none", 3)
