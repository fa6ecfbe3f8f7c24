"""The audit of a ledger in Valkey: it lists all records and reports damaged ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from cluster.chaos.check import check
from cluster.chaos.checker import Finding, Kind
from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.ledger.entry import Append, Event, State
from router.ledger.listing import Audited, Claim, Item
from router.ledger.redis.connections import Command
from router.ledger.redis.redis_ledger import RedisLedger
from tests.support.ledger.ledgers import connected, make_request, scored, valkey_server

TERM = 7
LEASE_S = 600.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey_server() as url:
        yield url


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[RedisLedger]:
    """Ledger with three shards and a glob pattern as prefix; a has ended, b runs, c is queued."""
    async with connected(url, shards=3, key_prefix="audit[x]*") as ledger:
        await ledger.heartbeat("g", "g:1", LEASE_S)
        await ledger.lead("g", "g:1", TERM, LEASE_S)
        await ledger.put_worker(session_pb2.WorkerInfo(worker_id="w", address="w:1"))
        for name in "abc":
            await ledger.open(make_request(name, n=2, logprobs=0), "g")
        for name in "ab":
            await ledger.dispatch(name, "w", 9, TERM)
        appends = [
            Append("a", 9, 0, (1, 2), choice, FinishReason.STOP, scored(0.5, 1.5))
            for choice in range(2)
        ]
        await ledger.append([*appends, Append("b", 9, 0, (3,), logprobs=scored(0.5))])
        yield ledger
        await wipe(ledger)


async def command(ledger: RedisLedger, request_id: str, *arguments: str) -> object:
    """Run a command on a request's shard; ``{}`` in ``arguments`` is the root of the shard."""
    shards = ledger._shards
    root = shards.key("", shards.of(request_id))
    filled = tuple(argument.replace("{}", root) for argument in arguments)
    [answer] = await shards.run_commands("test", Command(root, filled))
    return answer


async def wipe(ledger: RedisLedger) -> None:
    async for keys in ledger.audit()._keys():
        for key in keys:
            await ledger._shards.run_commands("test", Command(key, ("DEL", key)))


async def everything(ledger: RedisLedger) -> list[Item]:
    return [item async for item in ledger.audit().items()]


async def findings(ledger: RedisLedger) -> set[Finding]:
    return set((await check(ledger, timeout_s=0.0)).findings)


async def test_audit_of_sound_ledger_finds_nothing(ledger: RedisLedger) -> None:
    items = await everything(ledger)
    audited = sorted(
        (item for item in items if isinstance(item, Audited)), key=lambda it: it.request_id
    )
    assert [item.entry for item in audited] == [await ledger.get(name) for name in "abc"]
    assert [item.owned for item in audited] == [False, True, True]
    assert [item.finished_by for item in audited] == [9, 0, 0]
    claims = {item for item in items if isinstance(item, Claim)}
    assert claims == {Claim("b", "g", State.RUNNING, "g"), Claim("c", "g", State.QUEUED, "g")}
    assert len(items) == 5
    assert audited[0].events == await ledger.events("a")
    assert [event.move for event in audited[0].events] == ["open", "dispatch", "finish"]
    result = await check(ledger)
    assert (result.tokens, result.findings) == (5, ())
    assert result.states == {State.FINISHED: 1, State.RUNNING: 1, State.QUEUED: 1}


async def test_audit_reports_orphaned_keys_of_deleted_record(
    ledger: RedisLedger,
) -> None:
    await command(ledger, "b", "DEL", "{}r:b")
    orphaned = ("t:b:0", "t:b:1", "l:b:0", "l:b:1", "p:b", "e:b")
    assert await findings(ledger) == {
        Finding(Kind.LOST, "b", "gateway g owns it, but there is no such request"),
        *(Finding(Kind.ORPHANED, "b", f"{key} has no request") for key in orphaned),
    }


async def test_audit_reports_keys_without_expiry(ledger: RedisLedger) -> None:
    shards = ledger._shards
    tokens, record = shards.key("t:a:1", shards.of("a")), shards.key("r:c", shards.of("c"))
    # Rewritten keys have no expiry.
    [kept] = await shards.run_commands("test", Command(tokens, ("GET", tokens)))
    await shards.run_commands("test", Command(tokens, ("SET", tokens, kept)))
    [fields] = await shards.run_commands("test", Command(record, ("HGETALL", record)))
    pairs = fields.items() if isinstance(fields, dict) else zip(*[iter(fields)] * 2, strict=True)
    rewritten = ("HSET", record, *(part for pair in pairs for part in pair))
    for arguments in (("DEL", record), rewritten):
        await shards.run_commands("test", Command(record, arguments))
    assert await findings(ledger) == {
        Finding(Kind.IMMORTAL, "a", "t:a:1 of a finished request never expires"),
        Finding(Kind.IMMORTAL, "c", "r:c of a queued request never expires"),
    }


async def test_audit_reports_missing_tokens(ledger: RedisLedger) -> None:
    await command(ledger, "b", "DEL", "{}t:b:0")
    assert await findings(ledger) == {Finding(Kind.LOST, "b", "its key t:b:0 is missing")}


async def test_audit_reports_request_without_owner(ledger: RedisLedger) -> None:
    await command(ledger, "c", "SREM", "{}owned:g", "c")
    assert await findings(ledger) == {Finding(Kind.LOST, "c", "gateway g does not own it")}


async def test_audit_reports_request_on_missing_worker(ledger: RedisLedger) -> None:
    await ledger.drop_worker("w")
    assert await findings(ledger) == {Finding(Kind.LOST, "b", "it runs on worker w, which is gone")}


async def test_audit_reports_forged_event(ledger: RedisLedger) -> None:
    await command(ledger, "b", "RPUSH", "{}e:b", "1 dispatch v")
    assert Event(1e-6, "dispatch", "v") in await ledger.events("b")
    assert await findings(ledger) == {
        Finding(Kind.REPEATED, "b", "dispatch of a request that was running")
    }


async def test_audit_reports_request_not_listed_at_arrival(ledger: RedisLedger) -> None:
    await ledger.open(make_request("t/r"), "g")
    await ledger.open(make_request("t/s"), "g")
    await command(ledger, "c", "ZREM", "{}arrivals", "c")
    await command(ledger, "t/r", "ZREM", "{}arrivals:t", "t/r")
    await command(ledger, "t/s", "ZADD", "{}arrivals:t", "5", "t/s")
    assert await findings(ledger) == {
        Finding(
            Kind.MISLISTED, name, "a listing lacks it, or has it at another time than its arrival"
        )
        for name in ("c", "t/r", "t/s")
    }


async def test_audit_reports_stale_tenant_listing(ledger: RedisLedger) -> None:
    await command(ledger, "t/gone", "ZADD", "{}arrivals:t", "5", "t/gone")
    # The sweep removes t/expired from both listings; u/r does not belong to tenant t.
    await command(ledger, "t/expired", "ZADD", "{}arrivals:t", "5", "t/expired")
    await command(ledger, "t/expired", "ZADD", "{}arrivals", "5", "t/expired")
    await command(ledger, "u/r", "ZADD", "{}arrivals:t", "5", "u/r")
    await command(ledger, "u/r", "ZADD", "{}arrivals", "5", "u/r")
    assert await findings(ledger) == {
        Finding(
            Kind.MISLISTED,
            name,
            "the listing of tenant t has it, but the listing of all requests does not",
        )
        for name in ("t/gone", "u/r")
    }


async def test_audit_leaves_ledger_unchanged(ledger: RedisLedger) -> None:
    before = [await ledger.read(name) for name in "abc"]
    await check(ledger)
    after = [await ledger.read(name) for name in "abc"]
    assert [(it.entry, it.choices) for it in after] == [(it.entry, it.choices) for it in before]
