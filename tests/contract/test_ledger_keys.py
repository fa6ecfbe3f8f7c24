"""Keys that a ledger's moves leave on a server, and their times to live."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from everlift.errors import RateLimited
from everlift.hashes import CHUNK_SIZE
from everlift.messages import FinishReason
from everlift.v1.session_pb2 import WorkerInfo
from router.ledger.base import Ledger, StaleTerm
from router.ledger.config import DEFAULTS
from router.ledger.entry import Append, Appended, Reasserted, State
from router.ledger.objects import object_name
from router.ledger.quota import Charge, Settlement
from router.ledger.redis import scripts
from router.ledger.redis.redis_ledger import RedisLedger
from tests.support.ledger.ledgers import (
    connected,
    eventually,
    make_request,
    scored,
    unbury,
    valkey_server,
)

TERM = 1
EPOCH = 5
AGES_S = 3600.0
#: Limit of a call to a server that may lack a core for seconds.
TIMEOUT_S = 20.0
RETENTION_MS = DEFAULTS.retention * 1000
WEEK_MS = 7 * 24 * 3600 * 1000
#: Keys of a request with two choices and log probabilities.
OF_REQUEST = {"r:r", "e:r", "t:r:0", "t:r:1", "l:r:0", "l:r:1", "p:r"}
#: Keys of the leadership.
ALWAYS = {"term", "leader"}
#: Keys of the listings that contain a request.
LISTED = {"arrivals", "expiries"}


class Keys:
    """Keys of one ledger."""

    def __init__(self, client: Redis, ledger: RedisLedger) -> None:
        self._client = client
        self._root = ledger._shards.key("")

    async def names(self) -> set[str]:
        found = self._client.scan_iter(f"{self._root}*", count=1000)
        return {key[len(self._root) :] async for key in found}

    async def left_ms(self) -> dict[str, int]:
        """Return the time to live of each key in ms; -1 means no limit."""
        names = await self.names() - ALWAYS
        return {name: await self._client.pttl(self._root + name) for name in names}

    async def left_ms_of_request(self) -> list[int]:
        left = await self.left_ms()
        return [left[name] for name in OF_REQUEST]

    async def age(self) -> None:
        """Set the time to live of the request's keys to a minute."""
        for name in OF_REQUEST:
            assert await self._client.pexpire(self._root + name, 60_000)

    async def put(self, name: str, field: str, value: int) -> None:
        await self._client.hset(self._root + name, field, str(value))

    async def expire(self, *request_ids: str) -> None:
        """Drop the keys of these requests, as if the requests had expired."""
        await self.drop(*(f"r:{it}" for it in request_ids))
        await self._client.zadd(f"{self._root}expiries", dict.fromkeys(request_ids, 1))

    async def expire_objects(self, *names: str) -> None:
        """Drop the keys of these objects, as if the objects had expired."""
        await self.drop(*(f"o:{it}" for it in names))
        await self.make_objects_due(*names)

    async def make_objects_due(self, *names: str) -> None:
        await self._client.zadd(f"{self._root}object_expiries", dict.fromkeys(names, 1))

    async def drop(self, *names: str) -> None:
        await self._client.delete(*(self._root + name for name in names))

    async def fields_of(self, slots: str, charges: str) -> set[str]:
        """Return the members of a sorted set together with the fields of a hash."""
        scored = await self._client.zrange(self._root + slots, 0, -1)
        return {*scored, *await self._client.hgetall(self._root + charges)}

    async def listed(self, name: str) -> list[str]:
        return list(await self._client.zrange(self._root + name, 0, -1))

    async def members(self, name: str) -> set[str]:
        return set(await self._client.smembers(self._root + name))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey_server() as url:
        yield url


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[RedisLedger]:
    async with connected(url, timeout=TIMEOUT_S) as ledger:
        yield ledger


@pytest.fixture
async def keys(url: str, ledger: RedisLedger) -> AsyncIterator[Keys]:
    async with Redis.from_url(url, decode_responses=True) as client:
        yield Keys(client, ledger)


async def run(ledger: Ledger) -> None:
    request = make_request(n=2, logprobs=0, prompt_logprobs=0)
    await ledger.open(request, "gateway")
    assert await ledger.lead("router", "address", TERM, AGES_S)
    await ledger.dispatch("r", "worker", EPOCH, TERM)


async def release(ledger: Ledger) -> None:
    await ledger.release("r", EPOCH, loss="why", max_losses=3)


async def take_over(ledger: Ledger) -> None:
    await ledger.take_over("r", "successor", "gateway")


async def follow(ledger: Ledger) -> None:
    copy = await ledger.read("r")
    copy = replace(copy, entry=replace(copy.entry, moves=copy.entry.moves + 1))
    assert (await ledger.reassert(copy))[0] is Reasserted.OK


Move = Callable[[Ledger], Awaitable[None]]


async def test_open_creates_expected_request_and_owner_keys(
    ledger: RedisLedger, keys: Keys
) -> None:
    await ledger.open(make_request(n=2, logprobs=0), "gateway")
    assert await keys.names() == OF_REQUEST | {"owned:gateway", "owners"} | LISTED
    assert min(await keys.left_ms_of_request()) > WEEK_MS
    assert await keys.members("owners") == {"gateway"}
    assert await keys.members("owned:gateway") == {"r"}


@pytest.mark.parametrize("move", [release, take_over, follow])
async def test_move_renews_expiry_of_request_keys(
    ledger: RedisLedger, keys: Keys, move: Move
) -> None:
    await run(ledger)
    await keys.age()
    await move(ledger)
    assert min(await keys.left_ms_of_request()) > WEEK_MS


async def test_dispatch_renews_expiry_of_request_keys(ledger: RedisLedger, keys: Keys) -> None:
    await run(ledger)
    await ledger.release("r", EPOCH, loss=None, max_losses=3)
    await keys.age()
    await ledger.dispatch("r", "worker", EPOCH + 1, TERM)
    assert min(await keys.left_ms_of_request()) > WEEK_MS


async def cancel(ledger: Ledger) -> None:
    await ledger.end_request("r", State.CANCELLED, "slug", "")


async def lose(ledger: Ledger) -> None:
    await ledger.release("r", EPOCH, loss="why", max_losses=1)


async def finish(ledger: Ledger) -> None:
    ends = [
        Append("r", EPOCH, 0, (1,), choice, FinishReason.STOP, scored(-1.0)) for choice in (0, 1)
    ]
    assert (await ledger.append(ends))[-1] is Appended.FINISHED


async def resync_end(ledger: Ledger) -> None:
    copy = await ledger.read("r")
    ended = {"state": State.EXPIRED, "worker": "", "epoch": 0, "moves": copy.entry.moves + 1}
    await ledger.reassert(replace(copy, entry=replace(copy.entry, **ended)))


async def resync_last_tokens(ledger: Ledger) -> None:
    copy = await ledger.read("r")
    reasons = (FinishReason.STOP,) * 2
    await ledger.reassert(replace(copy, entry=replace(copy.entry, finish_reasons=reasons)))


ENDS = [cancel, lose, finish, resync_end, resync_last_tokens]


@pytest.mark.parametrize("end", ENDS)
async def test_ended_request_has_no_owner_and_expires_after_retention(
    ledger: RedisLedger, keys: Keys, end: Move
) -> None:
    await run(ledger)
    await end(ledger)
    assert await keys.names() == OF_REQUEST | ALWAYS | LISTED
    left = await keys.left_ms_of_request()
    assert 0 < min(left) <= max(left) <= RETENTION_MS


@pytest.mark.parametrize("end", ENDS)
async def test_reasserted_end_expires_after_retention(
    ledger: RedisLedger, keys: Keys, end: Move
) -> None:
    await run(ledger)
    await end(ledger)
    copy = await ledger.read("r")
    await ledger.erase("r")
    await unbury(ledger, copy.entry)
    assert (await ledger.reassert(copy))[0] is Reasserted.OK
    left = await keys.left_ms_of_request()
    assert 0 < min(left) <= max(left) <= RETENTION_MS


async def test_discard_removes_all_request_keys(ledger: RedisLedger, keys: Keys) -> None:
    await run(ledger)
    await release(ledger)
    await ledger.discard("r", "gateway")
    assert await keys.names() == ALWAYS


async def test_long_prompt_is_deleted_in_several_steps(ledger: RedisLedger, keys: Keys) -> None:
    prompt_ids = tuple(range(600 * CHUNK_SIZE))
    await ledger.open(make_request("r", prompt_ids=prompt_ids, session_id="s"), "gateway")
    await keys.drop(*OF_REQUEST, "owned:gateway", "owners")
    await keys.expire("r")
    left = []
    for _ in range(4):
        await ledger.orphans(1)
        left.append(len([name for name in await keys.names() if name.startswith("c:")]))
    # The first call deletes twice as many, because garbage is then deleted, too.
    assert left == [88, 0, 0, 0]
    assert await keys.names() == set()


async def test_garbage_that_a_prompt_refers_to_is_kept(ledger: RedisLedger, keys: Keys) -> None:
    first = make_request("r", prompt_ids=tuple(range(600 * CHUNK_SIZE)))
    # The deletion of the first prompt's chunks stops at the last chunk of this prompt.
    second = make_request("s", prompt_ids=first.prompt_ids[: 88 * CHUNK_SIZE])
    await ledger.open(first, "gateway")
    await keys.drop("r:r")
    await keys.expire("r")
    await ledger.orphans(1)
    await ledger.open(second, "gateway")
    await ledger.orphans(1)
    assert (await ledger.read("s")).request == second
    await ledger.discard("s", "gateway")
    assert not [name for name in await keys.names() if name.startswith("c:")]


async def test_erase_leaves_only_expiring_markers(ledger: RedisLedger, keys: Keys) -> None:
    await run(ledger)
    await cancel(ledger)
    await ledger.erase("r")
    (call, call_left), *graves = sorted((await keys.left_ms()).items())
    assert call.startswith("f:")
    assert 0 < call_left <= 2000 * TIMEOUT_S
    assert [name[:2] for name, _ in graves] == ["g:", "h:"]
    for grave, grave_left in graves:
        assert "r" not in grave
        assert 0 < grave_left <= RETENTION_MS


async def test_owner_is_removed_with_its_last_request(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.open(make_request("other"), "gateway")
    await run(ledger)
    await take_over(ledger)
    assert await keys.members("owners") == {"gateway", "successor"}
    await cancel(ledger)
    assert await keys.members("owners") == {"gateway"}
    assert await keys.members("owned:gateway") == {"other"}


# listings


async def test_tenant_request_is_in_both_listings(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.open(make_request("r"), "gateway")
    await ledger.open(make_request("acme/r"), "gateway")
    assert await keys.listed("arrivals") == ["r", "acme/r"]
    assert await keys.listed("arrivals:acme") == ["acme/r"]


async def test_expired_requests_leave_listings_on_later_opens(
    ledger: RedisLedger, keys: Keys
) -> None:
    names = [f"t/r{number}" for number in range(12)]
    for name in names:
        await ledger.open(make_request(name), "gateway")
    await keys.expire(*names[2:10])
    for number in range(4):
        await ledger.open(make_request(f"t/new{number}"), "gateway")
    left = [*names[:2], *names[10:], *(f"t/new{number}" for number in range(4))]
    assert await keys.listed("arrivals") == await keys.listed("arrivals:t") == left


async def test_expired_requests_leave_listings_on_orphan_scans(
    ledger: RedisLedger, keys: Keys
) -> None:
    names = [f"t/r{number}" for number in range(100)]
    for name in names:
        await ledger.open(make_request(name), "gateway")
    await keys.expire(*names[1:])
    for _ in range(2):
        await ledger.orphans(10)
    assert await keys.listed("arrivals") == await keys.listed("arrivals:t") == names[:1]


async def test_listing_removes_expired_requests_it_meets(ledger: RedisLedger, keys: Keys) -> None:
    for name in ("t/a", "t/b"):
        await ledger.open(make_request(name), "gateway")
    await keys.drop("r:t/a")
    assert len((await ledger.list_requests("t")).entries) == 1
    assert await keys.listed("arrivals") == await keys.listed("arrivals:t") == ["t/b"]


# leaders


async def test_slow_leader_cannot_overwrite_term_of_successor(
    ledger: RedisLedger,
) -> None:
    await ledger.open(make_request(), "gateway")
    assert await ledger.lead("router", "address", TERM, AGES_S)
    assert await ledger._shards.run(scripts.FENCE, 0, TERM + 1, 1) == 0
    with pytest.raises(StaleTerm):
        await ledger.dispatch("r", "worker", EPOCH, TERM + 1)
    assert (await ledger.dispatch("r", "worker", EPOCH, TERM)).state is State.RUNNING


async def test_leader_with_expired_lease_is_not_reported(ledger: RedisLedger, keys: Keys) -> None:
    assert await ledger.lead("router", "address", TERM, AGES_S)
    assert (await ledger.heartbeat("gateway", "address", AGES_S)).term == TERM
    await keys.put("leader", "ends", 1)
    assert (await ledger.heartbeat("gateway", "address", AGES_S)).term == 0


async def test_term_advances_after_clock_moved_backwards(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.open(make_request(), "gateway")
    assert await ledger.lead("router", "address", TERM, AGES_S)
    for name in ("leader", "term"):
        await keys.put(name, "since", 2**52)
    await ledger.resign(TERM)
    assert await ledger.lead("other", "address", TERM + 1, AGES_S)
    assert (await ledger.dispatch("r", "worker", EPOCH, TERM + 1)).state is State.RUNNING


# cleanup after expired requests and objects


async def test_orphan_scan_removes_expired_request_from_owner(
    ledger: RedisLedger, keys: Keys
) -> None:
    await run(ledger)
    await keys.drop(*OF_REQUEST)
    await keys.expire("r")
    assert await keys.members("owned:gateway") == {"r"}
    assert await keys.listed("arrivals") == ["r"]
    assert await ledger.orphans(10) == []
    assert await keys.names() == ALWAYS


async def test_worker_removal_is_recorded_as_a_change(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.put_worker(WorkerInfo(worker_id="w", address="127.0.0.1:1"))
    left = {"workers_version", "last_workers"}
    assert await keys.names() == {"workers", "worker_addresses", *left}
    await ledger.drop_worker("w")
    assert await keys.names() == left


async def test_tenant_keys_expire_when_buckets_are_full(ledger: RedisLedger, keys: Keys) -> None:
    limits = {"requests_per_minute": 1, "tokens_per_minute": 10, "max_concurrent": 1}
    await ledger.charge(Charge("acme/r", 1, 9, **limits), 30.0)
    left = await keys.left_ms()
    assert left.keys() == {"slots:acme", "charges:acme", "buckets:acme"}
    assert 0 < min(left.values()) <= max(left.values()) <= 61_000
    await ledger.renew_charges(["acme/r"], 100.0)
    left = await keys.left_ms()
    assert min(left["slots:acme"], left["charges:acme"]) > 61_000
    await ledger.settle_charges([Settlement("acme/r", 9)])
    assert await keys.names() == {"buckets:acme"}


async def test_bucket_key_is_kept_until_refilled(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.charge(Charge("acme/a", 0, 30, tokens_per_minute=10), 1.0)
    await ledger.charge(Charge("acme/b", 0, 1, requests_per_minute=10), 1.0)
    assert (await keys.left_ms())["buckets:acme"] > 120_000


async def test_bucket_is_capped_at_one_minute_of_tokens(ledger: RedisLedger, keys: Keys) -> None:
    await keys.put("buckets:acme", "tokens", 1)
    assert await ledger.charge(Charge("acme/a", 0, 10, tokens_per_minute=10), 1.0)
    with pytest.raises(RateLimited):
        await ledger.charge(Charge("acme/b", 0, 1, tokens_per_minute=10), 1.0)


async def test_expired_slot_is_removed_by_next_charge(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.charge(Charge("acme/a", 0, 1, max_concurrent=1), 0.01)

    async def is_free() -> bool:
        try:
            return await ledger.charge(Charge("acme/b", 0, 1, max_concurrent=1), AGES_S)
        except RateLimited:
            return False

    await eventually(is_free)
    assert await keys.fields_of("slots:acme", "charges:acme") == {"acme/b"}


def thing(object_id: str) -> str:
    return object_name("t", "things", object_id)


THING = thing("a")
THINGS = tuple(f"{number:02}" for number in range(20))


async def test_object_keys_expire_or_are_removed(ledger: RedisLedger, keys: Keys) -> None:
    version = await ledger.put_object(THING, b"one", 0)
    await ledger.put_object(THING, b"two", version)
    left = await keys.left_ms()
    markers = {name for name in left if name.startswith("f:")}
    assert len(markers) == 2 and all(0 < left[name] <= 60_000 for name in markers)
    assert 0 < left[f"o:{THING}"] <= RETENTION_MS
    assert left.keys() - markers == {f"o:{THING}", "objects:t/things", "object_expiries"}
    await ledger.delete_object(THING)
    left = await keys.left_ms()
    assert all(name.startswith("f:") and ms > 0 for name, ms in left.items())


async def test_expired_objects_are_swept(ledger: RedisLedger, keys: Keys) -> None:
    for object_id in THINGS:
        await ledger.put_object(thing(object_id), b"", 0)
    await keys.expire_objects(*map(thing, THINGS[:-1]))
    await ledger.put_object(thing("new"), b"", 0)
    assert len(await keys.listed("objects:t/things")) == len(THINGS) - 1
    await ledger.orphans(1)
    assert await keys.listed("objects:t/things") == [thing(THINGS[-1]), thing("new")]
    assert await ledger.list_objects("things", "t") == (thing("new"), thing(THINGS[-1]))


async def test_put_again_before_sweep_is_not_swept(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.put_object(THING, b"", 0)
    await keys.expire_objects(THING)
    await ledger.put_object(THING, b"", 0)
    await ledger.orphans(1)
    assert await ledger.list_objects("things", "t") == (THING,)


async def test_put_sweeps_two_expired_objects(ledger: RedisLedger, keys: Keys) -> None:
    for object_id in THINGS:
        await ledger.put_object(thing(object_id), b"", 0)
    await keys.expire_objects(*map(thing, THINGS))
    await ledger.put_object(thing("new"), b"", 0)
    assert len(await keys.listed("objects:t/things")) == len(THINGS) - 1


async def test_listing_removes_expired_objects(ledger: RedisLedger, keys: Keys) -> None:
    for object_id in THINGS:
        await ledger.put_object(thing(object_id), b"", 0)
    await keys.expire_objects(*map(thing, THINGS[1:]))
    assert await ledger.list_objects("things", "t", limit=1) == (thing(THINGS[0]),)
    assert await keys.listed("objects:t/things") == [thing(THINGS[0])]


async def test_objects_that_remain_are_not_swept(ledger: RedisLedger, keys: Keys) -> None:
    await ledger.put_object(THING, b"", 0)
    # As if the listing's clock were ahead of the clock by which the object's key expires.
    await keys.make_objects_due(THING)
    await ledger.orphans(1)
    assert await ledger.list_objects("things", "t") == (THING,)
