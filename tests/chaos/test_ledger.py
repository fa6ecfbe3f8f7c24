"""Faults of the ledger's server under load: crash, rollback, freeze, full memory or disk."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from cluster.errors import ClusterFailed
from everlift.client.client import AsyncClient
from everlift.errors import DataLoss, EverliftError, LedgerFull
from everlift.v1 import inference_pb2 as pb
from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from tests.chaos.support import Cluster, Load, config, paused, report, running, until
from tests.support.ledger.ledgers import redis_server
from tests.support.router import retrying
from tests.support.router.proxy import Proxy, proxy
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

#: Slow enough for faults before the last token.
SLOW = FakeModel(step_time=0.01)


class Server:
    """Valkey server that a test can kill and restart, also with an earlier copy of its data."""

    def __init__(self, home: Path, settings: LedgerConfig | None = None) -> None:
        self._home = home
        self._server = EmbeddedLedger(settings or LedgerConfig())
        self.url = self._server.start(home)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def config(self) -> LedgerConfig:
        return LedgerConfig(url=self.url)

    @property
    def _data(self) -> Path:
        return self._home / "ledger" / "appendonlydir"

    def copy(self) -> Path:
        """Copy the server's current files; return the directory of the copy."""
        return Path(shutil.copytree(self._data, self._home / f"copy-{time.monotonic_ns()}"))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._server.stop()

    def start(self, data: Path | None = None) -> None:
        if data is not None:
            shutil.rmtree(self._data)
            shutil.copytree(data, self._data)
        self._server.start(self._home)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


async def check_all(cluster: Cluster, load: Load) -> None:
    """Check that the clients' outputs are right, and that the ledger has them too."""
    load.check()
    async with retrying.client(cluster.addresses) as client:
        for stream in load.streams:
            known = await client.get_request(stream.request_id)
            assert known.state == pb.REQUEST_STATE_FINISHED
            assert known.output_tokens == stream.count
    await cluster.idle()


async def test_streams_continue_while_killed_ledger_restarts(
    server: Server, tmp_path: Path
) -> None:
    settings = config(tmp_path, routers=2, fake=SLOW, ledger=server.config)
    async with running(settings) as cluster:
        # The streams run for 4 s, which is longer than stalls of this process.
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=400) as load:
            await load.until(40)
            since = time.time()
            server.kill()
            await until(lambda: any(stream.unledgered for stream in load.streams))
            await asyncio.to_thread(server.start)
            await load.finish()
        await check_all(cluster, load)
        report("ledger killed", cluster, load, since)


@pytest.mark.long
async def test_strict_streams_pause_until_ledger_returns(server: Server, tmp_path: Path) -> None:
    settings = config(
        tmp_path, fake=SLOW, ledger=server.config, router={"on_ledger_loss": "strict"}
    )
    async with running(settings) as cluster:
        async with Load(cluster.addresses, 12, fake=SLOW, plain=True) as load:
            await load.until(40)
            server.kill()
            paused_at = await quiet(load)
            await asyncio.to_thread(server.start)
            await load.finish()
            assert sum(paused_at) < 12 * load.streams[0].count
        await check_all(cluster, load)
        assert not any(stream.unledgered for stream in load.streams)


async def quiet(load: Load) -> list[int]:
    """Wait until no token has arrived for a second; return the number of tokens of each stream."""
    while True:
        before = [len(stream.tokens) for stream in load.streams]
        await asyncio.sleep(1)
        if before == [len(stream.tokens) for stream in load.streams]:
            return before


@pytest.mark.long
async def test_rolled_back_ledger_is_reasserted_by_routers(server: Server, tmp_path: Path) -> None:
    """The ledger restarts without the newest requests, ends, dispatches and tokens.

    None of these is lost or generated again.
    """
    settings = config(tmp_path, routers=2, fake=SLOW, ledger=server.config)
    async with running(settings) as cluster:
        addresses = cluster.addresses
        async with Load(addresses, 16, seed=1, fake=SLOW, max_tokens=400, plain=True) as old:
            await old.until(40)
            earlier = server.copy()
            async with (
                Load(addresses, 8, seed=2, fake=SLOW, max_tokens=10, plain=True) as done,
                Load(addresses, 8, seed=3, fake=SLOW, max_tokens=250, plain=True) as new,
            ):
                await done.finish()
                await new.until(30, part=1.0)
                since = time.time()
                server.kill()
                await asyncio.to_thread(server.start, earlier)
                await old.finish()
                await new.finish()
        for load in (old, done, new):
            await check_all(cluster, load)
            assert not load.moved
        report("ledger rolled back", cluster, old, since)
        assert all([(await cluster.status(router)).ledger.rollbacks for router in (0, 1)])


@pytest.mark.long
async def test_client_only_tokens_are_regenerated_or_reported(
    server: Server, tmp_path: Path
) -> None:
    """Ledger and router are killed together, and the ledger restarts from an earlier copy."""
    settings = config(tmp_path, fake=SLOW, ledger=server.config)
    async with running(settings) as cluster:
        async with Load(cluster.addresses, 12, seed=1, fake=SLOW, max_tokens=250) as old:
            await old.until(30, part=1.0)
            earlier = server.copy()
            async with Load(cluster.addresses, 4, seed=2, fake=SLOW, max_tokens=250) as new:
                await old.until(60, part=1.0)
                since = time.time()
                server.kill()
                await cluster.kill_router(0)
                await asyncio.to_thread(server.start, earlier)
                await cluster.restart_router(0)
                await old.finish()
                await new.finish()
        old.check()
        report("ledger rolled back, router killed", cluster, old, since)
        for stream in new.streams:
            assert isinstance(stream.error, DataLoss)
            right = expected_tokens(stream.prompt, len(stream.tokens), SLOW)
            assert stream.tokens == right
        await cluster.idle()


@pytest.mark.long
async def test_slow_ledger_delays_no_step(server: Server, tmp_path: Path) -> None:
    socket = Path(server.url.rpartition("@")[2])
    async with way_to(socket) as (way, url_of):
        ledger = LedgerConfig(url=server.url.replace(str(socket), url_of))
        async with running(config(tmp_path, ledger=ledger)) as cluster:
            way.delay_s = 0.2
            async with Load(cluster.addresses, 24) as load:
                await load.finish()
            load.check()
            assert not load.moved
            way.delay_s = 0.0
            await check_all(cluster, load)


@asynccontextmanager
async def way_to(socket: Path) -> AsyncIterator[tuple[Proxy, str]]:
    """Yield a proxy in front of the server, and the path of its socket."""
    with tempfile.TemporaryDirectory() as directory:
        async with proxy(str(socket), Path(directory) / "way") as way:
            yield way, way.address


@pytest.mark.long
async def test_broken_ledger_connections_lose_nothing(redis_url: str, tmp_path: Path) -> None:
    async with way_to(Path(redis_url.removeprefix("unix://"))) as (way, path):
        settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=f"unix://{path}"))
        async with running(settings) as cluster:
            async with Load(cluster.addresses, 24, fake=SLOW, plain=True) as load:
                await load.until(5)
                for _ in range(20):
                    before = way.resets
                    way.reset_after = 5
                    await until(lambda before=before: way.resets > before)
                with way.drop_answers():
                    await asyncio.sleep(0.5)
                await load.finish()
            await check_all(cluster, load)
            assert not load.moved


@pytest.mark.long
async def test_frozen_ledger_is_awaited(server: Server, tmp_path: Path) -> None:
    settings = config(tmp_path, routers=2, fake=SLOW, ledger=server.config)
    async with running(settings) as cluster:
        async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=450) as load:
            await load.until(40)
            since = time.time()
            with paused([server.pid]):
                await asyncio.sleep(3)
            await load.finish()
        await check_all(cluster, load)
        assert any(stream.unledgered for stream in load.streams)
        report("ledger frozen for 3 s", cluster, load, since)


@pytest.mark.long
async def test_nearly_full_ledger_rejects_only_new_requests(redis_url: str, tmp_path: Path) -> None:
    settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=redis_url))
    with Redis.from_url(redis_url) as admin:
        async with running(settings) as cluster, single_attempt_client(cluster) as client:
            async with Load(cluster.addresses, 12, fake=SLOW, max_tokens=250) as load:
                await load.until(20)
                used = int(admin.info("memory")["used_memory"])  # type: ignore[index]
                admin.config_set("maxmemory", round(used / 0.9))
                await until(lambda: is_refused(client))
                await load.finish()
            await check_all(cluster, load)
            admin.config_set("maxmemory", 0)
            await until(lambda: is_taken(client))


def single_attempt_client(cluster: Cluster) -> AsyncClient:
    """Return a client that makes only one attempt."""
    return AsyncClient(cluster.addresses, reconnect_s=0.1, retry_s=0.0)


async def is_refused(client: AsyncClient) -> bool:
    try:
        await client.generate([1], max_tokens=1).text()
    except LedgerFull:
        return True
    return False


async def is_taken(client: AsyncClient) -> bool:
    try:
        await client.generate([1], max_tokens=1).text()
    except EverliftError:
        return False
    return True


@pytest.mark.long
async def test_streams_continue_unledgered_while_ledger_is_full(
    redis_url: str, tmp_path: Path
) -> None:
    settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=redis_url))
    with Redis.from_url(redis_url) as admin:
        async with running(settings) as cluster, single_attempt_client(cluster) as client:
            async with Load(cluster.addresses, 12, fake=SLOW, max_tokens=300) as load:
                await load.until(20)
                admin.config_set("maxmemory", 1)
                await until(lambda: all(stream.unledgered > 20 for stream in load.streams))
                assert not await is_taken(client)
                admin.config_set("maxmemory", 0)
                await load.finish()
            await check_all(cluster, load)


@pytest.mark.long
async def test_read_only_ledger_is_awaited(redis_url: str, tmp_path: Path) -> None:
    """The ledger rejects writes, as after a failover that the routers have not detected."""
    settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=redis_url))
    with Redis.from_url(redis_url) as admin:
        async with running(settings) as cluster:
            async with Load(cluster.addresses, 12, fake=SLOW, max_tokens=300) as load:
                await load.until(20)
                admin.replicaof("127.0.0.1", "1")
                await until(lambda: all(stream.unledgered > 20 for stream in load.streams))
                admin.replicaof("NO", "ONE")
                await load.finish()
            await check_all(cluster, load)


@pytest.mark.long
async def test_ledger_script_flush_and_hang_lose_nothing(redis_url: str, tmp_path: Path) -> None:
    settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=redis_url))
    with Redis.from_url(redis_url) as admin:
        async with running(settings) as cluster:
            async with Load(cluster.addresses, 12, fake=SLOW, max_tokens=300) as load:
                await load.until(20)
                for _ in range(5):
                    admin.script_flush()
                    await asyncio.sleep(0.05)
                admin.config_set("busy-reply-threshold", 50)
                hanging = asyncio.create_task(asyncio.to_thread(hang, redis_url))
                await asyncio.sleep(0.5)
                admin.script_kill()
                await hanging
                await load.finish()
            await check_all(cluster, load)


def hang(url: str) -> None:
    with Redis.from_url(url) as client, pytest.raises(ResponseError, match="killed"):
        client.eval("while true do end", 0)


@pytest.mark.long
async def test_ledger_flushall_hangs_no_request(redis_url: str, tmp_path: Path) -> None:
    """Requests in the gateways' memory continue after an operator's FLUSHALL."""
    settings = config(tmp_path, routers=2, fake=SLOW, ledger=LedgerConfig(url=redis_url))
    with Redis.from_url(redis_url) as admin:
        async with running(settings) as cluster, single_attempt_client(cluster) as client:
            async with Load(cluster.addresses, 24, fake=SLOW, max_tokens=300) as load:
                await load.until(20)
                since = time.time()
                admin.flushall()
                await load.finish()
            load.check()
            report("FLUSHALL", cluster, load, since)
            await until(lambda: is_taken(client))
            await cluster.idle()


@pytest.mark.long
async def test_ledger_with_full_disk_is_awaited(tmp_path: Path) -> None:
    with redis_that_can_be_full() as (url, disk_is_full), Redis.from_url(url) as admin:
        settings = config(tmp_path, fake=SLOW, ledger=LedgerConfig(url=url))
        async with running(settings) as cluster:
            async with Load(cluster.addresses, 12, fake=SLOW, max_tokens=300) as load:
                await load.until(20)
                with disk_is_full():
                    await until(lambda: "MISCONF" in said_of_a_write(admin))
                    await until(lambda: any(stream.unledgered > 20 for stream in load.streams))
                await load.finish()
            await check_all(cluster, load)


def said_of_a_write(admin: Redis) -> str:
    try:
        admin.set("probe", 1)
    except ResponseError as error:
        return str(error)
    return ""


@contextmanager
def redis_that_can_be_full() -> Iterator[tuple[str, object]]:
    """Run a server whose files cannot grow inside the context manager ``disk_is_full``."""
    with redis_server() as url:
        with Redis.from_url(url) as client:
            pid = int(client.info("server")["process_id"])  # type: ignore[index]

        @contextmanager
        def disk_is_full() -> Iterator[None]:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            try:
                yield
            finally:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

        yield url, disk_is_full


async def test_wrong_ledger_password_is_reported_at_start(server: Server, tmp_path: Path) -> None:
    user, socket = server.url.removeprefix("unix://").split(":")[0], server.url.split("@")[1]
    ledger = LedgerConfig(url=f"unix://{user}:wrong@{socket}")
    with pytest.raises(ClusterFailed, match=r"router-0: .*(password|AuthenticationError)") as error:
        await Cluster(config(tmp_path, ledger=ledger)).start()
    assert "wrong@" not in str(error.value)
