"""The ledger while its server, or the connection to it, fails."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from everlift.errors import LedgerFull, LedgerUnavailable, UnknownRequest
from everlift.messages import FinishReason
from everlift.v1.session_pb2 import ClusterLoad, WorkerInfo
from router.event_loop import first_answer
from router.ledger.base import StaleTerm
from router.ledger.config import LedgerConfig, LedgerSetupError
from router.ledger.embedded.embedded import EmbeddedLedger
from router.ledger.entry import Append, Appended, Reasserted, State
from router.ledger.redis import scripts
from router.ledger.redis.redis_ledger import RedisLedger, connect
from router.ledger.redis.server import SCHEMA
from router.ledger.redis.shards import Shards
from tests.support.ledger.ledgers import (
    connected,
    make_request,
    redis_server,
    tokens_of,
    unbury,
    valkey_server,
    written,
)

TERM = 1
EPOCH = 2**64 - 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedLedger]:
    server = EmbeddedLedger()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


class LossyWay:
    """Unix socket proxy that drops the next reply and its connection, or all replies."""

    def __init__(self, socket: str) -> None:
        self._server_socket = socket
        self.lose_next = False
        self.lost = 0
        #: open connections
        self.open: set[asyncio.Task[None] | None] = set()
        #: open connections that drop all replies
        self.dead: set[asyncio.Task[None] | None] = set()

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.open.add(asyncio.current_task())
        answers, server = await asyncio.open_unix_connection(self._server_socket)
        there = asyncio.create_task(self._carry(client, server))
        try:
            while data := await answers.read(1 << 16):
                if asyncio.current_task() in self.dead:
                    continue
                if self.lose_next:
                    self.lose_next, self.lost = False, self.lost + 1
                    break
                back.write(data)
        finally:
            there.cancel()
            server.close()
            back.close()
            self.open.discard(asyncio.current_task())

    async def _carry(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            to.write(data)
        to.close()


@asynccontextmanager
async def lossy_way(
    url: str, directory: Path, **settings: object
) -> AsyncIterator[tuple[LossyWay, RedisLedger]]:
    way = LossyWay(url.removeprefix("unix://"))
    socket = directory / "lossy"
    async with await asyncio.start_unix_server(way.serve, socket):
        async with connected(f"unix://{socket}", **settings) as ledger:
            yield way, ledger
        while way.open:
            await asyncio.sleep(0.001)


async def test_moves_with_lost_replies_take_effect_exactly_once(
    redis_url: str, tmp_path: Path
) -> None:
    async with lossy_way(redis_url, tmp_path) as (way, ledger):
        # The first pass loads the scripts: from then on the lost reply is that of the call itself.
        for request_id in ("warm", "r"):
            losing = request_id == "r"
            await check_a_life(way, ledger, request_id, losing)
            assert way.lost == (10 if losing else 0)


async def check_a_life(way: LossyWay, ledger: RedisLedger, request_id: str, losing: bool) -> None:
    way.lose_next = losing
    assert (await ledger.open(make_request(request_id), "gateway")).created
    way.lose_next = losing
    assert await ledger.lead("router", "address", TERM, 60.0)
    way.lose_next = losing
    entry = await ledger.dispatch(request_id, "worker", 5, TERM)
    assert (entry.epoch, entry.attempts) == (5, 1)
    way.lose_next = losing
    entry = await ledger.release(request_id, 5, loss="why", max_losses=2)
    assert (entry.state, entry.losses) == (State.QUEUED, 1)
    await ledger.dispatch(request_id, "worker", 6, TERM)
    way.lose_next = losing
    taken = (await ledger.take_over(request_id, "successor", "gateway")).entry
    assert (taken.state, taken.gateway) == (State.QUEUED, "successor")
    await ledger.dispatch(request_id, "worker", EPOCH, TERM)
    way.lose_next = losing
    assert await ledger.append([Append(request_id, EPOCH, 0, (1, 2))]) == [Appended.OK]
    way.lose_next = losing
    last = Append(request_id, EPOCH, 2, (3,), finish_reason=FinishReason.STOP)
    assert await ledger.append([last]) == [Appended.FINISHED]
    way.lose_next = losing
    snapshot = await ledger.read(request_id)
    assert snapshot.choices[0].tokens == (1, 2, 3)
    way.lose_next = losing
    assert await ledger.erase(request_id) is None
    await unbury(ledger, snapshot.entry)
    way.lose_next = losing
    assert await ledger.reassert(snapshot) == (Reasserted.OK, snapshot.entry)


async def test_hedged_lead_does_not_wait_for_a_dead_connection(
    redis_url: str, tmp_path: Path
) -> None:
    # The connection itself times out after 30 s.
    async with lossy_way(redis_url, tmp_path, timeout=60.0) as (way, ledger):

        def lead() -> Coroutine[Any, Any, bool]:
            return ledger.lead("router", "address", TERM, 60.0)

        assert await lead()
        await ledger.open(make_request(), "gateway")
        way.dead = set(way.open)
        async with asyncio.timeout(20.0):
            assert await first_answer(lead, 0.05)


@pytest.mark.parametrize("owner", ["first successor", "successor"])
async def test_retried_takeover_preserves_intermediate_dispatch(
    redis_url: str, tmp_path: Path, owner: str
) -> None:
    """The dispatch comes between the first attempt, whose reply is lost, and its retry."""
    async with lossy_way(redis_url, tmp_path) as (way, ledger):
        await ledger.lead("router", "address", TERM, 60.0)
        await ledger.open(make_request(), "dead")
        await ledger.take_over("r", owner, "dead")
        way.lose_next = True
        taking = asyncio.create_task(ledger.take_over("r", "successor", owner))
        while not way.lost:
            await asyncio.sleep(0)
        # The first attempt has been made; the second one waits for the backoff or is in flight.
        entry = await ledger.dispatch("r", "worker", EPOCH, TERM)
        assert entry.gateway == "successor"
        assert (await taking).entry.state in (State.QUEUED, State.RUNNING)
        assert (await ledger.get("r")).epoch == EPOCH


async def test_ledger_reconnects_and_reloads_scripts_after_restart(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    url = server.start(tmp_path)
    async with connected(url) as ledger:
        await ledger.open(make_request(), "gateway")
        await written(url)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        asking = asyncio.create_task(ledger.get("r"))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start, tmp_path)
        assert (await asking).state is State.QUEUED
        assert not (await ledger.open(make_request(), "gateway")).created


async def test_ledger_reloads_flushed_scripts(redis_url: str) -> None:
    async with connected(redis_url, shards=3) as ledger:
        await ledger.lead("router", "address", TERM, 60.0)
        ids = [f"r{n}" for n in range(10)]
        for n, request_id in enumerate(ids):
            await ledger.open(make_request(request_id), "gateway")
            await ledger.dispatch(request_id, "worker", n + 1, TERM)
        with Redis.from_url(redis_url) as client:
            client.script_flush()
        appends = [Append(request_id, n + 1, 0, (n,)) for n, request_id in enumerate(ids)]
        assert await ledger.append(appends) == [Appended.OK] * 10


async def test_ledger_stopped_server_raises_unavailable_in_time(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    async with connected(server.start(tmp_path), timeout=3.0) as ledger:
        server.stop()
        start = time.monotonic()
        with pytest.raises(LedgerUnavailable, match="get: ") as error:
            await ledger.get("r")
        assert time.monotonic() - start < 20.0
        assert error.value.__cause__ is not None


async def test_ledger_frozen_server_times_out_and_recovers(
    server: EmbeddedLedger, tmp_path: Path
) -> None:
    async with connected(server.start(tmp_path), timeout=4.0) as ledger:
        await ledger.lead("router", "address", TERM, 60.0)
        await ledger.open(make_request(), "gateway")
        await ledger.dispatch("r", "worker", EPOCH, TERM)
        items = [[Append("r", EPOCH, n, (n,))] for n in range(4)]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            answers = await asyncio.gather(*map(ledger.append, items), return_exceptions=True)
            assert time.monotonic() - start < 20.0
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert {type(answer) for answer in answers} == {LedgerUnavailable}
        # Some may have been applied nevertheless; repeated in order, all of them are accepted.
        for item in items:
            assert await ledger.append(item) == [Appended.OK]
        assert await tokens_of(ledger, "r") == (0, 1, 2, 3)


async def test_ledger_cancelled_call_leaves_no_stray_reply(redis_url: str) -> None:
    async with connected(redis_url) as ledger:
        for request_id in ("a", "b"):
            await ledger.open(make_request(request_id), "gateway")
        for _ in range(20):
            asking = asyncio.create_task(ledger.get("a"))
            for _ in range(secrets.randbelow(6)):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert (await ledger.read("b")).request.request_id == "b"


async def test_full_ledger_rejects_growth_and_allows_release(redis_url: str) -> None:
    async with connected(redis_url) as ledger:
        await ledger.lead("router", "address", TERM, 60.0)
        for request_id in ("queued", "running", "failing", "moving"):
            await ledger.open(make_request(request_id), "gateway")
        for request_id in ("running", "failing", "moving"):
            await ledger.dispatch(request_id, "worker", EPOCH, TERM)
        with full(redis_url):
            with pytest.raises(LedgerFull) as error:
                await ledger.open(make_request("new"), "gateway")
            assert error.value.retry_after_s == 1.0
            with pytest.raises(LedgerUnavailable, match="append: OutOfMemoryError"):
                await ledger.append([Append("running", EPOCH, 0, (1,))])
            entry = await ledger.release("running", EPOCH, loss="why", max_losses=2)
            assert (entry.state, entry.losses) == (State.QUEUED, 1)
            entry = await ledger.release("failing", EPOCH, loss="why", max_losses=1)
            assert entry.state is State.FAILED
            stored = await ledger.take_over("moving", "successor", "gateway")
            assert (stored.entry.state, stored.entry.gateway) == (State.QUEUED, "successor")
            for request_id in ("queued", "running", "moving"):
                entry = await ledger.end_request(request_id, State.CANCELLED, "cancelled", "")
                assert entry.state is State.CANCELLED
            snapshot = await ledger.read("queued")
            assert await ledger.erase("queued") is None
            await unbury(ledger, snapshot.entry)
            with pytest.raises(LedgerUnavailable, match="reassert: OutOfMemoryError"):
                await ledger.reassert(snapshot)
            with pytest.raises(UnknownRequest):
                await ledger.get("queued")
        assert (await ledger.open(make_request("new"), "gateway")).created


async def test_full_ledger_accepts_heartbeats_and_leadership(redis_url: str) -> None:
    """Otherwise no router would be ready, and no request could be read."""
    async with connected(redis_url) as ledger:
        assert await ledger.lead("router", "address", TERM, 60.0)
        await ledger.heartbeat("gateway", "address", 60.0)
        with full(redis_url):
            assert await ledger.lead("router", "address", TERM, 60.0, is_new=False)
            membership = await ledger.heartbeat("gateway", "address", 60.0)
            assert (membership.leader, membership.unfit) == ("router", "")
            assert membership.memory_used > 1.0
            await ledger.put_load(ClusterLoad(term=TERM, queued=3))
            report = await ledger.load()
            assert report is not None and report.load.queued == 3
            await ledger.renew_charges(["tenant/r"], 60.0)
            await ledger.resign(TERM)
            assert await ledger.lead("other", "address", TERM + 1, 60.0)
            await ledger.end_lease("gateway")
            assert await ledger.gateways() == {}
            another = await connect(ledger._config)
            assert await another.cluster_id() == await ledger.cluster_id()
            await another.close()


@contextmanager
def full(url: str) -> Iterator[None]:
    with Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


async def test_full_ledger_rejects_open_after_expired_record(redis_url: str) -> None:
    async with connected(redis_url) as ledger:
        await ledger.open(make_request("expired"), "gateway")
        await ledger.open(make_request("kept"), "gateway")
        with Redis.from_url(redis_url) as client:
            client.delete(ledger._shards.key("r:expired"))
        with full(redis_url), pytest.raises(LedgerFull):
            await ledger.open(make_request("new"), "gateway")
        page = await ledger.list_requests("")
        assert [entry.request_id for entry in page.entries] == ["kept"]


async def test_ledger_errors_contain_no_password(redis_url: str) -> None:
    url = redis_url.replace("unix://", "unix://user:hunter2@")
    with pytest.raises(LedgerSetupError) as error:
        await connect(LedgerConfig(url=url))
    assert str(error.value) == "the ledger's server refuses the user or password"
    cause: BaseException | None = error.value
    while cause is not None:
        assert "hunter2" not in f"{cause!r} {cause}"
        cause = cause.__cause__ or cause.__context__


async def test_ledger_rejects_server_with_eviction_policy() -> None:
    with (
        redis_server("--maxmemory-policy", "allkeys-lru") as url,
        pytest.raises(LedgerSetupError, match="allkeys-lru"),
    ):
        await connect(url)


async def test_ledger_rejects_different_shards_or_schema(redis_url: str) -> None:
    config = LedgerConfig(url=redis_url, key_prefix="layout", shards=2)
    ledger = await connect(config)
    cluster_id = await ledger.cluster_id()
    await ledger.close()
    with pytest.raises(LedgerSetupError, match="2 shards, not 1"):
        await connect(LedgerConfig(url=redis_url, key_prefix="layout"))
    with Redis.from_url(redis_url) as client:
        client.hset("layout:layout", "schema", 99)
        with pytest.raises(LedgerSetupError, match="schema 99"):
            await connect(config)
        client.hset("layout:layout", "schema", SCHEMA)
    again = await connect(config)
    assert await again.cluster_id() == cluster_id
    await again.close()


async def test_flushed_ledger_keeps_cluster_id(redis_url: str) -> None:
    """A worker refuses a router with another cluster id."""
    config = LedgerConfig(url=redis_url, key_prefix="flushed", shards=2)
    async with connected(redis_url, key_prefix="flushed", shards=2) as ledger:
        with Redis.from_url(redis_url) as client:
            client.flushall()
        await ledger.heartbeat("gateway", "address", 60.0)
        next_one = await connect(config)
        assert await next_one.cluster_id() == await ledger.cluster_id()
        await next_one.close()
        with pytest.raises(LedgerSetupError, match="2 shards, not 1"):
            await connect(LedgerConfig(url=redis_url, key_prefix="flushed"))


async def test_ledger_prefixes_isolate_clusters_on_one_server(redis_url: str) -> None:
    async with connected(redis_url) as one, connected(redis_url) as other:
        await one.open(make_request(), "gateway")
        assert (await other.open(make_request(body=b"other"), "gateway")).created
        assert await one.cluster_id() != await other.cluster_id()


async def test_fence_of_older_leader_arriving_late_is_ignored(redis_url: str) -> None:
    config = LedgerConfig(url=redis_url, key_prefix="late", shards=2)
    ledger, shards = await connect(config), Shards(config)
    newest = await shards.run(scripts.LEAD, 0, "new", "address", 2, 60_000_000)
    assert await ledger.lead("new", "address", 2, 60.0)
    for shard in range(2):
        assert not await shards.run(scripts.FENCE, shard, 1, int(newest) - 1)
    for n in range(8):
        await ledger.open(make_request(f"r{n}"), "gateway")
        with pytest.raises(StaleTerm):
            await ledger.dispatch(f"r{n}", "worker", n + 1, 1)
        assert (await ledger.dispatch(f"r{n}", "worker", n + 1, 2)).state is State.RUNNING
    await shards.close()
    await ledger.close()


async def test_expired_request_is_removed_from_orphans(redis_url: str) -> None:
    async with connected(redis_url, key_prefix="expired") as ledger:
        for request_id in ("expired", "kept"):
            await ledger.open(make_request(request_id), "dead")
        with Redis.from_url(redis_url) as client:
            assert (
                client.delete(
                    f"expired:{SCHEMA}:{{0}}:r:expired", f"expired:{SCHEMA}:{{0}}:t:expired:0"
                )
                == 2
            )
            assert await ledger.orphans(10) == ["kept"]
            assert client.smembers(f"expired:{SCHEMA}:{{0}}:owned:dead") == {b"kept"}
            assert client.pttl(f"expired:{SCHEMA}:{{0}}:r:kept") > 7 * 24 * 3600 * 1000


async def test_dropped_worker_leaves_no_address(redis_url: str) -> None:
    async with connected(redis_url, key_prefix="gone") as ledger:
        for worker_id, address in (("replaced", "h:1"), ("kept", "h:1"), ("dropped", "h:2")):
            await ledger.put_worker(WorkerInfo(worker_id=worker_id, address=address))
        await ledger.drop_worker("dropped")
        with Redis.from_url(redis_url) as client:
            assert client.hgetall(f"gone:{SCHEMA}:{{0}}:worker_addresses") == {b"kept": b"h:1"}


async def test_embedded_ledger_connects_by_url_only() -> None:
    with pytest.raises(ValueError, match="embedded"):
        await connect(LedgerConfig())
    with valkey_server() as url:
        ledger = await connect(url)
        await ledger.close()
