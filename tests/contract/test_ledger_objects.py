"""Objects of a ledger: versions, listings and retention, in memory and on servers."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from everlift.errors import InvalidRequest, LedgerFull
from router.ledger.base import MAX_PAGE_SIZE, Ledger
from router.ledger.objects import MAX_OBJECT_BYTES, ObjectConflict, StoredObject, object_name
from tests.support.ledger.ledgers import (
    Tick,
    connected,
    eventually,
    lose_answers,
    valkey_server,
)

AGES_S = 3600.0
#: Ids that are spread over all shards.
IDS = tuple(f"{number:02}" for number in range(20))


def name_of(object_id: str, tenant: str = "t") -> str:
    return object_name(tenant, "things", object_id)


NAME = name_of("a")


async def conflict(ledger: Ledger, version: int, name: str = NAME) -> int:
    """Return the current version that a rejected put reports."""
    with pytest.raises(ObjectConflict) as caught:
        await ledger.put_object(name, b"refused", version)
    return caught.value.version


async def is_gone(ledger: Ledger, name: str = NAME) -> bool:
    return await ledger.get_object(name) is None


async def test_object_is_put_read_and_deleted(ledger: Ledger) -> None:
    assert await ledger.get_object(NAME) is None
    first = await ledger.put_object(NAME, b"\x00one", 0)
    assert await ledger.get_object(NAME) == StoredObject(b"\x00one", first)
    second = await ledger.put_object(NAME, b"", first)
    assert second > first > 0
    assert await ledger.get_object(NAME) == StoredObject(b"", second)
    assert await ledger.delete_object(NAME) is True
    assert await ledger.get_object(NAME) is None
    assert await ledger.delete_object(NAME) is False


async def test_put_with_other_version_stores_nothing(ledger: Ledger) -> None:
    assert await conflict(ledger, 7) == 0
    assert await ledger.list_objects("things", "t") == ()
    version = await ledger.put_object(NAME, b"one", 0)
    for other in (0, version - 1, version + 1):
        assert await conflict(ledger, other) == version
    assert await ledger.get_object(NAME) == StoredObject(b"one", version)


async def test_version_is_not_used_again_after_delete(ledger: Ledger) -> None:
    old = await ledger.put_object(NAME, b"one", 0)
    await ledger.delete_object(NAME)
    new = await ledger.put_object(NAME, b"other", 0)
    assert new > old
    assert await conflict(ledger, old) == new


async def test_concurrent_puts_have_one_winner(ledger: Ledger) -> None:
    puts = [ledger.put_object(NAME, b"%d" % number, 0) for number in range(8)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    [winner] = [number for number, it in enumerate(results) if isinstance(it, int)]
    stored = StoredObject(b"%d" % winner, results[winner])  # type: ignore[arg-type]
    assert await ledger.get_object(NAME) == stored


async def test_object_change_with_lost_answer_is_applied_once(ledger: Ledger) -> None:
    lose_answers(ledger)
    version = await ledger.put_object(NAME, b"one", 0)
    assert await ledger.get_object(NAME) == StoredObject(b"one", version)
    version = await ledger.put_object(NAME, b"two", version)
    assert await ledger.get_object(NAME) == StoredObject(b"two", version)
    assert await ledger.delete_object(NAME) is True
    assert await ledger.delete_object(NAME) is False


async def test_objects_are_listed_by_descending_name(ledger: Ledger) -> None:
    for object_id in (*IDS[::2], *IDS[1::2]):
        await ledger.put_object(name_of(object_id), b"", 0)
    names = tuple(map(name_of, reversed(IDS)))
    assert await ledger.list_objects("things", "t") == names
    assert await ledger.list_objects("things", "t", limit=3) == names[:3]
    assert await ledger.list_objects("things", "t", names[2], limit=4) == names[3:7]
    # The name after which a page begins need not exist.
    assert await ledger.list_objects("things", "t", name_of("055"), limit=1) == (name_of("05"),)
    assert await ledger.list_objects("things", "t", names[-1]) == ()


async def test_object_listing_has_one_tenant_and_kind(ledger: Ledger) -> None:
    others = (name_of("a", ""), name_of("a", "other"), object_name("t", "others", "a"))
    for name in (NAME, *others):
        await ledger.put_object(name, name.encode(), 0)
    assert await ledger.list_objects("things", "t") == (NAME,)
    assert await ledger.list_objects("things", "") == ("things/a",)
    for name in others:
        stored = await ledger.get_object(name)
        assert stored is not None and stored.data == name.encode()


async def test_deleted_objects_leave_the_listing(ledger: Ledger) -> None:
    for object_id in IDS:
        await ledger.put_object(name_of(object_id), b"", 0)
    for object_id in IDS[4:]:
        await ledger.delete_object(name_of(object_id))
    names = tuple(map(name_of, reversed(IDS[:4])))
    assert await ledger.list_objects("things", "t", limit=4) == names


async def test_object_is_kept_from_its_last_put(expiring: Ledger, tick: Tick) -> None:
    version = await expiring.put_object(NAME, b"one", 0)
    await expiring.put_object(name_of("b"), b"", 0)
    try:
        version = await expiring.put_object(NAME, b"two", version, AGES_S)
    except ObjectConflict:
        # On a busy machine, much time may pass between two calls.
        version = await expiring.put_object(NAME, b"two", 0, AGES_S)
    await eventually(lambda: is_gone(expiring, name_of("b")), tick)
    assert await expiring.get_object(NAME) == StoredObject(b"two", version)
    version = await expiring.put_object(NAME, b"three", version)
    await eventually(lambda: is_gone(expiring), tick)
    assert await conflict(expiring, version) == 0
    assert await expiring.put_object(NAME, b"new", 0) > version


async def test_object_has_its_own_retention(expiring: Ledger, tick: Tick) -> None:
    lasting, other = name_of("b"), name_of("c")
    await expiring.put_object(lasting, b"", 0, 3600.0)
    await expiring.put_object(NAME, b"", 0)
    version = await expiring.put_object(other, b"", 0, 3600.0)
    await expiring.put_object(other, b"", version)
    await eventually(lambda: is_gone(expiring), tick)
    await eventually(lambda: is_gone(expiring, other), tick)
    assert not await is_gone(expiring, lasting)
    assert await expiring.list_objects("things", "t") == (lasting,)


async def test_expired_objects_leave_the_listing(expiring: Ledger, tick: Tick) -> None:
    for object_id in IDS[:8]:
        await expiring.put_object(name_of(object_id), b"", 0)
    await eventually(lambda: is_gone(expiring, name_of(IDS[7])), tick)
    await expiring.put_object(name_of("0"), b"", 0, AGES_S)
    assert await expiring.list_objects("things", "t", limit=1) == (name_of("0"),)


async def test_invalid_object_is_refused(ledger: Ledger) -> None:
    for name in ("a", "things/", "Things/a", "t/things/a b", "t/things/" + "a" * 129):
        with pytest.raises(ValueError, match="name must be"):
            await ledger.put_object(name, b"", 0)
    with pytest.raises(InvalidRequest):
        await ledger.put_object("T/things/a", b"", 0)
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        await ledger.put_object(NAME, bytes(MAX_OBJECT_BYTES + 1), 0)
    for limit in (0, MAX_PAGE_SIZE + 1):
        with pytest.raises(ValueError, match="limit must be"):
            await ledger.list_objects("things", "t", limit=limit)


async def test_largest_object_is_stored(ledger: Ledger) -> None:
    version = await ledger.put_object(NAME, bytes(MAX_OBJECT_BYTES), 0)
    assert await ledger.get_object(NAME) == StoredObject(bytes(MAX_OBJECT_BYTES), version)


async def test_full_server_refuses_objects_but_deletes() -> None:
    with valkey_server(also="+config|set") as url:
        async with connected(url) as ledger, Redis.from_url(url) as client:
            version = await ledger.put_object(NAME, b"one", 0)
            await client.config_set("maxmemory", 1)
            for name, expected in ((NAME, version), (name_of("b"), 0)):
                with pytest.raises(LedgerFull):
                    await ledger.put_object(name, b"two", expected)
            assert await ledger.get_object(NAME) == StoredObject(b"one", version)
            assert await ledger.list_objects("things", "t") == (NAME,)
            assert await ledger.delete_object(NAME) is True
            assert await ledger.list_objects("things", "t") == ()
